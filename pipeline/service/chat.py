"""Chats: how their answers are written, as OpenAI has them: a message, or deltas that begin with the role. No Ray.

How they come about is that of completions (`completions`); what is asked: `parse`; messages to prompts:
`actors.templates.chat_template`. Left out: tools, and what a message of an assistant can have beside its text.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NotRequired, TypedDict

from actors.serving.engine import Progress
from pipeline.openai.logprobs import Decode, token_name
from pipeline.service.answers import ChatLogprob, Choice, ChoiceBody, Logprobs, Usage, usage
from pipeline.service.parse import AskedRequest, ChatRequest
from skipdecode.engine.request import Request
from skipdecode.engine.results import TokenLogprobs


class MessageBody(TypedDict, total=False):
    """Of an answer, or what is new of it."""

    role: str
    content: str
    refusal: None


class ChatChoiceBody(TypedDict):
    """An entry of `choices`."""

    index: int
    message: NotRequired[MessageBody]
    delta: NotRequired[MessageBody]
    logprobs: Logprobs | None
    finish_reason: str | None
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    layers: NotRequired[list[tuple[str, int]]]


class ChatBody(TypedDict):
    """An answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: NotRequired[Usage]


class ChatChoice(Choice):
    """One of the `n` answers as it grows."""

    def __init__(self, index: int, request: Request, asked: ChatRequest, decode: Decode) -> None:
        super().__init__(index, request, replace(asked, logprobs=None), decode)  # those of a chat are others
        self._is_scored = asked.logprobs is not None

    def take(self, progress: Progress) -> ChoiceBody:
        entry = super().take(progress)
        if self._is_scored:
            scored = zip(progress.tokens, progress.logprobs, strict=True)
            entry["logprobs"] = {"content": [self._scored(token, one) for token, one in scored]}
        return entry

    def _scored(self, token: int, scored: TokenLogprobs) -> ChatLogprob:
        top = [self._logprob(other, logprob) for other, logprob in scored.top]
        return {**self._logprob(token, scored.logprob), "top_logprobs": top}

    def _logprob(self, token: int, logprob: float) -> ChatLogprob:
        text = self._decode([token])
        name = token_name(token, self._decode)
        return {"token": name, "logprob": logprob, "bytes": list(text.encode()) if name == text else None}


class ChatForm:
    def __init__(self, asked: ChatRequest, model: str, decode: Decode) -> None:
        self.asked: AskedRequest = asked
        self._chat, self._model, self._decode = asked, model, decode
        self._id, self._created = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        self._begun: set[int] = set()

    def choice(self, index: int, request: Request) -> Choice:
        return ChatChoice(index, request, self._chat, self._decode)

    def whole(self, entries: Sequence[ChoiceBody], choices: Sequence[Choice]) -> object:
        made: list[ChatChoiceBody] = []
        for entry in entries:
            message: MessageBody = {"role": "assistant", "content": entry["text"], "refusal": None}
            made.append(_dressed(entry) | {"message": message})
        return self._body("chat.completion", made) | {"usage": usage(choices)}

    def chunks(self, entries: Sequence[ChoiceBody]) -> Iterator[object]:
        """The role of an answer comes before the first of its text."""
        newcomers: list[ChatChoiceBody] = []
        for entry in entries:
            if entry["index"] not in self._begun:
                self._begun.add(entry["index"])
                role: MessageBody = {"role": "assistant", "content": "", "refusal": None}
                newcomers.append({"index": entry["index"], "delta": role, "logprobs": None, "finish_reason": None})
        if newcomers:
            yield self._body("chat.completion.chunk", newcomers)
        made: list[ChatChoiceBody] = []
        for entry in entries:
            delta: MessageBody = {"content": entry["text"]} if entry["text"] else {}
            made.append(_dressed(entry) | {"delta": delta})
        yield self._body("chat.completion.chunk", made)

    def last(self, choices: Sequence[Choice]) -> object:
        return self._body("chat.completion.chunk", []) | {"usage": usage(choices)}

    def _body(self, kind: str, choices: list[ChatChoiceBody]) -> ChatBody:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _dressed(entry: ChoiceBody) -> ChatChoiceBody:
    """An entry without its text."""
    made: ChatChoiceBody = {
        "index": entry["index"], "logprobs": entry["logprobs"], "finish_reason": entry["finish_reason"]
    }  # fmt: skip
    for key in ("prompt_token_ids", "token_ids"):
        if key in entry:
            made[key] = entry[key]
    if "layers" in entry:
        made["layers"] = entry["layers"]
    return made
