"""Choosing the next token of every row of a batch, on its device: greedy, or one draw from what top-k and top-p leave.

Greedy at temperature 0; else temperature, top-k, top-p, then the row's own uniform number (`sampling.row_uniforms`). No
repetition penalties and no beams. B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.sampling import Sampling, row_uniforms


class Sampler:
    """The rows of one batch, with their parameters and random numbers on the device."""

    def __init__(self, ids: Sequence[str], rows: Sequence[Sampling], num_tokens: int, device: torch.device) -> None:
        self.is_greedy = all(row.temperature == 0 for row in rows)
        if self.is_greedy:
            return
        uniforms = np.stack([row_uniforms(row.seed, i, num_tokens) for i, row in zip(ids, rows, strict=True)])
        self._uniforms = to_device(uniforms, device)  # [B, N]
        self._cuts = any(cuts(row) for row in rows)
        self._temperature = to_device([[row.temperature] for row in rows], device, torch.float32)  # [B, 1]
        self._top_p = to_device([[row.top_p] for row in rows], device, torch.float32)
        self._top_k = to_device([[row.top_k or 2**62] for row in rows], device)

    def keep(self, rows: Tensor) -> None:
        """Drops all rows but `rows` [R] int64."""
        if not self.is_greedy:
            for name in ("_uniforms", "_temperature", "_top_p", "_top_k"):
                setattr(self, name, getattr(self, name)[rows])

    def __call__(self, logits: Tensor, k: int) -> Tensor:
        """Token y_k from [B, V] logits: [B] int64. Ties go to the lower token id."""
        if self.is_greedy:
            return argmax(logits)
        uniform = self._uniforms[:, k : k + 1]
        return pick(logits, self._temperature, self._top_k, self._top_p, uniform, cuts=self._cuts)


def cuts(row: Sampling) -> bool:
    """Whether a row draws, and from fewer than all tokens."""
    return row.temperature > 0 and (row.top_k > 0 or row.top_p < 1)


def argmax(logits: Tensor) -> Tensor:
    """[B, V] -> [B] int64; the lower token id where two are equal."""
    return backend_on(logits.device).argmax(logits)


def pick(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, cuts: bool = True
) -> Tensor:
    """One token per row from [B, V] logits and [B, 1] parameters; greedy at temperature 0: [B] int64.

    `cuts`: whether top_k or top_p leave anything out in any row. Without them there is nothing to sort, and a row's
    token is the same, bit for bit.
    """
    if (drawn := backend_on(logits.device).draw(logits, temperature, top_k, top_p, uniform)) is not None:
        return drawn
    return pick_by_sort(logits.float(), temperature, top_k, top_p, uniform, cuts=cuts)


def pick_by_sort(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, cuts: bool = True
) -> Tensor:
    """`pick` from [B, V] float32 logits by torch's operators: the reference of all others."""
    greedy = temperature == 0
    # the largest becomes 0, so that a tiny temperature cannot overflow to inf - inf
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.masked_fill(greedy, 1.0)
    drawn = draw(scaled, top_k, top_p, uniform) if cuts else _drawn(scaled.exp(), uniform)
    return torch.where(greedy[:, 0], argmax(logits), drawn)


def draw(logits: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draw from [B, V] logits after top-k and top-p ([B, 1] each): [B] int64.

    The CDF runs over token ids, not over ranks: logits that differ by rounding only, as they do from one batch shape to
    another, may swap ranks, and would swap the tokens that a number stands for.
    """
    ordered, tokens = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    p = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
    before = p.cumsum(dim=-1) - p
    is_cut = (before >= top_p) & (rank > 0) & (top_p < 1)  # the token that crosses top_p stays, and the first always
    is_cut = torch.zeros_like(is_cut).scatter(1, tokens, is_cut | (rank >= top_k))  # by token id
    weights = (logits - ordered[:, :1]).exp()  # in proportion to p, and the same for a token whatever else is kept
    return _drawn(weights.masked_fill(is_cut, 0.0), uniform)


def _drawn(weights: Tensor, uniform: Tensor) -> Tensor:
    """[B, V] weights, not all 0 -> [B] int64."""
    cdf = weights.cumsum(dim=-1)
    # what was cut is no hit, even where a parallel sum is not flat across it; rounding may leave no hit at all
    hit = (cdf > uniform * cdf[:, -1:]) & (weights > 0)
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).int().argmax(dim=-1)
    return torch.where(hit.any(dim=-1), hit.int().argmax(dim=-1), last)
