"""Decoder layers as one call of a CPU kernel: for one new token per row (`cpp/step.cpp`) and for prompts
(`cpp/prompt.cpp`).

Structures hold addresses only, so every object here keeps the tensors that its structures point to.

B rows, T columns, N tokens of all prompts, D width, H query heads, G KV heads, K head dim.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.backends.backend import KVRange, LayerNorms, LayerShape, PackedPrompts, SharedPrefix
from skipdecode.backends.cpu_kernels import EPILOGUE
from skipdecode.backends.cpu_library import (
    INT64,
    POINTER,
    HeadsStruct,
    LayerStruct,
    NormStruct,
    ProductStruct,
    SharedPrefixStruct,
    check_types,
    function,
    heads_struct,
    pointer,
    shared_prefix_struct,
)
from skipdecode.backends.cpu_weights import BlockWeight, Operand, Weight, operand_of, part_of


@dataclass(frozen=True)
class Product:
    """A linear layer for the kernels: its packed weight and its bias [outputs] or None."""

    packed: Weight
    outputs: int
    bias: Tensor | None
    is_gated: bool = False
    """Packed for `swiglu`, with a bias that is interleaved like the weight."""

    def struct(self) -> ProductStruct:
        """The structure that kernels take; the tensors must outlive it."""
        operand, bias = self._operand, pointer(self.bias)
        if isinstance(self.packed, BlockWeight):
            blocks, block_format = operand.pointers
            return ProductStruct(self.outputs, self.inputs, blocks, None, None, bias, block_format)
        tiles, scales, totals = (*operand.pointers, None, None)[:3]
        return ProductStruct(self.outputs, self.inputs, tiles, scales, totals, bias)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its inputs."""
        return self._operand.rows

    @property
    def inputs(self) -> int:
        return self._operand.inputs

    @property
    def _operand(self) -> Operand:
        return operand_of(self.packed, self.outputs)

    def tail(self, start: int) -> "Product":
        """The part for the outputs from `start` on, a multiple of 32."""
        assert start % 32 == 0, start
        return Product(
            part_of(self.packed, start), self.outputs - start, None if self.bias is None else self.bias[start:]
        )


