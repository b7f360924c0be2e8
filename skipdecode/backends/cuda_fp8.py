"""Products in FP8: weights with a scale per output, inputs with a scale per row that is found as they come.

`torch._scaled_mm` multiplies them on GPUs. Elsewhere the same numbers are multiplied in float32, which is the
reference: it differs in the order of sums alone.

N rows.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import Activation, activate
from skipdecode.backends.cuda_kernels import Kernels
from skipdecode.backends.fp8 import rows_in_fp8
from skipdecode.backends.torch_sampling import mask

STEP = 16
"""Inputs and outputs of `torch._scaled_mm` are multiples of this."""


@dataclass(frozen=True, eq=False)
class Fp8Product:
    """A linear layer: a weight [out, in] in FP8, filled up with zeros to a multiple of STEP outputs, and a bias."""

    numbers: Tensor
    scales: Tensor
    """[1, out] float32"""
    outputs: int
    bias: Tensor | None
    dtype: torch.dtype
    """Of inputs and outputs."""
    kernels: Kernels

    @property
    def weight(self) -> Tensor:
        return self.numbers

    @property
    def inputs(self) -> int:
        return self.numbers.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        y = self.without_bias(x)
        return y if self.bias is None else y + self.bias

    def relu(self, x: Tensor) -> Tensor:
        return self(x).relu_()

    def without_bias(self, x: Tensor) -> Tensor:
        """[N, in] -> [N, out]."""
        narrow, scales = self.kernels.rows_in_fp8(x)
        return scaled_product(narrow, scales, self.numbers, self.scales, self.dtype)[:, : self.outputs]

    def tail(self, start: int) -> "Fp8Product":
        """The part for the outputs from `start` on, a multiple of STEP."""
        assert start % STEP == 0, start
        bias = None if self.bias is None else self.bias[start:]
        scales = self.scales[:, start:].contiguous()
        return replace(self, numbers=self.numbers[start:], scales=scales, outputs=self.outputs - start, bias=bias)


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """Implements `PackedWeight`."""

    plain: Fp8Product
    """Without a bias."""

    @classmethod
    def of(cls, weight: Tensor, kernels: Kernels) -> "Fp8Weight":
        """A weight [out, in], whose inputs are a multiple of STEP, rounded."""
        numbers, scales = rows_in_fp8(weight)
        fill = -len(weight) % STEP
        whole = F.pad(numbers.view(torch.uint8), (0, 0, 0, fill)).view(numbers.dtype)
        row = F.pad(scales.view(1, -1), (0, fill))
        return cls(Fp8Product(whole, row, len(weight), None, weight.dtype, kernels))

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        y = self.product(bias)(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        y = activate(y, activation)
        return y if residual is None else residual + y

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self.plain(x))

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        logits = self.plain(x)
        return self.plain.kernels.argmax(logits if allowed is None else mask(logits, allowed))

    def ordered(self, bias: Tensor) -> Tensor:
        return bias

    def product(self, bias: Tensor | None) -> Fp8Product:
        return replace(self.plain, bias=bias)


def scaled_product(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """x [N, in] times weight [out, in], both in FP8, with scales [N, 1] and [1, out]: [N, out]."""
    if x.device.type != "cuda":
        return (x.float() @ weight.float().t() * x_scales * scales).to(dtype)
    made: Tensor = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=scales, out_dtype=dtype)
    return made
