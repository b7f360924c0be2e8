"""OPT (Meta, 2022): learned positions, LayerNorm, ReLU, multi-head attention, a tied head.

Field names are those of `transformers.OPTConfig`. What is not supported (other activations, untied heads) is refused by
name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from skipdecode.config.json_files import refuse
from skipdecode.config.model import DecoderConfig, FeedForwardKind, Parts, TokenizerRules

# Released shapes (metaseq opt_job_constants.py): layers, hidden, heads; ffn = 4 x hidden.
RELEASED = {
    "opt-125m": (12, 768, 12),
    "opt-350m": (24, 1024, 16),
    "opt-1.3b": (24, 2048, 32),
    "opt-2.7b": (32, 2560, 32),
    "opt-6.7b": (32, 4096, 32),
    "opt-13b": (40, 5120, 40),
    "opt-30b": (48, 7168, 56),
    "opt-66b": (64, 9216, 72),
}


@dataclass(frozen=True)
class OPTConfig(DecoderConfig):
    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    sizes: ClassVar[tuple[str, ...]] = (*DecoderConfig.sizes, "ffn_dim")
    prefix: ClassVar[str] = "model.decoder."
    layer_parts: ClassVar[Parts] = {
        "attn_norm": ("self_attn_layer_norm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out_proj": ("self_attn.out_proj",),
        "ffn_norm": ("final_layer_norm",),
        "fc1": ("fc1",),
        "fc2": ("fc2",),
    }
    model_parts: ClassVar[Parts] = {
        "embed_tokens": ("embed_tokens",),
        "embed_positions": ("embed_positions",),
        "project_in": ("project_in",),
        "project_out": ("project_out",),
        "final_norm": ("final_layer_norm",),
    }
    ignored_tensors: ClassVar[tuple[str, ...]] = ("decoder.version",)
    position_offset: ClassVar[int] = 2  # as OPTLearnedPositionalEmbedding of transformers
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules("GPT2Tokenizer", is_opt=True)
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {
        name: {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * hidden}
        | ({"word_embed_proj_dim": 512, "do_layer_norm_before": False} if name == "opt-350m" else {})
        for name, (layers, hidden, heads) in RELEASED.items()
    }

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    num_attention_heads: int = 12
    word_embed_proj_dim: int | None = None
    """Width of the embeddings; differs from hidden_size in 350m only. None: hidden_size."""
    do_layer_norm_before: bool = True
    """False in 350m: norms come after each residual, and there is no final norm."""
    remove_final_layer_norm: bool = False
    """`_remove_final_layer_norm` in config.json."""
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        width = self.word_embed_proj_dim
        if width is not None and not (isinstance(width, int) and width >= 1):
            raise ValueError(f"word_embed_proj_dim is {width!r}, expected a positive integer")
        super().__post_init__()
        if self.bos_token_id is not None and not 0 <= self.bos_token_id < self.vocab_size:
            raise ValueError(f"bos_token_id is {self.bos_token_id}, and vocab_size is {self.vocab_size}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )

    @property
    def mlp(self) -> FeedForwardKind:
        return "relu"

    @property
    def norm(self) -> Literal["layer", "rms"]:
        return "layer"

    @property
    def norm_affine(self) -> bool:
        return self.layer_norm_elementwise_affine

    @property
    def is_pre_norm(self) -> bool:
        return self.do_layer_norm_before

    @property
    def has_final_norm(self) -> bool:
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @property
    def qkv_bias(self) -> bool:
        return self.enable_bias

    @property
    def out_bias(self) -> bool:
        return self.enable_bias

    @property
    def mlp_bias(self) -> bool:
        return self.enable_bias

    @property
    def embed_dim(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        refuse(raw, "activation_function", "relu")
        refuse(raw, "tie_word_embeddings", True)
        known = super().read_fields(raw)
        if raw.get("_remove_final_layer_norm") is not None:
            known["remove_final_layer_norm"] = raw["_remove_final_layer_norm"]
        return known

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        raw |= {"activation_function": "relu", "tie_word_embeddings": True}
        raw |= {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "word_embed_proj_dim": self.embed_dim}
        raw["_remove_final_layer_norm"] = raw.pop("remove_final_layer_norm")
        return raw
