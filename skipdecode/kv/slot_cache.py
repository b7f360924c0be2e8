"""The KV cache of rows that come and go: one slot per row, each with its own length, and what forward calls see of it.

A slot is the place of a whole row, as in llama.cpp; what vLLM calls a slot is a column here.

Column `c` of a slot holds position `c`, or, where a prefix that rows share lies in a slot of another cache, the
position `c` behind it. A row keeps its slot until it ends, and the slot then serves the next one: nothing is moved when
rows join or leave. As in a static cache, a layer has columns for the longest prompt and for the steps that run it.
Memory grows when a longer row or one more row joins, unless it was reserved for all rows to come.

B rows, R slots, N tokens of a pass, T most tokens of a slot, S columns visible, H query heads, G key/value heads,
K head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.backend import Backend, DecodeAttention, FusedLayer, KVRange, PrefixGroups, SharedPrefix
from skipdecode.backends.device import backend_on
from skipdecode.backends.fp8 import as_bytes, narrowed, widened
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.rope import RotaryTables, Rotations
from skipdecode.config.model import DecoderConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.kv.view import AttentionVariant, MaskRule, StepView, attention, kernels_take, window_of

ROW_STEP, COLUMN_STEP = 8, 64  # memory grows by whole steps, so that it seldom does
MAX_PREPARED = 64  # prepared calls that are kept: of groups of layers, for as many numbers of tokens
MIN_PREPARED_TOKENS = 64  # tokens that a call is prepared for at least, if it may be given fewer


@dataclass(eq=False)
class Slot:
    """The place of one row. `index` changes when the cache moves its rows into smaller memory."""

    index: int
    prompt: int
    """Tokens of its prompt that are stored here."""
    limit: int
    """The new tokens that it may generate."""
    length: int = 0
    """Columns written, as far as the batch has said (`SlotCache.take`)."""


@dataclass(frozen=True)
class _PreparedCall:
    """Layers as one call for tokens of the batch, laid out once."""

    index: Tensor
    """`TokensView.index`, in the memory that the call reads."""
    groups: Tensor | None
    """`TokensView.groups`, likewise."""
    call: Callable[[Tensor], Tensor]
    parts: dict[int, Tensor]
    """Slices of `index` by number of tokens."""


class SlotCache:
    """k[l], v[l]: [R, G, columns of layer l, K]. G and K may differ from layer to layer, and K from keys to values."""

    def __init__(
        self,
        config: DecoderConfig,
        kv_owner: Sequence[int],
        ends: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`kv_owner` as in `KVCache`. `ends` [L]: the decode step from which on a layer does not run."""
        self._config, self._dtype, self._device = config, dtype, device
        self.kv_owner = list(kv_owner)
        self._backend = backend_on(device)
        # shared K/V are as long as the longest of the layers needs, which is the last in this order
        self._ends = dict(sorted(zip(kv_owner, ends, strict=True)))
        self.slots: list[Slot] = []
        """Those in use."""
        self.must_be_finite = False
        """Whether masked columns are read though the back end has kernels, so that new memory has to be zeros."""
        self._is_reserved = False
        self._prepared: dict[tuple[Any, ...], _PreparedCall] = {}
        self._prepared_for: Tensor | None = None  # the prefixes' memory
        self._clear()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for own in (self._k, self._v) for t in own.values())

    @property
    def num_slots(self) -> int:
        """R, those in use and the others."""
        return self._num_slots

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """K and V of all slots, [L] tensors each."""
        return [self._k[owner] for owner in self.kv_owner], [self._v[owner] for owner in self.kv_owner]

    def memory_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of all slots: [R, G, columns of the layer, K]."""
        owner = self.kv_owner[layer]
        return self._k[owner], self._v[owner]

    def bytes_with(self, prompts: Sequence[int], limits: Sequence[int]) -> int:
        """Bytes held while rows with so many prompt tokens and new tokens join: the present memory, and the memory that
        replaces it if it is too small. What replaces memory that is far too large is not counted."""
        needed, columns = self._needed(prompts, limits)
        if needed <= self._num_slots and self._has(columns):
            return self.nbytes
        return self.nbytes + self._nbytes(self._room_for(needed), columns)

    def reserve(self, num_rows: int, prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Memory for `num_rows` rows at a time of those with these prompt tokens and new tokens, in an empty cache. It
        is kept until the cache is dropped."""
        assert not self.slots, "the cache is in use"
        self._is_reserved = True
        self._k, self._v = self._allocate(num_rows, self._columns(prompts, limits))
        self._num_slots = num_rows

    def take(self, prompts: Sequence[int], limits: Sequence[int]) -> list[Slot]:
        """Slots for new rows, whose first `prompts[i]` columns the caller fills. `Slot.length` of the others says what
        is to be kept if memory has to grow. Nothing has changed if memory runs out."""
        needed, columns = self._needed(prompts, limits)
        if needed > self._num_slots or not self._has(columns) or self._is_far_too_large(needed):
            self._move(self._room_for(needed), columns)
        used = {slot.index for slot in self.slots}
        free = (index for index in range(self._num_slots) if index not in used)
        new = [Slot(next(free), prompt, limit, prompt) for prompt, limit in zip(prompts, limits, strict=True)]
        self.slots += new
        return new

    def release(self, slots: Sequence[Slot]) -> None:
        """Their rows have ended."""
        if not slots:
            return
        gone = set(map(id, slots))
        self.slots = [slot for slot in self.slots if id(slot) not in gone]
        if not self.slots and not self._is_reserved:
            self._clear()  # releases the memory of a burst of long rows

    def copy(self, cache: KVCache, slots: Sequence[Slot]) -> None:
        """Copies the rows of a filled prompt cache to `slots`, without their padding."""
        count, longest = len(slots), max(slot.prompt for slot in slots)
        to, rows = to_device([slot.index for slot in slots], self._device), torch.arange(count, device=self._device)
        # position c of a row is at column c + its padding; entries after its prompt are stale until overwritten
        padded = (torch.arange(longest, device=self._device) + cache.num_pad[:, None]).clamp(max=cache.length - 1)
        sources: dict[tuple[int, int], Tensor] = {}  # by heads and capacity, which most layers have in common
        for owner in self._ends:
            for own, new in ((self._k, cache.k[owner]), (self._v, cache.v[owner])):
                _, heads, capacity, dim = new.shape
                if (heads, capacity) not in sources:
                    lines = rows[:, None, None] * heads + torch.arange(heads, device=self._device)[:, None]  # [n, G, 1]
                    sources[heads, capacity] = (lines * capacity + padded[:, None]).flatten()
                # K numbers at a time: ten times as fast as `gather`, which looks up each number
                picked = as_bytes(new).view(-1, dim).index_select(0, sources[heads, capacity])
                as_bytes(own[owner])[to, :, :longest] = picked.view(count, heads, longest, dim)

    def copy_slot(self, source: Slot, to: Slot, columns: int) -> None:
        """Copies the first columns of one slot to another."""
        for own in map(as_bytes, (*self._k.values(), *self._v.values())):
            own[to.index, :, :columns] = own[source.index, :, :columns]

    def prompts_at(self, slots: Sequence[Slot]) -> KVCache:
        """The memory of these slots as a cache that prompts are fed into without padding."""
        k, v = self.memory
        pads = [0] * len(slots)
        cache = KVCache(k, v, to_device(pads, self._device, torch.int64), self.kv_owner, num_pad_host=pads)
        cache.slots = to_device([slot.index for slot in slots], self._device, torch.int64)
        return cache

    @cached_property
    def token_attention(self) -> DecodeAttention | None:
        """The attention of `TokensView`; None if it takes torch's operators."""
        return self._backend.decode_attention(self._k[0]) if self._backend.supports_multi_token_rows else None

    def prepare_step(
        self, kernels: Sequence[FusedLayer], layers: Sequence[int], view: "TokensView", *, runs_ffn: bool
    ) -> Callable[[Tensor], Tensor]:
        """`Backend.prepare_step` for the tokens of `view`, which attend.

        Calls are kept as long as the memory stays, since preparing one takes as long as a third of a small model's
        step.
        """
        backend, size, index = self._backend, view.index.shape[1], view.index
        prefixes = None if view.prefixes is None else view.prefixes.memory_of(0)[0]
        if prefixes is not self._prepared_for:
            self._prepared.clear()
            self._prepared_for = prefixes
        room = max(MIN_PREPARED_TOKENS, 1 << (size - 1).bit_length()) if backend.accepts_fewer_rows else size
        most = view.most if backend.needs_query_index else 1
        num_grouped = None if view.groups is None else view.groups.shape[1]
        key = (room, most, num_grouped, runs_ffn, *layers, *kernels)
        if key not in self._prepared:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            own_index = index.new_zeros(len(index), room)
            groups = None if view.groups is None else torch.empty_like(view.groups)
            columns = [view.columns_at(layer, own_index, groups) for layer in layers]
            first = columns[0]
            columns = [  # the very same tensors in all layers
                first._replace(k=one.k, v=one.v, shared=one.shared) for one in columns
            ]
            call = backend.prepare_step(kernels, room, columns, runs_ffn=runs_ffn)
            self._prepared[key] = _PreparedCall(own_index, groups, call, {})
        prepared = self._prepared[key]
        if size not in prepared.parts:
            prepared.parts[size] = prepared.index[:, :size]
        prepared.parts[size].copy_(index)
        if prepared.groups is not None and view.groups is not None:
            prepared.groups.copy_(view.groups)
        return prepared.call

    # --- memory

    def _needed(self, prompts: Sequence[int], limits: Sequence[int]) -> tuple[int, dict[int, int]]:
        """Slots and columns that the rows and these newcomers need."""
        columns = self._columns(
            [*(slot.prompt for slot in self.slots), *prompts], [*(slot.limit for slot in self.slots), *limits]
        )
        return len(self.slots) + len(prompts), columns

    def _has(self, columns: dict[int, int]) -> bool:
        return all(columns[owner] <= self._k[owner].shape[2] for owner in self._ends)

    def _is_far_too_large(self, needed: int) -> bool:
        return not self._is_reserved and self._num_slots > 4 * max(needed, ROW_STEP)

    def _columns(self, prompts: Sequence[int], limits: Sequence[int]) -> dict[int, int]:
        """Columns that the rows need in each layer that stores K/V, in whole steps; the last new token is not fed."""
        ends, limit = np.array(list(self._ends.values())), np.array(limits, dtype=np.int64)[:, None]
        most = (np.array(prompts, dtype=np.int64)[:, None] + np.minimum(limit - 1, ends)).max(axis=0)
        return {owner: -(-int(n) // COLUMN_STEP) * COLUMN_STEP for owner, n in zip(self._ends, most, strict=True)}

    def _room_for(self, num_rows: int) -> int:
        """Slots for a batch of so many rows: half as many again, since more rows may join."""
        return -(-(num_rows + num_rows // 2) // ROW_STEP) * ROW_STEP

    def _shapes(self, num_slots: int, columns: dict[int, int]) -> list[tuple[int, int, int, int]]:
        """Of K in all layers that store them, and then of V."""
        found = []
        for values in (False, True):
            for owner in self._ends:
                heads, *dims = self._config.kv_shape(owner)
                found.append((num_slots, heads, columns[owner], dims[values]))
        return found

    def _nbytes(self, num_slots: int, columns: dict[int, int]) -> int:
        return sum(map(math.prod, self._shapes(num_slots, columns))) * self._dtype.itemsize

    def _clear(self) -> None:
        self._num_slots = 0
        columns = dict.fromkeys(self._ends, 0)
        self._k, self._v = self._views(torch.empty(0, dtype=self._dtype, device=self._device), 0, columns)
        self._prepared.clear()

    def _allocate(self, num_slots: int, columns: dict[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """All K and V in one piece of memory: freeing many pieces of a few MB each would fragment it."""
        count = sum(map(math.prod, self._shapes(num_slots, columns)))
        memory = self._backend.allocate_cache(count, self._dtype, self._device, is_filled=self._is_reserved)
        self._prepared.clear()
        return self._views(memory.zero_() if self.must_be_finite else memory, num_slots, columns)

    def _views(
        self, memory: Tensor, num_slots: int, columns: dict[int, int]
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        shapes = self._shapes(num_slots, columns)
        pieces = torch.split(memory, [math.prod(shape) for shape in shapes])
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        count = len(self._ends)
        return dict(zip(self._ends, views[:count], strict=True)), dict(zip(self._ends, views[count:], strict=True))

    def _move(self, room: int, columns: dict[int, int]) -> None:
        """Moves the rows to the first slots of new memory."""
        k, v = self._allocate(room, columns)
        # Beside an answer of 1,000 tokens every row has as many columns: only those that were written are copied.
        for parts in _of_like_length(self.slots):
            source = to_device([slot.index for slot in parts], self._device)
            to = to_device([self.slots.index(slot) for slot in parts], self._device)
            written = max(slot.length for slot in parts)
            for old, new in ((self._k, k), (self._v, v)):
                for owner in self._ends:
                    filled = min(old[owner].shape[2], new[owner].shape[2], written)
                    as_bytes(new[owner])[to, :, :filled] = as_bytes(old[owner])[source, :, :filled]
        for index, slot in enumerate(self.slots):
            slot.index = index
        self._k, self._v, self._num_slots = k, v, room


def _of_like_length(slots: Sequence[Slot]) -> list[list[Slot]]:
    """The slots, split into those of usual length and those far longer."""
    usual = 2 * sorted(slot.length for slot in slots)[len(slots) // 2] if slots else 0
    parts = [slot for slot in slots if slot.length <= usual], [slot for slot in slots if slot.length > usual]
    return [part for part in parts if part]


class TokensView(StepView):
    """New tokens of some rows in one pass, one or several of a row. States are [N, 1, D].

    Each token has a slot and a column; it attends to columns up to its own, and to the prefix before its row's own
    columns. Tokens of a slot are neighbours, in any order: all are stored before any attends. Kernels serve where they
    take slots (`KVRange.slots`); elsewhere the tokens of a slot are queries of masked attention.
    """

    def __init__(
        self,
        cache: SlotCache,
        index: Tensor,
        tables: RotaryTables,
        *,
        most: int,
        num_columns: int,
        prefixes: SlotCache | None = None,
        groups: Tensor | None = None,
    ) -> None:
        """`index` as `token_index` makes it. `tables`: the rotary ones of all layers. `most`: the largest number of
        tokens of a slot. `num_columns`: what the tokens attend to at most. `prefixes`: where shared prefixes are.
        `groups` [3, tokens of the batch]: `prefix_groups`, where the back end needs them."""
        self._cache, self.index, self._tables, self.most, self.prefixes = cache, index, tables, most, prefixes
        self._num_columns, self.groups = num_columns, groups
        self._masks: dict[MaskRule, Tensor] = {}
        self._decode_attention = cache.token_attention
        self.has_kernels = self._decode_attention is not None
        assert prefixes is None or self.has_kernels, "attention by torch's operators does not read shared prefixes"

    def advance(self) -> None:
        """Moves every token to its slot's next position."""
        self.index[COLUMN] += 1
        self._num_columns += 1
        self._masks.clear()
        for cached in ("positions", "rotations", "_mask", "_last_columns"):
            self.__dict__.pop(cached, None)

    @cached_property
    def positions(self) -> Tensor:
        """[N, 1] int64."""
        return (self.index[COLUMN] + self.index[PREFIX_LENGTH])[:, None]

    @cached_property
    def rotations(self) -> Rotations:
        return Rotations(self._tables, self.positions)

    def columns(self, layer: int) -> KVRange:
        return self.columns_at(layer, self.index, self.groups)

    def columns_at(self, layer: int, index: Tensor, groups: Tensor | None) -> KVRange:
        """What tokens with that `index` and these `groups` attend to in a layer."""
        shared = None
        if self.prefixes is not None:
            grouped, memory = None, self.prefixes.memory_of(layer)
            if groups is not None:
                rows, starts, sizes = groups
                grouped = PrefixGroups(rows, starts, sizes, index[NUMBER])
            shared = SharedPrefix(*memory, index[PREFIX_OFFSET], index[PREFIX_LENGTH], grouped)
        queries = index[QUERY : QUERY + 2] if self._cache.backend.needs_query_index else None
        memory = self._cache.memory_of(layer)
        return KVRange(
            *memory, index[FIRST], index[COLUMN], index[SLOT], shared, query_index=queries, max_queries=self.most
        )

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        """`KVView.run_fused`, by a cached call if the tokens attend (`SlotCache.prepare_step`)."""
        if not attends:
            return super().run_fused(kernels, h, layers, attends=attends, runs_ffn=runs_ffn)
        return self._cache.prepare_step(kernels, layers, self, runs_ffn=runs_ffn)(h)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        if self._decode_attention is not None and kernels_take(variant):
            return self._decode_attention(q, k, v, self.columns(layer), window=window_of(variant))
        if k is not None and v is not None:
            self.store(layer, k, v)
        mask = self._mask_of(variant)
        slots, number = self.index[SLOT], self.index[QUERY]
        keys, values = (widened(memory[:, :, : mask.shape[3]], q.dtype) for memory in self._cache.memory_of(layer))
        queries = q.new_zeros(len(mask), q.shape[1], mask.shape[2], q.shape[3])  # [R, H, T, K]
        queries[slots, :, number] = q[:, :, 0]
        return attention(queries, keys, values, mask, variant)[slots, :, number][:, :, None]

    def _mask_of(self, variant: AttentionVariant | None) -> Tensor:
        if variant is None or variant.rule is None:
            return self._mask
        if variant.rule not in self._masks:  # layers of one kind have the same rule
            columns = torch.arange(self._num_columns, device=self.index.device)
            zero = columns[:1]  # no rule here tells rows or heads apart
            allowed = variant.rule(zero, zero, self._last_columns[:, None, :, None], columns[None, None, None])
            self._masks[variant.rule] = allowed & self._mask
        return self._masks[variant.rule]

    @cached_property
    def _mask(self) -> Tensor:
        """[R, 1, T, S] bool: the columns that the tokens of each slot attend to."""
        columns = torch.arange(self._num_columns, device=self.index.device)
        return (columns <= self._last_columns[..., None])[:, None]

    @cached_property
    def _last_columns(self) -> Tensor:
        """[R, T] int64: the column of each token; 0 for queries without one, which see one column too."""
        last = self.index.new_zeros(self._cache.num_slots, self.most)
        last[self.index[SLOT], self.index[QUERY]] = self.index[COLUMN]
        return last

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._cache.memory_of(layer)
        slots, columns = self.index[SLOT], self.index[COLUMN]
        for memory, new in ((keys, k), (values, v)):
            as_bytes(memory)[slots, :, columns] = as_bytes(narrowed(new[:, :, 0], memory.dtype))

    def part(self, where: slice) -> "TokensView":
        if where == slice(None):
            return self
        return TokensView(
            self._cache,
            self.index[:, where].contiguous(),
            self._tables,
            most=self.most,
            num_columns=self._num_columns,
            prefixes=self.prefixes,
            groups=self.groups,
        )

    def last(self, h: Tensor) -> tuple[Tensor, "TokensView"]:
        raise AssertionError("every token is a last one")


FIRST, COLUMN, SLOT, QUERY, _QUERIES, NUMBER, PREFIX_OFFSET, PREFIX_LENGTH = range(8)
"""The lines of `TokensView.index` [8, N] int64: a token's first column (0), its own column, its slot, its number among
the tokens of its slot, how many these are, its number in the batch, and where the prefix begins
(`SharedPrefix.offsets`) and how long it is."""


def token_index(
    columns: Sequence[int],
    slots: Sequence[int],
    prefixes: Sequence[tuple[int, int]] | None = None,
    *,
    queries: Sequence[tuple[int, int]] | None = None,
) -> np.ndarray[Any, Any]:
    """`TokensView.index` on the host. `prefixes`: offset and length of each token's, None if none has any. `queries`:
    each token's number among those of its slot, and how many these are; None: one each."""
    index = np.zeros((8, len(columns)), dtype=np.int64)
    index[COLUMN], index[SLOT], index[_QUERIES], index[NUMBER] = columns, slots, 1, np.arange(len(columns))
    if queries is not None:
        index[QUERY : QUERY + 2] = np.array(queries, dtype=np.int64).T
    if prefixes is not None:
        index[PREFIX_OFFSET:] = np.array(prefixes, dtype=np.int64).T
    return index
