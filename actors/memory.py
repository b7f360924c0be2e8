"""The memory of a worker: what of its devices caches may take, and how many rows of a batch fit into that.

On a GPU a share is for weights and caches. Of a host's memory, which Ray and others use too, caches get a part of what
is free.
"""

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from skipdecode.backends.device import backend_on
from skipdecode.backends.errors import is_out_of_memory
from skipdecode.backends.host_memory import available_bytes
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.batch_sizes import MAX_ROWS, row_rounding, rows_within
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.cost.predict import MAX_GPUS, Workload, gpus_needed, num_weights, rows_that_fit
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.schedules.schedule import FullDepth, Schedule

logger = logging.getLogger(__name__)

MAX_BATCH_ROWS = {"cpu": 128, "cuda": MAX_ROWS}  # `batch_size: auto`: more rows than this bring little on either kind
DETERMINISTIC_ROWS = 32  # `batch_size: auto` under `deterministic`: the same on every machine
BATCH_SHARE = 0.25  # of a host's free memory, for the cache of one batch of a job
SERVING_SHARE = 0.5  # of a host's free memory, for the caches of all batches of an endpoint
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
MEMORY_WAIT_S, MEMORY_POLL_S = 60.0, 1.0
ENOUGH_OF_SHARE = 0.8  # of what a worker may take; with less its batches are notably smaller
SPARE_SHARE = 0.05  # of a GPU's memory, left free whatever the worker's share, since others may hold some of it


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a GPU's memory."""

    total: int
    free: int
    """What this process could still get, including what torch has reserved."""
    own: int
    """Held by tensors of this process: after loading, the weights."""

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_allocated(device)
        return cls(int(total), int(free) + torch.cuda.memory_reserved(device) - own, own)

    def for_caches(self, share: float) -> int:
        """Bytes for the caches of all batches, if this process may take `share` of the device."""
        return max(0, min(int(share * self.total) - self.own, self.free - int(SPARE_SHARE * self.total)))


@dataclass(frozen=True)
class MemoryBudget:
    """Memory for the caches of one model's batches."""

    config: DecoderConfig
    itemsize: int
    """Bytes of one number of keys and values."""
    devices: Sequence[torch.device]
    memory_share: float
    """The share of a GPU's memory for weights and caches."""
    graphs: CudaGraphs | None = None
    """Owns the memory where decode steps are captured."""

    @property
    def is_cuda(self) -> bool:
        return self.devices[0].type == "cuda"

    def rows(
        self, schedules: Mapping[Schedule, float], *, prompt_columns: int, num_new: int, prefix_columns: int = 0
    ) -> int:
        """The number of rows of a batch, at least one, that fits under each of the schedules.

        `schedules` has a weight for each, by which its cache is multiplied. `prefix_columns`: tokens of shared prefixes
        per row, which lie beside the `prompt_columns`.
        """
        shape = {"prompt_columns": prompt_columns, "num_new": num_new, "itemsize": self.itemsize}
        per_row = max(
            weight * cache_bytes_per_row(self.config, schedule, **shape) for schedule, weight in schedules.items()
        )
        per_row += 2 * self.config.num_hidden_layers * self.config.kv_dim * self.itemsize * prefix_columns
        if not self.is_cuda:
            fits = int(BATCH_SHARE * free_bytes(self.devices[0]) / per_row)
            return max(1, min(MAX_BATCH_ROWS["cpu"], fits))
        # Only certain sizes, so that shapes repeat from batch to batch and graphs can be replayed.
        rows = rows_within(
            self._total_bytes,
            int(per_row) + row_rounding(self.config, self.itemsize),
            num_gpus=len(self.devices),
            has_graphs=self.graphs is not None,
            rungs=None if self.graphs is None else self.graphs.rungs,
        )
        return max(len(self.devices), rows)

    @property
    def serving_cache_bytes(self) -> int:
        """Bytes for the caches of all batches of an endpoint."""
        return self._total_bytes if self.is_cuda else int(SERVING_SHARE * free_bytes(self.devices[0]))

    @property
    def gpu_cache_bytes(self) -> int:
        """Bytes for caches on all GPUs. Every GPU has as many layers, so the one with the least memory decides."""
        found = [DeviceMemory.of(device).for_caches(self.memory_share) for device in set(self.devices)]
        return len(found) * min(found)

    @property
    def _total_bytes(self) -> int:
        return self.gpu_cache_bytes if self.graphs is None else self.graphs.nbytes


