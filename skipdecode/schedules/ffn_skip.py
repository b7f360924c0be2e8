"""FFN-SkipLLM (arXiv 2404.03865) on top of any schedule: attention always runs, some feed-forward blocks do not.

`SkipSaturated` is the paper's rule, which each row decides for itself on the device (`skipdecode.model.ffn_rows`);
`SkipBand`
leaves the same blocks out for every row, so its plans are static. `SkipAtRandom` is the paper's baseline. The prompt
and the first `warmup_tokens` decode steps skip nothing. No torch at import.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.schedules.ffn_policy import FFNs
from skipdecode.schedules.plan import LayerPlan, Schedule

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FFNSkip:
    """What the three have in common: a schedule beneath, and decode steps that are left alone."""

    mode: ClassVar[str]
    """`decode.ffn_skip.mode` that makes it."""

    base: Schedule
    warmup_tokens: int

    def __post_init__(self) -> None:
        if self.warmup_tokens < 0:
            raise ValueError(f"decode.ffn_skip.warmup_tokens: must be at least 0, got {self.warmup_tokens}")

    @property
    def num_layers(self) -> int:
        return self.base.num_layers

    @property
    def is_static(self) -> bool:
        return self.base.is_static

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        return self.base.ffns(ids, num_steps, device, gather=gather)

    @property
    def keys(self) -> dict[str, Any]:
        """The `decode.ffn_skip` mapping that makes it."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "base"}
        return {"mode": self.mode} | {key: list(v) if isinstance(v, tuple) else v for key, v in own.items()}

    def prefill(self) -> LayerPlan:
        return self.base.prefill()

    def step(self, k: int) -> LayerPlan:
        plan = self.base.step(k)
        return plan if k < self.warmup_tokens else self._thinned(plan)

    def _thinned(self, plan: LayerPlan) -> LayerPlan:
        raise NotImplementedError


@dataclass(frozen=True)
class SkipBand(FFNSkip):
    """The feed-forward blocks of `layers` are left out for every row."""

    mode: ClassVar[str] = "fixed"

    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if wrong := [layer for layer in self.layers if not 0 <= layer < self.num_layers]:
            raise ValueError(
                f"decode.ffn_skip.layers: {wrong[0]} is no layer of a model with {self.num_layers} layers (0 to "
                f"{self.num_layers - 1})"
            )

    def _thinned(self, plan: LayerPlan) -> LayerPlan:
        return _without(plan, self.layers)


@dataclass(frozen=True)
class SkipByRow(FFNSkip):
    """Layers cold_start <= l < L - cold_end are in question, and each row decides on the device."""

    cold_start: int
    cold_end: int

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

    @property
    def is_static(self) -> bool:
        return False

    def _thinned(self, plan: LayerPlan) -> LayerPlan:
        return _by_row(plan, self.cold_start, self.num_layers - self.cold_end)


@dataclass(frozen=True)
class SkipSaturated(SkipByRow):
    """A token whose state a block leaves as it was, cos(h, h + FFN(h)) >= threshold, skips the blocks after it."""

    mode: ClassVar[str] = "row"

    threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"decode.ffn_skip.threshold: a cosine lies between -1 and 1, got {self.threshold}")

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        from skipdecode.model.ffn_rows import SaturatedRows

        return SaturatedRows(len(ids), device, self.threshold, gather=gather)


@dataclass(frozen=True)
class SkipAtRandom(SkipByRow):
    """Each block of each token is skipped with probability `share`, whatever the hidden state."""

    mode: ClassVar[str] = "random"

    share: float
    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1:
            raise ValueError(f"decode.ffn_skip.share: must lie between 0 and 1, got {self.share}")

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        from skipdecode.model.ffn_rows import RandomRows

        return RandomRows(ids, max(num_steps, 1), self.num_layers, self.share, self.seed, device, gather=gather)


KINDS: dict[str, type[FFNSkip]] = {
    "row": SkipSaturated,
    "random": SkipAtRandom,
    "fixed": SkipBand,
    "calibrated": SkipBand,
}
"""By `decode.ffn_skip.mode`."""


@lru_cache(maxsize=4096)
def _without(plan: LayerPlan, layers: tuple[int, ...]) -> LayerPlan:
    return replace(plan, ffn=tuple(runs and i not in layers for i, runs in enumerate(plan.ffn)))


@lru_cache(maxsize=4096)
def _by_row(plan: LayerPlan, start: int, end: int) -> LayerPlan:
    return replace(plan, dynamic_ffn=tuple(runs and start <= i < end for i, runs in enumerate(plan.ffn)))
