"""Choosing the next token, and the randomness behind it.

Greedy at temperature 0; else temperature, top-k, top-p, then one uniform number. The number for token k of a row comes
from a counter-based generator (Philox) keyed by seed and row id, so it never depends on neighbours, batch, worker or a
retry. No repetition penalties and no beams.

B rows, V vocabulary.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


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


class Sampler:
    """The rows of one batch, with their parameters and random numbers on the device."""

    def __init__(self, ids: Sequence[str], rows: Sequence[Sampling], num_tokens: int, device: torch.device) -> None:
        self.is_greedy = all(row.temperature == 0 for row in rows)
        if self.is_greedy:
            return
        uniforms = np.stack([row_uniforms(row.seed, i, num_tokens) for i, row in zip(ids, rows, strict=True)])
        self._uniforms = torch.from_numpy(uniforms).to(device)  # [B, N]
        self._temperature = torch.tensor([[row.temperature] for row in rows], device=device)  # [B, 1]
        self._top_p = torch.tensor([[row.top_p] for row in rows], device=device)
        self._top_k = torch.tensor([[row.top_k or 2**62] for row in rows], device=device)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows` [R] int64."""
        if not self.is_greedy:
            for name in ("_uniforms", "_temperature", "_top_p", "_top_k"):
                setattr(self, name, getattr(self, name)[rows])

    def __call__(self, logits: Tensor, k: int) -> Tensor:
        """Token y_k from [B, V] float32 logits: [B] int64. Ties go to the lower token id."""
        if self.is_greedy:
            return logits.argmax(dim=-1)
        greedy = self._temperature == 0
        # the largest becomes 0, so that a tiny temperature cannot overflow to inf - inf
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self._temperature.masked_fill(greedy, 1.0)
        drawn = draw(scaled, self._top_k, self._top_p, self._uniforms[:, k : k + 1])
        return torch.where(greedy[:, 0], logits.argmax(dim=-1), drawn)


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from [B, V] logits after top-k and top-p ([B, 1] each): [B] int64."""
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    p = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = p.cumsum(dim=-1) - p
    is_cut = (before >= top_p) & (rank > 0) & (top_p < 1)  # the token that crosses top_p stays, and the first always
    p = p.masked_fill(is_cut, 0.0)
    cdf = p.cumsum(dim=-1)
    index = (cdf <= uniform * cdf[:, -1:]).sum(dim=-1, keepdim=True)
    last = (p > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not step past what was kept
    return tokens.gather(1, torch.minimum(index, last))[:, 0]


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
