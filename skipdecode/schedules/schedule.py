"""Which layers run for which token, decided on the host before decoding starts. No torch.

A `LayerPlan` says what runs in one forward call; a `Schedule` gives the plan of the prompt and of each decode step. The
schedules follow the definitions of the papers, with a fixed rounding rule (half up, in integers), which the papers
leave open: SkipDecode (arXiv 2307.02628), early exit, Unified Layer Skipping (arXiv 2404.06954), and any fixed set of
layers. All rows of a batch share a plan, and layer sets are nested over the steps, so no token ever needs K/V that an
earlier token did not write (`has_no_kv_holes`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from skipdecode.schedules.layer_plan import LayerPlan


class Schedule(Protocol):
    """The layer plans of a generation. Schedules are frozen, hashable values: rows with equal ones share batches."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""

    @property
    def ffn_threshold(self) -> float | None:
        """Cosine similarity at which a token skips its remaining dynamic feed-forward blocks (FFN-SkipLLM's rule per
        row); None if no plan has dynamic blocks."""

    def prefill(self) -> LayerPlan:
        """The plan of the prompt."""

    def step(self, k: int) -> LayerPlan:
        """The plan of decode step `k` (0-based), which feeds y_k and yields y_(k+1) (y_0 comes from prefill)."""

    @property
    def is_static(self) -> bool:
        """True if the plans alone say what runs, for every row."""

    def __hash__(self) -> int:
        """Equal schedules have equal hashes."""


@lru_cache(maxsize=4096)
def _plan(layers: tuple[int, ...], num_layers: int) -> LayerPlan:
    return LayerPlan.of_layers(layers, num_layers)


@dataclass(frozen=True)
class LayerSchedule:
    """Base of the schedules that skip whole layers of generated tokens: the prompt runs all layers."""

    num_layers: int

    @property
    def ffn_threshold(self) -> float | None:
        return None

    @property
    def is_static(self) -> bool:
        return True

    def prefill(self) -> LayerPlan:
        return _plan(tuple(range(self.num_layers)), self.num_layers)


@dataclass(frozen=True)
class FullDepth(LayerSchedule):
    """Every layer, always."""

    @property
    def full_plan(self) -> LayerPlan:
        """The plan of the prompt and of every step: all layers run."""
        return self.prefill()

    def step(self, k: int) -> LayerPlan:
        return self.full_plan


@dataclass(frozen=True)
class SkipDecode(LayerSchedule):
    """Depth falls linearly from max_layers to min_layers over `horizon` steps.

    The first `warmup_layers` always run; the rest of the budget is spent on the top of the network.
    """

    max_layers: int
    min_layers: int
    warmup_layers: int
    horizon: int

    def __post_init__(self) -> None:
        w, m, big_m, total = self.warmup_layers, self.min_layers, self.max_layers, self.num_layers
        if not 1 <= w <= m <= big_m <= total:
            raise ValueError(
                "decode: need 1 <= warmup_layers <= min_layers <= max_layers <= number of layers, got "
                f"warmup_layers={w}, min_layers={m}, max_layers={big_m}, layers of the model={total}"
            )
        if self.horizon < 1:
            raise ValueError(f"decode.horizon: must be at least 1, got {self.horizon}")

    def budget(self, k: int) -> int:
        """b(k): the number of layers that decode step `k` runs, warm-up layers included."""
        # floor(M - (M-m)*k/(S-1) + 1/2) in integers: no float can round a tie the wrong way
        span = max(self.horizon - 1, 1)
        k = min(k, span)
        return (2 * self.max_layers * span - 2 * (self.max_layers - self.min_layers) * k + span) // (2 * span)

    def step(self, k: int) -> LayerPlan:
        w, total = self.warmup_layers, self.num_layers
        return _plan((*range(w), *range(total - (self.budget(k) - w), total)), total)


@dataclass(frozen=True)
class EarlyExit(SkipDecode):
    """The budget of SkipDecode spent on the lowest layers, followed by final norm and head; `warmup_layers` changes
    nothing."""

    def step(self, k: int) -> LayerPlan:
        return _plan(tuple(range(self.budget(k))), self.num_layers)


