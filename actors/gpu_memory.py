"""A worker's GPU: its memory, what of it caches may take, and whether it is still there. No model, no rows.

What hosts give to caches is `actors.batching.memory_budget`'s choice: their memory is shared with Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipdecode.config.model import DecoderConfig
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.predict import MAX_GPUS, Workload, gpus_needed, num_weights, rows_that_fit
from skipdecode.schedules.plan import FullDepth

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


def refuse_too_large(
    config: DecoderConfig, source: str, devices: Sequence[torch.device], itemsize: int, share: float
) -> None:
    """ValueError for a model whose weights leave no room for keys and values in `share` of these devices. It says how
    many of them would do. To be asked before its weights are loaded."""
    count, total = len(devices), min(DeviceMemory.of(device).total for device in devices)
    least = Workload(prompt_tokens=1, new_tokens=1)
    if rows_that_fit(config, FullDepth(config.num_hidden_layers), total, count, least, share, itemsize) > 0:
        return
    enough = gpus_needed(config, total, Workload(), max(share, MEMORY_SHARE), itemsize)
    if enough is None:
        remedy = f"not even actors.num_gpus={MAX_GPUS} would do; use a smaller dtype (model.dtype) or larger GPUs"
    elif enough > count:
        remedy = f"set actors.num_gpus={enough}, which shares its layers out (an endpoint decodes on one GPU alone)"
    else:
        remedy = f"set actors.num_gpus={enough} where workers share a GPU, else raise actors.memory_share"
    weights, room = itemsize * num_weights(config) / 2**30, share * total * count / 2**30
    of = "a GPU" if count == 1 else f"{count} GPUs"
    raise ValueError(
        f"{source} takes {weights:.1f} GiB, and {room:.1f} GiB of {of} are for it and its caches; {remedy}"
    )


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
