"""Products of weights in blocks by torch alone, in the arithmetic of the kernels: whole numbers, then float32 block by
block. What the kernels must give, bit by bit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from skipdecode.backends.backend import Activation, activate
from skipdecode.backends.block_quantization import BLOCK, StoredBlocks


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """x y + z in float32, rounded once. The product is exact in float64; its sum is rounded to odd, which keeps what
    the second rounding needs to know."""
    product, z = x.double() * y.double(), z.double()
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)
    bits = total.view(torch.int64)
    is_even = (bits & 1) == 0
    outward = torch.where((lost > 0) == (total > 0), 1, -1)
    odd = torch.where((lost != 0) & is_even, bits + outward, bits)
    return odd.view(torch.float64).float()


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, in] -> numbers [R, in / 32, 32] in [-127, 127] and scales [R, in / 32], float32 both."""
    groups = x.float().view(len(x), x.shape[1] // BLOCK, BLOCK)
    top = groups.abs().amax(dim=2)
    is_none = top < 1e-34
    inverse = torch.where(is_none, 0.0, torch.full_like(top, 127.0) / top)  # a plain 127.0 is multiplied by 1 / top
    numbers = (groups * inverse[..., None]).round()
    return numbers, torch.where(is_none, 0.0, top * torch.tensor(1.0 / 127.0))


def block_sums(x: Tensor, weight: StoredBlocks) -> Tensor:
    """x [R, in] times the weight [out, in], in float32: [R, out]."""
    numbers, scales = quantized_rows(x)
    raw = weight.rows(torch.arange(weight.shape[0]))
    halves = raw[..., : 4 if weight.kind == "Q4_1" else 2].contiguous().view(torch.float16).float()
    if weight.kind == "Q8_0":
        whole = raw[..., 2:].contiguous().view(torch.int8).float()
    else:
        whole = torch.cat([raw[..., -16:] & 15, raw[..., -16:] >> 4], dim=-1).float()
        whole = whole - 8 if weight.kind == "Q4_0" else whole
    sums = torch.zeros(len(x), weight.shape[0])
    for block in range(weight.shape[1] // BLOCK):
        integers = numbers[:, block] @ whole[:, block].T  # exact: below 2^24
        scale = halves[:, block, 0] * scales[:, block, None]
        sums = fma(integers, scale, sums)
        if weight.kind == "Q4_1":
            scaled = scales[:, block] * numbers[:, block].sum(dim=1)
            sums = fma(halves[:, block, 1].expand_as(sums), scaled[:, None], sums)
    return sums


@dataclass
class BlockProduct:
    """A `PackedWeight` by `block_sums`."""

    weight: StoredBlocks

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        y = block_sums(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.weight.shape[0])
        y = activate(y if bias is None else y + bias.float(), activation)
        return (y if residual is None else y + residual.float()).to(x.dtype)

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self(x, None))

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        assert allowed is None, "no masks here"
        return self(x, None).argmax(dim=-1)

    def ordered(self, bias: Tensor) -> Tensor:
        return bias

    def product(self, bias: Tensor | None) -> None:
        return None
