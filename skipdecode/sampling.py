"""How a row is to be continued: its parameters, its random numbers, and where its text stops.

The number for token k of a row comes from a counter-based generator (Philox) keyed by seed and row id, so it never
depends on neighbours, batch, worker or a retry. Without torch, so that processes that only handle text start quickly;
choosing tokens from logits is `sampler`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


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


def stop_length(
    tokens: Sequence[int], checked: int, stop: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> int | None:
    """How many of `tokens` it takes until the text holds a stop string; None when it does not.

    The first `checked` tokens are known to hold none.
    """
    # a stop string spans at most as many tokens with text as it has bytes, so older tokens cannot matter
    start, needed = checked, max(len(s.encode()) for s in stop)
    while start > 0 and needed > 0:
        start -= 1
        needed -= decode(tokens[start : start + 1]) != ""  # special tokens have no text
    if not any(s in decode(tokens[start:]) for s in stop):
        return None
    for end in range(checked + 1, len(tokens) + 1):
        text = decode(tokens[start:end])
        if any(s in text for s in stop):
            return end
    return len(tokens)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` up to the first stop string in it."""
    ends = [at for at in (text.find(s) for s in stop) if at >= 0]
    return text[: min(ends)] if ends else text
