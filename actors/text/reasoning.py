"""Reasoning apart from the answer: what a model writes into a block `<think>...</think>` before it answers.

The block begins the answer, blanks aside; or it is open already, where the generation prompt of the chat template ends
with `<think>`. Line breaks around its text, and those before the answer, belong to neither. No torch.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from actors.text.text_stream import TextStream, overlap
from skipdecode.config.sampling import Sampling

START, END = "<think>", "</think>"
LOOKED_AT = 16
"""Tokens at the end of a prompt that are looked at: in no vocabulary `<think>` and a line break are more."""


def opens_block(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Whether a prompt ends with the beginning of a block."""
    return text_opens_block(decode(prompt[-LOOKED_AT:]))


def text_opens_block(prompt: str) -> bool:
    """`opens_block` of a prompt's text."""
    return prompt.rstrip().endswith(START)


def is_unfinished(text: str, *, is_open: bool) -> bool:
    """Whether all of an answer's text is a block that does not end. `is_open`: whether the prompt has begun it."""
    return (is_open or text.lstrip().startswith(START)) and END not in text


class Parts(NamedTuple):
    """An answer, or the new part of one."""

    reasoning: str
    content: str


class ReasoningStream:
    """Splits a text that arrives in pieces. `push` and `finish` return what is certain."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: whether the prompt has begun the block."""
        self._is_open = self.has_block = is_open
        self._state: Literal["start", "block", "gap", "answer"] = "start"
        self._held = ""
        self._is_blank = True  # the block has had nothing but line breaks
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the block and its marks that `push_token` was given."""
        return self._num_tokens if self.has_block else 0

    def push_token(self, text: str) -> Parts:
        """`push` of what one token made certain."""
        self._num_tokens += self._state in ("start", "block")
        return self.push(text)

    def push(self, text: str) -> Parts:
        self._held += text
        reasoning = content = ""
        if self._state == "start":
            self._begin()
        if self._state == "block":
            reasoning = self._take_from_block()
        if self._state == "gap" and (rest := self._held.lstrip("\n")):
            self._state, self._held = "answer", rest
        if self._state == "answer":
            content, self._held = self._held, ""
        return Parts(reasoning, content)

    def finish(self) -> Parts:
        """The rest, at the end of the text."""
        held, self._held = self._held, ""
        if self._state == "gap":
            return Parts("", "")
        if not self.has_block:
            return Parts("", held)
        return Parts(held.strip("\n") if self._is_blank else held.rstrip("\n"), "")

    def _begin(self) -> None:
        text = self._held.lstrip()
        if text.startswith(START):
            self._state, self._held, self.has_block = "block", text.removeprefix(START), True
        elif not START.startswith(text):
            self._state = "block" if self._is_open else "answer"

    def _take_from_block(self) -> str:
        text, mark, rest = self._held.partition(END)
        if mark:
            self._state, self._held, certain = "gap", rest, text.rstrip("\n")
        else:
            certain = text[: len(text) - overlap(text, END)].rstrip("\n")
            self._held = text[len(certain) :]
        if self._is_blank:
            certain = certain.lstrip("\n")
            self._is_blank = not certain
        return certain


class SplitAnswer(NamedTuple):
    """A whole answer."""

    reasoning: str | None
    """None without a block."""
    content: str
    num_reasoning_tokens: int


def split_answer(
    tokens: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str], *, is_open: bool
) -> SplitAnswer:
    """The text of a row's tokens in its two parts, as a stream of them would give it."""
    text, stream = TextStream(decode, sampling.stop, sampling.stop_token_ids), ReasoningStream(is_open=is_open)
    parts = [stream.push_token(text.push(token)) for token in tokens]
    parts += [stream.push(text.finish()), stream.finish()]
    reasoning, content = ("".join(part) for part in zip(*parts, strict=True))
    return SplitAnswer(reasoning if stream.has_block else None, content, stream.num_tokens)
