"""A decoder layer as one call of a CPU kernel: for one new column per row (`cpp/step.cpp`), and for prompts
(`cpp/prompt.cpp`).

B rows, T columns, N tokens of all prompts, D width, H heads of queries, G of keys and values, K head dim.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.backends.backend import KVRange, LayerShape, PackedPrompts, SharedPrefix
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
from skipdecode.backends.cpu_weights import Operand, Weight, operand_of, tail_of


@dataclass(frozen=True)
class Product:
    """A linear layer: its weight as the back end packs it, its bias [outputs] or None."""

    packed: Weight
    outputs: int
    bias: Tensor | None
    is_gated: bool = False
    """Packed for `swiglu`, and the bias interleaved like the weight."""

    def struct(self) -> ProductStruct:
        """As kernels take it; whoever holds it holds the tensors."""
        tiles, scales, totals = (*self._operand.pointers, None, None)[:3]
        return ProductStruct(self.outputs, self.inputs, tiles, scales, totals, pointer(self.bias))

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers that are multiplied by it."""
        return self._operand.rows

    @property
    def inputs(self) -> int:
        return self._operand.inputs

    @property
    def _operand(self) -> Operand:
        return operand_of(self.packed, self.outputs)

    def tail(self, start: int) -> "Product":
        """That of the outputs from `start` on, a multiple of 32."""
        assert start % 32 == 0, start
        return Product(
            tail_of(self.packed, start), self.outputs - start, None if self.bias is None else self.bias[start:]
        )


def parameters_of(norm: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias of a norm, which may have neither."""
    return getattr(norm, "weight", None), getattr(norm, "bias", None)


def norm_struct(shape: LayerShape, norm: nn.Module) -> NormStruct:
    """A norm of the layer's width, as kernels take it."""
    weight, bias = parameters_of(norm)
    assert bias is None or (weight is not None and shape.norm == "layer"), "a bias that would not be added"
    return NormStruct(pointer(weight), pointer(bias), shape.norm == "rms")


def head_norm(norm: nn.Module | None) -> Tensor | None:
    """The weight [K] of a norm of each head's numbers; None: there is no such norm."""
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
    )


