"""Choosing the next token of every row of a batch, on its device: greedy, or one draw from what top-k and top-p leave.

Greedy at temperature 0; else temperature, top-k, top-p, then the row's own uniform number
(`random_numbers.row_uniforms`). Penalties, biases and min_p change the logits before
(`skipdecode.engine.logits_processor`). No beams. B rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.sampling import Sampling
from skipdecode.model.random_numbers import row_uniforms

NO_TOP_K = 2**62


class Sampler:
    """The rows of one batch, with their parameters and random numbers on the device."""

    def __init__(self, ids: Sequence[str], rows: Sequence[Sampling], num_tokens: int, device: torch.device) -> None:
        self.is_greedy = all(row.temperature == 0 for row in rows)
        if self.is_greedy:
            return
        uniforms = np.stack([row_uniforms(row.seed, i, num_tokens) for i, row in zip(ids, rows, strict=True)])
        self._uniforms = to_device(uniforms, device)  # [B, N]
        self._cuts = any(cuts(row) for row in rows)
        self._temperature, self._top_k, self._top_p = parameters(rows, device)

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
    """Whether a row draws, and from fewer tokens than its logits leave."""
    return row.temperature > 0 and not row.has_min_p and (row.top_k > 0 or row.top_p < 1)


def parameters(rows: Sequence[Sampling], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature, top_k and top_p [B, 1] of the rows for `pick`; what processed logits have cut is not cut again."""
    temperature, top_k, top_p, min_p = limits(rows, device)
    return temperature, top_k.masked_fill(min_p > 0, NO_TOP_K), top_p.masked_fill(min_p > 0, 1.0)


def limits(rows: Sequence[Sampling], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top_k, top_p and min_p [B, 1] of the rows."""
    return (
        to_device([[row.temperature] for row in rows], device, torch.float32),
        to_device([[row.top_k or NO_TOP_K] for row in rows], device),
        to_device([[row.top_p] for row in rows], device, torch.float32),
        to_device([[row.min_p if row.has_min_p else 0.0] for row in rows], device, torch.float32),
    )


def argmax(logits: Tensor) -> Tensor:
    """[B, V] -> [B] int64; the lower token id where two are equal."""
    return backend_on(logits.device).argmax(logits)


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """Makes logits [B, V] -inf, in place, where the bit in `allowed` [B, ceil(V / 32)] int32 is 0: the logits."""
    return backend_on(logits.device).mask(logits, allowed)


def pick(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, cuts: bool = True
) -> Tensor:
    """One token per row from [B, V] logits and [B, 1] parameters; greedy at temperature 0: [B] int64.

    `cuts`: whether top_k or top_p leave anything out in any row. Without them there is nothing to sort, and a row's
    token is the same, bit for bit.
    """
    return backend_on(logits.device).draw(logits, temperature, top_k, top_p, uniform, cuts=cuts)
