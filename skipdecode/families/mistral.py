"""Mistral: a Llama with grouped-query attention and, in its first version, a sliding window.

Defaults are those of `transformers.MistralConfig`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.model import TokenizerRules
from skipdecode.families.sliding_window import WindowedConfig, read_window


@dataclass(frozen=True)
class MistralConfig(WindowedConfig):
    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules(is_file_alone=True)
    nullable_sizes: ClassVar[tuple[str, ...]] = ("head_dim",)
    stray_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "layer_types")

    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    max_position_embeddings: int = 4096 * 32
    sliding_window: int | None = 4096

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        return read_window(raw, cls.sliding_window), ()

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        del raw["layer_types"]
        return raw
