"""The KV cache of rows that start together, and what forward calls see of it.

The positions that run a layer are a prefix of the sequence, so layer `l` needs memory for its first n_l positions only:
a decode step costs no memory in the layers it skips. Rows are left-padded to a common length, so that all rows write
the same column of the cache in a step: a row's position is its column minus its padding. Prompts may also be fed
without their padding, where the back end takes them (`PackedPromptsView`). Nothing here decides what runs.

B rows, L layers, R shared prefixes, T new columns, N tokens of all prompts, S columns, H query heads, G key/value
heads, K head dim, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from skipdecode.backends.backend import (
    DecodeAttention,
    FusedKVStore,
    FusedLayer,
    KVRange,
    PackedPrompts,
    PrefixGroups,
    SharedPrefix,
    prefix_groups,
)
from skipdecode.backends.device import backend_on
from skipdecode.backends.fp8 import as_bytes, narrowed, widened
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.rope import RotaryTables, Rotations
from skipdecode.config.model import DecoderConfig
from skipdecode.kv.view import (
    AttentionVariant,
    MaskRule,
    StepView,
    allowed_by,
    attention,
    causal_mask,
    diagonal,
    kernels_take,
    window_of,
)


class SharedPrefixKV:
    """One copy of the K/V of prompt prefixes that several rows of a batch attend to: k[l], v[l] [R, G, S, K].

    Attention goes over a row's prefix and its own columns with one softmax (`SharedPrefix`). On CPUs a row's result is
    bit for bit that of all columns in one piece; on GPUs it is added up in parts. Only kernels read it; elsewhere
    prefixes are copied into the rows' own memory (`skipdecode.engine.prefix_sharing`).
    """

    def __init__(
        self,
        k: Sequence[Tensor],
        v: Sequence[Tensor],
        kv_owner: Sequence[int],
        places: Sequence[tuple[int, int]],
        where: Tensor | None = None,
        held: object = None,
    ) -> None:
        """`places` [B]: where each row's prefix begins, as in `SharedPrefix.offsets`, alike in all layers, and how many
        tokens it has, 0 if there is none. `where` [L, 4]: as in `GraphKVRange`, if they are in its memory. `held`: the
        owner of the memory, which is kept as long as this."""
        self._k, self._v, self._kv_owner, self.where, self._held = k, v, kv_owner, where, held
        self._places, self._device = list(places), k[0].device

    @property
    def memory(self) -> list[Tensor]:
        """The K and V tensors, each once."""
        return [t[layer] for layer in set(self._kv_owner) for t in (self._k, self._v)]

    @cached_property
    def placed(self) -> Tensor:
        """[2, B] int64: offsets and lengths."""
        return to_device(list(zip(*self._places, strict=True)), self._device)

    @property
    def counts(self) -> Tensor:
        """[B] int64: the tokens of each row's prefix, 0 if it has none."""
        return self.placed[1]

    @cached_property
    def groups(self) -> PrefixGroups | None:
        """None where the back end needs none."""
        most = backend_on(self._device).prefix_group_rows
        if most is None:
            return None
        rows, starts, sizes = to_device(prefix_groups(self._places, most), self._device)
        return PrefixGroups(rows, starts, sizes, torch.arange(len(rows), device=self._device))

    def columns(self, layer: int) -> SharedPrefix:
        """For prompts."""
        return SharedPrefix(self._k[layer], self._v[layer], *self.placed)

    def step_columns(self, layer: int) -> SharedPrefix:
        """For one new token of each row."""
        return self.columns(layer)._replace(groups=self.groups)

    def of(self, rows: Sequence[int] | slice) -> "SharedPrefixKV":
        """The prefixes of some of the rows, in the same memory."""
        own = self._places[rows] if isinstance(rows, slice) else [self._places[row] for row in rows]
        return SharedPrefixKV(self._k, self._v, self._kv_owner, own, self.where, self._held)


