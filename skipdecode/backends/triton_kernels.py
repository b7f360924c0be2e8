"""`cuda_kernels.Kernels` in Triton: the grid, blocks, warps and output memory of every launch.

The kernels themselves are in `triton_attention`, `triton_norm` and `triton_sampling`. Importing this needs Triton.
"""

import os
from typing import NamedTuple

import torch
from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, KVRange, PackedPrompts, SharedPrefix
from skipdecode.backends.cuda_kernels import PREFIX_ROWS, Heads, Norm
from skipdecode.backends.flash_attention import flash_attention, misfit, reference_attention
from skipdecode.backends.fp8 import FP8, why_no_fp8
from skipdecode.backends.triton_attention import (
    attend_kernel,
    attend_prefix_kernel,
    attend_several_kernel,
    store_kernel,
)
from skipdecode.backends.triton_fp8 import rows_in_fp8_kernel
from skipdecode.backends.triton_norm import add_norm_kernel, gate_kernel
from skipdecode.backends.triton_sampling import argmax_kernel, draw_kernel
from skipdecode.config.model import FeedForwardKind

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
"""Whether Triton's interpreter runs the kernels on a CPU; it cannot multiply bfloat16."""
MAX_SPLITS = 16
MIN_CHUNK = 256
"""The fewest columns that a program reads: with fewer, starting it and combining the parts cost more than they gain."""
BLOCK, WARPS = 32, 2
"""Columns at a time, and warps that share them. Sums over columns cross warps, which is the expensive part: on an H200
OPT-1.3B's attention takes half the time of four warps with 64 columns, OPT-6.7B's 0.84 of it."""
MAX_FP8_HEAD = 128
"""The longest heads in FP8 of which that many columns fit into registers."""
TOGETHER = 32
"""Queries that share what is read of a KV head, where a row has several new tokens or rows share a prefix."""
MAX_RESULTS = 4096
"""Numbers that a program makes at most for queries of rows that share a prefix, and keys that it reads at a time; with
twice as many, registers spill."""
ENOUGH_PROGRAMS = 1024
"""Programs that keep memory busy: some eight for each of an H100's 132 multiprocessors."""


