"""A worker's model: loaded onto its devices and packed for them, with a place for its decode steps as CUDA graphs.

Left out: what is decoded with it, and which steps are captured (`generator`); how many rows fit (`room`).
"""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.batching.memory_budget import DETERMINISTIC_ROWS, MAX_BATCH_ROWS, Room
from actors.generator_config import GeneratorConfig
from actors.gpu_memory import refuse_too_large
from skipdecode.backends.device import backend_on
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model
from skipdecode.engine.cuda_graphs import CudaGraphs, graphs_serve
from skipdecode.model.decoder import Decoder
from skipdecode.model.pipeline_parallel import choose_device, choose_dtype, devices_of

logger = logging.getLogger(__name__)

DRAFTS_NEED_SAME_BITS = (
    "rows that get several tokens at a time have no fixed batch shapes, so under sampling.deterministic they need the "
    "CPU kernels, which give a token the same bits in any shape"
)


@dataclass(frozen=True)
class Loaded:
    """What a worker decodes with."""

    model: Decoder
    devices: Sequence[torch.device]
    """Layers lie on them in turns; the rest on the first."""
    dtype: torch.dtype
    """Of states, keys and values."""


def load(config: GeneratorConfig) -> Loaded:
    """ValueError where there are fewer devices, or the weights leave no room on them, before any is read; behind that,
    where `decode.lossless` could not be `deterministic`."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    devices = devices_of(device, config.num_devices)
    if devices[0].type == "cuda":
        shape, share = read_config(resolve_source(config.source)), config.memory_share
        refuse_too_large(shape, config.source, devices, dtype.itemsize, share)
    model = load_model(config.source, adapter=config.adapter, device=devices[0], dtype=dtype, devices=devices)
    packed = model.pack(config.quantization)
    if config.deterministic and config.decode.get("lossless") and not packed.is_batch_invariant:
        raise ValueError(f"decode.lossless: {DRAFTS_NEED_SAME_BITS}; here products of this model are torch's")
    if (reason := backend_on(devices[0]).why_slow) is not None:
        logger.warning("decoding is slower than it could be: %s", reason)
    return Loaded(packed, devices, dtype)


def keep_loaded() -> None:
    """Takes all there is now out of Python's searches for garbage, for a process that keeps it to its end. With torch
    and Ray in it, a search of everything takes a quarter of a second, in the midst of decoding."""
    gc.collect()
    gc.freeze()


def make_graphs(config: GeneratorConfig, model: Decoder, room: Room) -> CudaGraphs | None:
    """Takes what `room` has left on the device; None where steps are not captured."""
    is_lossless = bool(config.decode.get("lossless"))  # its caches lie in torch's own memory
    if not config.has_graphs or is_lossless or len(room.devices) > 1 or not graphs_serve(model):
        return None
    rows = config.batch_size or (DETERMINISTIC_ROWS if config.deterministic else MAX_BATCH_ROWS["cuda"])
    return CudaGraphs(model, room.on_gpus, max_rows=rows)
