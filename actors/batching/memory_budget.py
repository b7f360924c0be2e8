"""How many rows a batch may have: as many as the memory for its keys and values holds.

Of a GPU a share is for weights and caches; of a host, whose memory Ray and others use too, a part of what is free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from actors.gpu_memory import DeviceMemory
from skipdecode.backends.device import backend_on
from skipdecode.backends.host_memory import available_bytes
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.batch_sizes import MAX_ROWS, row_rounding, rows_within
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.schedules.plan import Schedule

MAX_BATCH_ROWS = {"cpu": 128, "cuda": MAX_ROWS}  # `auto`: more rows than this bring little on either kind
ENGINE_SHARE = 0.5  # of a host's free memory, for the caches of all batches of an endpoint
CACHE_SHARE = 0.25  # of a host's free memory, for the cache of one batch (it is shared with Ray)
DETERMINISTIC_ROWS = 32  # `auto` under `deterministic`: the same on every machine


@dataclass(frozen=True)
class Room:
    """Memory for the caches of one model's batches."""

    config: DecoderConfig
    itemsize: int
    """Bytes of a number of keys and values."""
    devices: Sequence[torch.device]
    memory_share: float
    """Of a GPU's memory, for weights and caches."""
    graphs: CudaGraphs | None = None
    """Who has it, where decode steps are captured."""

    @property
    def is_cuda(self) -> bool:
        return self.devices[0].type == "cuda"

    def rows(
        self, schedules: Mapping[Schedule, float], *, prompt_columns: int, num_new: int, head_columns: int = 0
    ) -> int:
        """Rows of a batch, at least one, that fits under each of `schedules`, whose caches count so many times.

        `head_columns`: of heads that rows share beside these columns, per row.
        """
        shape = {"prompt_columns": prompt_columns, "num_new": num_new, "itemsize": self.itemsize}
        per_row = max(
            weight * cache_bytes_per_row(self.config, schedule, **shape) for schedule, weight in schedules.items()
        )
        per_row += 2 * self.config.num_hidden_layers * self.config.kv_dim * self.itemsize * head_columns
        if self.is_cuda:  # so that shapes repeat from batch to batch, and graphs serve
            parts, price = len(self.devices), int(per_row) + row_rounding(self.config, self.itemsize)
            rungs = None if self.graphs is None else self.graphs.rungs
            has_graphs = self.graphs is not None
            rows = rows_within(self._cache_bytes, price, num_gpus=parts, has_graphs=has_graphs, rungs=rungs)
            return max(parts, rows)
        fits = int(CACHE_SHARE * free_bytes(self.devices[0]) / per_row)
        return max(1, min(MAX_BATCH_ROWS["cpu"], fits))

    @property
    def engine_bytes(self) -> int:
        """For the caches of all batches of an endpoint."""
        return self._cache_bytes if self.is_cuda else int(ENGINE_SHARE * free_bytes(self.devices[0]))

    @property
    def on_gpus(self) -> int:
        """Bytes for caches, of all GPUs. Layers are dealt evenly, so the one with the least room decides."""
        room = [DeviceMemory.of(device).for_caches(self.memory_share) for device in set(self.devices)]
        return len(room) * min(room)

    @property
    def _cache_bytes(self) -> int:
        """On a GPU, for the caches of all batches."""
        return self.on_gpus if self.graphs is None else self.graphs.nbytes


def free_bytes(device: torch.device) -> int:
    """Memory that is free for caches."""
    if device.type == "cuda":
        return DeviceMemory.of(device).free
    return available_bytes() + backend_on(device).reusable_bytes
