"""A linear layer that can be packed: on CPUs, its weight laid out once as the matrix units read it.

oneDNN reorders a plain bfloat16 weight in every call; with few rows that is half of the time. A packed layer computes
the same product, and fuses a ReLU or a residual into it. What the back end multiplies itself goes through its kernels
(`backends.cpu`), the rest through oneDNN. Some back ends take int8 weights, which is another model in half of the
weights' bytes. Packing is for inference: there is no gradient, and the plain weight is given up.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends import choice, cpu
from skipdecode.backends.layer import Product
from skipdecode.config import Quantization
from skipdecode.sampler import likeliest


class Packed(Protocol):
    """A packed weight [out, in], to be called as `Linear` is: [..., in] -> [..., out]."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, relu: bool = False, residual: Tensor | None = None
    ) -> Tensor: ...

    def likeliest(self, x: Tensor) -> Tensor:
        """The output that is largest, without a bias, the lower of two that are equal: [B, in] -> [B] int64."""


class Linear(nn.Linear):
    """[..., in] -> [..., out]: x W^T + b, then ReLU or plus `residual` [..., out] where asked for."""

    packed: Packed | None = None

    def forward(self, x: Tensor, *, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        if self.packed is not None:
            assert not (torch.is_grad_enabled() and x.requires_grad), "a packed layer has no gradient"
            return self.packed(x, self.bias, relu=relu, residual=residual)
        y = F.linear(x, self.weight, self.bias)
        if relu:
            y = F.relu(y)
        return y if residual is None else residual + y

    def pack(self, quantization: Quantization | None = None) -> None:
        """Gives up `weight` for a packed one, where this CPU and type gain by it; else nothing happens."""
        self.packed = pack(self.weight, quantization)
        if self.packed is not None:
            self.register_parameter("weight", None)

    def product(self) -> Product | None:
        """For a kernel that does more than this layer; None where its weight is not packed for kernels."""
        return product(self.packed, self.bias)


def product(packed: Packed | None, bias: Tensor | None) -> Product | None:
    """For a kernel that does more than this product; None where the weight is not packed for kernels."""
    return Product(packed.weight, packed.outputs, bias) if isinstance(packed, _Kernel) else None


def pack(weight: Tensor, quantization: Quantization | None = None) -> Packed | None:
    """The weight [out, in] in as many bytes, or None where that is no gain; with `quantization` in half of them.

    ValueError where there is no kernel for that.
    """
    if quantization == "int8":
        check_int8(weight)
        return _Kernel(cpu.pack_int8(weight), len(weight))
    if weight.device.type != "cpu":
        return None
    if _fits_kernels(weight):
        return _Kernel(cpu.pack(weight), len(weight))
    if onednn_lays_out(weight.dtype):
        return _OneDNN(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()))
    return None


def _fits_kernels(weight: Tensor) -> bool:
    return weight.shape[1] % 32 == 0 and cpu.multiplies(weight.dtype)


def check_int8(weight: Tensor) -> None:
    """ValueError where there is no kernel for int8 weights in place of this one."""
    kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        raise ValueError(f"quantization: int8 weights are for bfloat16 on CPUs, and this is {kind}")
    if (problem := choice.choose().no_int8) is not None:
        raise ValueError(f"quantization: no int8 weights here: {problem}")
    if not _fits_kernels(weight):
        raise ValueError(f"quantization: int8 weights need inputs in a multiple of 32, and these are {weight.shape[1]}")
    if weight.shape[1] > cpu.MAX_INT8_INPUTS:
        raise ValueError(f"quantization: int8 weights have at most {cpu.MAX_INT8_INPUTS} inputs")


@dataclass
class _Kernel:
    weight: Tensor | cpu.Int8Weight
    outputs: int

    def __call__(self, x: Tensor, bias: Tensor | None, *, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        return cpu.linear(x, self.weight, self.outputs, bias, relu=relu, residual=residual)

    def likeliest(self, x: Tensor) -> Tensor:
        return cpu.argmax_linear(x, self.weight, self.outputs)


@dataclass
class _OneDNN:
    """By the operators of `torch.compile`'s frozen graphs."""

    weight: Tensor

    def __call__(self, x: Tensor, bias: Tensor | None, *, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        y: Tensor
        if residual is not None:
            assert not relu, "one of the two"
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, bias, "add")
        else:
            y = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, "relu" if relu else "none", [], "")
        return y

    def likeliest(self, x: Tensor) -> Tensor:
        return likeliest(self(x, None))


def onednn_lays_out(dtype: torch.dtype) -> bool:
    """Whether oneDNN lays weights of this type out once on this CPU; it raises where it cannot."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)
