"""A worker's GPU: its memory, what of it caches may take, and whether it is still there. No model, no rows.

What hosts give to caches is `actors.generator`'s choice: their memory is shared with Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MEMORY_ERRORS = torch.OutOfMemoryError, MemoryError

SPARE = 0.05  # of a GPU's memory, left free whatever its share: others may hold some of it


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes."""

    total: int
    free: int
    """What this process could still get, torch's own reserve included."""
    own: int
    """In this process's tensors: the weights, after loading."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)
        return cls(int(total), int(free) + torch.cuda.memory_reserved(device) - own, own)

    def for_caches(self, share: float) -> int:
        """Bytes for the caches of all batches, where this process may take `share` of the device."""
        return max(0, min(int(share * self.total) - self.own, self.free - int(SPARE * self.total)))


def is_lost(error: Exception, devices: Sequence[torch.device]) -> bool:
    """Whether a device is gone for this process, so that every later batch would fail too, and a new process may not.

    Errors of CUDA come by many names: torch's, cuBLAS's, Triton's. After one that was the batch's own the devices still
    count.
    """
    return not isinstance(error, MEMORY_ERRORS) and not all(map(_counts, devices))


def _counts(device: torch.device) -> bool:
    try:
        return torch.ones(8, device=device).sum().item() == 8
    except Exception:
        return False
