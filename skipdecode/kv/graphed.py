"""Keys and values in fixed memory, for decode steps as CUDA graphs (`skipdecode.step_graphs`).

A graph replays fixed kernels on fixed addresses: so the column that a step writes is a number on the device, and
attention reads columns in whole steps of COLUMN_STEP behind a mask.

B rows, S columns visible, H heads of queries, G of keys and values, K head dim.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from skipdecode.backends.backend import FusedLayer, FusedStore
from skipdecode.kv.padded import KVCache
from skipdecode.kv.view import attention
from skipdecode.rope import Turn, turn_of

COLUMN_STEP = 32  # a graph for every so many columns; also what a layer's memory is rounded up to


class GraphedCache(KVCache):
    """A `KVCache` in memory of `StepGraphs`; `keep` moves rows within it."""

    def keep(self, rows: Tensor) -> Self:
        for owner in set(self.owners):
            for memory in (self.k[owner], self.v[owner]):
                memory[: len(rows)] = memory[rows]  # indexing copies first
        return self._of(slice(len(rows)), rows)  # leading rows: the same addresses and strides, however many


class GraphedView:
    """What a captured step sees of a cache: `columns` of them, of which it writes the one that `at` [1] says."""

    has_kernels = stores_by_kernel = False

    def __init__(
        self, cache: KVCache, num_pad: Tensor, at: Tensor, columns: int, positions: Tensor, table: Tensor | None
    ) -> None:
        """`positions` [B, 1] int64; `table`: of `rope.rotations`."""
        self._cache, self._num_pad, self._at, self._columns = cache, num_pad, at, columns
        self._positions, self._table = positions, table

    @cached_property
    def turn(self) -> Turn | None:
        return turn_of(self._table, self._positions)

    @cached_property
    def _mask(self) -> Tensor:
        columns = torch.arange(self._columns, device=self._at.device)
        may = (columns >= self._num_pad[:, None]) & (columns <= self._at)
        # additive, so that the attention of every layer need not make it so
        bias = torch.zeros(may.shape, dtype=self._cache.k[0].dtype, device=may.device).masked_fill_(~may, float("-inf"))
        return bias[:, None, None]

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if k is not None and v is not None:
            self.store(layer, k, v)
        keys, values = (memory[layer][:, :, : self._columns] for memory in (self._cache.k, self._cache.v))
        return attention(q, keys, values, self._mask)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.k[layer].index_copy_(2, self._at, k)
        self._cache.v[layer].index_copy_(2, self._at, v)

    def run(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, feeds: bool
    ) -> Tensor:
        raise AssertionError("a kernel for CPUs")

    def store_by_kernel(self, kernel: FusedStore, h: Tensor, layers: Mapping[int, int]) -> None:
        raise AssertionError("a kernel for CPUs")

    def part(self, where: slice) -> "GraphedView":
        assert where == slice(None), "all rows of a cohort are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "GraphedView"]:
        raise AssertionError("one new column already")
