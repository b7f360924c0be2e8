"""Loads the model of a worker: checks the devices, waits for their memory, reads the weights and packs them."""

from collections.abc import Sequence

import torch

from actors.generator_config import GeneratorConfig
from actors.memory import check_weights_fit, keep_segments_whole, wait_for_memory
from skipdecode.backends.device import backend_on
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_device, choose_dtype, devices_of

KERNELS_ARE_REQUIRED = "actors.require_kernels is set"
DRAFTS_NEED_SAME_BITS = (
    "speculative rows have no fixed batch shape, so under sampling.deterministic they need the CPU kernels, whose "
    "results do not depend on the shape"
)


def load_packed_model(config: GeneratorConfig) -> tuple[Decoder, Sequence[torch.device], torch.dtype]:
    """The model, packed for its devices; the devices; and the type of hidden states, keys and values.

    Raises ValueError before any weight is read if devices are missing or the weights do not fit.
    """
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    device = choose_device(config.device)
    if config.require_kernels and (reason := backend_on(device).why_slow) is not None:
        raise ValueError(f"{KERNELS_ARE_REQUIRED}, and {reason}")  # before the weights are read
    dtype = choose_dtype(config.dtype, device)
    devices = devices_of(device, config.num_devices)
    if devices[0].type == "cuda":
        keep_segments_whole()
        shape = read_config(resolve_source(config.source), config.implementation)
        check_weights_fit(shape, config.source, devices, dtype.itemsize, config.memory_share)
        wait_for_memory(devices, config.memory_share)
    model = load_model(
        config.source,
        adapter=config.adapter,
        device=devices[0],
        dtype=dtype,
        devices=devices,
        implementation=config.implementation,
        quantization=config.quantization,
    )
    packed = model.pack(config.quantization, config.kv_cache_dtype)
    if config.deterministic and config.decode.get("lossless") and not packed.is_batch_invariant:
        raise ValueError(f"decode.lossless: {DRAFTS_NEED_SAME_BITS}; here products of this model are torch's")
    return packed, devices, dtype
