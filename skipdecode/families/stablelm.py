"""StableLM (Stability AI): a Llama with LayerNorm and rotary positions on a quarter of each head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from skipdecode.config.json_files import refuse
from skipdecode.config.model import TokenizerRules
from skipdecode.families.llama import LlamaConfig


@dataclass(frozen=True)
class StableLMConfig(LlamaConfig):
    """Field names are those of `transformers.StableLmConfig`."""

    model_type: ClassVar[str] = "stablelm"
    architecture: ClassVar[str] = "StableLmForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules(is_file_alone=True)
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}
    rotary_share: ClassVar[float | None] = None
    nullable_sizes: ClassVar[tuple[str, ...]] = ()
    stray_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    num_key_value_heads: int = 32
    layer_norm_eps: float = 1e-5
    use_qkv_bias: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim * self.num_attention_heads != self.hidden_size:
            raise ValueError(f"head_dim is {self.head_dim}; only hidden_size / num_attention_heads is supported")

    @property
    def norm(self) -> Literal["layer", "rms"]:
        return "layer"

    @property
    def norm_epsilon(self) -> float:
        return self.layer_norm_eps

    @property
    def qkv_bias(self) -> bool:
        return self.use_qkv_bias

    @property
    def out_bias(self) -> bool:
        return False

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        refuse(raw, "qk_layernorm", False)
        refuse(raw, "use_parallel_residual", False)
        rope, share = raw.get("rope_parameters"), raw.get("partial_rotary_factor", 0.25)  # as transformers
        share = rope.get("partial_rotary_factor", share) if isinstance(rope, dict) else share
        return super().read_fields(raw | {"partial_rotary_factor": share})