def free_bytes(device: torch.device) -> int:
    """Memory that is free for caches."""
    if device.type == "cuda":
        return DeviceMemory.of(device).free
    return available_bytes() + backend_on(device).reusable_bytes


def check_weights_fit(
    config: DecoderConfig, source: str, devices: Sequence[torch.device], itemsize: int, share: float
) -> None:
    """Raises ValueError if the weights leave no memory for keys and values in `share` of these GPUs.

    The message says how many GPUs would do. Meant to be called before the weights are loaded.
    """
    count, total = len(devices), min(DeviceMemory.of(device).total for device in devices)
    least = Workload(num_prompt_tokens=1, new_tokens=1)
    if rows_that_fit(config, FullDepth(config.num_hidden_layers), total, count, least, share, itemsize) > 0:
        return
    enough = gpus_needed(config, total, Workload(), max(share, MEMORY_SHARE), itemsize)
    if enough is None:
        remedy = f"not even actors.num_gpus={MAX_GPUS} would do; use a smaller dtype (model.dtype) or larger GPUs"
    elif enough > count:
        remedy = f"set actors.num_gpus={enough}, which shares its layers out (an endpoint decodes on one GPU alone)"
    else:
        remedy = f"set actors.num_gpus={enough} where workers share a GPU, else raise actors.memory_share"
    weights, budget = itemsize * num_weights(config) / 2**30, share * total * count / 2**30
    of = "a GPU" if count == 1 else f"{count} GPUs"
    raise ValueError(
        f"{source} takes {weights:.1f} GiB, and {budget:.1f} GiB of {of} are for it and its caches; {remedy}"
    )


def keep_segments_whole() -> None:
    """Lets torch's allocator grow its segments of a GPU's memory, unless the environment says otherwise.

    Prompts of ever new shapes fragment what is beside the caches. To be called before CUDA is used in this process.
    """
    if not os.environ.keys() & set(ALLOCATOR_VARIABLES):
        is_new = hasattr(torch._C, "_accelerator_setAllocatorSettings")  # torch 2.9 warns of the older name
        os.environ[ALLOCATOR_VARIABLES[0 if is_new else 1]] = "expandable_segments:True"


def wait_for_memory(devices: Sequence[torch.device], share: float) -> None:
    """Waits until `share` of each GPU is free, which a worker keeps for good at its start: the process that it follows
    may still hold some. Warns after MEMORY_WAIT_S where much of it is still missing."""
    deadline = time.monotonic() + MEMORY_WAIT_S
    while True:
        memories = [DeviceMemory.of(device) for device in devices]
        least = min((memory.free + memory.own) / memory.total for memory in memories)
        if least >= share:
            return
        if time.monotonic() >= deadline:
            break
        time.sleep(MEMORY_POLL_S)
    if least < ENOUGH_OF_SHARE * share:
        logger.warning(
            "%.0f %% of a GPU's memory is free, and this worker may take %.0f %% (actors.memory_share): others hold "
            "the rest, and batches are smaller for it",
            100 * least,
            100 * share,
        )


def is_device_lost(error: Exception, devices: Sequence[torch.device]) -> bool:
    """True if a device no longer works in this process, so that every later batch would fail too.

    CUDA errors have many types (torch's, cuBLAS's, Triton's). After an error of the batch's own the devices still add.
    """
    return not is_out_of_memory(error) and not all(map(_works, devices))


def _works(device: torch.device) -> bool:
    try:
        return torch.ones(8, device=device).sum().item() == 8
    except Exception as error:
        return is_out_of_memory(error)  # a full device works


def freeze_gc() -> None:
    """Calls `gc.freeze()`, so that full collections skip the loaded model.

    With torch and Ray in the process a full collection takes a quarter of a second, in the middle of decoding.
    """
    gc.collect()
    gc.freeze()
