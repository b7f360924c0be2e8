"""A linear layer that can be packed: its weight laid out once, as the device's back end reads it.

A packed layer computes the same product, and fuses an activation or a residual into it. Packing is for inference: there
is no gradient, and the plain weight is given up. Which weights gain by it, and which quantizations there are, the back
end knows (`skipdecode.backends`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import TORCH, Activation, Backend, PackedWeight, Product, activate
from skipdecode.backends.device import backend_on
from skipdecode.config.model import Quantization


class Linear(nn.Linear):
    """[..., in] -> [..., out]: x W^T + b, then an activation or plus `residual` [..., out] where asked for.

    `is_gated`: a layer for `swiglu`: outputs are [gate; other], and the result is silu(gate) * other [..., out / 2].
    """

    packed: PackedWeight | None = None
    backend: Backend = TORCH
    """What packed it."""

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
        self.lora: nn.Module | None = None
        """What training adds (`skipdecode.training.lora`)."""

    def forward(self, x: Tensor, *, activation: Activation = "none", residual: Tensor | None = None) -> Tensor:
        assert self.is_gated == (activation == "swiglu"), (self.is_gated, activation)
        if self.packed is not None:
            assert not (torch.is_grad_enabled() and x.requires_grad), "a packed layer has no gradient"
            return self.packed(x, self.bias, activation=activation, residual=residual)
        y = F.linear(x, self.weight, self.bias)
        y = activate(y if self.lora is None else self.lora(x, y), activation)
        return y if residual is None else residual + y

    def pack(self, quantization: Quantization | None = None) -> None:
        """Gives up `weight` for a packed one, where this device and type gain by it; else nothing happens."""
        assert self.lora is None, "an adapter is trained here"
        self.backend = backend_on(self.weight.device)
        self.packed = self.backend.pack(self.weight, quantization, is_gated=self.is_gated)
        if self.packed is None:
            return
        self.register_parameter("weight", None)
        if self.is_gated and self.bias is not None:
            self.bias = nn.Parameter(self.packed.ordered(self.bias.detach()), requires_grad=False)

    def product(self) -> Product | None:
        """For a kernel that does more than this layer; None where its weight is not packed for kernels."""
        return product(self.packed, self.bias)


def pack(weight: Tensor, quantization: Quantization | None = None, *, is_gated: bool = False) -> PackedWeight | None:
    """A weight [out, in] alone, as `Linear.pack` does it."""
    return backend_on(weight.device).pack(weight, quantization, is_gated=is_gated)


def product(packed: PackedWeight | None, bias: Tensor | None) -> Product | None:
    """For a kernel that does more than this product; None where the weight is not packed for kernels."""
    return None if packed is None else packed.product(bias)
