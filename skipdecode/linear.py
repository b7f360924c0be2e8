"""A linear layer that can be packed: on CPUs, its weight laid out once as the matrix units read it.

oneDNN reorders a plain bfloat16 weight in every call; with few rows that is half of the time. A packed layer computes
the same product, and fuses a ReLU or a residual into it. Packing is for inference: there is no gradient, and the plain
weight is given up.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """[..., in] -> [..., out]: x W^T + b, then ReLU or plus `residual` [..., out] where asked for."""

    packed: Tensor | None = None

    def forward(self, x: Tensor, *, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        if self.packed is not None:
            return packed_linear(x, self.packed, self.bias, relu=relu, residual=residual)
        y = F.linear(x, self.weight, self.bias)
        if relu:
            y = F.relu(y)
        return y if residual is None else residual + y

    def pack(self) -> None:
        """Gives up `weight` for a packed one, where this CPU and type gain by it; else nothing happens."""
        self.packed = pack(self.weight)
        if self.packed is not None:
            self.register_parameter("weight", None)


def pack(weight: Tensor) -> Tensor | None:
    """The weight [out, in] as oneDNN wants it (an opaque tensor of as many bytes), or None where that is no gain."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    if weight.dtype != torch.float32 and not (weight.dtype == torch.bfloat16 and _has_bfloat16()):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed


def packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, *, relu: bool = False, residual: Tensor | None = None
) -> Tensor:
    """As `Linear.forward`, with a weight from `pack`. The operators are those of `torch.compile`'s frozen graphs."""
    y: Tensor
    if residual is not None:
        assert not relu, "one of the two"
        y = torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")
    else:
        y = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "relu" if relu else "none", [], "")
    return y


def _has_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
