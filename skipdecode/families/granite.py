"""Granite (IBM): a Llama with four multipliers, which are folded into weights where they can be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.model import TokenizerRules
from skipdecode.families.llama import LlamaConfig


@dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """Field names and defaults are those of `transformers.GraniteConfig`."""

    model_type: ClassVar[str] = "granite"
    architecture: ClassVar[str] = "GraniteForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules(is_file_alone=True)
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    """The factor of attention scores, in place of 1 / sqrt(head_dim)."""
    residual_multiplier: float = 1.0
    """The factor of what a sublayer adds to the residual."""
    logits_scaling: float = 1.0
    """The divisor of logits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} is {getattr(self, key)}, expected a positive number")

    @property
    def embed_scale(self) -> float:
        return self.embedding_multiplier

    def folded(self, part: str) -> tuple[float, float]:
        if part.startswith("self_attn.q_proj"):
            return self.attention_multiplier * math.sqrt(self.head_dim), 0.0
        if part in ("self_attn.o_proj", "mlp.down_proj"):
            return self.residual_multiplier, 0.0
        return (1 / self.logits_scaling, 0.0) if part == "norm" else (1.0, 0.0)