def parameters_of(norm: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """A norm's weight and bias, either of which may be missing."""
    return getattr(norm, "weight", None), getattr(norm, "bias", None)


def norm_struct(shape: LayerShape, norm: nn.Module) -> NormStruct:
    """A norm over the layer's width as kernels take it."""
    weight, bias = parameters_of(norm)
    assert bias is None or (weight is not None and shape.norm == "layer"), "a bias that would not be added"
    return NormStruct(pointer(weight), pointer(bias), shape.norm == "rms")


def head_norm(norm: nn.Module | None) -> Tensor | None:
    """The weight [K] of a norm over each head; None if there is no such norm."""
    weight, bias = parameters_of(norm)
    assert (norm is None) == (weight is None), "a norm of heads without a weight"
    assert bias is None, "a bias that would not be added"
    return weight


def heads_of(shape: LayerShape, q_norm: Tensor | None, k_norm: Tensor | None) -> HeadsStruct:
    """The layer's heads as kernels take them; `q_norm`, `k_norm` of `head_norm`."""
    return heads_struct(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        rotary_table=shape.rotary_table,
        epsilon=shape.epsilon,
        q_norm=q_norm,
        k_norm=k_norm,
        window=shape.window,
    )


class KVStoreKernel:
    """Stores the keys and values of prompts for one or several layers, the norm included, in one call."""

    def __init__(
        self,
        shape: LayerShape,
        norm: nn.Module | None,
        products: Sequence[Product],
        k_norms: Sequence[nn.Module | None] | None = None,
        tables: Sequence[Tensor | None] | None = None,
    ) -> None:
        """`products`: for each layer the projection D -> 2 G K, keys above values. `k_norms`: for each layer the norm
        of its keys (`LayerNorms`). `tables`: for each layer its rotary table; None: that of `shape`. Keys are rotated
        by their token's position in its prompt."""
        self._weights = [head_norm(norm) for norm in k_norms or [None] * len(products)]
        self._tables = list(tables or [shape.rotary_table] * len(products))
        assert len(self._weights) == len(self._tables) == len(products), (len(self._weights), len(products))
        for table in self._tables:
            assert table is None or (shape.rotary_table is not None and table.shape == shape.rotary_table.shape)
        self._held = (shape, norm, products)  # what the pointers point to
        self._shape, self.dtype = shape, products[0].dtype
        biases = [product.bias for product in products]
        check_types(self.dtype, *parameters_of(norm), *biases, *self._weights)
        self._heads = heads_of(shape, None, None)
        self._norm = None if norm is None else ctypes.byref(norm_struct(shape, norm))
        self._products = [product.struct() for product in products]
        self.width = products[0].inputs
        for product in products:
            assert (product.inputs, product.outputs) == (self.width, 2 * shape.kv_heads * shape.head_dim)
        for weight in self._weights:
            assert weight is None or weight.shape == (shape.head_dim,), "a norm of other heads"
        self._call = function("store", self.dtype)

    def __call__(self, h: Tensor, prompts: PackedPrompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """From h [N, D], fills k and v [B, G, S, K] of each layer in `memory` up to the prompts' ends."""
        if not memory:
            return
        _check_states(self.dtype, h, (prompts.num_tokens, self.width))
        for k, v in memory.values():
            _check_cache(self.dtype, _rows_of(prompts, k), self._shape, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
        count = len(memory)
        self._call(
            ctypes.byref(self._heads),
            self._norm,
            count,
            (ProductStruct * count)(*(self._products[layer] for layer in memory)),
            (POINTER * count)(*(pointer(self._weights[layer]) for layer in memory)),
            (POINTER * count)(*(pointer(self._tables[layer]) for layer in memory)),
            *prompts.pointers(),
            h.data_ptr(),
            (POINTER * count)(*(k.data_ptr() for k, _ in memory.values())),
            (POINTER * count)(*(v.data_ptr() for _, v in memory.values())),
            (INT64 * count)(*(k.shape[2] for k, _ in memory.values())),
            torch.get_num_threads(),
        )


class LayerKernel:
    """A decoder layer as one call.

    It computes what its parts compute one after the other (`linear`, `attend`, norms), but enters the library and forks
    its threads only once.
    """

    STAGES = ("norms", "query, key, value", "attention", "attention output", "feed-forward")
    seconds: Tensor | None = None
    """[5] float64 by stage, to which steps add their times while it is set (`actors.measuring.profile`)."""

    def __init__(
        self,
        shape: LayerShape,
        norms: LayerNorms,
        qkv: Product,
        out: Product,
        fc1: Product,
        fc2: Product,
    ) -> None:
        """`qkv`: D -> (H + 2 G) K, queries above keys above values; or only queries, for steps whose keys and values
        are in the cache already (SwiftKV)."""
        self._held = (shape, norms, qkv, out, fc1, fc2)  # what the pointers point to
        self._shape, self.dtype = shape, out.dtype
        biases = [product.bias for product in (qkv, out, fc1, fc2)]
        has_sublayer_norms = norms.attn_out is not None
        assert has_sublayer_norms == (norms.ffn_out is not None), "a norm of one output alone"
        assert shape.is_pre_norm or not has_sublayer_norms, "norms of outputs come beside norms of inputs"
        wide = [parameter for norm in norms for parameter in parameters_of(norm)]
        check_types(self.dtype, *wide, *biases)
        width, queries, kv = out.outputs, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.width = width
        _check_products(width, queries, kv, qkv, out)
        is_gated = shape.is_gated
        assert fc1.is_gated == is_gated, "a feed-forward block that is packed for another activation"
        assert (fc1.inputs, fc1.outputs) == (width, fc2.inputs * (2 if is_gated else 1)), (fc1.outputs, fc2.inputs)
        assert fc2.outputs == width, (fc2.outputs, width)
        self._block = LayerStruct(
            heads_of(shape, head_norm(norms.q), head_norm(norms.k)),
            shape.is_pre_norm,
            EPILOGUE[shape.mlp],
            norm_struct(shape, norms.attn),
            qkv.struct(),
            out.struct(),
            norm_struct(shape, norms.ffn),
            fc1.struct(),
            fc2.struct(),
            has_sublayer_norms,
            *(NormStruct() if norm is None else norm_struct(shape, norm) for norm in (norms.attn_out, norms.ffn_out)),
        )
        first_norm = norms.attn if shape.is_pre_norm else None
        has_keys = qkv.outputs > queries
        self.store = KVStoreKernel(shape, first_norm, [qkv.tail(queries)], [norms.k]) if has_keys else None
        self._reference = ctypes.byref(self._block)
        self._read = function("prompt", self.dtype)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._block)

    def pointers(self, rows: int, columns: KVRange) -> tuple[int, int, int, int, int]:
        """Keys, values, capacity, first and last columns, as the kernel `step` takes them."""
        k, v, first, last, slots = columns[:5]
        _check_cache(self.dtype, rows if slots is None else len(k), self._shape, k, v)
        return k.data_ptr(), v.data_ptr(), k.shape[2], first.data_ptr(), last.data_ptr()

    def run_prompts(
        self,
        h: Tensor,
        prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        runs_ffn: bool,
        shared: SharedPrefix | None = None,
    ) -> Tensor:
        """`FusedLayer.run_prompts` by the kernel of `cpp/prompt.cpp`."""
        _check_states(self.dtype, h, (prompts.num_tokens, self.width))
        assert self.store is not None, "no keys and values"
        where: tuple[Any, ...] = (None, None, 0, None)
        if memory is not None:
            k, v = memory
            _check_cache(self.dtype, _rows_of(prompts, k), self._shape, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
            prefix = None if shared is None else ctypes.byref(shared_prefix_struct(shared, len(prompts), k))
            where = (k.data_ptr(), v.data_ptr(), k.shape[2], prefix)
        threads = torch.get_num_threads()
        self._read(self._reference, *prompts.pointers(), h.data_ptr(), memory is not None, runs_ffn, *where, threads)
        return h


class Step:
    """A decode step through consecutive layers, for one new token per row.

    All arguments are checked and laid out once, not in every step, because Python is slow then: the weights have
    evicted it from the CPU's caches.
    """

    def __init__(
        self, layers: Sequence[LayerKernel], rows: int, columns: Sequence[KVRange] | None, *, runs_ffn: bool
    ) -> None:
        """Parameters as of `Backend.prepare_step`. The call also accepts fewer rows."""
        count, dtype = len(layers), layers[0].dtype
        memory: list[tuple[Any, ...]] = [(None, None, 0, None, None)] * count
        slots = shared = None
        if columns is not None:
            slots = columns[0].slots
            assert all(at.slots is slots for at in columns), "layers of other rows"
            indices = [index for at in columns for index in (at.first, at.last, at.slots) if index is not None]
            for index in {id(index): index for index in indices}.values():  # mostly the same tensors in all layers
                _check_indices(rows, index)
            heads = [shared_prefix_struct(at.shared, rows, at.k) for at in columns if at.shared is not None]
            assert len(heads) in (0, count), "shared columns in some of the layers"
            shared = (SharedPrefixStruct * count)(*heads) if heads else None
            memory = [kernel.pointers(rows, at) for kernel, at in zip(layers, columns, strict=True)]
        for kernel in layers:
            assert (kernel.dtype, kernel.width) == (dtype, layers[0].width), (kernel.dtype, kernel.width)
        self._held = (layers, columns)  # what the pointers point to
        self._dtype, self._width, self._most = dtype, layers[0].width, rows
        k, v, capacities, first, last = zip(*memory, strict=True)
        pointers = POINTER * count
        self._call = function("step", dtype)
        self._layers = pointers(*(kernel.address for kernel in layers)), count
        self._columns = (
            columns is not None,
            runs_ffn,
            pointers(*k),
            pointers(*v),
            (INT64 * count)(*capacities),
            pointers(*first),
            pointers(*last),
            pointer(slots),
            shared,
        )

    def __call__(self, h: Tensor) -> Tensor:
        """Takes h [B, 1, D] through the layers in place."""
        rows, threads = len(h), torch.get_num_threads()
        assert rows <= self._most, (rows, self._most)
        _check_states(self._dtype, h, (rows, 1, self._width))
        self._call(*self._layers, rows, h.data_ptr(), *self._columns, pointer(LayerKernel.seconds), threads)
        return h


# Checks of what a kernel would otherwise misread


def _check_states(dtype: torch.dtype, h: Tensor, shape: tuple[int, ...]) -> None:
    assert h.dtype == dtype, h.dtype
    assert h.shape == shape, (h.shape, shape)
    assert h.is_contiguous(), h.stride()


def _check_products(width: int, queries: int, kv: int, qkv: Product, out: Product) -> None:
    assert qkv.inputs == width, (qkv.inputs, width)
    assert out.inputs == queries, (out.inputs, queries)
    assert qkv.outputs in (queries, queries + 2 * kv), (qkv.outputs, queries, kv)


def _check_cache(dtype: torch.dtype, rows: int, shape: LayerShape, *memory: Tensor) -> None:
    for held in memory:
        assert held.dtype == dtype, held.dtype
        assert held.is_contiguous(), held.stride()
        assert held.shape == (rows, shape.kv_heads, memory[0].shape[2], shape.head_dim), held.shape


def _rows_of(prompts: PackedPrompts, memory: Tensor) -> int:
    """The rows that a cache like `memory` must have."""
    return len(prompts) if prompts.slots is None else len(memory)


def _check_indices(count: int, indices: Tensor) -> None:
    assert indices.dtype == torch.int64, indices.dtype
    assert indices.shape == (count,), (indices.shape, count)
    assert indices.is_contiguous(), indices.stride()
