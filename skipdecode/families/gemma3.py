"""Gemma 3 (Google), text: GELU in the feed-forward block, norms on both sides of each sublayer, scaled embeddings, and
layers with a sliding window, which have rotary positions of their own.

What is not supported (soft caps, attention in both directions) is refused by name. Checkpoints that also take images
have another `model_type`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.json_files import check_size, refuse
from skipdecode.config.model import FeedForwardKind, Parts, TokenizerRules
from skipdecode.config.rope import Rope, read_rope, write_rope
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.sliding_window import FULL, SLIDING, WindowedConfig, read_layer_types, read_window

LOCAL_THETA = "rope_local_base_freq"


@dataclass(frozen=True)
class Gemma3Config(WindowedConfig):
    """Field names and defaults are those of `transformers.Gemma3TextConfig`."""

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules("GemmaTokenizer")
    activation: ClassVar[tuple[str, str]] = ("hidden_activation", "gelu_pytorch_tanh")
    layer_parts: ClassVar[Parts] = {
        **LlamaConfig.layer_parts,
        "attn_out_norm": ("post_attention_layernorm",),
        "ffn_norm": ("pre_feedforward_layernorm",),
        "ffn_out_norm": ("post_feedforward_layernorm",),
    }
    nullable_sizes: ClassVar[tuple[str, ...]] = ()
    stray_keys: ClassVar[tuple[str, ...]] = ("hidden_act", "mlp_bias")
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {
        "gemma-3-270m": {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
        "gemma-3-1b": {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
        },
    }

    vocab_size: int = 262_208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072
    rope: Rope = Rope(theta=1_000_000.0)  # noqa: RUF009 - frozen
    """Of layers without a window."""
    local_rope: Rope = Rope()  # noqa: RUF009 - frozen
    """Of layers with a window."""
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256
    """Attention scores are divided by its square root."""
    sliding_window: int | None = 4096
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] = 1
    pad_token_id: int | None = 0

    @property
    def mlp(self) -> FeedForwardKind:
        return "geglu"

    @property
    def has_qk_norm(self) -> bool:
        return True

    @property
    def has_sublayer_norms(self) -> bool:
        return True

    @property
    def embed_scale(self) -> float:
        return math.sqrt(self.hidden_size)

    def layer_rope(self, layer: int) -> Rope | None:
        return self.local_rope if self._is_local(layer) else self.rope

    def _is_local(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING if self.layer_types else (layer + 1) % 6 != 0

    def layer_window(self, layer: int) -> int | None:
        return super().layer_window(layer) if self._is_local(layer) else None

    def folded(self, part: str) -> tuple[float, float]:
        if not part.endswith("norm"):
            return 1.0, 0.0
        scale = math.sqrt(self.head_dim / self.query_pre_attn_scalar) if part == "self_attn.q_norm" else 1.0
        return scale, scale  # norms multiply by 1 + weight

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        pattern = check_size("sliding_window_pattern", raw.get("sliding_window_pattern", 6))
        return read_window(raw, cls.sliding_window), read_layer_types(
            raw, num_layers, lambda layer: (layer + 1) % pattern != 0
        )

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        refuse(raw, "attn_logit_softcapping", None)
        refuse(raw, "final_logit_softcapping", None)
        refuse(raw, "use_bidirectional_attention", False)
        whole, local = _ropes(raw, cls)
        context = raw.get("max_position_embeddings", cls.max_position_embeddings)
        known = super().read_fields({key: raw[key] for key in raw.keys() - {"rope_parameters", "rope_scaling"}} | whole)
        return known | {"local_rope": read_rope(local, context)}

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        del raw["local_rope"], raw["mlp_bias"]
        kinds = [SLIDING if self._is_local(layer) else FULL for layer in range(self.num_hidden_layers)]
        if self.local_rope == Rope(self.local_rope.theta):
            return raw | {"layer_types": kinds, LOCAL_THETA: self.local_rope.theta}
        ropes = {FULL: _parameters(self.rope), SLIDING: _parameters(self.local_rope)}
        return raw | {"layer_types": kinds, "rope_scaling": None, "rope_parameters": ropes}


def _ropes(raw: dict[str, Any], family: type[Gemma3Config]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys that `read_rope` reads, of layers without a window and of those with one; from `rope_parameters` by
    their kinds (transformers 5), or from `rope_scaling`, `rope_theta` and `rope_local_base_freq`."""
    given = raw.get("rope_parameters")
    theta, local_theta = raw.get("rope_theta", family.rope.theta), raw.get(LOCAL_THETA, family.local_rope.theta)
    if isinstance(given, dict) and given.keys() & {FULL, SLIDING}:
        whole, local = ({"rope_parameters": given.get(kind) or {}} for kind in (FULL, SLIDING))
    else:
        whole, local = {"rope_parameters": given, "rope_scaling": raw.get("rope_scaling")}, {}
    return whole | {"rope_theta": theta}, local | {"rope_theta": local_theta}


def _parameters(rope: Rope) -> dict[str, Any]:
    written = write_rope(rope)
    return {"rope_type": "default", "rope_theta": rope.theta, **(written["rope_scaling"] or {})}
