"""Small lists on their way to a device, for which nobody waits.

A copy from ordinary memory to a CUDA device waits until the device has done all it was given before. One from pinned
memory does not; torch gives such memory to nobody else before the copy is over. The other way:
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
    """As `torch.tensor`: the shape of the list, and by default int64 or float32, or the type of the array, whose memory
    it may keep."""
    if device.type != "cuda":
        if isinstance(numbers, np.ndarray) and dtype is None:  # sooner by several microseconds
            return torch.from_numpy(numbers)
        return torch.tensor(numbers, dtype=dtype, device=device)
    if isinstance(numbers, np.ndarray):  # which torch.tensor does not pin
        given = torch.from_numpy(numbers)
        pinned = torch.empty(given.shape, dtype=dtype or given.dtype, pin_memory=True).copy_(given)
    else:
        pinned = torch.tensor(numbers, dtype=dtype, pin_memory=True)
    return pinned.to(device, non_blocking=True)
