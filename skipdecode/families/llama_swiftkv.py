"""Snowflake's SwiftKV checkpoints (`llama_swiftkv`): a Llama with SwiftKV's weights beside its own.

The keys are those of ArcticTraining's `LlamaSwiftKVConfig` and ArcticInference's. Its later variants, whose layers
share keys by `kv_sharing_map` or have feed-forward blocks of their own, are refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from skipdecode.config.json_files import check_flag, check_size
from skipdecode.config.model import DecoderConfig, SwiftKVConfig
from skipdecode.families.llama import LlamaConfig


@dataclass(frozen=True)
class LlamaSwiftKVConfig(LlamaConfig):
    """`swiftkv` comes from `num_key_value_layers` and `key_value_group_size`."""

    model_type: ClassVar[str] = "llama_swiftkv"
    architecture: ClassVar[str] = "LlamaSwiftKVForCausalLM"
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for key in ("kv_sharing_map", "mlp_tuning_enabled", "layernorm_tuning_enabled"):
            if raw.get(key):
                raise ValueError(f"{key} is {str(raw[key])[:80]}, which is not supported")
        check_flag("swiftkv", raw.get("swiftkv", True))  # whether the files' own code uses it
        known = super().read_fields({key: value for key, value in raw.items() if key != "swiftkv"})
        num_layers = known.get("num_hidden_layers", cls.num_hidden_layers)
        own = raw.get("num_key_value_layers")
        if own is not None and check_size("num_key_value_layers", own) < num_layers:
            size = raw.get("key_value_group_size")
            known["swiftkv"] = SwiftKVConfig(own, 1 if size is None else check_size("key_value_group_size", size))
        return known

    @property
    def default_prefill(self) -> Literal["full", "swiftkv"]:
        return "full" if self.swiftkv is None else "swiftkv"

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        raw.pop("swiftkv", None)
        if self.swiftkv is None:  # the Llama alone
            return raw | {"architectures": [LlamaConfig.architecture], "model_type": LlamaConfig.model_type}
        shape = {"num_key_value_layers": self.swiftkv.kv_layers, "key_value_group_size": self.swiftkv.group_size}
        return raw | shape | {"swiftkv": True}


def as_llama_swiftkv(config: DecoderConfig) -> LlamaSwiftKVConfig:
    """The same model to be written in that layout; ValueError if it is no Llama with SwiftKV."""
    if type(config) not in (LlamaConfig, LlamaSwiftKVConfig):
        raise ValueError(f"llama_swiftkv is a layout of Llamas, and model_type is {config.model_type!r}")
    if config.swiftkv is None:
        raise ValueError("llama_swiftkv is a layout of models with SwiftKV; give model.swiftkv")
    return LlamaSwiftKVConfig(**{one.name: getattr(config, one.name) for one in fields(config)})
