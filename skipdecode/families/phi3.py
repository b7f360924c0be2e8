"""Phi-3 and Phi-4-mini (Microsoft): a Llama whose projections are fused in the files, with rotary positions on a share
of each head, `longrope`, and, in the first ones, a sliding window.

Under `longrope` transformers changes all frequencies at the `original_max_position_embeddings`-th token of a text, and
what is cached would have turned by the old ones. So texts end there: the context is that length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.model import Parts, TokenizerRules
from skipdecode.config.rope import ORIGINAL
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.sliding_window import WindowedConfig, read_window


@dataclass(frozen=True)
class Phi3Config(WindowedConfig):
    """Field names are those of `transformers.Phi3Config`."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    tokenizer: ClassVar[TokenizerRules] = TokenizerRules(is_file_alone=True)
    layer_parts: ClassVar[Parts] = {
        **LlamaConfig.layer_parts,
        "qkv": ("self_attn.qkv_proj",),
        "fc1": ("mlp.gate_up_proj",),
    }
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}
    rotary_share: ClassVar[float | None] = None
    stray_keys: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "layer_types")

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | tuple[int, ...] = 32000
    pad_token_id: int | None = 32000

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        return read_window(raw, None), ()

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        for key in ("rope_scaling", "rope_parameters"):
            scaling = raw.get(key)
            if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
                raw = raw | {key: {**scaling, "rope_type": "longrope"}}  # older names of it
        return super().read_fields(raw)

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        del raw["layer_types"]
        original = self.rope.get(ORIGINAL)
        return raw if original is None else raw | {ORIGINAL: original}
