"""`LayerPlan`: which sublayers run in one forward call, as data for the layer loop. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LayerPlan:
    """Which sublayers run in one forward call, the same for every row of the batch."""

    attn: tuple[bool, ...]
    """[L] whether attention runs and writes K/V."""
    ffn: tuple[bool, ...]
    """[L] whether the feed-forward block runs."""
    dynamic_ffn: tuple[bool, ...] = ()
    """[L] which of the blocks in `ffn` run only for the rows that need them, as decided on the device
    (`skipdecode.model.ffn_executor`); empty if none."""
    swiftkv_from: int | None = None
    """SwiftKV: K/V of this layer and all above are computed from one hidden state, the one that enters the first
    executed layer at or above it. Of a prompt, only the last token runs these layers. None: off."""

    @classmethod
    def of_layers(cls, layers: Sequence[int], num_layers: int) -> "LayerPlan":
        """The plan that runs both sublayers of each of `layers`."""
        chosen = frozenset(layers)
        runs = tuple(layer in chosen for layer in range(num_layers))
        return cls(attn=runs, ffn=runs)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers of which at least one sublayer runs."""
        return tuple(i for i, runs in enumerate(zip(self.attn, self.ffn, strict=True)) if any(runs))

    @property
    def num_layers_run(self) -> int:
        return len(self.layers)

    @property
    def is_static(self) -> bool:
        """True if no feed-forward block is decided per row at run time."""
        return not self.dynamic_ffn

    @property
    def static_ffns(self) -> tuple[bool, ...]:
        """[L] which feed-forward blocks run for all rows."""
        if not self.dynamic_ffn:
            return self.ffn
        return tuple(runs and not dynamic for runs, dynamic in zip(self.ffn, self.dynamic_ffn, strict=True))

    @property
    def num_static_ffns(self) -> int:
        return sum(self.static_ffns)
