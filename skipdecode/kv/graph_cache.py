"""The KV caches of decode steps that are CUDA graphs (`skipdecode.engine.cuda_graphs`), in one memory pool.

A captured step has fixed addresses, so all batches live in one piece of memory, allocated once. Where a layer's
keys and values begin in it, the strides of its rows and heads, each row's first column and the column that the step
writes are numbers on the device: the same graph serves batches of any length, wherever they lie in the pool.

B rows, L layers, G key/value heads, C columns of a layer's memory, K head dim.
"""

import itertools
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, PrefixGroups, SharedPrefix
from skipdecode.backends.device import backend_on
from skipdecode.backends.fp8 import as_bytes, narrowed
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.rope import RotaryTables, Rotations
from skipdecode.config.model import KV_ALIGNMENT, DecoderConfig
from skipdecode.kv.static_cache import KVCache, SharedPrefixKV
from skipdecode.kv.view import AttentionVariant, StepView, window_of


class PoolFull(RuntimeError):
    """The pool has no memory for the batch at the moment."""


class CachePool:
    """Memory for the K/V of all batches on a device: one piece, allocated once, so that addresses stay valid.

    First fit. A batch returns its part once nothing refers to it. One thread takes; any thread may drop what was taken.
    """

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        count = max(KV_ALIGNMENT, num_bytes // dtype.itemsize // KV_ALIGNMENT * KV_ALIGNMENT)
        self.memory: Tensor = torch.zeros(KV_ALIGNMENT, dtype=dtype, device=device).new_empty(count)
        self._gaps: list[tuple[int, int]] = [(0, count)]  # [start, end), ascending, no two adjacent
        # The last reference to a part may be dropped on any thread, and by the garbage collector within any line here
        # that allocates, where a lock would wait for itself. So returned parts go to a queue, whose `append` is atomic.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    @property
    def free_bytes(self) -> int:
        """Free bytes, over all gaps."""
        return sum(end - start for start, end in self._free()) * self.memory.element_size()

    def has_room(self, count: int) -> bool:
        """True if there is a gap for `count` elements."""
        return any(end - start >= count for start, end in self._free())

    def take(self, count: int) -> "PoolPart":
        """Memory for `count` elements; PoolFull if no gap is that large."""
        count = -(-count // KV_ALIGNMENT) * KV_ALIGNMENT
        for at, (start, end) in enumerate(self._free()):
            if end - start >= count:
                self._gaps[at : at + 1] = [(start + count, end)] if end - start > count else []
                return PoolPart(self, start, start + count)
        size = self.memory.element_size()
        raise PoolFull(
            f"keys and values of the batch take {count * size} bytes, and of {self.nbytes} for all batches no gap is "
            "as large; use fewer rows (actors.batch_size), more memory (actors.memory_share) or more GPUs "
            "(actors.num_gpus)"
        )

    def give_back(self, start: int, end: int) -> None:
        """Returns elements start..end-1; may be called from any thread."""
        self._returned.append((start, end))

    def _free(self) -> list[tuple[int, int]]:
        """The gaps, including everything returned so far."""
        while self._returned:
            insort(self._gaps, self._returned.popleft())
            merged: list[tuple[int, int]] = []
            for gap in self._gaps:
                if merged and merged[-1][1] == gap[0]:
                    merged[-1] = (merged[-1][0], gap[1])
                else:
                    merged.append(gap)
            self._gaps = merged
        return self._gaps


class PoolPart:
    """Elements start..end-1 of the pool, returned to it with the last reference to this object."""

    def __init__(self, pool: CachePool, start: int, end: int) -> None:
        self._pool, self.start, self.end = pool, start, end

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self._pool.memory.element_size()

    def __del__(self) -> None:
        self._pool.give_back(self.start, self.end)


_serials = itertools.count()


@dataclass(frozen=True)
class Layout:
    """The layout of a batch's K and V within its part of the pool."""

    rows: int
    heads: int
    head_dim: int
    columns: dict[int, int]
    """KVRange by layer, of the layers that store K/V of their own."""

    @classmethod
    def of(cls, config: DecoderConfig, rows: int, capacities: Sequence[int], kv_owner: Sequence[int]) -> "Layout":
        """The layout for `capacities` [L], rounded up so that every row begins at a multiple of 16 elements."""
        columns = {owner: -(-capacities[owner] // KV_ALIGNMENT) * KV_ALIGNMENT for owner in sorted(set(kv_owner))}
        return cls(rows, config.num_kv_heads, config.head_dim, columns)

    @property
    def count(self) -> int:
        """Elements in total."""
        return 2 * self.rows * sum(self.columns.values()) * self.heads * self.head_dim

    def shape(self, owner: int) -> tuple[int, int, int, int]:
        """[R, G, C, K]."""
        return self.rows, self.heads, self.columns[owner], self.head_dim

    def offsets(self, start: int) -> dict[int, tuple[int, int, int, int]]:
        """`GraphKVRange.where` by layer, of a part that begins at `start`."""
        offsets, at = {}, start
        for owner, columns in self.columns.items():
            head = columns * self.head_dim
            size = self.rows * self.heads * head
            offsets[owner] = (at, at + size, self.heads * head, head)
            at += 2 * size
        return offsets


class GraphedCache(KVCache):
    """A `KVCache` in a part of the pool; `keep` moves rows within that part."""

    part: PoolPart
    where: Tensor
    """[L, 4] int64: `GraphKVRange.where` of each layer."""
    serial: int
    """Identifies these rows at this address; a cache with other rows has another number."""

    @classmethod
    def within(
        cls,
        pool: CachePool,
        layout: Layout,
        num_pad: Tensor,
        kv_owner: Sequence[int],
        *,
        force_mask: bool = False,
        num_pad_host: Sequence[int] | None = None,
    ) -> "GraphedCache":
        """A cache for rows with `num_pad` [B], filled up to `layout.rows`. PoolFull if there is no memory."""
        part = pool.take(layout.count)
        offsets = layout.offsets(part.start)
        own: dict[tuple[str, int], Tensor] = {}
        for owner, (k_at, v_at, _, _) in offsets.items():
            shape = layout.shape(owner)
            for name, at in (("k", k_at), ("v", v_at)):
                memory = pool.memory[at : at + torch.Size(shape).numel()].view(shape)
                own[name, owner] = memory[: len(num_pad)]
        k, v = [own["k", owner] for owner in kv_owner], [own["v", owner] for owner in kv_owner]
        cache = cls(k, v, num_pad, kv_owner, force_mask=force_mask, num_pad_host=num_pad_host)
        cache.part, cache.serial = part, next(_serials)
        cache.force_mask = cache.valid is not None  # saves a wait for the device when rows are dropped
        # copied asynchronously, since steps of other batches may be running
        cache.where = to_device([offsets[owner] for owner in kv_owner], num_pad.device)
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes of the whole part, also after rows have left, and of shared prefixes."""
        shared = [] if self.shared is None else self.shared.memory
        return self.part.nbytes + sum(memory.numel() * memory.element_size() for memory in shared)

    def keep(self, rows: Sequence[int], runs: Sequence[bool]) -> Self:
        chosen = to_device(rows, self.num_pad.device)
        for owner in self.storing_layers(runs):
            filled = slice(min(self.length, self.k[owner].shape[2]))
            for memory in map(as_bytes, (self.k[owner], self.v[owner])):
                memory[: len(rows), :, filled] = memory[:, :, filled][chosen]  # indexing copies first
        first = slice(len(rows))  # leading rows keep their addresses and strides
        return self._with({owner: (self.k[owner][first], self.v[owner][first]) for owner in set(self.kv_owner)}, rows)

    def _with(self, own: Mapping[int, tuple[Tensor, Tensor]], rows: Sequence[int] | slice) -> Self:
        cache = super()._with(own, rows)
        cache.part, cache.where, cache.serial = self.part, self.where, next(_serials)
        return cache


class PrefixTable:
    """The shared prefixes that a captured step reads, as numbers on the device, at addresses that stay."""

    def __init__(self, num_layers: int, max_rows: int, device: torch.device) -> None:
        self._where = torch.zeros(num_layers, 4, dtype=torch.int64, device=device)
        # offset, length, and the lines of `PrefixGroups`
        self._rows = torch.zeros(5, max_rows, dtype=torch.int64, device=device)
        self._numbers = torch.arange(max_rows, device=device)
        self._is_filled = False

    def fill(self, shared: SharedPrefixKV | None) -> None:
        """Those of a batch, whose rows come first; None: it has none."""
        if self._is_filled:
            self._rows.zero_()
        self._is_filled = shared is not None
        if shared is None:
            return
        assert shared.where is not None, "prefixes outside of the graphs' memory"
        assert shared.groups is not None
        self._where.copy_(shared.where)
        for line, own in zip(self._rows, (*shared.placed, *shared.groups[:3]), strict=True):
            line[: len(own)].copy_(own)

    def counts(self, rows: int) -> Tensor:
        """[B] int64: the lengths of the first rows' prefixes."""
        return self._rows[1, :rows]

    def columns(self, memory: Tensor, layer: int, rows: int) -> SharedPrefix:
        offsets, counts, members, starts, sizes = self._rows[:, :rows]
        groups = PrefixGroups(members, starts, sizes, self._numbers[:rows])
        return SharedPrefix(memory, memory, offsets, counts, groups, self._where[layer])


class TableView(StepView):
    """What a captured step sees: one new token per row, whose address is computed from numbers on the device."""

    has_kernels = True

    def __init__(
        self,
        memory: Tensor,
        where: Tensor,
        first: Tensor,
        last: Tensor,
        positions: Tensor,
        tables: RotaryTables,
        prefixes: "PrefixTable | None" = None,
    ) -> None:
        """`memory` of the pool, `where` [L, 4], `first` [B], `last` [1]: as in `GraphKVRange`. `positions` [B, 1]
        int64. `tables`: the rotary ones of all layers. `prefixes`: those that rows share; None: they are not read."""
        self._memory, self._where, self._first, self._last = memory, where, first, last
        self._prefixes = prefixes
        self._positions, self._tables = positions, tables
        decode_attention = backend_on(memory.device).decode_attention(memory)
        assert decode_attention is not None, "the back end cannot read addresses from a table"
        self._decode_attention = decode_attention

    @cached_property
    def rotations(self) -> Rotations:
        return Rotations(self._tables, self._positions)

    def columns(self, layer: int) -> GraphKVRange:
        rows, prefixes = len(self._first), self._prefixes
        shared = None if prefixes is None else prefixes.columns(self._memory, layer, rows)
        return GraphKVRange(self._memory, self._where[layer], self._first, self._last.expand(rows), shared)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        return self._decode_attention(q, k, v, self.columns(layer), window=window_of(variant))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores K and V [B, G, 1, K] in the column `last` of every row."""
        rows, heads, _, dim = k.shape
        offsets = self._where[layer]

        def along(count: int, step: Tensor | int) -> Tensor:
            return torch.arange(count, device=k.device) * step

        own = along(rows, offsets[2])[:, None, None] + along(heads, offsets[3])[:, None] + along(dim, 1)  # [B, G, K]
        own = own + self._last * dim
        for at, new in ((offsets[0], k), (offsets[1], v)):
            stored = narrowed(new[:, :, 0], self._memory.dtype)
            as_bytes(self._memory).index_put_((own + at,), as_bytes(stored))

    def part(self, where: slice) -> "TableView":
        assert where == slice(None), "all rows of a static batch are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "TableView"]:
        raise AssertionError("there is one new token per row already")
