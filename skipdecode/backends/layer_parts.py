"""What a decoder layer is made of, as the compiled kernels take it (`cpp/layer.h`): its products, norms and heads.

Whoever makes a structure from tensors keeps these alive: it has their addresses alone. The calls are in `layer`.

D width, K head dim.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from skipdecode.backends.cpu_weights import Operand, Weight, operand_of, tail_of
from skipdecode.backends.heads import INT64, POINTER, Heads, heads
from skipdecode.backends.layer_shape import LayerShape


class NormStruct(ctypes.Structure):
    """`Norm` of `cpp/layer.h`: no weight stands for 1, no bias for 0."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("is_rms", INT64)]


class ProductStruct(ctypes.Structure):
    """`Product` of `cpp/layer.h`, as `Product.struct` fills it."""

    _fields_ = [
        ("outputs", INT64),
        ("inputs", INT64),
        ("weight", POINTER),
        ("scales", POINTER),
        ("totals", POINTER),
        ("bias", POINTER),
    ]


class Block(ctypes.Structure):
    """`Block` of `cpp/layer.h`: a whole layer."""

    _fields_ = [
        ("heads", Heads),
        ("is_pre_norm", INT64),
        ("is_gated", INT64),
        ("attn_norm", NormStruct),
        ("qkv", ProductStruct),
        ("out", ProductStruct),
        ("ffn_norm", NormStruct),
        ("fc1", ProductStruct),
        ("fc2", ProductStruct),
    ]


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


def heads_of(shape: LayerShape, q_norm: Tensor | None, k_norm: Tensor | None) -> Heads:
    """The layer's heads as kernels take them; `q_norm`, `k_norm` of `head_norm`."""
    return heads(
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        rotary_table=shape.rotary_table,
        epsilon=shape.epsilon,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def check_types(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """AssertionError for one of another type, which would be read as if it were right."""
    for tensor in tensors:
        assert tensor is None or tensor.dtype == dtype, tensor.dtype


def pointer(tensor: Tensor | None) -> int | None:
    """Where the tensor begins, which must be contiguous; None: a null pointer."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
