"""A linear layer that can be packed: on CPUs, its weight laid out once as the matrix units read it.

oneDNN reorders a plain bfloat16 weight in every call; with few rows that is half of the time. A packed layer computes
the same product, and fuses an activation or a residual into it. What the back end multiplies itself goes through its
kernels (`backends.cpu`), the rest through oneDNN. Some back ends take int8 weights, which is another model in half of
the weights' bytes. Packing is for inference: there is no gradient, and the plain weight is given up.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends import choice, cpu
from skipdecode.backends.cpu import Activation
from skipdecode.backends.layer import Product
from skipdecode.config import Quantization
from skipdecode.sampler import likeliest


class Packed(Protocol):
    """A packed weight [out, in], to be called as `Linear` is: [..., in] -> [..., out]."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor: ...

    def likeliest(self, x: Tensor) -> Tensor:
        """The output that is largest, without a bias, the lower of two that are equal: [B, in] -> [B] int64."""


class Linear(nn.Linear):
    """[..., in] -> [..., out]: x W^T + b, then an activation or plus `residual` [..., out] where asked for.

    `is_gated`: a layer for `swiglu`: outputs are [gate; other], and the result is silu(gate) * other [..., out / 2].
    """

    packed: Packed | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_gated: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.is_gated = is_gated

    def forward(self, x: Tensor, *, activation: Activation = "none", residual: Tensor | None = None) -> Tensor:
        assert self.is_gated == (activation == "swiglu"), (self.is_gated, activation)
        if self.packed is not None:
            assert not (torch.is_grad_enabled() and x.requires_grad), "a packed layer has no gradient"
            return self.packed(x, self.bias, activation=activation, residual=residual)
        y = activate(F.linear(x, self.weight, self.bias), activation)
        return y if residual is None else residual + y

    def pack(self, quantization: Quantization | None = None) -> None:
        """Gives up `weight` for a packed one, where this CPU and type gain by it; else nothing happens."""
        self.packed = pack(self.weight, quantization, is_gated=self.is_gated)
        if self.packed is not None:
            self.register_parameter("weight", None)
        if self.is_gated and self.bias is not None and isinstance(self.packed, _Kernel):
            self.bias = nn.Parameter(cpu.interleave(self.bias.detach()), requires_grad=False)

    def product(self) -> Product | None:
        """For a kernel that does more than this layer; None where its weight is not packed for kernels."""
        return product(self.packed, self.bias)


def activate(y: Tensor, activation: Activation) -> Tensor:
    """[..., out] -> [..., out], or [..., out / 2] for `swiglu`."""
    if activation == "swiglu":
        gate, other = y.chunk(2, dim=-1)
        return F.silu(gate) * other
    return F.relu(y) if activation == "relu" else y


def product(packed: Packed | None, bias: Tensor | None) -> Product | None:
    """For a kernel that does more than this product; None where the weight is not packed for kernels."""
    if not isinstance(packed, _Kernel):
        return None
    return Product(packed.weight, packed.outputs, bias, packed.is_gated)


def pack(weight: Tensor, quantization: Quantization | None = None, *, is_gated: bool = False) -> Packed | None:
    """The weight [out, in] in as many bytes, or None where that is no gain; with `quantization` in half of them.

    `is_gated`: for `swiglu` (`Linear`); kernels take [gate; other] in multiples of 16 each. ValueError where there is
    no kernel for that quantization.
    """
    if quantization == "int8":
        check_int8(weight, is_gated=is_gated)
        return _Kernel(cpu.pack_int8(weight, gated=is_gated), len(weight), is_gated)
    if weight.device.type != "cpu":
        return None
    if _fits_kernels(weight, is_gated):
        return _Kernel(cpu.pack(weight, gated=is_gated), len(weight), is_gated)
    if onednn_lays_out(weight.dtype):
        return _OneDNN(torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous()))
    return None


def _fits_kernels(weight: Tensor, is_gated: bool) -> bool:
    fits = weight.shape[1] % 32 == 0 and not (is_gated and len(weight) % (2 * cpu.GATES))
    return fits and cpu.multiplies(weight.dtype)


def check_int8(weight: Tensor, *, is_gated: bool = False) -> None:
    """ValueError where there is no kernel for int8 weights in place of this one."""
    kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        raise ValueError(f"quantization: int8 weights are for bfloat16 on CPUs, and this is {kind}")
    if (problem := choice.choose().no_int8) is not None:
        raise ValueError(f"quantization: no int8 weights here: {problem}")
    if is_gated and len(weight) % (2 * cpu.GATES):
        raise ValueError(f"quantization: int8 weights need gates in a multiple of 16, and these are {len(weight) // 2}")
    if not _fits_kernels(weight, is_gated):
        raise ValueError(f"quantization: int8 weights need inputs in a multiple of 32, and these are {weight.shape[1]}")
    if weight.shape[1] > cpu.MAX_INT8_INPUTS:
        raise ValueError(f"quantization: int8 weights have at most {cpu.MAX_INT8_INPUTS} inputs")


@dataclass
class _Kernel:
    weight: Tensor | cpu.Int8Weight
    outputs: int
    is_gated: bool = False

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        return cpu.linear(x, self.weight, self.outputs, bias, activation=activation, residual=residual)

    def likeliest(self, x: Tensor) -> Tensor:
        return cpu.argmax_linear(x, self.weight, self.outputs)


@dataclass
class _OneDNN:
    """By the operators of `torch.compile`'s frozen graphs."""

    weight: Tensor

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        y: Tensor
        if residual is not None:
            assert activation == "none", "one of the two"
            y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, bias, "add")
            return y
        name = "relu" if activation == "relu" else "none"
        y = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, bias, name, [], "")
        return activate(y, "swiglu") if activation == "swiglu" else y

    def likeliest(self, x: Tensor) -> Tensor:
        return likeliest(self(x, None))


def onednn_lays_out(dtype: torch.dtype) -> bool:
    """Whether oneDNN lays weights of this type out once on this CPU; it raises where it cannot."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)
