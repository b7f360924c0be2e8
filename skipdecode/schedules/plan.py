"""Which layers run for which token, decided on the host before the loop. No torch.

A `LayerPlan` is a value for one forward call; a `Schedule` gives the plan of the prompt and of each decode step. The
schedules are the definitions of the papers with the rounding fixed: SkipDecode (arXiv 2307.02628), early exit, and
Unified Layer Skipping (arXiv 2404.06954); and any set of layers. All rows of a batch share a plan, and layer sets are
nested over the steps, so no token ever needs K/V that an earlier token did not write (`has_no_kv_holes`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Protocol

from skipdecode.schedules.ffn_policy import ALL_ROWS, FFNs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LayerPlan:
    """Which sublayers run in one forward call: a hashable value, the same for every row."""

    attn: tuple[bool, ...]
    """[L] attention runs and writes K/V."""
    ffn: tuple[bool, ...]
    """[L] the feed-forward block runs."""
    dynamic_ffn: tuple[bool, ...] = ()
    """[L], or empty for none: of the blocks in `ffn`, those that run only for the rows that need them, which is decided
    on the device (`skipdecode.model.ffn_rows`)."""
    kv_layers: int | None = None
    """K/V of this layer and those above come from the state that enters the first of them that runs, and of a prompt
    only the last column goes on (SwiftKV); None: every layer makes its own."""

    @classmethod
    def of_layers(cls, layers: Sequence[int], num_layers: int) -> "LayerPlan":
        """Both sublayers of each of `layers`."""
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
        """Nothing is left to the rows."""
        return not self.dynamic_ffn

    @property
    def static_ffns(self) -> tuple[bool, ...]:
        """[L] the feed-forward block runs, and for all rows."""
        if not self.dynamic_ffn:
            return self.ffn
        return tuple(runs and not left for runs, left in zip(self.ffn, self.dynamic_ffn, strict=True))

    @property
    def num_static_ffns(self) -> int:
        return sum(self.static_ffns)


class Schedule(Protocol):
    """Decides on the host, before the loop, and equally for all rows."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def prefill(self) -> LayerPlan:
        """The plan of the prompt."""

    def step(self, k: int) -> LayerPlan:
        """The plan of decode step `k` (0-based), which feeds y_k and yields y_(k+1)."""

    @property
    def is_static(self) -> bool:
        """All plans are: they say what runs, for every row."""

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        """Who runs the feed-forward blocks of a batch with the rows `ids` over so many decode steps. `gather`: those of
        some rows may be run alone, which waits for the device."""

    def __hash__(self) -> int:
        """Schedules are values: rows with equal ones share batches."""


@lru_cache(maxsize=4096)
def _plan(layers: tuple[int, ...], num_layers: int) -> LayerPlan:
    return LayerPlan.of_layers(layers, num_layers)


@dataclass(frozen=True)
class FullDepth:
    """Every layer, always."""

    num_layers: int

    @property
    def is_static(self) -> bool:
        return True

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        return ALL_ROWS

    def prefill(self) -> LayerPlan:
        return _plan(tuple(range(self.num_layers)), self.num_layers)

    def step(self, k: int) -> LayerPlan:
        return self.prefill()


@dataclass(frozen=True)
class SkipDecode(FullDepth):
    """Depth falls linearly from max_layers to min_layers over `horizon` steps; low and middle layers go first.

    The first `warmup_layers` always run, the rest of the budget is the top of the network.
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
        """b(k): how many layers decode step `k` runs, warm-up layers included."""
        # floor(M - (M-m)*k/(S-1) + 1/2) in integers: no float can round a tie the wrong way
        span = max(self.horizon - 1, 1)
        k = min(k, span)
        return (2 * self.max_layers * span - 2 * (self.max_layers - self.min_layers) * k + span) // (2 * span)

    def step(self, k: int) -> LayerPlan:
        w, total = self.warmup_layers, self.num_layers
        return _plan((*range(w), *range(total - (self.budget(k) - w), total)), total)


@dataclass(frozen=True)
class EarlyExit(SkipDecode):
    """The same budget as SkipDecode, spent on the lowest layers, then final norm and head."""

    def step(self, k: int) -> LayerPlan:
        return _plan(tuple(range(self.budget(k))), self.num_layers)


@dataclass(frozen=True)
class Unified(FullDepth):
    """`layers` evenly spaced layers, first and last among them, for every generated token."""

    layers: int

    def __post_init__(self) -> None:
        if not 2 <= self.layers <= self.num_layers:
            raise ValueError(f"decode.layers: need 2 <= layers <= {self.num_layers}, got {self.layers}")

    def step(self, k: int) -> LayerPlan:
        last, gaps = self.num_layers - 1, self.layers - 1
        return _plan(tuple((2 * i * last + gaps) // (2 * gaps) for i in range(self.layers)), self.num_layers)


@dataclass(frozen=True)
class ChosenLayers(FullDepth):
    """The layers of these numbers, for every generated token: any set, such as a search finds for drafts."""

    layers: tuple[int, ...]
    """Rising, each once."""

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
class SwiftPrefill:
    """`base` on a model with SwiftKV: the prompt stops before layer `kv_layers`, but for its last token."""

    base: Schedule
    kv_layers: int

    @property
    def num_layers(self) -> int:
        return self.base.num_layers

    @property
    def is_static(self) -> bool:
        return self.base.is_static

    def ffns(self, ids: Sequence[str], num_steps: int, device: "torch.device", *, gather: bool) -> FFNs:
        return self.base.ffns(ids, num_steps, device, gather=gather)

    def prefill(self) -> LayerPlan:
        return _with_swiftkv(self.base.prefill(), self.kv_layers)

    def step(self, k: int) -> LayerPlan:
        return _with_swiftkv(self.base.step(k), self.kv_layers)


@lru_cache(maxsize=4096)
def _with_swiftkv(plan: LayerPlan, kv_layers: int) -> LayerPlan:
    return replace(plan, kv_layers=kv_layers)


def has_no_kv_holes(plans: Sequence[LayerPlan]) -> bool:
    """True when each plan's attention layers are among those of every earlier plan."""
    pairs = itertools.pairwise(plans)
    return all(not now or before for a, b in pairs for before, now in zip(a.attn, b.attn, strict=True))


def kv_sharing_map(schedule: Schedule, group_size: int) -> list[int]:
    """[L] the layer whose K/V each layer attends to: its own, or under SwiftKV that of the first of its group."""
    kv_layers = schedule.prefill().kv_layers
    first = schedule.num_layers if kv_layers is None else kv_layers
    return [layer if layer < first else layer - (layer - first) % group_size for layer in range(schedule.num_layers)]


def kv_columns(owners: Sequence[int], schedule: Schedule, prompt_columns: int, num_new: int) -> dict[int, int]:
    """Columns of K and V by the layer that owns them: the prompt, and the steps that run it or one that shares them."""
    columns: dict[int, int] = {}
    for owner, steps in zip(owners, steps_per_layer(schedule, num_new - 1), strict=True):
        columns[owner] = max(columns.get(owner, 0), prompt_columns + steps)
    return columns


def steps_per_layer(schedule: Schedule, num_steps: int) -> list[int]:
    """[L] how many of the decode steps 0..num_steps-1 run each layer's attention: always the first ones."""
    counts = [0] * schedule.num_layers
    for k in range(num_steps):
        for layer, runs in enumerate(schedule.step(k).attn):
            counts[layer] += runs
    return counts