@dataclass(frozen=True)
class Unified(LayerSchedule):
    """`layers` evenly spaced layers, first and last among them, for every generated token."""

    layers: int

    def __post_init__(self) -> None:
        if not 2 <= self.layers <= self.num_layers:
            raise ValueError(f"decode.layers: need 2 <= layers <= {self.num_layers}, got {self.layers}")

    def step(self, k: int) -> LayerPlan:
        last, gaps = self.num_layers - 1, self.layers - 1
        return _plan(tuple((2 * i * last + gaps) // (2 * gaps) for i in range(self.layers)), self.num_layers)


@dataclass(frozen=True)
class ChosenLayers(LayerSchedule):
    """A fixed set of layers for every generated token, e.g. the draft layers found by `calibrate`."""

    layers: tuple[int, ...]
    """Layer numbers, ascending and distinct."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("decode.layers: method 'layers' needs one layer at least, got none; name those that run")
        if wrong := [layer for layer in self.layers if not 0 <= layer < self.num_layers]:
            raise ValueError(
                f"decode.layers: {wrong[0]} is no layer of a model with {self.num_layers} layers (0 to "
                f"{self.num_layers - 1})"
            )

    def step(self, k: int) -> LayerPlan:
        return _plan(self.layers, self.num_layers)


@dataclass(frozen=True)
class WrappedSchedule:
    """A schedule that changes the plans of another one, `base`; the base of wrappers."""

    base: Schedule

    @property
    def num_layers(self) -> int:
        return self.base.num_layers

    @property
    def ffn_threshold(self) -> float | None:
        return self.base.ffn_threshold

    @property
    def is_static(self) -> bool:
        return self.ffn_threshold is None

    def prefill(self) -> LayerPlan:
        return self.base.prefill()

    def step(self, k: int) -> LayerPlan:
        return self.base.step(k)


@dataclass(frozen=True)
class SwiftKVPrefill(WrappedSchedule):
    """`base` on a model with SwiftKV: all prompt tokens but the last stop before layer `swiftkv_from`."""

    swiftkv_from: int

    def prefill(self) -> LayerPlan:
        return _with_swiftkv(self.base.prefill(), self.swiftkv_from)

    def step(self, k: int) -> LayerPlan:
        return _with_swiftkv(self.base.step(k), self.swiftkv_from)


@lru_cache(maxsize=4096)
def _with_swiftkv(plan: LayerPlan, swiftkv_from: int) -> LayerPlan:
    return replace(plan, swiftkv_from=swiftkv_from)


def has_no_kv_holes(plans: Sequence[LayerPlan]) -> bool:
    """True if each plan's attention layers are among those of every earlier plan."""
    pairs = itertools.pairwise(plans)
    return all(not now or before for a, b in pairs for before, now in zip(a.attn, b.attn, strict=True))


def kv_owner_of_layers(schedule: Schedule, group_size: int) -> list[int]:
    """[L] the layer whose K/V each layer attends to: its own, or with SwiftKV that of the first layer of its group."""
    swiftkv_from = schedule.prefill().swiftkv_from
    first = schedule.num_layers if swiftkv_from is None else swiftkv_from
    return [layer if layer < first else layer - (layer - first) % group_size for layer in range(schedule.num_layers)]


def kv_capacities(
    kv_owner: Sequence[int], schedule: Schedule, num_prompt_tokens: int, max_new_tokens: int
) -> dict[int, int]:
    """Positions of K/V by the layer that stores them: the prompt, and the steps that run it or a layer that shares its
    K/V."""
    capacities: dict[int, int] = {}
    for layer, steps in zip(kv_owner, steps_per_layer(schedule, max_new_tokens - 1), strict=True):
        capacities[layer] = max(capacities.get(layer, 0), num_prompt_tokens + steps)
    return capacities


def steps_per_layer(schedule: Schedule, num_steps: int) -> list[int]:
    """[L] how many of the decode steps 0..num_steps-1 run each layer's attention; these are always the first ones."""
    counts = [0] * schedule.num_layers
    for k in range(num_steps):
        for layer, runs in enumerate(schedule.step(k).attn):
            counts[layer] += runs
    return counts
