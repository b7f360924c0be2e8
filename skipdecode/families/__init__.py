"""Model families, one file each: what the keys of a config.json mean, and the names of the weights.

To add a family: a subclass of `skipdecode.config.model.DecoderConfig` in a file here, its name in FAMILIES below, and a
line in `FAMILY_MODELS` of `tests/support/families.py` (docs/contributing.md has the steps).
"""

from typing import Any

from skipdecode.config.model import DecoderConfig
from skipdecode.families.gemma3 import Gemma3Config
from skipdecode.families.granite import GraniteConfig
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.llama_swiftkv import LlamaSwiftKVConfig
from skipdecode.families.mistral import MistralConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.families.phi3 import Phi3Config
from skipdecode.families.qwen import Qwen2Config, Qwen3Config
from skipdecode.families.smollm3 import SmolLM3Config
from skipdecode.families.stablelm import StableLMConfig

__all__ = ["FAMILIES", "OPTConfig", "config_of", "released"]

FAMILIES: dict[str, type[DecoderConfig]] = {
    family.model_type: family
    for family in (
        OPTConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, StableLMConfig, Gemma3Config, Phi3Config,
        SmolLM3Config, GraniteConfig, LlamaSwiftKVConfig,
    )
}  # fmt: skip
"""By `model_type` of config.json."""


def config_of(raw: Any) -> DecoderConfig:
    """Reads the contents of a Hugging Face `config.json`; ValueError names the key at fault."""
    if not isinstance(raw, dict):
        raise ValueError(f"expected a mapping, got {type(raw).__name__}")
    family = FAMILIES.get(raw.get("model_type", ""))
    if family is None:
        raise ValueError(f"model_type is {raw.get('model_type')!r}; supported are {', '.join(FAMILIES)}")
    return family.from_dict(raw)


def released(name: str) -> DecoderConfig:
    """The shape of a released model, such as `opt-1.3b` or `llama-3.1-8b`; ValueError lists the known ones."""
    for family in FAMILIES.values():
        if name in family.released_shapes:
            return family.from_dict({"model_type": family.model_type} | family.released_shapes[name])
    known = dict.fromkeys(name for family in FAMILIES.values() for name in family.released_shapes)  # some are inherited
    raise ValueError(f"unknown shape {name!r}; known: {', '.join(known)}")
