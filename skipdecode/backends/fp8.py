"""FP8 (e4m3): how keys and values, weights, and inputs of products are rounded to 8 bits.

A number has 3 bits behind its leading one, so it is off by 2^-4 of itself at most wherever it is between 2^-6 and 448.
Below it is off by 2^-10, and above it becomes 448. CUDA devices multiply such numbers from capability 8.9 on.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
"""448"""
LEAST = 1e-12
"""What counts as the largest number of a row of zeros."""
MIN_CAPABILITY = (8, 9)
"""Ada (L4), Hopper and later: what is older has no such type."""


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in the type of a cache. In FP8 what is too large becomes the largest number, and NaN stays."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8) if dtype == FP8 != x.dtype else x.to(dtype)


def widened(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cache has, for torch's operators: FP8 in the type of states."""
    return memory.to(dtype) if memory.dtype == FP8 else memory


def as_bytes(memory: Tensor) -> Tensor:
    """The same memory in a type that torch's operators can move: few of them take FP8."""
    return memory.view(torch.uint8) if memory.dtype == FP8 else memory


def rows_in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of x [N, K] divided by a scale for each row, in FP8, and the scales [N, 1] float32: the largest
    number of a row becomes FP8_MAX."""
    wide = x.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp(min=LEAST) / FP8_MAX
    return narrowed(wide / scales, FP8), scales


def why_no_fp8(device: torch.device) -> str | None:
    """Why a device does not compute with FP8; None if it does."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return (
            f"FP8 needs compute capability 8.9 (L4, H100 and later), and this GPU has {'.'.join(map(str, capability))}"
        )
    return None