class KVStoreKernel:
    """A norm, and keys and values of the tokens of prompts in one or several layers, as one call."""

    def __init__(
        self,
        shape: LayerShape,
        norm: nn.Module | None,
        products: Sequence[Product],
        k_norms: Sequence[nn.Module | None] | None = None,
    ) -> None:
        """`products`: of each layer, D -> 2 G K, K above V; `k_norms`: of each, what its keys go through
        (`LayerKernel`). Keys turn by their token's place in its prompt."""
        self._weights = [head_norm(norm) for norm in k_norms or [None] * len(products)]
        assert len(self._weights) == len(products), (len(self._weights), len(products))
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
        """h [N, D] -> for each product that `memory` names k, v [B, G, S, K], filled up to the prompts' ends."""
        if not memory:
            return
        _check_states(self.dtype, h, (prompts.num_tokens, self.width))
        for k, v in memory.values():
            _check_cache(self.dtype, len(prompts), self._shape, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
        count = len(memory)
        self._call(
            ctypes.byref(self._heads),
            self._norm,
            count,
            (ProductStruct * count)(*(self._products[layer] for layer in memory)),
            (POINTER * count)(*(pointer(self._weights[layer]) for layer in memory)),
            *prompts.pointers(),
            h.data_ptr(),
            (POINTER * count)(*(k.data_ptr() for k, _ in memory.values())),
            (POINTER * count)(*(v.data_ptr() for _, v in memory.values())),
            (INT64 * count)(*(k.shape[2] for k, _ in memory.values())),
            torch.get_num_threads(),
        )


class LayerKernel:
    """A decoder layer as one call.

    The same as its parts one after the other (`linear`, `attend`, a norm), without the entries and the threads' forks
    between them.
    """

    STAGES = ("norms", "query, key, value", "attention", "attention output", "feed-forward")
    seconds: Tensor | None = None
    """[5] float64 by stage: what steps add their times to, while it is set (`actors.measuring.profile`)."""

    def __init__(
        self,
        shape: LayerShape,
        attn_norm: nn.Module,
        qkv: Product,
        out: Product,
        ffn_norm: nn.Module,
        fc1: Product,
        fc2: Product,
        *,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> None:
        """`qkv`: D -> (H + 2 G) K, queries above keys above values; or queries alone, for steps whose keys and values
        are in the cache already (SwiftKV). `q_norm`, `k_norm`: RMS norms of each head's K numbers, before they turn."""
        self._held = (shape, attn_norm, qkv, out, ffn_norm, fc1, fc2, q_norm, k_norm)  # what the pointers point to
        self._shape, self.dtype = shape, out.dtype
        biases = [product.bias for product in (qkv, out, fc1, fc2)]
        norms = [head_norm(q_norm), head_norm(k_norm)]
        check_types(self.dtype, *parameters_of(attn_norm), *parameters_of(ffn_norm), *biases, *norms)
        width, queries, kv = out.outputs, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.width = width
        _check_products(width, queries, kv, qkv, out)
        is_gated = shape.mlp == "swiglu"
        assert fc1.is_gated == is_gated, "a feed-forward block that is packed for another activation"
        assert (fc1.inputs, fc1.outputs) == (width, fc2.inputs * (2 if is_gated else 1)), (fc1.outputs, fc2.inputs)
        assert fc2.outputs == width, (fc2.outputs, width)
        self._block = LayerStruct(
            heads_of(shape, *norms),
            shape.is_pre_norm,
            is_gated,
            norm_struct(shape, attn_norm),
            qkv.struct(),
            out.struct(),
            norm_struct(shape, ffn_norm),
            fc1.struct(),
            fc2.struct(),
        )
        first_norm = attn_norm if shape.is_pre_norm else None
        has_keys = qkv.outputs > queries
        self.store = KVStoreKernel(shape, first_norm, [qkv.tail(queries)], [k_norm]) if has_keys else None
        self._reference = ctypes.byref(self._block)
        self._read = function("prompt", self.dtype)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._block)

    def pointers(self, rows: int, columns: KVRange) -> tuple[int, int, int, int, int]:
        """Keys, values, capacity, first and last columns, as `step` takes them."""
        k, v, first, last, slots = columns[:5]
        _check_cache(self.dtype, rows if slots is None else len(k), self._shape, k, v)
        return k.data_ptr(), v.data_ptr(), k.shape[2], first.data_ptr(), last.data_ptr()

    def read(
        self,
        h: Tensor,
        prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        feeds: bool,
        shared: SharedPrefix | None = None,
    ) -> Tensor:
        """h [N, D], prompts, through the layer, in place; `memory`: k, v [B, G, S, K], filled up to the prompts' ends.
        `shared`: of the tokens `before` those given, where they are not in `memory`."""
        _check_states(self.dtype, h, (prompts.num_tokens, self.width))
        assert self.store is not None, "no keys and values"
        where: tuple[Any, ...] = (None, None, 0, None)
        if memory is not None:
            k, v = memory
            _check_cache(self.dtype, len(prompts), self._shape, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
            head = None if shared is None else ctypes.byref(shared_prefix_struct(shared, len(prompts), k))
            where = (k.data_ptr(), v.data_ptr(), k.shape[2], head)
        threads = torch.get_num_threads()
        self._read(self._reference, *prompts.pointers(), h.data_ptr(), memory is not None, feeds, *where, threads)
        return h


class Step:
    """Layers of one type, one behind the other, for one new column per row. All they take is checked and laid out once,
    so that no step does it: weights have pushed Python out of the caches since the step before."""

    def __init__(
        self, layers: Sequence[LayerKernel], rows: int, columns: Sequence[KVRange] | None, *, feeds: bool
    ) -> None:
        """As `Backend.prepare_step`; it `accepts_fewer_rows`."""
        count, dtype = len(layers), layers[0].dtype
        memory: list[tuple[Any, ...]] = [(None, None, 0, None, None)] * count
        slots = shared = None
        if columns is not None:
            slots = columns[0].slots
            assert all(of.slots is slots for of in columns), "layers of other rows"
            numbers = [number for of in columns for number in (of.first, of.last, of.slots) if number is not None]
            for indices in {id(number): number for number in numbers}.values():  # mostly the same in all layers
                _check_indices(rows, indices)
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
            feeds,
            pointers(*k),
            pointers(*v),
            (INT64 * count)(*capacities),
            pointers(*first),
            pointers(*last),
            pointer(slots),
            shared,
        )

    def __call__(self, h: Tensor) -> Tensor:
        """h [B, 1, D], in place."""
        rows, threads = len(h), torch.get_num_threads()
        assert rows <= self._most, (rows, self._most)
        _check_states(self._dtype, h, (rows, 1, self._width))
        self._call(*self._layers, rows, h.data_ptr(), *self._columns, pointer(LayerKernel.seconds), threads)
        return h


# wrong ones would be read as if they were right


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


def _check_indices(count: int, indices: Tensor) -> None:
    assert indices.dtype == torch.int64, indices.dtype
    assert indices.shape == (count,), (indices.shape, count)
    assert indices.is_contiguous(), indices.stride()
