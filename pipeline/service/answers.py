"""What goes back over HTTP: completions, stream chunks, models, as OpenAI has them. Pure functions and text.

How a chat is written: `chat`.
"""

import json
import secrets
import time
from collections.abc import Sequence
from typing import NotRequired, TypeAlias, TypedDict, cast

from actors.serving.engine import Progress
from actors.serving.text_stream import TextStream
from pipeline.openai.logprobs import (
    Decode,
    LogprobsBody,
    TextOffsets,
    add_logprob,
    add_prompt,
    empty_logprobs,
)
from pipeline.service.parse import AskedRequest
from skipdecode.engine.request import Request

DONE = b"data: [DONE]\n\n"


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None
    """Of the text in UTF-8; None for a token without one (special tokens, parts of a character)."""
    top_logprobs: NotRequired[list["ChatLogprob"]]


class ChatLogprobs(TypedDict):
    """One entry per token."""

    content: list[ChatLogprob]


Logprobs: TypeAlias = LogprobsBody | ChatLogprobs


class ChoiceBody(TypedDict):
    """An entry of `choices`."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    layers: NotRequired[list[tuple[str, int]]]
    """Pieces of the text, each with the layers of its token."""


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionBody(TypedDict):
    """An answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceBody]
    usage: NotRequired[Usage]


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    has_chat_template: bool
    """Extension, as `max_model_len` is."""


class Choice:
    """The answer to one prompt as it grows."""

    def __init__(self, index: int, request: Request, asked: AskedRequest, decode: Decode) -> None:
        self.index, self.request, self.asked = index, request, asked
        self._decode = decode
        self._stream = TextStream(decode, request.sampling.stop)
        self._offsets = TextOffsets(decode)
        self.tokens: list[int] = []
        self.layers: list[int] = []
        self.finish_reason: str | None = None
        self._has_begun = False
        self._is_prompt_only = asked.max_tokens == 0

    def take(self, progress: Progress) -> ChoiceBody:
        """A `choices` entry with what is new: text, log-probabilities, tokens, layers."""
        logprobs = None if self.asked.logprobs is None else empty_logprobs()
        is_first, self._has_begun = not self._has_begun, True
        text = self._begin(progress, logprobs) if is_first and self.asked.echo else ""
        pieces: list[tuple[str, int]] = []
        for number, token in enumerate([] if self._is_prompt_only else progress.tokens):
            piece = self._stream.push(token)
            text += piece
            pieces.append((piece, progress.layers[number]))
            if logprobs is not None:
                add_logprob(logprobs, token, progress.logprobs[number], self._offsets.next(token), self._decode)
        self.tokens += progress.tokens
        self.layers += progress.layers
        if progress.finish_reason is not None:
            self.finish_reason = "length" if self._is_prompt_only else progress.finish_reason
            rest = "" if self._is_prompt_only else self._stream.finish()
            text += rest
            if rest and pieces:
                pieces[-1] = (pieces[-1][0] + rest, pieces[-1][1])
        entry: ChoiceBody = {
            "index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason
        }  # fmt: skip
        if self.asked.return_token_ids:
            if is_first:
                entry["prompt_token_ids"] = list(self.request.prompt_tokens)
            entry["token_ids"] = [] if self._is_prompt_only else list(progress.tokens)
        if self.asked.return_layers:
            entry["layers"] = pieces
        return entry

    def _begin(self, progress: Progress, logprobs: LogprobsBody | None) -> str:
        """The prompt, which is echoed; its log-probabilities go to `logprobs`."""
        text = self._decode(self.request.prompt_tokens)
        self._offsets = TextOffsets(self._decode, len(text))
        if logprobs is not None:
            add_prompt(logprobs, self.request.prompt_tokens, progress.prompt_logprobs, self._decode)
        return text


def merged(entries: Sequence[ChoiceBody]) -> ChoiceBody:
    """One `choices` entry from those of a whole answer, in order."""
    whole = entries[0].copy()
    for entry in entries[1:]:
        whole["text"] += entry["text"]
        whole["finish_reason"] = entry["finish_reason"]
        if "token_ids" in whole:
            whole["token_ids"] = whole["token_ids"] + entry["token_ids"]
        if "layers" in whole:
            whole["layers"] = whole["layers"] + entry["layers"]
        if whole["logprobs"] is not None and entry["logprobs"] is not None:
            whole["logprobs"] = _joined(whole["logprobs"], entry["logprobs"])
    return whole


def _joined(first: Logprobs, second: Logprobs) -> Logprobs:
    """Of one kind: lists by the same names, one behind the other."""
    lists, more = cast(dict[str, list[object]], first), cast(dict[str, list[object]], second)
    return cast(Logprobs, {name: lists[name] + more[name] for name in lists})


def is_news(entry: ChoiceBody) -> bool:
    """Whether a stream should show it: half a character is none, but what is asked about its tokens is."""
    scored = entry["logprobs"] and any(entry["logprobs"].values())
    return bool(entry["text"] or entry["finish_reason"] or entry.get("token_ids") or entry.get("layers") or scored)


def usage(choices: Sequence[Choice]) -> Usage:
    """A prompt counts once, however many answers it has."""
    prompt = sum(len(choice.request.prompt_tokens) for choice in choices[:: choices[0].asked.num_answers])
    completion = sum(0 if choice.asked.max_tokens == 0 else len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Envelope:
    """What all chunks of an answer have in common."""

    def __init__(self, model: str) -> None:
        self._id, self._created, self._model = f"cmpl-{secrets.token_hex(12)}", int(time.time()), model

    def body(self, choices: Sequence[ChoiceBody], counts: Usage | None = None) -> CompletionBody:
        body: CompletionBody = {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }
        if counts is not None:
            body["usage"] = counts
        return body


def model_card(name: str, created: int, context: int, has_chat: bool) -> ModelCard:
    return {
        "id": name, "object": "model", "created": created, "owned_by": "skipdecode-ray",
        "max_model_len": context, "has_chat_template": has_chat,
    }  # fmt: skip


def encode(body: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a client may have sent, stays an escape."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"
