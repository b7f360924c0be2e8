"""How a row is to be continued: its parameters, its random numbers, and where its text stops.

The number for token k of a row comes from a counter-based generator (Philox) keyed by seed and row id, so it never
depends on neighbours, batch, worker or a retry. Without torch, so that processes that only handle text start quickly;
choosing tokens from logits is `sampler`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

INCOMPLETE = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
MAX_OPEN, MAX_PARTS = 8, 3  # an unfinished character has at most three bytes, and so lies in as many tokens with text


@dataclass(frozen=True)
class Sampling:
    """How one row is continued."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def row_uniforms(seed: int, row_id: str, count: int) -> np.ndarray:
    """[count] float32 in [0, 1): number k decides token y_k of that row."""
    digest = hashlib.blake2b(f"{seed}\0{row_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)
    return ((raw >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)  # 24 bits: exact in float32


class GrowingText:
    """Tokens to text one by one: what `push` has given, and then `rest`, is the text of all tokens at once.

    A token costs the same however long the text is. Tokens are pieces of UTF-8, special ones have no text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._open: list[int] = []  # the last tokens, while they end in what may be part of a character
        self._given = 0  # characters of their text that `push` has given
        self.rest = ""
        """The end of the text, which the next token may change: INCOMPLETE, or nothing."""

    def push(self, token: int) -> str:
        """The characters that are certain now and were not before."""
        self._open.append(token)
        text = self._decode(self._open)[self._given :]
        certain = text.removesuffix(INCOMPLETE)
        self.rest = text[len(certain) :]
        if not self.rest:
            self._open, self._given = [], 0
        elif len(self._open) <= MAX_OPEN:
            self._given += len(certain)
        else:
            self._open = [t for t in self._open if self._decode([t])][-MAX_PARTS:]
            self._given = len(self._decode(self._open)) - 1
        return certain


class StopScan:
    """Looks for stop strings in a text that grows token by token."""

    def __init__(self, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stop, self._text = stop, GrowingText(decode)
        self._longest = max(map(len, stop))
        self._tail = ""  # of the text so far, where a stop string may have begun

    def push(self, token: int) -> bool:
        """Whether the text holds a stop string with this token; not to be asked again once it does."""
        text = self._tail + self._text.push(token)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        text += self._text.rest
        return any(s in text for s in self._stop)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(ends)] if ends else text
