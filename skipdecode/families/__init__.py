"""Model families: one file each, which says what its config.json means and how its weights are called.

To add one: a subclass of `skipdecode.config.model.DecoderConfig` in a file here, a line in FAMILIES, and a test against
Hugging Face (docs/contributing.md has the steps).
"""

import json
from pathlib import Path
from typing import Any

from skipdecode.config.json_files import read_eos
from skipdecode.config.model import DecoderConfig
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.mistral import MistralConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.families.qwen import Qwen2Config, Qwen3Config
from skipdecode.families.stablelm import StableLMConfig

__all__ = ["FAMILIES", "OPTConfig", "config_of", "read_config", "released"]

FAMILIES: dict[str, type[DecoderConfig]] = {
    family.model_type: family
    for family in (OPTConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, StableLMConfig)
}
"""By `model_type` of config.json."""


def config_of(raw: Any) -> DecoderConfig:
    """From the contents of a Hugging Face `config.json`; ValueError names the key at fault."""
    if not isinstance(raw, dict):
        raise ValueError(f"expected a mapping, got {type(raw).__name__}")
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise ValueError(f"model_type is {raw.get('model_type')!r}; supported are {', '.join(FAMILIES)}")
    return family.from_dict(raw)


def read_config(folder: str | Path) -> DecoderConfig:
    """Of a Hugging Face folder: config.json, and what generation_config.json says of the end of a text. Of a GGUF file:
    its metadata.

    ValueError when config.json is absent or asks for what we do not have.
    """
    if Path(folder).is_file():
        from skipdecode.checkpoint import gguf_file  # imports numpy, which a head node need not have

        return gguf_file.checked(folder, config_of)
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face model folder") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    generation = Path(folder) / "generation_config.json"
    try:
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    except FileNotFoundError:
        eos = None
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{generation}: cannot be read: {error}") from error
    try:
        return config_of(raw if eos is None else raw | {"eos_token_id": read_eos("eos_token_id", eos)})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def released(name: str) -> DecoderConfig:
    """The shape of a released model, e.g. `opt-1.3b` or `llama-3.1-8b`; ValueError names those there are."""
    for family in FAMILIES.values():
        if name in family.released_shapes:
            return family.from_dict({"model_type": family.model_type} | family.released_shapes[name])
    known = dict.fromkeys(name for family in FAMILIES.values() for name in family.released_shapes)  # some are inherited
    raise ValueError(f"unknown shape {name!r}; known: {', '.join(known)}")
