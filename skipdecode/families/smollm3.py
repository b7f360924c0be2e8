"""SmolLM3 (Hugging Face): a Llama some of whose layers have no rotary positions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from skipdecode.config.json_files import check_flag, check_size
from skipdecode.config.rope import Rope
from skipdecode.families.sliding_window import WindowedConfig, read_layer_types, read_window


@dataclass(frozen=True)
class SmolLM3Config(WindowedConfig):
    """Field names and defaults are those of `transformers.SmolLM3Config`."""

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    released_shapes: ClassVar[Mapping[str, dict[str, Any]]] = {}

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    rope: Rope = Rope(theta=2_000_000.0)  # noqa: RUF009 - frozen
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] = 128001
    pad_token_id: int | None = 128004
    no_rope_layers: tuple[int, ...] = ()
    """[L] 0 for a layer without rotary positions, else 1; (): every fourth layer is one."""

    def layer_rope(self, layer: int) -> Rope | None:
        has_rope = self.no_rope_layers[layer] if self.no_rope_layers else (layer + 1) % 4
        return self.rope if has_rope else None

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        has_windows = check_flag("use_sliding_window", raw.get("use_sliding_window") or False)
        window, has_rope = read_window(raw, None) if has_windows else None, read_no_rope_layers(raw, num_layers)
        return window, read_layer_types(raw, num_layers, lambda layer: window is not None and not has_rope[layer])

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        known = super().read_fields({"rope_theta": cls.rope.theta} | raw)
        num_layers = known.get("num_hidden_layers", cls.num_hidden_layers)
        return known | {"no_rope_layers": read_no_rope_layers(raw, num_layers)}

    def to_dict(self) -> dict[str, Any]:
        has_rope = [int(self.layer_rope(layer) is not None) for layer in range(self.num_hidden_layers)]
        has_windows = self.sliding_window is not None
        return super().to_dict() | {"no_rope_layers": has_rope, "use_sliding_window": has_windows}


def read_no_rope_layers(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """[L] 0 for a layer without rotary positions, else 1."""
    given = raw.get("no_rope_layers")
    if given is None:
        interval = check_size("no_rope_layer_interval", raw.get("no_rope_layer_interval", 4))
        return tuple(int((layer + 1) % interval != 0) for layer in range(num_layers))
    if not isinstance(given, list) or len(given) < num_layers or any(one not in (0, 1) for one in given):
        raise ValueError(f"no_rope_layers is {str(given)[:80]}, expected 0 or 1 for each of {num_layers} layers")
    return tuple(int(one) for one in given[:num_layers])
