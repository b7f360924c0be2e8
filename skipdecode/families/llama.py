"""Llama, the base of most families: rotary positions, RMSNorm, SwiGLU, grouped-query attention.

Field names and defaults are those of `transformers.LlamaConfig`. What is not supported is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from skipdecode.config.json_files import check_flag, check_size, refuse
from skipdecode.config.model import DecoderConfig, FeedForwardKind, Parts
from skipdecode.config.rope import ORIGINAL, Rope, read_rope, write_rope


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    sizes: ClassVar[tuple[str, ...]] = (*DecoderConfig.sizes, "intermediate_size", "num_key_value_heads", "head_dim")
    prefix: ClassVar[str] = "model."
    layer_parts: ClassVar[Parts] = {
        "attn_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "out_proj": ("self_attn.o_proj",),
        "ffn_norm": ("post_attention_layernorm",),
        "fc1": ("mlp.gate_proj", "mlp.up_proj"),
        "fc2": ("mlp.down_proj",),
    }
    model_parts: ClassVar[Parts] = {"embed_tokens": ("embed_tokens",), "final_norm": ("norm",)}
    ignored_tensors: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    nullable_sizes: ClassVar[tuple[str, ...]] = ("num_key_value_heads", "head_dim")
    stray_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of Llama that the class of this family in transformers does not read."""
    activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")
    """The key of the activation, and the only value."""
    rotary_share: ClassVar[float | None] = 1.0
    """The share of a head's dimensions that are rotated, if the family leaves no choice."""
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {
        "smollm2-135m": {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100_000.0,
            "tie_word_embeddings": True,
        },
        "smollm2-1.7b": {
            "vocab_size": 49152,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 130_000.0,
            "tie_word_embeddings": True,
        },
        "llama-3.2-1b": {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        "llama-3.2-3b": {
            "vocab_size": 128256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        "tinyllama-1.1b": {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
        "llama-3.1-8b": {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        "llama-3.1-70b": {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    }

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    """0: as many as query heads."""
    head_dim: int = 0
    """0: hidden_size / num_attention_heads."""
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()  # noqa: RUF009 - frozen
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    has_mlp_bias: bool = False
    """`mlp_bias` in config.json."""
    bos_token_id: int | None = 1

    def __post_init__(self) -> None:
        if self.head_dim == 0:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}, and there is no head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_key_value_heads == 0:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, and rotary positions rotate pairs of numbers")
        num_rotated = int(self.head_dim * self.rope.share)
        if num_rotated % 2 or not 0 < num_rotated <= self.head_dim:
            raise ValueError(
                f"partial_rotary_factor {self.rope.share} rotates {num_rotated} of a head's {self.head_dim} "
                "dimensions; expected an even number, since rotary positions rotate pairs"
            )
        if self.rope.scaling == "longrope":
            for key in ("short_factor", "long_factor"):
                if len(self.rope.get(key)) != num_rotated // 2:
                    raise ValueError(
                        f"rope_scaling.{key} has {len(self.rope.get(key))} numbers, expected {num_rotated // 2}, one "
                        "for each pair of a head's dimensions that is rotated"
                    )

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads

    @property
    def ffn_dim(self) -> int:
        return self.intermediate_size

    @property
    def mlp(self) -> FeedForwardKind:
        return "swiglu"

    @property
    def norm(self) -> Literal["layer", "rms"]:
        return "rms"

    @property
    def norm_epsilon(self) -> float:
        return self.rms_norm_eps

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias

    @property
    def mlp_bias(self) -> bool:
        return self.has_mlp_bias

    @property
    def has_tied_head(self) -> bool:
        return self.tie_word_embeddings

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        raw = {key: value for key, value in raw.items() if key not in cls.stray_keys}
        refuse(raw, *cls.activation)
        refuse(raw, "pretraining_tp", 1)
        known = super().read_fields(raw)
        for key in ("num_key_value_heads", "head_dim"):
            if raw.get(key) == 0:
                raise ValueError(f"{key} is 0, expected a positive integer")
        if "num_key_value_heads" in raw and raw["num_key_value_heads"] is None:  # not the family's default
            known["num_key_value_heads"] = 0
        known["has_mlp_bias"] = check_flag("mlp_bias", raw.get("mlp_bias") or False)
        context = known.get("max_position_embeddings", cls.max_position_embeddings)
        rope = known["rope"] = read_rope(raw, check_size("max_position_embeddings", context))
        if rope.scaling == "longrope":  # its frequencies change there, and what is cached has turned by the old ones
            known["max_position_embeddings"] = min(context, rope.get(ORIGINAL))
        if cls.rotary_share not in (None, rope.share):
            raise ValueError(f"partial_rotary_factor is {rope.share}; only {cls.rotary_share} is supported")
        return known

    def to_dict(self) -> dict[str, Any]:
        key, name = self.activation
        raw = super().to_dict() | {key: name}
        raw["mlp_bias"] = raw.pop("has_mlp_bias")
        del raw["rope"]
        if self.rotary_share is None:  # for a family with a choice an absent key does not mean 1
            raw["partial_rotary_factor"] = self.rope.share
        return raw | write_rope(self.rope)
