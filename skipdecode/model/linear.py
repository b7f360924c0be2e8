"""A linear layer whose weight can be packed, that is, laid out once as the device's back end reads it.

A packed layer computes the same product and can fuse an activation or a residual into it. Packing is for inference:
there is no gradient, and the plain weight is dropped. The back end decides which weights are packed, and which
quantizations exist (`skipdecode.backends`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import GATED, TORCH, Activation, Backend, PackedWeight, Product, activate
from skipdecode.backends.block_quantization import StoredBlocks, quantize
from skipdecode.backends.device import backend_on
from skipdecode.config.model import Quantization


class Linear(nn.Linear):
    """[..., in] -> [..., out]: x W^T + b, then an activation, or the sum with `residual` [..., out].

    `is_gated`: for `swiglu` and `geglu`, where the outputs are [gate; up] and the result is [..., out / 2].
    """

    packed: PackedWeight | None = None
    backend: Backend = TORCH
    """The back end that packed it."""

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
        self.blocks: StoredBlocks | None = None
        """What a file has of the weight, whose own values are then on the meta device until it is packed as int4."""
        self.lora: nn.Module | None = None
        """A LoRA adapter in training (`skipdecode.training.lora`)."""

    def forward(self, x: Tensor, *, activation: Activation = "none", residual: Tensor | None = None) -> Tensor:
        assert self.is_gated == (activation in GATED), (self.is_gated, activation)
        if self.packed is not None:
            assert not (torch.is_grad_enabled() and x.requires_grad), "a packed layer has no gradient"
            return self.packed(x, self.bias, activation=activation, residual=residual)
        y = F.linear(x, self.weight, self.bias)
        y = activate(y if self.lora is None else self.lora(x, y), activation)
        return y if residual is None else residual + y

    def pack(self, quantization: Quantization | None = None) -> None:
        """Replaces `weight` by a packed one if the back end packs it on this device and in this dtype."""
        assert self.lora is None, "a layer with an adapter in training cannot be packed"
        self.backend = _backend_of(self.weight, self.blocks)
        self.packed = self.backend.pack(self.weight, quantization, is_gated=self.is_gated, blocks=self.blocks)
        self.blocks = None
        if self.packed is None:
            return
        self.register_parameter("weight", None)
        if self.is_gated and self.bias is not None:
            self.bias = nn.Parameter(self.packed.ordered(self.bias.detach()), requires_grad=False)

    def product(self) -> Product | None:
        """The layer as part of a larger kernel; None if its weight is not packed for kernels."""
        return product(self.packed, self.bias)


def pack_head(
    weight: Tensor, quantization: Quantization | None = None, blocks: StoredBlocks | None = None
) -> PackedWeight | None:
    """The weight [V, E] of an LM head packed as `Linear.pack` does it; None if the back end does not pack it
    (`Backend.pack`). `blocks`: what a file has of it."""
    backend = _backend_of(weight, blocks)
    backend.check(weight, quantization)
    return backend.pack(weight, quantization, blocks=blocks or head_blocks(weight, quantization))


def head_blocks(weight: Tensor, quantization: Quantization | None) -> StoredBlocks | None:
    """What int4 makes of an LM head, which keeps 8 bits; None for other quantizations."""
    return quantize(weight.detach(), "Q8_0") if quantization == "int4" else None


def _backend_of(weight: Tensor, blocks: StoredBlocks | None) -> Backend:
    """Blocks are read by the CPU, wherever the weight that they replace would be."""
    return backend_on(weight.device if blocks is None else torch.device("cpu"))


def product(packed: PackedWeight | None, bias: Tensor | None) -> Product | None:
    """The product as part of a larger kernel; None if the weight is not packed for kernels."""
    return None if packed is None else packed.product(bias)
