"""FFN-SkipLLM (arXiv 2404.03865) over any schedule: attention always runs, some feed-forward blocks do not. No torch.

`SkipSaturated` is the paper's rule, which each row applies on the device (`skipdecode.model.ffn_executor`). `SkipBand`
leaves out the same blocks for every row, so its plans are static. The prompt and the first `warmup_tokens` decode steps
skip nothing.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, ClassVar

from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import WrappedSchedule


@dataclass(frozen=True)
class FFNSkip(WrappedSchedule):
    """What both variants have in common: the schedule underneath, and decode steps at the start that skip nothing."""

    mode: ClassVar[str]
    """The value of `decode.ffn_skip.mode` that selects it."""

    warmup_tokens: int

    def __post_init__(self) -> None:
        if self.warmup_tokens < 0:
            raise ValueError(f"decode.ffn_skip.warmup_tokens: must be at least 0, got {self.warmup_tokens}")

    @property
    def keys(self) -> dict[str, Any]:
        """The `decode.ffn_skip` mapping that makes this schedule."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "base"}
        return {"mode": self.mode} | {key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}

    def step(self, k: int) -> LayerPlan:
        plan = self.base.step(k)
        return plan if k < self.warmup_tokens else self._skip_ffns(plan)

    def _skip_ffns(self, plan: LayerPlan) -> LayerPlan:
        raise NotImplementedError


@dataclass(frozen=True)
class SkipBand(FFNSkip):
    """Leaves out the feed-forward blocks of `layers` for every row."""

    mode: ClassVar[str] = "fixed"

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [layer for layer in self.layers if not 0 <= layer < self.num_layers]:
            raise ValueError(
                f"decode.ffn_skip.layers: {wrong[0]} is no layer of a model with {self.num_layers} layers (0 to "
                f"{self.num_layers - 1})"
            )

    def _skip_ffns(self, plan: LayerPlan) -> LayerPlan:
        return _without(plan, self.layers)


@dataclass(frozen=True)
class SkipSaturated(FFNSkip):
    """The rule of the paper, applied per row to layers cold_start <= l < L - cold_end.

    Once a block leaves a token's state nearly unchanged, cos(h, h + FFN(h)) >= threshold, the token skips the blocks of
    the later layers of that range.
    """

    mode: ClassVar[str] = "row"

    cold_start: int
    cold_end: int
    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cold_start", "cold_end"):
            if getattr(self, name) < 0:
                raise ValueError(f"decode.ffn_skip.{name}: must be at least 0, got {getattr(self, name)}")
        if self.cold_start + self.cold_end > self.num_layers:
            raise ValueError(
                f"decode.ffn_skip.cold_start: the cold borders overlap: cold_start={self.cold_start} and "
                f"cold_end={self.cold_end} are more than the model's {self.num_layers} layers"
            )
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"decode.ffn_skip.threshold: a cosine lies between -1 and 1, got {self.threshold}")

    @property
    def ffn_threshold(self) -> float | None:
        return self.threshold

    def _skip_ffns(self, plan: LayerPlan) -> LayerPlan:
        return _dynamic_between(plan, self.cold_start, self.num_layers - self.cold_end)


@lru_cache(maxsize=4096)
def _without(plan: LayerPlan, layers: tuple[int, ...]) -> LayerPlan:
    return replace(plan, ffn=tuple(runs and i not in layers for i, runs in enumerate(plan.ffn)))


@lru_cache(maxsize=4096)
def _dynamic_between(plan: LayerPlan, start: int, end: int) -> LayerPlan:
    return replace(plan, dynamic_ffn=tuple(runs and start <= i < end for i, runs in enumerate(plan.ffn)))
