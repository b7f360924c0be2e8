"""Copies small lists to a device without waiting for it.

A copy from ordinary memory to a CUDA device waits until the device has done everything queued before; one from pinned
memory does not, and torch does not reuse that memory before the copy is done. The other direction is
`skipdecode.engine.async_output`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int]
    | Sequence[float]
    | Sequence[Sequence[int]]
    | Sequence[Sequence[float]]
    | np.ndarray[Any, Any],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.tensor(numbers, dtype, device)` that does not wait for the device. An array keeps its type, and on a CPU
    its memory is shared."""
    if device.type != "cuda":
        if isinstance(numbers, np.ndarray) and dtype is None:  # several microseconds faster
            return torch.from_numpy(numbers)
        return torch.tensor(numbers, dtype=dtype, device=device)
    if isinstance(numbers, np.ndarray):  # torch.tensor does not pin its copy
        given = torch.from_numpy(numbers)
        pinned = torch.empty(given.shape, dtype=dtype or given.dtype, pin_memory=True).copy_(given)
    else:
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)
