"""Log-probabilities in the format of OpenAI's completions, for the endpoint and for batch lines."""

from collections.abc import Callable, Sequence
from typing import TypedDict

from skipdecode.checkpoint.detokenizer import REPLACEMENT, IncrementalDetokenizer
from skipdecode.engine.results import TokenLogprobs

Decode = Callable[[Sequence[int]], str]


class LogprobsBody(TypedDict):
    """OpenAI's `logprobs` of a choice, with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextOffsets:
    """Where each token of a text begins, in characters; tokens that are parts of a character begin where it does."""

    def __init__(self, decode: Decode, start: int = 0) -> None:
        self._text, self._num_chars = IncrementalDetokenizer(decode), start

    def next(self, token: int) -> int:
        begin = self._num_chars + self._text.num_uncertain
        self._num_chars += len(self._text.push(token))
        return begin


def empty_logprobs() -> LogprobsBody:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def add_logprob(to: LogprobsBody, token: int, scored: TokenLogprobs | None, offset: int, decode: Decode) -> None:
    """Appends the entry of a token; `scored` is None for the first one, which has no log-probability."""
    top: dict[str, float] | None = None
    if scored is not None:
        top = {}
        # likeliest first, and the token itself in any case; of tokens with one text the likelier counts
        for other, logprob in [*scored.top, (token, scored.logprob)]:
            top.setdefault(token_name(other, decode), logprob)
    to["tokens"].append(token_name(token, decode))
    to["text_offset"].append(offset)
    to["token_logprobs"].append(None if scored is None else scored.logprob)
    to["top_logprobs"].append(top)


def add_prompt(to: LogprobsBody, prompt: Sequence[int], scored: Sequence[TokenLogprobs], decode: Decode) -> None:
    """Appends the entries of an echoed prompt; `scored` has those of all its tokens but the first."""
    offsets = TextOffsets(decode)
    for number, token in enumerate(prompt):
        add_logprob(to, token, scored[number - 1] if number else None, offsets.next(token), decode)


def token_name(token: int, decode: Decode) -> str:
    """A token's own text, or `token_id:7` if it has none (special tokens, parts of a character)."""
    text = decode([token])
    return f"token_id:{token}" if not text or REPLACEMENT in text else text
