"""Keys and values for decode steps as CUDA graphs (`skipdecode.engine.cuda_graphs`): a captured step knows one address.

All caches lie in one memory (`skipdecode.kv.pool`). Where a layer's keys and values begin in it, and how far its rows
lie apart, stands in a table on the device, as do a row's first column and the one that the step writes. So the same
graph serves batches of any length, and of any place in memory.

B rows, L layers, G heads of keys and values, C columns of a layer's memory, K head dim.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from skipdecode.backends.backend import TableColumns
from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.rope import Turn, turn_of
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.batch_sizes import ALIGNMENT
from skipdecode.kv.padded import KVCache
from skipdecode.kv.pool import CachePool, PoolPart
from skipdecode.kv.view import StepView

_serials = itertools.count()


@dataclass(frozen=True)
class Layout:
    """Where each layer's K and V lie in the part of a batch."""

    rows: int
    heads: int
    head_dim: int
    columns: dict[int, int]
    """Of each layer that has memory of its own; what others share is that of one of these."""

    @classmethod
    def of(cls, config: DecoderConfig, rows: int, capacities: Sequence[int], owners: Sequence[int]) -> "Layout":
        """`capacities` [L] are rounded up, so that every row begins at a whole 16 numbers."""
        columns = {owner: -(-capacities[owner] // ALIGNMENT) * ALIGNMENT for owner in sorted(set(owners))}
        return cls(rows, config.num_kv_heads, config.head_dim, columns)

    @property
    def count(self) -> int:
        """Numbers in all."""
        return 2 * self.rows * sum(self.columns.values()) * self.heads * self.head_dim

    def shape(self, owner: int) -> tuple[int, int, int, int]:
        """[R, G, C, K]."""
        return self.rows, self.heads, self.columns[owner], self.head_dim

    def places(self, start: int) -> dict[int, tuple[int, int, int, int]]:
        """As `TableColumns.where`, of a part that begins at `start`."""
        places, at = {}, start
        for owner, columns in self.columns.items():
            head = columns * self.head_dim
            size = self.rows * self.heads * head
            places[owner] = (at, at + size, self.heads * head, head)
            at += 2 * size
        return places


class GraphedCache(KVCache):
    """A `KVCache` in a part of the pool; `keep` moves rows within it."""

    part: PoolPart
    where: Tensor
    """[L, 4] int64, as `TableColumns.where` of each layer."""
    serial: int
    """Of these rows in that place; other rows, another number."""

    @classmethod
    def within(
        cls,
        pool: CachePool,
        layout: Layout,
        num_pad: Tensor,
        owners: Sequence[int],
        *,
        is_masked: bool = False,
        paddings: Sequence[int] | None = None,
    ) -> "GraphedCache":
        """Rows for `num_pad` [B] and those that fill them up to `layout.rows`. PoolFull where there is no room."""
        part = pool.take(layout.count)
        places = layout.places(part.start)
        own: dict[tuple[str, int], Tensor] = {}
        for owner, (k_at, v_at, _, _) in places.items():
            shape = layout.shape(owner)
            for name, at in (("k", k_at), ("v", v_at)):
                memory = pool.memory[at : at + torch.Size(shape).numel()].view(shape)
                own[name, owner] = memory[: len(num_pad)]
        k, v = [own["k", owner] for owner in owners], [own["v", owner] for owner in owners]
        cache = cls(k, v, num_pad, owners, is_masked=is_masked, paddings=paddings)
        cache.part, cache.serial = part, next(_serials)
        cache.is_masked = cache.valid is not None  # so that nobody waits to see whether rows that stay are padded
        cache.where = to_device(
            [places[owner] for owner in owners], num_pad.device
        )  # other cohorts' steps run meanwhile
        return cache

    @property
    def nbytes(self) -> int:
        """Of the whole part, also when rows have left."""
        return self.part.nbytes

    def keep(self, rows: Sequence[int], runs: Sequence[bool]) -> Self:
        chosen = to_device(rows, self.num_pad.device)
        for owner in self.owners_of(runs):
            filled = slice(min(self.length, self.k[owner].shape[2]))
            for memory in (self.k[owner], self.v[owner]):
                memory[: len(rows), :, filled] = memory[:, :, filled][chosen]  # indexing copies first
        first = slice(len(rows))  # leading rows: the same addresses and strides, however many
        return self._with({owner: (self.k[owner][first], self.v[owner][first]) for owner in set(self.owners)}, rows)

    def _with(self, own: Mapping[int, tuple[Tensor, Tensor]], rows: Sequence[int] | slice) -> Self:
        cache = super()._with(own, rows)
        cache.part, cache.where, cache.serial = self.part, self.where, next(_serials)
        return cache


class TableView(StepView):
    """What a captured step sees: one new column per row, whose place is a number on the device."""

    has_kernels = True

    def __init__(
        self, memory: Tensor, where: Tensor, first: Tensor, last: Tensor, positions: Tensor, table: Tensor | None
    ) -> None:
        """`memory` of the pool, `where` [L, 4], `first` [B], `last` [1]: as in `TableColumns`. `positions` [B, 1]
        int64; `table`: of `rope.rotary_table`."""
        self._memory, self._where, self._first, self._last = memory, where, first, last
        self._positions, self._table = positions, table
        attend_one = backend_on(memory.device).column_attention(memory)
        assert attend_one is not None, "a back end that reads no tables"
        self._attend_one = attend_one

    @cached_property
    def turn(self) -> Turn | None:
        return turn_of(self._table, self._positions)

    def columns(self, layer: int) -> TableColumns:
        return TableColumns(self._memory, self._where[layer], self._first, self._last.expand(len(self._first)))

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return self._attend_one(q, k, v, self.columns(layer))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Into the column `last` of every row."""
        rows, heads, _, dim = k.shape
        places = self._where[layer]

        def along(count: int, step: Tensor | int) -> Tensor:
            return torch.arange(count, device=k.device) * step

        own = along(rows, places[2])[:, None, None] + along(heads, places[3])[:, None] + along(dim, 1)  # [B, G, K]
        own = own + self._last * dim
        for at, new in ((places[0], k), (places[1], v)):
            self._memory.index_put_((own + at,), new[:, :, 0])

    def part(self, where: slice) -> "TableView":
        assert where == slice(None), "all rows of a cohort are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "TableView"]:
        raise AssertionError("one new column already")
