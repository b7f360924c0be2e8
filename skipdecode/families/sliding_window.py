"""Layers that attend to the newest tokens alone: the keys `sliding_window` and `layer_types` of config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from skipdecode.config.json_files import check_size
from skipdecode.families.llama import LlamaConfig

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class WindowedConfig(LlamaConfig):
    """A relative of Llama some of whose layers may have a sliding window."""

    sliding_window: int | None = None
    """The newest tokens that a layer with a window attends to; None: no layer has one."""
    layer_types: tuple[str, ...] = ()
    """[L] FULL or SLIDING; (): all layers are as `sliding_window` says."""

    def layer_window(self, layer: int) -> int | None:
        if self.sliding_window is None or self.sliding_window >= self.max_position_embeddings:
            return None
        return self.sliding_window if not self.layer_types or self.layer_types[layer] == SLIDING else None

    @classmethod
    def read_windows(cls, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[str, ...]]:
        """`sliding_window` and `layer_types`, as transformers reads them for this family."""
        raise NotImplementedError

    @classmethod
    def read_fields(cls, raw: dict[str, Any]) -> dict[str, Any]:
        known = super().read_fields(raw)
        num_layers = check_size("num_hidden_layers", known.get("num_hidden_layers", cls.num_hidden_layers))
        known["sliding_window"], known["layer_types"] = cls.read_windows(raw, num_layers)
        return known

    def to_dict(self) -> dict[str, Any]:
        raw = super().to_dict()
        raw["layer_types"] = list(self.layer_types) or None
        return raw


def read_window(raw: dict[str, Any], default: int | None) -> int | None:
    window = raw.get("sliding_window", default)
    return None if window is None else check_size("sliding_window", window)


def read_layer_types(
    raw: dict[str, Any], num_layers: int, is_sliding: Callable[[int], bool] = lambda layer: False
) -> tuple[str, ...]:
    """[L] `layer_types`, or what `is_sliding` says of each layer where there is no such key; ValueError for a kind of
    layer that is not supported."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple(SLIDING if is_sliding(layer) else FULL for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise ValueError(f"layer_types is {str(kinds)[:80]}, expected a list of num_hidden_layers ({num_layers}) names")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ValueError(f"layer_types has {kind!r}; supported are {FULL} and {SLIDING}")
    return tuple(kinds)
