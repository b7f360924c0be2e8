"""Qwen2 and Qwen3: Llamas with biases on queries, keys and values, or with norms on each head of queries and keys.

Defaults are those of `transformers.Qwen2Config` and `Qwen3Config`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.json_files import check_flag
from skipdecode.config.model import TokenizerRules
from skipdecode.families.sliding_window import SLIDING, WindowedConfig, read_layer_types, read_window


@dataclass(frozen=True)
class Qwen2Config(WindowedConfig):
    """Biases on queries, keys and values only."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules("Qwen2Tokenizer", is_class_fixed=True)
    stray_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    attention_bias: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] = ()

    @property
    def out_bias(self) -> bool:
        return False

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        has_windows = check_flag("use_sliding_window", raw.get("use_sliding_window") or False)
        window = read_window(raw, 4096) if has_windows else None
        from_layer = raw.get("max_window_layers", 28)
        kinds = read_layer_types(raw, num_layers, lambda layer: window is not None and layer >= from_layer)
        if not has_windows and SLIDING in kinds:
            raise ValueError(f"layer_types has {SLIDING!r}, and use_sliding_window is false")
        return window, kinds

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict() | {"use_sliding_window": self.sliding_window is not None}
        del raw["attention_bias"]
        return raw


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Norms on each head's queries and keys; no biases unless `attention_bias` asks for them."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules("Qwen2Tokenizer")
    nullable_sizes: ClassVar[tuple[str, ...]] = ("num_key_value_heads",)
    stray_keys: ClassVar[tuple[str, ...]] = ("mlp_bias",)

    head_dim: int = 128
    attention_bias: bool = False

    @property
    def out_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_qk_norm(self) -> bool:
        return True

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"attention_bias": self.attention_bias}
