"""Saves a model of transformers as `save_pretrained` does: tensors with the names that files of its type have."""

import json
import shutil
import sys
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from skipdecode.config.model import OWN_KEYS
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import dtype_name
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.model.wrapped.examine import no_progress_bar
from skipdecode.model.wrapped.swiftkv import save_weights


def save_wrapped(decoder: Decoder, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json and one model.safetensors, with parameters as `dtype` and buffers as they are.

    config.json is transformers', with the schedules of `decoder.config` and the tokens that end a text.
    """
    decoder = cast(WrappedDecoder, decoder)
    model, config = decoder.model, decoder.config
    made: dict[int, Tensor] = {}  # tied weights stay one tensor, of which transformers stores one
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in made:
            is_weight = isinstance(value, nn.Parameter) and value.is_floating_point()
            made[id(value)] = value.detach().to(device="cpu", dtype=dtype if is_weight else value.dtype)
        state[name] = made[id(value)]
    generation, model.generation_config = model.generation_config, GenerationConfig()  # it does not save all it loads
    try:
        with no_progress_bar():
            model.save_pretrained(folder, state_dict=state, max_shard_size=sys.maxsize)
    finally:
        model.generation_config = generation
    (folder / "generation_config.json").unlink(missing_ok=True)
    path, ends = folder / "config.json", config.eos_token_id
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw |= {"dtype": dtype_name(dtype), "eos_token_id": ends if isinstance(ends, int) else list(ends) or None}
    own = {key: getattr(config, key) for key in OWN_KEYS if getattr(config, key) is not None}
    if config.swiftkv is not None:
        own["swiftkv"] = vars(config.swiftkv)
    if decoder.swiftkv is not None:
        save_weights(decoder.swiftkv, folder, dtype)
    raw = {key: value for key, value in raw.items() if key not in OWN_KEYS} | own
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(path, folder / "model.safetensors")  # safetensors makes its file readable by the owner only
