"""What goes back over HTTP: completions, stream chunks, models, as OpenAI has them. Pure functions and text."""

import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from actors.engine import Progress
from actors.text_stream import TextStream
from pipeline.service.parse import CompletionRequest
from skipdecode.request import Request, TokenLogprobs
from skipdecode.sampling import INCOMPLETE

Decode = Callable[[Sequence[int]], str]
DONE = b"data: [DONE]\n\n"


class Choice:
    """The answer to one prompt as it grows."""

    def __init__(self, index: int, request: Request, asked: CompletionRequest, decode: Decode) -> None:
        self.index, self.request, self.asked = index, request, asked
        self._decode = decode
        self._stream = TextStream(decode, request.sampling.stop)
        self._offsets = TextOffsets(decode)
        self.tokens: list[int] = []
        self.layers: list[int] = []
        self.finish_reason: str | None = None
        self._has_begun = False
        self._is_prompt_only = asked.max_tokens == 0

    def take(self, progress: Progress) -> dict[str, Any]:
        """A `choices` entry with what is new: text, log-probabilities, tokens, layers."""
        entry = self._begin(progress)
        text: str = entry["text"]
        logprobs: dict[str, Any] | None = entry.pop("logprobs")
        pieces: list[tuple[str, int]] = []
        for number, token in enumerate([] if self._is_prompt_only else progress.tokens):
            piece = self._stream.push(token)
            text += piece
            pieces.append((piece, progress.layers[number]))
            if logprobs is not None:
                self._add_logprob(logprobs, token, progress.logprobs[number], self._offsets.next(token))
        self.tokens += progress.tokens
        self.layers += progress.layers
        if progress.finish_reason is not None:
            self.finish_reason = "length" if self._is_prompt_only else progress.finish_reason
            rest = "" if self._is_prompt_only else self._stream.finish()
            text += rest
            if rest and pieces:
                pieces[-1] = (pieces[-1][0] + rest, pieces[-1][1])
        entry |= {"text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self.asked.return_token_ids:
            entry["token_ids"] = [] if self._is_prompt_only else list(progress.tokens)
        if self.asked.return_layers:
            entry["layers"] = pieces
        return entry

    def _begin(self, progress: Progress) -> dict[str, Any]:
        """The entry with the prompt in front, where it is to be echoed and was not yet."""
        logprobs = None if self.asked.logprobs is None else empty_logprobs()
        entry: dict[str, Any] = {"index": self.index, "text": "", "logprobs": logprobs}
        if self._has_begun:
            return entry
        self._has_begun = True
        prompt = self.request.prompt_tokens
        if self.asked.return_token_ids:
            entry["prompt_token_ids"] = list(prompt)
        if self.asked.echo:
            entry["text"] = self._decode(prompt)
            self._offsets = TextOffsets(self._decode, len(entry["text"]))
            if logprobs is not None:
                self._add_prompt(logprobs, progress)
        return entry

    def _add_prompt(self, logprobs: dict[str, Any], progress: Progress) -> None:
        offsets = TextOffsets(self._decode)
        for number, token in enumerate(self.request.prompt_tokens):
            scored = progress.prompt_logprobs[number - 1] if number else None  # nothing comes before the first
            self._add_logprob(logprobs, token, scored, offsets.next(token))

    def _add_logprob(self, to: dict[str, Any], token: int, scored: TokenLogprobs | None, offset: int) -> None:
        top: dict[str, float] | None = None
        if scored is not None:
            top = {}
            # likeliest first, and the token itself in any case; of tokens with one text the likelier counts
            for other, logprob in [*scored.top, (token, scored.logprob)]:
                top.setdefault(token_name(other, self._decode), logprob)
        to["tokens"].append(token_name(token, self._decode))
        to["text_offset"].append(offset)
        to["token_logprobs"].append(None if scored is None else scored.logprob)
        to["top_logprobs"].append(top)


class TextOffsets:
    """Where each token of a text begins, in characters; the parts of one character all begin where it does."""

    def __init__(self, decode: Decode, start: int = 0) -> None:
        self._decode, self._num_chars = decode, start
        self._tokens: list[int] = []  # parts of a character so far

    def next(self, token: int) -> int:
        self._tokens.append(token)
        begin, text = self._num_chars, self._decode(self._tokens)
        if not text.endswith(INCOMPLETE):
            self._num_chars += len(text)
            self._tokens = []
        return begin


def empty_logprobs() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def token_name(token: int, decode: Decode) -> str:
    """A token's own text; `token_id:7` where it has none (special tokens, parts of a character)."""
    text = decode([token])
    return f"token_id:{token}" if not text or INCOMPLETE in text else text


def merged(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One `choices` entry from those of a whole answer, in order."""
    whole = dict(entries[0])
    for entry in entries[1:]:
        whole["text"] += entry["text"]
        whole["finish_reason"] = entry["finish_reason"]
        for name in ("token_ids", "layers"):
            if name in whole:
                whole[name] = whole[name] + entry[name]
        if whole["logprobs"] is not None:
            whole["logprobs"] = {name: own + entry["logprobs"][name] for name, own in whole["logprobs"].items()}
    return whole


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt = sum(len(choice.request.prompt_tokens) for choice in choices)
    completion = sum(0 if choice.asked.max_tokens == 0 else len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Envelope:
    """What all chunks of an answer have in common."""

    def __init__(self, model: str) -> None:
        self._common = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def body(self, choices: Sequence[dict[str, Any]], counts: dict[str, int] | None = None) -> dict[str, Any]:
        return self._common | {"choices": list(choices)} | ({} if counts is None else {"usage": counts})


def model_card(name: str, created: int, context: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "skipdecode-ray", "max_model_len": context}


def encode(body: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which a client may have sent, stays an escape."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(body) + b"\n\n"
