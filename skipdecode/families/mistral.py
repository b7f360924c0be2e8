"""Mistral: a Llama with grouped-query attention and, in its first version, a sliding window.

Defaults are those of `transformers.MistralConfig`. Windows shorter than the context are refused (`LlamaConfig`).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.model import TokenizerRules
from skipdecode.families.llama import LlamaConfig


@dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules(is_file_alone=True)
    nullable_sizes: ClassVar[tuple[str, ...]] = ("head_dim",)
    stray_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    num_key_value_heads: int = 8
    intermediate_size: int = 14336
    max_position_embeddings: int = 4096 * 32

    @classmethod
    def refuse_windows(cls, raw: dict[str, Any]) -> None:
        cls.refuse_short_window(raw)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"sliding_window": None}
