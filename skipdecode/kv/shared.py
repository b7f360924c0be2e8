"""Keys and values of prompts' heads that several rows of a batch read: one copy, beside the memory of the rows' own.

Attention goes over both with one softmax (`SharedColumns`): a row's bits are those it has with all columns in one
piece. Only kernels read it; where there are none, heads are copied into the rows' own memory
(`skipdecode.engine.prefix_sharing`).

B rows, R heads of prompts, G heads of keys and values, S columns, K head dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends.backend import SharedColumns


class SharedHeads:
    """k[l], v[l]: [R, G, S, K], the columns of every head up to its end, so that all end together."""

    def __init__(
        self, k: Sequence[Tensor], v: Sequence[Tensor], owners: Sequence[int], lengths: Tensor, of_row: Tensor
    ) -> None:
        """`lengths` [R] int64; `of_row` [B] int64: the head that a row begins with, -1: none."""
        self._k, self._v, self._owners, self._lengths, self._of_row = k, v, owners, lengths, of_row
        has_head = of_row >= 0
        chosen = of_row.clamp(min=0)
        self.counts = torch.where(has_head, lengths[chosen], 0)
        """[B] int64: columns of the row's head."""
        groups, columns = k[0].shape[1:3]
        self._where = torch.where(has_head, chosen * groups * columns + columns - self.counts, 0)

    @property
    def memory(self) -> list[Tensor]:
        """All of it, once."""
        return [t[owner] for owner in set(self._owners) for t in (self._k, self._v)]

    def columns(self, layer: int) -> SharedColumns:
        return SharedColumns(self._k[layer], self._v[layer], self._where, self.counts)

    def of(self, rows: Tensor | slice) -> "SharedHeads":
        """For some of the rows, the same memory."""
        return SharedHeads(self._k, self._v, self._owners, self._lengths, self._of_row[rows].contiguous())
