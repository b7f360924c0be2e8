"""What goes back over HTTP: completions and chats, whole or as the chunks of a stream, as OpenAI has them.

Pure functions of the engine's progress; when something is sent is decided in `responses`.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from actors.serving.engine import Progress
from actors.text.reasoning import Parts, ReasoningStream, opens_block
from actors.text.text_stream import TextStream
from actors.text.tool_calls import ToolCallStream, ToolForm, shown_calls
from pipeline.openai_format.logprobs import Decode, TextOffsets, add_logprob, add_prompt, empty_logprobs, token_name
from pipeline.service.requests import ChatRequest, CompletionRequest
from skipdecode.engine.request import Request
from skipdecode.engine.results import TokenLogprobs

DONE = b"data: [DONE]\n\n"
PIECE_ENTRIES = 256  # of a list, encoded at once: a millisecond or two
_to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
Body: TypeAlias = dict[str, Any]
"""A JSON object to be sent."""


@dataclass(frozen=True)
class Parsers:
    """How the texts of chats are taken apart."""

    reasoning: str | None = None
    """`output.reasoning_parser`."""
    tools: ToolForm = "hermes"
    """The form of calls, where a request has tools."""


NO_PARSERS = Parsers()


class Choice:
    """One of the answers to a request, as it grows."""

    def __init__(
        self,
        index: int,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        decode: Decode,
        parsers: Parsers = NO_PARSERS,
    ) -> None:
        self.request, self.num_tokens = request, 0
        self._index, self._asked, self._decode = index, asked, decode
        self._is_chat = isinstance(asked, ChatRequest)
        self._echoes = isinstance(asked, CompletionRequest) and bool(asked.echo)
        self._is_prompt_only = asked.max_new_tokens == 0
        sampling = request.sampling
        self._stream = TextStream(decode, sampling.stop, sampling.stop_token_ids)
        self._offsets = TextOffsets(decode)
        self.reasoning: ReasoningStream | None = None
        """Of a chat whose reasoning is told apart; with a structure there is none."""
        if self._is_chat and parsers.reasoning is not None and sampling.structured_outputs is None:
            self.reasoning = ReasoningStream(is_open=opens_block(request.prompt_tokens, decode))
        self._calls: ToolCallStream | None = None
        if isinstance(asked, ChatRequest) and (calls := asked.calls()) is not None:
            self._calls = ToolCallStream(parsers.tools, calls["names"], is_single=calls["is_single"])
        self._has_begun = False

    def take(self, progress: Progress) -> Body:
        """An entry of `choices` with what is new: text, log-probabilities, tokens, layers."""
        is_first, self._has_begun = not self._has_begun, True
        tokens = [] if self._is_prompt_only else progress.tokens
        self.num_tokens += len(tokens)
        logprobs: Any = None
        if self._is_chat and self._asked.logprobs:
            scored = zip(tokens, progress.logprobs, strict=True)
            logprobs = {"content": [_chat_logprobs(token, one, self._decode) for token, one in scored]}
        elif not self._is_chat and self._asked.logprobs is not None:
            logprobs = empty_logprobs()
        text = ""
        if is_first and self._echoes:
            text = self._decode(self.request.prompt_tokens)
            self._offsets = TextOffsets(self._decode, len(text))
            if logprobs is not None:
                add_prompt(logprobs, self.request.prompt_tokens, progress.prompt_logprobs, self._decode)
        parts: list[Parts] = []
        pieces: list[tuple[str, int]] = []  # of the text, each with the layers of its token
        for number, token in enumerate(tokens):
            piece = self._stream.push(token)
            if self.reasoning is None:
                text += piece
            else:
                parts.append(self.reasoning.push_token(piece))
            pieces.append((piece, progress.layers[number]))
            if logprobs is not None and not self._is_chat:
                add_logprob(logprobs, token, progress.logprobs[number], self._offsets.next(token), self._decode)
        finish_reason = progress.finish_reason
        if finish_reason is not None and self._is_prompt_only:
            finish_reason = "length"
        elif finish_reason is not None:
            rest = self._stream.finish()
            if pieces:
                pieces[-1] = (pieces[-1][0] + rest, pieces[-1][1])
            if self.reasoning is None:
                text += rest
            else:
                parts += [self.reasoning.push(rest), self.reasoning.finish()]
        entry: Body = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.reasoning is not None:
            entry["reasoning"] = "".join(part.reasoning for part in parts)
            entry["text"] = "".join(part.content for part in parts)
        if self._calls is not None:
            self._add_calls(entry, self._calls)
        if progress.is_valid is not None:
            entry["is_valid"] = progress.is_valid
        if self._asked.return_token_ids:
            if is_first:
                entry["prompt_token_ids"] = list(self.request.prompt_tokens)
            entry["token_ids"] = list(tokens)
        if self._asked.return_layers:
            entry["layers"] = pieces
        return entry

    @staticmethod
    def _add_calls(entry: Body, stream: ToolCallStream) -> None:
        """Tells the calls of tools from the text of an entry."""
        first = stream.num_calls
        content, calls = stream.push(entry["text"])
        if entry["finish_reason"] is not None:
            rest = stream.finish()
            content, calls = content + rest.content, calls + rest.calls
        entry["text"] = content
        if calls:
            entry["tool_calls"] = shown_calls(calls, [f"call_{secrets.token_hex(12)}" for _ in calls], first=first)
        if entry["finish_reason"] == "stop" and stream.num_calls:
            entry["finish_reason"] = "tool_calls"


def _chat_logprobs(token: int, scored: TokenLogprobs, decode: Decode) -> Body:
    """The entry of one token in `logprobs.content`."""

    def entry(token: int, logprob: float) -> Body:
        text, name = decode([token]), token_name(token, decode)
        return {"token": name, "logprob": logprob, "bytes": list(text.encode()) if name == text else None}

    return entry(token, scored.logprob) | {"top_logprobs": [entry(*other) for other in scored.top]}


def combined(made: Sequence[Progress]) -> Progress:
    """Consecutive progress of one request as if it came from one step."""
    if len(made) == 1:
        return made[0]
    return replace(
        made[-1],
        tokens=[token for one in made for token in one.tokens],
        layers=[layers for one in made for layers in one.layers],
        logprobs=[scored for one in made for scored in one.logprobs],
        prompt_logprobs=made[0].prompt_logprobs,
    )


def is_news(entry: Body) -> bool:
    """Whether a stream should send the entry: half a character shows nothing, but what was asked about it does."""
    scored = entry["logprobs"] and any(entry["logprobs"].values())
    told = (entry.get(key) for key in ("text", "reasoning", "tool_calls", "finish_reason", "token_ids", "layers"))
    return bool(scored or any(told))


class CompletionAnswer:
    """The answer to a request for completions."""

    ID, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        asked: CompletionRequest | ChatRequest,
        requests: Sequence[Request],
        model: str,
        decode: Decode,
        parsers: Parsers = NO_PARSERS,
    ) -> None:
        self.asked, self._tells_reasoning = asked, parsers.reasoning is not None
        self.choices = [Choice(number, request, asked, decode, parsers) for number, request in enumerate(requests)]
        self._id, self._created, self._model = f"{self.ID}-{secrets.token_hex(12)}", int(time.time()), model

    def entries(self, made: Mapping[int, Sequence[Progress]]) -> list[Body]:
        """The entry of each choice that has made progress, by the number of the choice."""
        return [self.choices[number].take(combined(parts)) for number, parts in made.items()]

    def whole(self, entries: Sequence[Body]) -> Body:
        return self._body(self.WHOLE, entries) | {"usage": self._usage()}

    def chunks(self, entries: Sequence[Body]) -> Iterator[Body]:
        """The events for new entries."""
        yield self._chunk(entries)

    def usage_chunk(self) -> Body:
        """The event with the usage, after all others."""
        return self._body(self.CHUNK, []) | {"usage": self._usage()}

    def _chunk(self, choices: Sequence[Body]) -> Body:
        usage = {"usage": self._usage()} if self.asked.has_continuous_usage else {}
        return self._body(self.CHUNK, choices) | usage

    def _body(self, kind: str, choices: Sequence[Body]) -> Body:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": list(choices)}

    def _usage(self) -> Body:
        """A prompt counts once, however many answers it has."""
        prompt = sum(len(choice.request.prompt_tokens) for choice in self.choices[:: self.asked.n or 1])
        completion = sum(choice.num_tokens for choice in self.choices)
        usage: Body = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._tells_reasoning:
            num_tokens = sum(choice.reasoning.num_tokens for choice in self.choices if choice.reasoning is not None)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_tokens}
        return usage


class ChatAnswer(CompletionAnswer):
    """The answer to a chat: a message, or deltas of which the first holds the role."""

    ID, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        asked: ChatRequest,
        requests: Sequence[Request],
        model: str,
        decode: Decode,
        parsers: Parsers = NO_PARSERS,
    ) -> None:
        super().__init__(asked, requests, model, decode, parsers)
        self._begun: set[int] = set()

    def whole(self, entries: Sequence[Body]) -> Body:
        return super().whole([_without_text(e) | {"message": self._message(e)} for e in entries])

    def _message(self, entry: Body) -> Body:
        message = _message(entry["text"])
        if self._tells_reasoning:
            stream = self.choices[entry["index"]].reasoning
            has_block = stream is not None and stream.has_block
            message["reasoning_content"] = entry["reasoning"] if has_block else None
        if calls := entry.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
        return message

    def chunks(self, entries: Sequence[Body]) -> Iterator[Body]:
        newcomers = [entry["index"] for entry in entries if entry["index"] not in self._begun]
        self._begun.update(newcomers)
        if newcomers:
            yield self._chunk(
                [{"index": n, "delta": _message(""), "logprobs": None, "finish_reason": None} for n in newcomers]
            )
        deltas = ({name: entry[key] for name, key in DELTAS.items() if entry.get(key)} for entry in entries)
        yield self._chunk([_without_text(e) | {"delta": delta} for e, delta in zip(entries, deltas, strict=True)])


DELTAS = {"reasoning_content": "reasoning", "content": "text", "tool_calls": "tool_calls"}
"""The fields of a message -> the keys of an entry that holds more of them."""


def _message(content: str) -> Body:
    return {"role": "assistant", "content": content, "refusal": None}


def _without_text(entry: Body) -> Body:
    return {key: value for key, value in entry.items() if key not in DELTAS.values()}


def model_card(name: str, created: int, context: int, has_chat: bool, has_batches: bool) -> Body:
    """An entry of `/v1/models`; `max_model_len`, `has_chat_template` and `has_batches` are extensions."""
    return {
        "id": name, "object": "model", "created": created, "owned_by": "skipdecode-ray",
        "max_model_len": context, "has_chat_template": has_chat, "has_batches": has_batches,
    }  # fmt: skip


def encode(body: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a client may have sent, stays an escape."""
    return _to_json(body).encode("utf-8", "backslashreplace")


def encode_in_pieces(body: Body) -> bytes:
    """As `encode`, but other threads get their turn in between, which the encoder of json does not give them."""
    return "".join(_pieces(body)).encode("utf-8", "backslashreplace")


def _pieces(value: Any, name: str = "") -> Iterator[str]:
    """The JSON of an answer, or of the part of it that is called `name`."""
    if isinstance(value, dict):
        for number, (key, part) in enumerate(value.items()):
            yield ("," if number else "{") + _to_json(key) + ":"
            yield from _pieces(part, key)
        yield "}" if value else "{}"
    elif isinstance(value, list) and (name == "choices" or len(value) > PIECE_ENTRIES):
        size = 1 if name == "choices" else PIECE_ENTRIES
        for start in range(0, len(value), size):
            yield "," if start else "["
            yield from _pieces(value[start]) if name == "choices" else (_to_json(value[start : start + size])[1:-1],)
        yield "]" if value else "[]"
    else:
        yield _to_json(value)


def event(body: Body, encode: Callable[[Body], bytes] = encode) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"