class KVCache:
    """k[l], v[l]: [B, G, capacity of layer l, K]; `length` columns are filled in every layer that still runs.

    G and K may differ from layer to layer, and K from keys to values.

    `kv_owner` [L]: the layer whose memory holds each layer's K/V, which is its own unless neighbours share theirs
    (AcrossKV). `shared`: the prefixes of prompts that several rows read; the columns here are those after them.
    """

    def __init__(
        self,
        k: list[Tensor],
        v: list[Tensor],
        num_pad: Tensor,
        kv_owner: Sequence[int],
        *,
        force_mask: bool = False,
        num_pad_host: Sequence[int] | None = None,
    ) -> None:
        """`num_pad` [B] int64: columns of left padding. `num_pad_host` [B]: the same numbers on the host, which saves a
        wait for the device; None if not known there."""
        self.k, self.v, self.kv_owner, self.force_mask = k, v, kv_owner, force_mask
        self.num_pad, self.num_pad_host = num_pad, num_pad_host
        self.length = 0
        self.shared: SharedPrefixKV | None = None
        self.slots: Tensor | None = None
        """[B] int64: where the rows are, if `k` and `v` are those of a `SlotCache`, for prompts without padding."""
        # a [B] tensor, always the same one, and the `length` that it was last filled with
        self._newest_columns: tuple[Tensor, int] | None = None
        self._steps: dict[tuple[object, ...], Callable[[Tensor], Tensor]] = {}  # prepared calls of `run_fused`
        self._by_device: dict[torch.device, Self] = {}  # made by `on`, for devices other than that of `num_pad`
        self._parts: list[tuple[slice, Self]] = []
        columns = torch.arange(max(t.shape[2] for t in k), device=num_pad.device)
        # Without padding, attention needs no mask. `force_mask` asks for one all the same, so that the choice of a
        # kernel, and with it the last bit, does not depend on the other rows of the batch.
        has_mask = force_mask or (bool(num_pad.any()) if num_pad_host is None else any(num_pad_host))
        self.valid: Tensor | None = columns >= num_pad[:, None] if has_mask else None  # [B, S]

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        *,
        num_pad: Tensor,
        capacities: Sequence[int],
        kv_owner: Sequence[int] | None = None,
        dtype: torch.dtype,
        force_mask: bool = False,
        devices: Sequence[torch.device] | None = None,
        num_pad_host: Sequence[int] | None = None,
    ) -> "KVCache":
        """An empty cache for len(num_pad) rows with `capacities` [L] columns per layer (`prefill.allocate_cache`).

        `kv_owner`: None if no layers share; those that do have the capacity of the layer that stores their K/V.
        `devices` [L]: None if all layers are on the device of `num_pad`.
        """
        kv_owner = range(len(capacities)) if kv_owner is None else kv_owner
        assert len(capacities) == len(kv_owner) == config.num_hidden_layers, (
            len(capacities),
            config.num_hidden_layers,
        )
        where = [num_pad.device] * len(capacities) if devices is None else devices
        shapes: KVShapes = {}
        for owner in sorted(set(kv_owner)):
            heads, *dims = config.kv_shape(owner)
            shapes[owner] = [(len(num_pad), heads, capacities[owner], dim) for dim in dims]
        own = _memory(shapes, dtype, where)
        k, v = [own[owner][0] for owner in kv_owner], [own[owner][1] for owner in kv_owner]
        return cls(k, v, num_pad, kv_owner, force_mask=force_mask, num_pad_host=num_pad_host)

    @property
    def nbytes(self) -> int:
        """Bytes of K and V; what layers or rows share counts once."""
        own = [t for owner in set(self.kv_owner) for t in (self.k[owner], self.v[owner])]
        own += self.shared.memory if self.shared else []
        return sum(t.numel() * t.element_size() for t in own)

    @property
    def next_positions(self) -> Tensor:
        """[B] int64: the position of each row's next token."""
        own = self.length - self.num_pad
        return own if self.shared is None else own + self.shared.counts

    @property
    def decode_attention(self) -> DecodeAttention | None:
        """The back end's attention for one new token per row (`Backend.decode_attention`); None if it has none."""
        return backend_on(self.num_pad.device).decode_attention(self.k[0])

    def columns(self, layer: int) -> KVRange:
        """Memory, first and last column of every row, for attention of one new token per row (`DecodeAttention`)."""
        assert self.length < self.k[layer].shape[2], f"layer {layer} has room for {self.k[layer].shape[2]} columns"
        shared = None if self.shared is None else self.shared.step_columns(layer)
        return KVRange(self.k[layer], self.v[layer], self.num_pad, self._newest(), shared=shared)

    def _newest(self) -> Tensor:
        """[B] int64: the column that the step writes. Filled once per step, not once per layer."""
        if self._newest_columns is None:
            with torch.inference_mode(False):  # otherwise no step outside of that mode could fill it
                self._newest_columns = (torch.empty_like(self.num_pad), -1)
        columns, filled_with = self._newest_columns
        if filled_with != self.length:
            self._newest_columns = (columns.fill_(self.length), self.length)
        return columns

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        """`KVView.run_fused` by a cached call: from step to step only `length` changes, never the memory."""
        if attends:
            self._newest()
            least = min(self.k[layer].shape[2] for layer in layers)
            assert self.length < least, f"a layer of {layers} has room for {least} columns"
        if (key := (*layers, *kernels, attends, runs_ffn)) not in self._steps:
            columns = [self.columns(layer) for layer in layers] if attends else None
            self._steps[key] = backend_on(h.device).prepare_step(kernels, len(h), columns, runs_ffn=runs_ffn)
        return self._steps[key](h)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores K and V [B, G, T, K] after the filled columns; returns all of the layer's K and V, [B, G, S, K]."""
        start, end = self.length, self.length + k.shape[2]
        assert end <= self.k[layer].shape[2], f"layer {layer} has room for {self.k[layer].shape[2]} columns, got {end}"
        self.k[layer][:, :, start:end] = narrowed(k, self.k[layer].dtype)
        self.v[layer][:, :, start:end] = narrowed(v, self.v[layer].dtype)
        return self.read(layer, k.shape[2])

    def read(self, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        """The layer's K and V [B, G, S, K], including `num_new` columns stored after the filled ones."""
        end = self.length + num_new
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def mask(self, num_new: int) -> Tensor | None:
        """[B, 1, T, S] bool for `num_new` columns after the filled ones; None if a causal mask alone is right."""
        assert self.shared is None, "attention by torch's operators does not read shared prefixes"
        total = self.length + num_new
        if self.valid is None:
            # a single new column sees everything; `is_causal` fits whole prompts only
            is_whole = num_new == 1 or self.length == 0
            return None if is_whole else causal_mask(num_new, total, self.num_pad.device)[None, None]
        valid = self.valid[:, None, None, :total]  # [B, 1, 1, S]
        if num_new == 1:
            return valid
        return valid & causal_mask(num_new, total, self.num_pad.device) | diagonal(num_new, total, self.num_pad.device)

    def mask_by(self, rule: MaskRule, num_new: int) -> Tensor:
        """[B, 1, T, S] bool: `mask`, and what `rule` allows."""
        columns = torch.arange(self.length + num_new, device=self.num_pad.device)
        allowed, mask = allowed_by(rule, columns - self.num_pad[:, None], num_new), self.mask(num_new)
        return allowed if mask is None else allowed & mask

    def slice_rows(self, start: int, end: int) -> Self:
        """A cache of rows start..end-1 in the same memory, with a `length` of its own."""
        rows = slice(start, end)
        return self._with({owner: (self.k[owner][rows], self.v[owner][rows]) for owner in set(self.kv_owner)}, rows)

    def on(self, device: torch.device) -> Self:
        """The cache as the layers on `device` see it: the same memory, with padding and mask on that device; made
        once."""
        if device == self.num_pad.device:
            return self
        if device not in self._by_device:
            num_pad = self.num_pad.to(device, non_blocking=True)
            made = type(self)(
                self.k, self.v, num_pad, self.kv_owner, force_mask=self.force_mask, num_pad_host=self.num_pad_host
            )
            self._by_device[device] = made
        other = self._by_device[device]
        other.length = self.length
        return other

    def parts(self, count: int) -> list[tuple[slice, Self]]:
        """The rows cut into at most `count` parts, made once: which rows, and a cache of them in the same memory."""
        rows = len(self.num_pad)
        size = -(-rows // count)
        if not self._parts:
            cuts = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
            self._parts = [(cut, self.slice_rows(cut.start, cut.stop)) for cut in cuts]
        for _, part in self._parts:
            part.length = self.length
        return self._parts

    def trimmed(self, start: int, end: int) -> "KVCache":
        """Rows start..end-1 of an empty cache in the same memory, without the columns that are padding in all of them,
        which become zeros."""
        assert self.length == 0, "the cache is not empty"
        assert self.num_pad_host is not None, "the rows' padding is not known on the host"
        rows, num_pad_host, own = slice(start, end), self.num_pad_host[start:end], {}
        pad = min(num_pad_host)
        for owner in set(self.kv_owner):
            memory = self.k[owner][rows], self.v[owner][rows]
            for tensor in memory:
                as_bytes(tensor)[:, :, :pad] = 0
            own[owner] = [tensor[:, :, pad:] for tensor in memory]
        k, v = ([own[owner][which] for owner in self.kv_owner] for which in range(2))
        left = [count - pad for count in num_pad_host]
        return KVCache(k, v, self.num_pad[rows] - pad, self.kv_owner, num_pad_host=left)

    def with_length(self, length: int) -> Self:
        """A cache in the same memory, of which `length` columns are filled."""
        cache = self.slice_rows(0, len(self.num_pad))
        cache.length = length
        return cache

    def keep(self, rows: Sequence[int], runs: Sequence[bool]) -> Self:
        """A smaller cache of `rows` (indices, in the new order).

        `runs` [L]: whether a later step runs each layer's attention; the K/V of other layers are dropped.
        """
        left, shapes = self.storing_layers(runs), KVShapes()
        for owner in sorted(set(self.kv_owner)):
            kv = [memory[owner].shape for memory in (self.k, self.v)]
            shapes[owner] = [(len(rows), heads, columns if owner in left else 0, dim) for _, heads, columns, dim in kv]
        own = _memory(shapes, self.k[0].dtype, [t.device for t in self.k])
        rows_on = {t.device: to_device(rows, t.device) for t in self.k}
        for owner in left:
            filled = slice(min(self.length, self.k[owner].shape[2]))
            for new, old in zip(map(as_bytes, own[owner]), map(as_bytes, (self.k[owner], self.v[owner])), strict=True):
                new[:, :, filled] = old[:, :, filled][rows_on[old.device]]
        return self._with(own, rows)

    def storing_layers(self, runs: Sequence[bool]) -> list[int]:
        """The layers whose memory is read by layers that run."""
        return sorted({owner for owner, is_run in zip(self.kv_owner, runs, strict=True) if is_run})

    def _with(self, own: Mapping[int, tuple[Tensor, Tensor]], rows: Sequence[int] | slice) -> Self:
        """A cache of these rows in the memory `own`, given by the layer that stores it."""
        k, v = [own[owner][0] for owner in self.kv_owner], [own[owner][1] for owner in self.kv_owner]
        chosen = rows if isinstance(rows, slice) else to_device(rows, self.num_pad.device)
        known = None
        if self.num_pad_host is not None:
            known = self.num_pad_host[rows] if isinstance(rows, slice) else [self.num_pad_host[row] for row in rows]
        cache = type(self)(k, v, self.num_pad[chosen], self.kv_owner, force_mask=self.force_mask, num_pad_host=known)
        cache.length = self.length
        cache.shared = None if self.shared is None else self.shared.of(rows)
        return cache


KVShapes = dict[int, list[tuple[int, ...]]]
"""Layer -> the shapes of its K and V."""


def _memory(shapes: KVShapes, dtype: torch.dtype, devices: Sequence[torch.device]) -> dict[int, tuple[Tensor, Tensor]]:
    """Uninitialised memory for K and V, by the layer that stores them; `devices` [L]."""
    own: dict[int, tuple[Tensor, Tensor]] = {}
    for device in dict.fromkeys(devices):
        owners = [owner for owner in shapes if devices[owner] == device]
        wanted = [shape for owner in owners for shape in shapes[owner]]
        memory = iter(backend_on(device).allocate_buffers(wanted, dtype, device))
        own |= {owner: (next(memory), next(memory)) for owner in owners}
    return own


class PaddedView(StepView):
    """T new columns after those in `cache`."""

    def __init__(
        self, cache: KVCache, positions: Tensor, tables: RotaryTables, *, original: KVCache | None = None
    ) -> None:
        """`positions` [B, T] int64, -1 for padding. `tables`: the rotary ones of all layers. `original`: the cache on
        the first device, if `cache` is its copy for another one (`KVCache.on`)."""
        self._cache, self.positions, self._tables = cache, positions, tables
        self._original = original or cache
        self._masks: dict[MaskRule, Tensor] = {}
        self._num_new = positions.shape[1]
        self._decode_attention = cache.decode_attention if self._num_new == 1 else None
        self.has_kernels = self._decode_attention is not None

    @cached_property
    def rotations(self) -> Rotations:
        return Rotations(self._tables, self.positions)

    def columns(self, layer: int) -> KVRange:
        return self._cache.columns(layer)

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        return self._cache.run_fused(kernels, h, layers, attends=attends, runs_ffn=runs_ffn)

    @cached_property
    def _mask(self) -> Tensor | None:
        return self._cache.mask(self._num_new)

    def _mask_of(self, variant: AttentionVariant | None) -> Tensor | None:
        if variant is None or variant.rule is None:
            return self._mask
        if variant.rule not in self._masks:  # layers of one kind have the same rule
            self._masks[variant.rule] = self._cache.mask_by(variant.rule, self._num_new)
        return self._masks[variant.rule]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        if self._decode_attention is not None and kernels_take(variant):
            return self._decode_attention(q, k, v, self.columns(layer), window=window_of(variant))
        if k is not None and v is not None:
            self.store(layer, k, v)
        keys, values = (widened(own, q.dtype) for own in self._cache.read(layer, self._num_new))
        return attention(q, keys, values, self._mask_of(variant), variant)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.append(layer, k, v)

    def part(self, where: slice) -> "PaddedView":
        assert where == slice(None), "all rows of a static batch are at the same step"
        return self

    def on(self, device: torch.device, tables: RotaryTables) -> "PaddedView":
        positions = self.positions.to(device, non_blocking=True)
        return PaddedView(self._original.on(device), positions, tables, original=self._original)

    def last(self, h: Tensor) -> tuple[Tensor, "PaddedView"]:
        cache = self._cache.with_length(self._cache.length + self._num_new - 1)
        return h[:, -1:].contiguous(), PaddedView(cache, self.positions[:, -1:], self._tables)


class PackedPromptsView:
    """Prompts fed into `cache` without their padding, where every layer is one kernel: states are [N, D], the
    tokens of all prompts one after the other.

    Prompts may be whole, or the ends of prompts whose prefixes are shared, and begin in any column.
    """

    has_kernels = stores_by_kernel = True

    def __init__(
        self,
        cache: KVCache,
        positions: Tensor,
        tables: RotaryTables,
        num_cached: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """`num_cached` [B]: tokens of each prompt that are already in `cache` or in a shared prefix; None if none are.
        `lengths` as in `PackedPrompts`."""
        self._cache, self._positions, self._tables = cache, positions, tables
        columns = cache.num_pad if cache.shared is None else cache.num_pad - cache.shared.counts
        self.prompts = PackedPrompts(positions, columns, num_cached, cache.slots, lengths)
        self.pack = self.prompts.pack

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        raise AssertionError("prompts without padding need layers that are one kernel")

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("prompts without padding need layers that are one kernel")

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        for kernel, layer in zip(kernels, layers, strict=True):
            memory = self._memory(layer) if attends else None
            h = kernel.run_prompts(h, self.prompts, memory, runs_ffn=runs_ffn, shared=self._shared(layer))
        return h

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        kernel(h, self.prompts, {product: self._memory(layer) for product, layer in layers.items()})

    @property
    def rotations(self) -> Rotations:
        raise AssertionError("prompts without padding need layers that are one kernel")

    def part(self, where: slice) -> "PackedPromptsView":
        assert where == slice(None), "all rows of a static batch are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "LastTokensView"]:
        rotations = Rotations(self._tables, self._positions[:, -1:])
        return self.prompts.last(h), LastTokensView(self._cache, self.prompts.last_columns, rotations)

    def _memory(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._cache.k[layer], self._cache.v[layer]

    def _shared(self, layer: int) -> SharedPrefix | None:
        return None if self._cache.shared is None else self._cache.shared.columns(layer)


class LastTokensView(StepView):
    """The last token of every prompt, whose keys and values are in `cache` already."""

    has_kernels = True

    def __init__(self, cache: KVCache, last_columns: Tensor, rotations: Rotations) -> None:
        """`last_columns` [B] int64: the columns of these tokens."""
        self._cache, self._last_columns, self.rotations = cache, last_columns, rotations

    def columns(self, layer: int) -> KVRange:
        cache = self._cache
        shared = None if cache.shared is None else cache.shared.step_columns(layer)
        return KVRange(cache.k[layer], cache.v[layer], cache.num_pad, self._last_columns, cache.slots, shared)

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        decode_attention = self._cache.decode_attention
        assert decode_attention is not None, "prompts without padding need a back end with kernels"
        return decode_attention(q, k, v, self.columns(layer), window=window_of(variant))

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        raise AssertionError("the prompts' keys and values are stored already")

    def part(self, where: slice) -> "LastTokensView":
        assert where == slice(None), "all rows of a static batch are at the same step"
        return self

    def last(self, h: Tensor) -> tuple[Tensor, "LastTokensView"]:
        raise AssertionError("these are the last tokens already")