def launch(kernel: object, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Launches a kernel on the current stream of the device that its first argument is on."""
    first = arguments[0]
    assert isinstance(first, Tensor), type(first)
    if first.device.type == "cuda" and first.device.index != torch.cuda.current_device():
        with torch.cuda.device(first.device):
            kernel[grid](*arguments, **options)  # type: ignore[index]
    else:
        kernel[grid](*arguments, **options)  # type: ignore[index]


def block_for(padded: int, dtype: torch.dtype) -> int:
    """Columns at a time of heads of `padded` numbers: half as many where FP8 is widened and registers would spill."""
    return BLOCK // 2 if padded > MAX_FP8_HEAD and dtype == FP8 else BLOCK


def splits_for(rows: int, kv_heads: int) -> int:
    """Into how many parts the columns of a row and KV head are split, so that there are enough programs.

    It depends only on the shape of the batch, so that a captured step stays valid for any number of columns. How many
    of the parts have columns is decided on the device.
    """
    splits = 1
    while splits < MAX_SPLITS and rows * kv_heads * splits < ENOUGH_PROGRAMS:
        splits *= 2
    return splits


def prefix_splits_for(rows: int, kv_heads: int) -> int:
    """Into how many parts shared prefixes are split; like `splits_for`, it depends only on the shape of the batch."""
    return splits_for(-(-rows // PREFIX_ROWS), kv_heads)


class _PrefixParts(NamedTuple):
    """What shared prefixes add to the attention of rows, in parts."""

    counts: Tensor | None = None
    """`SharedPrefix.counts`"""
    made: Tensor | None = None
    """[B, G, parts, GROUP, K] float32"""
    sums: Tensor | None = None
    """[B, G, parts, GROUP, 2] float32: the best score, and the sum of weights."""
    splits: int = 0


class TritonKernels:
    """Implements `cuda_kernels.Kernels`."""

    def __init__(self) -> None:
        self._arrived: dict[torch.device, Tensor] = {}

    def attend(
        self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange
    ) -> Tensor:
        if isinstance(columns, KVRange) and columns.max_queries > 1:
            return self._attend_several(heads, q, k, v, columns)
        B, H, G, K = len(q), heads.heads, heads.kv_heads, heads.head_dim
        has_new, splits, group, table = k is not None, splits_for(B, G), H // G, heads.rotary_table
        slots = columns.slots if isinstance(columns, KVRange) else None
        where = columns.where if isinstance(columns, GraphKVRange) else None
        keys, values = _memory(columns, heads)
        rotating = 0 if table is None else table.shape[1]
        _check(heads, q, k, v, columns)
        prefix = self._attend_prefix(heads, q, columns, is_ready=False)
        out = q.new_empty(B, H * K)
        padded = max(16, _power(K))  # the least that tensor cores take
        launch(
            attend_kernel,
            (G, B, splits),
            q, k, v, keys, values, where, columns.first, columns.last, slots, out,
            table, heads.q_norm, heads.k_norm, *self._parts(q, G, splits, group, K), *prefix[:3],
            q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0),
            0 if where is not None else keys.stride(0), 0 if where is not None else keys.stride(1),
            columns.last.stride(0), 1 if table is None else len(table), K**-0.5, heads.epsilon,
            G=G, GROUP=group, M=1 if group == 1 else max(16, _power(group)), K=K, KP=padded, HALF=rotating // 2,
            BLOCK=block_for(padded, keys.dtype), SPLITS=splits, MIN_CHUNK=MIN_CHUNK,
            HAS_NEW=has_new, HAS_TABLE=where is not None,
            HAS_SLOTS=slots is not None, HAS_Q_NORM=heads.q_norm is not None, HAS_K_NORM=heads.k_norm is not None,
            WINDOW=heads.window or 0, IN_FLOAT32=IS_INTERPRETED, PREFIX_SPLITS=prefix.splits, num_warps=WARPS,
        )  # fmt: skip
        return out

    def _attend_prefix(
        self, heads: Heads, q: Tensor, columns: KVRange | GraphKVRange, *, is_ready: bool
    ) -> _PrefixParts:
        """The attention of q [B, H K] to shared prefixes. `is_ready`: after norm and rotary embedding."""
        shared = columns.shared
        if shared is None:
            return _PrefixParts()
        B, H, G, K, groups = len(q), heads.heads, heads.kv_heads, heads.head_dim, shared.groups
        assert groups is not None
        group, splits, padded = H // G, prefix_splits_for(B, G), max(16, _power(K))
        rows = max(1, min(PREFIX_ROWS, min(TOGETHER, MAX_RESULTS // padded) // group))
        pieces, queries = -(-PREFIX_ROWS // rows), max(16, _power(rows * group))
        workers = min(len(groups.sizes), -(-ENOUGH_PROGRAMS // (G * splits * pieces)))
        keys, values, head = _prefix_memory(shared, heads)
        block = block_for(padded, keys.dtype)
        if not is_ready and (heads.rotary_table is not None or heads.q_norm is not None):
            ready = q.new_empty(B, H * K)
            _store(heads, q, None, None, None, (None, columns.first, columns.last, shared.counts), ready)
            q = ready
        made, sums = (q.new_empty((B, G, splits, group, width), dtype=torch.float32) for width in (K, 2))
        launch(
            attend_prefix_kernel,
            (G, workers, splits * pieces),
            q, shared.offsets, shared.counts, keys, values, shared.where, *groups, columns.first, columns.last,
            made, sums, q.stride(0), head, columns.last.stride(0), B, len(groups.sizes), K**-0.5,
            G=G, GROUP=group, T=rows, M=queries, K=K, KP=padded, BLOCK=block, STEP=min(block, MAX_RESULTS // padded),
            SPLITS=splits, MIN_CHUNK=MIN_CHUNK, HAS_TABLE=shared.where is not None, WINDOW=heads.window or 0,
            IN_FLOAT32=IS_INTERPRETED, num_warps=WARPS,
        )  # fmt: skip
        return _PrefixParts(shared.counts, made, sums, splits)

    def _attend_several(self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange) -> Tensor:
        N, H, G, K = len(q), heads.heads, heads.kv_heads, heads.head_dim
        group, table, splits = H // G, heads.rotary_table, splits_for(N, G)
        assert columns.slots is not None
        assert columns.query_index is not None
        assert columns.query_index.shape == (2, N), columns.query_index.shape
        _check(heads, q, k, v, columns)
        keys, values = _memory(columns, heads)
        padded, strides = max(16, _power(K)), (keys.stride(0), keys.stride(1))
        changes_queries = table is not None or heads.q_norm is not None
        ready = q.new_empty(N, H * K) if changes_queries else q
        if changes_queries or k is not None:
            at = columns.slots, columns.first, columns.last, None if columns.shared is None else columns.shared.counts
            _store(heads, q if changes_queries else None, k, v, (keys, values), at, ready)
        prefix = self._attend_prefix(heads, ready, columns, is_ready=True)
        together = max(1, min(_power(columns.max_queries), TOGETHER // group))
        out = q.new_empty(N, H * K)
        launch(
            attend_several_kernel,
            (G, N, splits),
            ready, *columns.query_index, keys, values, columns.slots, columns.first, columns.last, out,
            *self._parts(q, G, splits, together * group, K), *prefix[:3],
            ready.stride(0), *strides, K**-0.5,
            G=G, GROUP=group, T=together, M=max(16, _power(together * group)), K=K, KP=padded,
            BLOCK=block_for(padded, keys.dtype), SPLITS=splits, MIN_CHUNK=MIN_CHUNK, WINDOW=heads.window or 0,
            IN_FLOAT32=IS_INTERPRETED, PREFIX_SPLITS=prefix.splits, num_warps=WARPS,
        )  # fmt: skip
        return out

    def why_no_fp8(self, device: torch.device) -> str | None:
        return why_no_fp8(device)

    def why_no_prompts(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
        return misfit(head_dim, dtype) if device.type == "cuda" else None

    def store(
        self, heads: Heads, q: Tensor | None, k: Tensor, v: Tensor, prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
        N, H, G, K, new = len(k), heads.heads, heads.kv_heads, heads.head_dim, prompts.new
        keys, values = _memory(KVRange(*memory, new.first, new.columns, new.slots), heads)
        is_rotated = heads.rotary_table is not None
        changes_queries = q is not None and (is_rotated or heads.q_norm is not None)
        is_fp8 = keys.dtype == FP8
        changes_keys = q is not None and (is_rotated or heads.k_norm is not None or is_fp8)
        ready = k.new_empty(N, H * K) if changes_queries else q
        own = k.new_empty(N, G * K) if changes_keys else k
        own_values = v.new_empty(N, G * K) if q is not None and is_fp8 else v
        at = new.slots, new.first, new.columns, None
        stored = own if changes_keys else None, own_values if own_values is not v else None
        _store(heads, q if changes_queries else None, k, v, (keys, values), at, ready, stored)
        return None if ready is None else ready.view(N, H, K), own.view(N, G, K), own_values.view(N, G, K)

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        attend = flash_attention if q.device.type == "cuda" else reference_attention  # interpreted
        return attend(q, k, v, q_starts, k_starts, max_q, max_k, window)

    def _parts(self, q: Tensor, G: int, splits: int, queries: int, K: int) -> tuple[Tensor | None, ...]:
        """Memory for the partial results of a row's parts, and the counters of the parts that are done."""
        if splits == 1:
            return None, None, None
        shape = len(q), G, splits, queries
        made, sums = (q.new_empty((*shape, width), dtype=torch.float32) for width in (K, 2))
        return made, sums, self._counters(q.device)

    def add_norm(self, h: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None, *, is_pre: bool) -> Tensor:
        B, D = h.shape
        assert h.stride(1) == 1, h.stride()
        assert y is None or (y.shape == h.shape and y.stride(1) == 1 and y.dtype == h.dtype), (y.shape, y.dtype)
        assert norm is not None or y is not None, "nothing to do"
        out = h.new_empty(B, D) if is_pre and norm is not None else h
        weight, shift = (None, None) if norm is None else (norm.weight, norm.bias)
        block = _power(D)
        launch(
            add_norm_kernel,
            (B,),
            h, y, bias, weight, shift, out, h.stride(0), 0 if y is None else y.stride(0), out.stride(0),
            0.0 if norm is None else norm.epsilon,
            D=D, BLOCK=block, HAS_ADDED=y is not None, HAS_ADDED_BIAS=y is not None and bias is not None,
            STORES_SUM=y is not None and (is_pre or norm is None), NORM="none" if norm is None else norm.kind,
            HAS_WEIGHT=weight is not None, HAS_BIAS=shift is not None, num_warps=_warps(block, 16),
        )  # fmt: skip
        return out

    def gate(self, y: Tensor, mlp: FeedForwardKind = "swiglu") -> Tensor:
        B, F = len(y), y.shape[1] // 2
        assert y.stride(1) == 1, y.stride()
        out, block = y.new_empty(B, F), 1024
        is_gelu = mlp == "geglu"
        launch(gate_kernel, (B, -(-F // block)), y, out, y.stride(0), F, IS_GELU=is_gelu, BLOCK=block, num_warps=4)
        return out

    def rows_in_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        N, K = x.shape
        assert x.stride(1) == 1, x.stride()
        made, scales = x.new_empty(N, K, dtype=FP8), x.new_empty(N, 1, dtype=torch.float32)
        block = min(4096, _power(K))
        launch(
            rows_in_fp8_kernel, (N,), x, made, scales, x.stride(0), K, BLOCK=block, num_warps=_warps(block, 8)
        )  # fmt: skip
        return made, scales

    def argmax(self, logits: Tensor) -> Tensor:
        B, V = logits.shape
        assert logits.stride(1) == 1, logits.stride()
        out, block = logits.new_empty(B, dtype=torch.int64), min(4096, _power(V))
        launch(
            argmax_kernel, (B,), logits, out, logits.stride(0), V, BLOCK=block, num_warps=_warps(block, 16)
        )  # fmt: skip
        return out

    def draw(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        B, V = logits.shape
        assert logits.stride(1) == 1, logits.stride()
        for own in (temperature, top_k, top_p):
            assert own.shape == (B, 1), own.shape
            assert own.is_contiguous(), own.stride()
        assert uniform.shape == (B, 1), uniform.shape
        out = logits.new_empty(B, dtype=torch.int64)
        launch(
            draw_kernel,
            (B,),
            logits, temperature, top_k, top_p, uniform, out, logits.stride(0), uniform.stride(0), V,
            BLOCK=256, WIDE=2048, num_warps=8,
        )  # fmt: skip
        return out

    def _counters(self, device: torch.device) -> Tensor:
        """[ENOUGH_PROGRAMS] zeros that every call resets to zeros, at an address that captured steps rely on."""
        if device not in self._arrived:
            self._arrived[device] = torch.zeros(ENOUGH_PROGRAMS, dtype=torch.int32, device=device)
        return self._arrived[device]


def _store(
    heads: Heads, q: Tensor | None, k: Tensor | None, v: Tensor | None, memory: tuple[Tensor, Tensor] | None,
    at: tuple[Tensor | None, Tensor, Tensor, Tensor | None], ready: Tensor | None,
    stored: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:  # fmt: skip
    """Launches `store_kernel` for N tokens at these slots, first columns and columns, behind so many tokens of a shared
    prefix. `q`: None if they stay as they are; `k`: None if they alone are asked for, or keys are stored already;
    `stored`: where keys and values go beside `memory`, as it has them."""
    (slots, first, last, before), (keys, values), table = at, memory or (None, None), heads.rotary_table
    row, head = (0, 0) if keys is None else keys.stride()[:2]
    G, K, group = heads.kv_heads, heads.head_dim, heads.heads // heads.kv_heads
    launch(
        store_kernel,
        (len(last), G),
        keys if q is None else q, k, v, keys, values, slots, first, last, before, ready, *stored,
        table, heads.q_norm, heads.k_norm,
        0 if q is None else q.stride(0), 0 if k is None else k.stride(0), 0 if v is None else v.stride(0),
        row, head, last.stride(0), 1 if table is None else len(table), heads.epsilon,
        G=G, GROUP=group, M=_power(group), K=K, KP=max(16, _power(K)), HALF=0 if table is None else table.shape[1] // 2,
        HAS_NEW=k is not None, HAS_Q=q is not None, HAS_KEYS=stored[0] is not None, HAS_VALUES=stored[1] is not None,
        HAS_Q_NORM=heads.q_norm is not None, HAS_K_NORM=heads.k_norm is not None, HAS_PREFIX=before is not None,
        num_warps=1,
    )  # fmt: skip


def _check(heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange) -> None:
    B = len(q)
    assert q.shape == (B, heads.heads * heads.head_dim), q.shape
    assert q.stride(1) == 1, q.stride()
    assert columns.first.shape == columns.last.shape == (B,), (columns.first.shape, columns.last.shape)
    assert columns.first.stride(0) == 1, columns.first.stride()
    for new in (k, v):
        assert new is None or (new.shape == (B, heads.kv_heads * heads.head_dim) and new.stride(1) == 1), (
            new.shape,
            new.stride(),
        )
    slots = columns.slots if isinstance(columns, KVRange) else None
    assert slots is None or (slots.shape == (B,) and slots.stride(0) == columns.last.stride(0) == 1), slots


def _memory(columns: KVRange | GraphKVRange, heads: Heads) -> tuple[Tensor, Tensor]:
    """The tensors at whose addresses keys and values begin."""
    if isinstance(columns, GraphKVRange):
        return columns.memory, columns.memory
    assert columns.max_queries == 1 or columns.slots is not None, columns.max_queries
    for own in (columns.k, columns.v):
        assert own.shape[1::2] == (heads.kv_heads, heads.head_dim), (own.shape, heads)
        assert own.stride()[2:] == (heads.head_dim, 1), own.stride()
        assert own.stride() == columns.k.stride(), "keys and values have different strides"
    return columns.k, columns.v


def _prefix_memory(shared: SharedPrefix, heads: Heads) -> tuple[Tensor, Tensor, int]:
    """The tensors at whose addresses keys and values of shared prefixes begin, and the stride of a head."""
    if shared.where is not None:
        return shared.k, shared.v, 0
    for own in (shared.k, shared.v):
        assert own.shape[1::2] == (heads.kv_heads, heads.head_dim), (own.shape, heads)
        assert own.is_contiguous(), own.stride()
    return shared.k, shared.v, shared.k.stride(1)


def _power(number: int) -> int:
    """The smallest power of two that is not below it."""
    return 1 << (number - 1).bit_length()


def _warps(block: int, most: int) -> int:
    """One warp per 256 elements, or a power of two near that."""
    return max(1, min(most, block // 256))
