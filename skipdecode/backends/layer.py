"""A decoder layer as one call of a CPU kernel: for one new column per row (`cpp/step.cpp`), and for prompts
(`cpp/prompt.cpp`).

B rows, T columns, N tokens of all prompts, D width.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends import cpu
from skipdecode.backends.cpu import INT64, POINTER, Columns, Int8Weight


class _Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER)]


class _Product(ctypes.Structure):
    _fields_ = [
        ("outputs", INT64),
        ("inputs", INT64),
        ("weight", POINTER),
        ("scales", POINTER),
        ("totals", POINTER),
        ("bias", POINTER),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ("heads", INT64),
        ("is_pre_norm", INT64),
        ("epsilon", ctypes.c_double),
        ("attn_norm", _Norm),
        ("qkv", _Product),
        ("out", _Product),
        ("ffn_norm", _Norm),
        ("fc1", _Product),
        ("fc2", _Product),
    ]


@dataclass(frozen=True)
class Product:
    """A linear layer: its weight as `pack` or `pack_int8` gives it, its bias [outputs] or None."""

    packed: Tensor | Int8Weight
    outputs: int
    bias: Tensor | None

    def struct(self) -> _Product:
        bias = _pointer(self.bias)
        if isinstance(self.packed, Int8Weight):
            tiles, scales, totals, inputs = self.packed
            return _Product(self.outputs, inputs, _pointer(tiles), _pointer(scales), _pointer(totals), bias)
        return _Product(self.outputs, self.packed.shape[1] * 32, _pointer(self.packed), None, None, bias)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are multiplied."""
        return torch.bfloat16 if isinstance(self.packed, Int8Weight) else self.packed.dtype

    def tail(self, start: int) -> "Product":
        """That of the outputs from `start` on, a multiple of 32."""
        packed = self.packed
        if isinstance(packed, Int8Weight):
            tiles, scales, totals, inputs = packed
            packed = Int8Weight(tiles[start // 32 :], scales[start:], totals[start:], inputs)
        else:
            packed = packed[start // 32 :]
        return Product(packed, self.outputs - start, None if self.bias is None else self.bias[start:])


class Prompts:
    """Left-padded prompts [B, T] laid one behind the other, without the padding: [N, ...]."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` [B, T] int64: -1 a padding column (`OPT.embed`)."""
        self._is_real = positions >= 0
        lengths = self._is_real.sum(dim=1)
        assert bool((positions[:, -1] == lengths - 1).all() & (lengths > 0).all()), (
            "left-padded, and none of them empty"
        )
        self.columns = positions.shape[1] - lengths
        """[B] int64: the column of each prompt's first token."""
        self.starts = F.pad(lengths.cumsum(dim=0), (1, 0))
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_columns, self.num_tokens = positions.shape[1], int(self.starts[-1])  # T, N

    def __len__(self) -> int:
        return len(self.columns)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x[self._is_real]

    def last(self, h: Tensor) -> Tensor:
        """The last token of each prompt: [N, D] -> [B, 1, D]."""
        return h[self.starts[1:] - 1][:, None]

    def pointers(self) -> tuple[int, int, int]:
        return len(self), self.starts.data_ptr(), self.columns.data_ptr()


class StoreKernel:
    """A layer norm, and keys and values of the tokens of prompts in one or several layers, as one call."""

    def __init__(self, heads: int, norm: nn.LayerNorm | None, products: Sequence[Product]) -> None:
        """`products`: of each layer, D -> 2 D, K above V."""
        self._held = (norm, products)  # what the pointers point to
        self._dtype = products[0].dtype
        weights = [] if norm is None else list(norm.parameters())
        _check_types(self._dtype, *weights, *(product.bias for product in products))
        self._heads, self._epsilon = heads, 0.0 if norm is None else norm.eps
        self._norm = None if norm is None else ctypes.byref(_norm(norm))
        self._products = [product.struct() for product in products]
        self._width = self._products[0].inputs
        self._call = cpu.function("store", self._dtype)

    def __call__(self, h: Tensor, prompts: Prompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """h [N, D] -> for each product that `memory` names k, v [B, H, S, K], filled up to the prompts' ends."""
        if not memory:
            return
        _check_states(self._dtype, h, (prompts.num_tokens, self._width))
        for k, v in memory.values():
            _check_cache(self._dtype, len(prompts), self._heads, self._width, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
        count = len(memory)
        self._call(
            self._heads,
            self._epsilon,
            self._norm,
            count,
            (_Product * count)(*(self._products[layer] for layer in memory)),
            *prompts.pointers(),
            h.data_ptr(),
            (POINTER * count)(*(k.data_ptr() for k, _ in memory.values())),
            (POINTER * count)(*(v.data_ptr() for _, v in memory.values())),
            (INT64 * count)(*(k.shape[2] for k, _ in memory.values())),
            torch.get_num_threads(),
        )


class LayerKernel:
    """A decoder layer as one call.

    The same as its parts one after the other (`linear`, `attend`, a layer norm), without the entries and the threads'
    forks between them.
    """

    STAGES = ("norms", "query, key, value", "attention", "attention output", "feed-forward")
    seconds: Tensor | None = None
    """[5] float64 by stage: what steps add their times to, while it is set (`actors.profile`)."""

    def __init__(
        self,
        heads: int,
        attn_norm: nn.LayerNorm,
        qkv: Product,
        out: Product,
        ffn_norm: nn.LayerNorm,
        fc1: Product,
        fc2: Product,
        *,
        is_pre_norm: bool,
    ) -> None:
        """`qkv`: queries alone, for steps whose keys and values are in the cache already (SwiftKV)."""
        self._held = (attn_norm, qkv, out, ffn_norm, fc1, fc2)  # what the pointers point to
        self._dtype = out.dtype
        biases = [product.bias for product in (qkv, out, fc1, fc2)]
        _check_types(self._dtype, *attn_norm.parameters(), *ffn_norm.parameters(), *biases)
        self._width = out.outputs
        self._block = _Block(
            heads,
            is_pre_norm,
            attn_norm.eps,
            _norm(attn_norm),
            qkv.struct(),
            out.struct(),
            _norm(ffn_norm),
            fc1.struct(),
            fc2.struct(),
        )
        first_norm = attn_norm if is_pre_norm else None
        self.store = StoreKernel(heads, first_norm, [qkv.tail(self._width)]) if qkv.outputs > self._width else None
        self._reference = ctypes.byref(self._block)
        self._step = cpu.function("step", self._dtype)
        self._read = cpu.function("prompt", self._dtype)

    def step(self, h: Tensor, columns: Columns | None, *, feeds: bool) -> Tensor:
        """h [B, 1, D] through attention (with `columns`) and the feed-forward block (where it `feeds`), in place."""
        rows = len(h)
        _check_states(self._dtype, h, (rows, 1, self._width))
        memory: tuple[Any, ...] = (None, None, 0, None, None)
        if columns is not None:
            k, v, first, last = columns
            _check_cache(self._dtype, rows, self._block.heads, self._width, k, v)
            _check_indices(rows, first)
            _check_indices(rows, last)
            memory = (k.data_ptr(), v.data_ptr(), k.shape[2], first.data_ptr(), last.data_ptr())
        seconds = _pointer(LayerKernel.seconds)
        self._step(
            self._reference, rows, h.data_ptr(), columns is not None, feeds, *memory, seconds, torch.get_num_threads()
        )
        return h

    def read(self, h: Tensor, prompts: Prompts, memory: tuple[Tensor, Tensor] | None, *, feeds: bool) -> Tensor:
        """As `step` for whole prompts, h [N, D]; `memory`: k, v [B, H, S, K], filled up to the prompts' ends."""
        _check_states(self._dtype, h, (prompts.num_tokens, self._width))
        assert self.store is not None, "no keys and values"
        where: tuple[Any, ...] = (None, None, 0)
        if memory is not None:
            k, v = memory
            _check_cache(self._dtype, len(prompts), self._block.heads, self._width, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
            where = (k.data_ptr(), v.data_ptr(), k.shape[2])
        threads = torch.get_num_threads()
        self._read(self._reference, *prompts.pointers(), h.data_ptr(), memory is not None, feeds, *where, threads)
        return h


def _norm(norm: nn.LayerNorm) -> _Norm:
    return _Norm(_pointer(norm.weight), _pointer(norm.bias))


# wrong ones would be read as if they were right


def _check_types(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or tensor.dtype == dtype, tensor.dtype


def _check_states(dtype: torch.dtype, h: Tensor, shape: tuple[int, ...]) -> None:
    assert h.dtype == dtype, h.dtype
    assert h.shape == shape, (h.shape, shape)
    assert h.is_contiguous(), h.stride()


def _check_cache(dtype: torch.dtype, rows: int, heads: int, width: int, *memory: Tensor) -> None:
    for held in memory:
        assert held.dtype == dtype, held.dtype
        assert held.is_contiguous(), held.stride()
        assert held.shape == (rows, heads, memory[0].shape[2], width // heads), held.shape


def _check_indices(count: int, indices: Tensor) -> None:
    assert indices.dtype == torch.int64, indices.dtype
    assert indices.shape == (count,), (indices.shape, count)
    assert indices.is_contiguous(), indices.stride()


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
