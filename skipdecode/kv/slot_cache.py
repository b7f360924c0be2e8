"""The KV cache of a continuous batch: one slot per row, each with its own length, and what forward calls see of it.

Column `c` of a slot holds position `c`. Rows are appended at the end and drop out at the front. As in a static cache, a
layer has columns for the longest prompt and for the steps that run it; memory grows when a longer row or one more row
joins, and rows move to the front when its end is reached, so that each row is copied about once in its life.

B rows, R slots, N tokens of a pass, T most tokens of a slot, S columns visible, H query heads, G key/value heads,
K head dim.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipdecode.backends.backend import Backend, DecodeAttention, FusedLayer, KVRange
from skipdecode.backends.device import backend_on
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.rope import Rotation, rotation_at
from skipdecode.config.model import DecoderConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.kv.view import StepView, attention

ROW_STEP, COLUMN_STEP = 8, 64  # memory grows by whole steps, so that it seldom does
MAX_PREPARED = 8  # prepared calls that are kept: of the whole model and of drafts, for as many numbers of tokens
MIN_PREPARED_TOKENS = 64  # tokens that a call is prepared for at least, if it may be given fewer


@dataclass(frozen=True)
class _PreparedCall:
    """Layers as one call for tokens of the batch, laid out once."""

    index: Tensor
    """`TokensView.index`, in the memory that the call reads."""
    call: Callable[[Tensor], Tensor]
    parts: dict[int, Tensor]
    """Slices of `index` by number of tokens."""


class SlotCache:
    """k[l], v[l]: [R, G, columns of layer l, K]; the batch is rows `first` to `first + B - 1` of it."""

    def __init__(
        self,
        config: DecoderConfig,
        kv_owner: Sequence[int],
        ends: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_closed: bool = False,
    ) -> None:
        """`kv_owner` as in `KVCache`. `ends` [L]: the decode step from which on a layer does not run. `is_closed`:
        all rows join at once, and memory is for these alone."""
        self._config, self._kv_owner, self._dtype, self._device = config, list(kv_owner), dtype, device
        self._backend, self._is_closed = backend_on(device), is_closed
        # shared K/V are as long as the longest of the layers needs, which is the last in this order
        self._ends = dict(sorted(zip(kv_owner, ends, strict=True)))
        self.prompts: list[int] = []
        """The number of prompt tokens of each row of the batch."""
        self._limits: list[int] = []  # max_new_tokens
        self._lengths: list[int] = []  # columns written
        self._prepared: dict[tuple[Any, ...], _PreparedCall] = {}
        self._clear()

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for own in (self._k, self._v) for t in own.values())

    def bytes_with(self, num_rows: int, prompt: int, limit: int, *, prompt_columns: int) -> int:
        """Bytes held while `num_rows` rows of up to `prompt` tokens and `limit` new tokens join by `add`.

        That is the cache that `add` copies from, the present memory, and the memory that replaces it if it is too
        small. Not counted: once few rows are left, memory that is far too large exists for a moment beside its
        replacement of less than half the size.
        """
        needed, columns = len(self.prompts) + num_rows, self._columns([*self.prompts, prompt], [*self._limits, limit])
        is_enough = needed <= self._num_rows and self._has(columns)
        grown = 0 if is_enough else self._nbytes(self._room_for(needed), columns.values())
        return self._nbytes(num_rows, [prompt_columns] * len(columns)) + self.nbytes + grown

    def open(self, prompts: Sequence[int], limits: Sequence[int]) -> KVCache:
        """Memory for all rows of an empty batch, as a cache to feed prompts into without padding; then call `fill`."""
        self.keep([])
        self._k, self._v = self._allocate(len(prompts), self._columns(prompts, limits))
        self._num_rows = len(prompts)
        (k, v), pads = ([own[owner] for owner in self._kv_owner] for own in (self._k, self._v)), [0] * len(prompts)
        return KVCache(k, v, to_device(pads, self._device, torch.int64), self._kv_owner, num_pad_host=pads)

    def fill(self, rows: Sequence[int], prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Makes `rows`, a subset of those given to `open`, the batch, once their prompts are fed."""
        self.prompts, self._limits, self._lengths = list(prompts), list(limits), list(prompts)
        self.keep(rows)

    def add(self, cache: KVCache, keep: Tensor, prompts: Sequence[int], limits: Sequence[int]) -> None:
        """Appends the rows `keep` [n] (ascending) of a filled prompt cache, without their padding. The batch is
        unchanged if memory runs out."""
        self._prepared.clear()
        needed = len(self.prompts) + len(prompts)
        columns = self._columns([*self.prompts, *prompts], [*self._limits, *limits])
        if self.first + needed > self._num_rows or not self._has(columns):
            self._move(range(len(self.prompts)), needed, columns)
        end = self.first + len(self.prompts)
        longest = max(prompts)
        # position c of a row is at column c + its padding; entries after its prompt are stale until overwritten
        padded = (torch.arange(longest, device=self._device) + cache.num_pad[keep, None]).clamp(max=cache.length - 1)
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        lines = (keep[:, None] * heads + torch.arange(heads, device=self._device))[:, :, None]  # [n, G, 1]
        sources: dict[int, Tensor] = {}  # by capacity, which most layers have in common
        for owner in self._ends:
            for own, new in ((self._k, cache.k[owner]), (self._v, cache.v[owner])):
                capacity = new.shape[2]
                if capacity not in sources:
                    sources[capacity] = (lines * capacity + padded[:, None]).flatten()
                # K numbers at a time: ten times as fast as `gather`, which looks up each number
                picked = new.view(-1, dim).index_select(0, sources[capacity])
                own[owner][end : end + len(prompts), :, :longest] = picked.view(len(prompts), heads, longest, dim)
        self.prompts += prompts
        self._limits += limits
        self._lengths += prompts

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but these (ascending). Dropping rows at either end copies nothing."""
        self._prepared.clear()
        prompts, limits = [self.prompts[row] for row in rows], [self._limits[row] for row in rows]
        if not rows:
            self._clear()  # releases the memory of a burst of long rows
        elif list(rows) == list(range(rows[0], rows[-1] + 1)):
            self.first += rows[0]
        else:
            self._move(rows, len(rows), self._columns(prompts, limits))
        self.prompts, self._limits = prompts, limits
        self._lengths = [self._lengths[row] for row in rows]

    def begin(self, positions: Sequence[int]) -> None:
        """Prepares a step that writes position `positions[i]` of row i and attends up to it."""
        self._at = to_device(positions, self._device)  # [B]
        self._zeros = torch.zeros_like(self._at)
        self._rows = torch.arange(self.first, self.first + len(positions), device=self._device)
        self._lengths = [max(n, c + 1) for n, c in zip(self._lengths, positions, strict=True)]
        self._visible = list(positions)
        for row in reversed(range(len(positions) - 1)):
            self._visible[row] = max(self._visible[row], self._visible[row + 1])  # of the rows from here on
        columns = torch.arange(self._visible[0] + 1, device=self._device)
        self._mask = (columns <= self._at[:, None])[:, None, None]  # [B, 1, 1, S]

    def reach(self, lengths: Sequence[int]) -> None:
        """Sets how many columns of each row are written, after steps that wrote several (`TokensView`)."""
        self._lengths = list(lengths)

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return len(self.prompts)

    @cached_property
    def token_attention(self) -> DecodeAttention | None:
        """The attention of `TokensView`; None if it takes torch's operators."""
        return self._backend.decode_attention(self._k[0]) if self._backend.supports_multi_token_rows else None

    def memory_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of all rows of the batch: [B, G, columns of the layer, K]."""
        owner, rows = self._kv_owner[layer], slice(self.first, self.first + self.num_rows)
        if self.num_rows == self._num_rows:  # 2 L slices are a tenth of a small model's step
            return self._k[owner], self._v[owner]
        return self._k[owner][rows], self._v[owner][rows]

    @property
    def backend(self) -> Backend:
        return self._backend

    def prepare_step(
        self, kernels: Sequence[FusedLayer], layers: Sequence[int], index: Tensor, most: int, *, runs_ffn: bool
    ) -> Callable[[Tensor], Tensor]:
        """`Backend.prepare_step` for tokens that attend; `index` and `most` as in `TokensView`.

        Calls are kept as long as rows and their memory stay, since preparing one takes as long as a third of a small
        model's step.
        """
        backend, size = self._backend, index.shape[1]
        room = max(MIN_PREPARED_TOKENS, 1 << (size - 1).bit_length()) if backend.accepts_fewer_rows else size
        key = (room, most if backend.needs_query_index else 1, runs_ffn, *layers, *kernels)
        if key not in self._prepared:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            own_index = index.new_zeros(len(index), room)
            one = _token_columns(self.memory_of(layers[0]), own_index, most)
            columns = [one._replace(k=k, v=v) for k, v in map(self.memory_of, layers)]
            call = backend.prepare_step(kernels, room, columns, runs_ffn=runs_ffn)
            self._prepared[key] = _PreparedCall(own_index, call, {})
        prepared = self._prepared[key]
        if size not in prepared.parts:
            prepared.parts[size] = prepared.index[:, :size]
        prepared.parts[size].copy_(index)
        return prepared.call

    def view(self, table: Tensor | None = None) -> "SlotView":
        """All rows of the batch in the step that `begin` prepared; `table` as in `SlotView`."""
        decode_attention = self._backend.decode_attention(self._k[0])
        return SlotView(self, 0, len(self._visible), table, decode_attention)

    # --- rows start..end-1 in the step that `begin` prepared

    def columns_at(self, start: int, end: int) -> Tensor:
        """[n] int64: the position that each row writes."""
        return self._at[start:end]

    def memory(self, layer: int, start: int, end: int) -> KVRange:
        """Like `KVCache.columns`, but the last column differs from row to row."""
        owner, rows = self._kv_owner[layer], slice(self.first + start, self.first + end)
        return KVRange(self._k[owner][rows], self._v[owner][rows], self._zeros[start:end], self._at[start:end])

    def write(self, layer: int, start: int, end: int, k: Tensor, v: Tensor) -> None:
        """Stores K and V [n, G, 1, K] at each row's position."""
        owner, rows, at = self._kv_owner[layer], self._rows[start:end], self._at[start:end]
        self._k[owner][rows, :, at] = k[:, :, 0]
        self._v[owner][rows, :, at] = v[:, :, 0]

    def visible(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V [n, G, S, K], and the mask [n, 1, 1, S] bool: True up to each row's position."""
        owner, columns = self._kv_owner[layer], self._visible[start] + 1
        rows = slice(self.first + start, self.first + end)
        mask = self._mask[start:end, :, :, :columns]
        return self._k[owner][rows, :, :columns], self._v[owner][rows, :, :columns], mask

    # --- memory

    def _has(self, columns: dict[int, int]) -> bool:
        return all(columns[owner] <= self._k[owner].shape[2] for owner in self._ends)

    def _columns(self, prompts: Sequence[int], limits: Sequence[int]) -> dict[int, int]:
        """Columns that the rows need in each layer that stores K/V, in whole steps; the last new token is not fed."""
        ends, limit = np.array(list(self._ends.values())), np.array(limits, dtype=np.int64)[:, None]
        most = (np.array(prompts, dtype=np.int64)[:, None] + np.minimum(limit - 1, ends)).max(axis=0)
        return {owner: -(-int(n) // COLUMN_STEP) * COLUMN_STEP for owner, n in zip(self._ends, most, strict=True)}

    def _nbytes(self, num_rows: int, columns: Iterable[int]) -> int:
        return 2 * num_rows * sum(columns) * self._config.kv_dim * self._dtype.itemsize

    def _clear(self) -> None:
        self._num_rows = self.first = 0
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        nothing = torch.empty(0, heads, 0, dim, dtype=self._dtype, device=self._device)
        self._k, self._v = dict.fromkeys(self._ends, nothing), dict.fromkeys(self._ends, nothing)

    def _allocate(self, num_rows: int, columns: dict[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """All K and V in one piece of memory: freeing many pieces of a few MB each would fragment it."""
        heads, dim = self._config.num_kv_heads, self._config.head_dim
        shapes = [(num_rows, heads, columns[owner], dim) for owner in self._ends] * 2
        sizes = [math.prod(shape) for shape in shapes]
        memory = self._backend.allocate_cache(sum(sizes), self._dtype, self._device, is_filled=self._is_closed)
        pieces = torch.split(memory, sizes)
        views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        count = len(self._ends)
        return dict(zip(self._ends, views[:count], strict=True)), dict(zip(self._ends, views[count:], strict=True))

    def _room_for(self, num_rows: int) -> int:
        """Slots for a batch of so many rows: half as many again if more rows may join."""
        return num_rows if self._is_closed else -(-(num_rows + num_rows // 2) // ROW_STEP) * ROW_STEP

    def _move(self, rows: Sequence[int], needed: int, columns: dict[int, int]) -> None:
        """Moves rows of the batch to the front, into new memory if this is too small or far too large for `needed`
        rows."""
        k, v, room = self._k, self._v, self._num_rows
        if needed > room or not self._has(columns) or room > 4 * max(needed, ROW_STEP):
            room = self._room_for(needed)
            k, v = self._allocate(room, columns)
        # Beside an answer of 1,000 tokens every row has as many columns: only those that were written are copied, and
        # rows that are in place already are not.
        stay = 0
        while k is self._k and stay < len(rows) and self.first + rows[stay] == stay:
            stay += 1
        parts = [
            (to_device(some, self._device), max(self._lengths[rows[at]] for at in some))
            for some in _of_like_length([self._lengths[row] for row in rows], stay)
        ]
        source = to_device(list(rows), self._device, torch.int64) + self.first
        # the largest first: if there is memory to copy it through, there is for all
        for owner in sorted(self._ends, key=lambda owner: -self._k[owner].shape[2]):
            for old, new in ((self._k, k), (self._v, v)):
                columns_of = min(old[owner].shape[2], new[owner].shape[2])
                # indexing copies: all is read before any of it is written
                copies = [old[owner][source[at], :, : min(columns_of, written)] for at, written in parts]
                for (at, _), copied in zip(parts, copies, strict=True):
                    new[owner][at, :, : copied.shape[2]] = copied
        self._k, self._v, self._num_rows, self.first = k, v, room, 0


def _of_like_length(lengths: Sequence[int], stay: int) -> list[list[int]]:
    """The indices from `stay` on, split into those of usual length and those far longer."""
    moved = range(stay, len(lengths))
    usual = 2 * sorted(lengths[stay:])[len(moved) // 2] if moved else 0
    parts = [at for at in moved if lengths[at] <= usual], [at for at in moved if lengths[at] > usual]
    return [part for part in parts if part]


class SlotView(StepView):
    """Rows of a slot cache in the step that `begin` prepared, one new token each."""

    def __init__(
        self, cache: SlotCache, start: int, end: int, table: Tensor | None, decode_attention: DecodeAttention | None
    ) -> None:
        """`table`: the table of `rope.rotary_table`; `decode_attention` as in `KVCache`."""
        self._cache, self._start, self._end, self._table = cache, start, end, table
        self._decode_attention, self.has_kernels = decode_attention, decode_attention is not None

    @property
    def rotation(self) -> Rotation | None:
        return rotation_at(self._table, self._cache.columns_at(self._start, self._end)[:, None])

    def columns(self, layer: int) -> KVRange:
        return self._cache.memory(layer, self._start, self._end)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self._decode_attention is not None:
            return self._decode_attention(q, k, v, self.columns(layer))
        if k is not None and v is not None:
            self.store(layer, k, v)
        keys, values, mask = self._cache.visible(layer, self._start, self._end)
        return attention(q, keys, values, mask)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.write(layer, self._start, self._end, k, v)

    def part(self, where: slice) -> "SlotView":
        start, end, _ = where.indices(self._end - self._start)
        return SlotView(self._cache, self._start + start, self._start + end, self._table, self._decode_attention)

    def last(self, h: Tensor) -> tuple[Tensor, "SlotView"]:
        raise AssertionError("there is one new token per row already")


class TokensView(StepView):
    """New tokens of some rows in one pass, several of a row if need be, as drafts are verified
    (`skipdecode.speculative.speculative_batch`). States are [N, 1, D].

    Each token has a slot and a position; it attends to positions up to its own. Tokens of a slot are neighbours, in any
    order: all are stored before any attends. Kernels for one token per row serve where they take slots
    (`KVRange.slots`); elsewhere the tokens of a slot are queries of masked attention.
    """

    def __init__(self, cache: SlotCache, slots: Tensor, positions: Tensor, table: Tensor | None, most: int) -> None:
        """`slots`, `positions` [N] int64: no two tokens have both alike. `table`: the table of `rope.rotary_table`.
        `most`: the largest number of tokens of a slot."""
        self._cache, self._slots, self._at, self._table, self._most = cache, slots, positions, table, most
        self._decode_attention = cache.token_attention
        self.has_kernels = self._decode_attention is not None

    def advance(self) -> None:
        """Moves every token to its slot's next position."""
        self._at = self.index[1].add_(1)
        for cached in ("rotation", "_queries"):
            self.__dict__.pop(cached, None)

    @property
    def positions(self) -> Tensor:
        """[N, 1] int64."""
        return self._at[:, None]

    @cached_property
    def rotation(self) -> Rotation | None:
        return rotation_at(self._table, self.positions)

    @cached_property
    def index(self) -> Tensor:
        """[3, N] int64: the first column of each token's slot, the token's own column, and its slot; [5, N] with
        `query_index` where the back end wants it."""
        index = torch.stack([torch.zeros_like(self._at), self._at, self._slots])
        if not self._cache.backend.needs_query_index:
            return index
        return torch.cat([index, query_index(self._slots, self._cache.num_rows)])

    def columns(self, layer: int) -> KVRange:
        return _token_columns(self._cache.memory_of(layer), self.index, self._most)

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        """`KVView.run_fused`, by a cached call if the tokens attend (`SlotCache.prepare_step`)."""
        if not attends:
            return super().run_fused(kernels, h, layers, attends=attends, runs_ffn=runs_ffn)
        return self._cache.prepare_step(kernels, layers, self.index, self._most, runs_ffn=runs_ffn)(h)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        if self._decode_attention is not None:
            return self._decode_attention(q, k, v, self.columns(layer))
        if k is not None and v is not None:
            self.store(layer, k, v)
        number, mask = self._queries
        keys, values = (memory[:, :, : mask.shape[3]] for memory in self._cache.memory_of(layer))
        queries = q.new_zeros(len(mask), q.shape[1], mask.shape[2], q.shape[3])  # [B, H, T, K]
        queries[self._slots, :, number] = q[:, :, 0]
        return attention(queries, keys, values, mask)[self._slots, :, number][:, :, None]

    @cached_property
    def _queries(self) -> tuple[Tensor, Tensor]:
        """[N] the index of each token within its slot, and the mask [B, 1, T, S] of the columns these attend to."""
        number = query_index(self._slots, self._cache.num_rows)[0]
        last = self._at.new_zeros(self._cache.num_rows, self._most)  # queries without a token see one column too
        last[self._slots, number] = self._at
        columns = torch.arange(int(self._at.max()) + 1, device=self._slots.device)
        return number, (columns <= last[..., None])[:, None]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        keys, values = self._cache.memory_of(layer)
        keys[self._slots, :, self._at] = k[:, :, 0]
        values[self._slots, :, self._at] = v[:, :, 0]

    def part(self, where: slice) -> "TokensView":
        if where == slice(None):
            return self
        return TokensView(self._cache, self._slots[where], self._at[where], self._table, self._most)

    def last(self, h: Tensor) -> tuple[Tensor, "TokensView"]:
        raise AssertionError("every token is a last one")


def _token_columns(memory: tuple[Tensor, Tensor], index: Tensor, most: int) -> KVRange:
    """What tokens with that `TokensView.index` attend to in the `memory` of a layer."""
    first, last, slots = index[:3]
    return KVRange(*memory, first, last, slots, query_index=index[3:] if len(index) > 3 else None, max_queries=most)


def query_index(slots: Tensor, num_rows: int) -> Tensor:
    """For tokens in `slots` [N]: [2, N] the index of each within its slot, and the number of tokens in that slot. Does
    not wait for the device."""
    at = torch.arange(len(slots), device=slots.device)
    begins = torch.cat([at[:1] == 0, slots[1:] != slots[:-1]])
    counts = slots.new_zeros(num_rows).index_add_(0, slots, torch.ones_like(slots))
    return torch.stack([at - torch.where(begins, at, 0).cummax(0).values, counts[slots]])
