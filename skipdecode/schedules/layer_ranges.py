"""What part of the states each sublayer runs on, in one pass through the layers: a value that the layer loop reads.

Made of a plan (all rows alike), of the ages of rows (continuous batches), or of the plans of all steps (teacher-forced
passes). No torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from skipdecode.schedules.plan import LayerPlan, Schedule, has_no_kv_holes

Run = slice | None
"""The rows or columns that run a sublayer; None: it does not run."""
ALL = slice(None)
NEVER = 1 << 30
"""As an end: of a sublayer that every step runs."""


@dataclass(frozen=True)
class LayerRanges:
    """Which part of the states each sublayer runs on: [L] each."""

    attn: tuple[Run, ...]
    ffn: tuple[Run, ...]
    apart: tuple[bool, ...] = ()
    """Blocks of `ffn` that are never in one call with attention (`skipdecode.schedules.ffn_policy`); empty: none."""
    kv_layers: int | None = None
    """K/V of the layers from here on come from the state that enters the first of them that runs (SwiftKV)."""
    axis: int = 0
    """What `attn` and `ffn` are parts of: 0 rows from one on, 1 columns up to one."""
    narrows_at: int | None = None
    """Behind the keys and values of this layer (SwiftKV: of all above, too) a prompt goes on with its last column."""

    @classmethod
    @lru_cache(maxsize=4096)
    def of_plan(cls, plan: LayerPlan, apart: tuple[bool, ...] = (), *, is_prompt: bool = False) -> "LayerRanges":
        """The same for all rows. `is_prompt`: nobody wants more than the last column's state; blocks apart see all."""
        attn, ffn = (tuple(ALL if runs else None for runs in part) for part in (plan.attn, plan.ffn))
        narrows_at = None
        if is_prompt and not apart:
            upper = [] if plan.kv_layers is None else [i for i in plan.layers if i >= plan.kv_layers and plan.attn[i]]
            narrows_at = min(upper) if upper else max(plan.layers, default=None)
        return cls(attn, ffn, apart, plan.kv_layers, narrows_at=narrows_at)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers that run, in order. Those of a group run both sublayers on the same part, and between them there
        is nothing else to do."""
        found: list[list[int]] = []
        for i, (attn, ffn) in enumerate(zip(self.attn, self.ffn, strict=True)):
            if attn is None and ffn is None:
                continue
            if found and self._is_like(found[-1][0], i):
                found[-1].append(i)
            else:
                found.append([i])
        return tuple(map(tuple, found))

    def _is_like(self, first: int, layer: int) -> bool:
        part = self.attn[first]
        if part is None or not part == self.ffn[first] == self.attn[layer] == self.ffn[layer]:
            return False
        is_apart = bool(self.apart) and (self.apart[first] or self.apart[layer])
        is_entered = self.kv_layers is not None and first < self.kv_layers <= layer
        return not is_apart and not is_entered and layer != self.narrows_at

    def entering(self, layer: int, entered: slice | None) -> Run:
        """The tokens whose first upper layer `layer` is: their K and V of all upper layers are to be written.
        `entered`: those that have them."""
        part = self.attn[layer]
        assert part is not None, "a layer that does not run"
        if entered is None:
            return part if self.axis == 0 else ALL  # columns all at once: their states stay until they run a layer
        if self.axis == 1 or (part.start or 0) >= (entered.start or 0):
            return None
        return slice(part.start, entered.start)

    def layers_of(self, part: slice) -> list[bool]:
        """[L] whose attention runs on any of `part`."""
        if self.axis == 1 or part.stop is None:
            return [run is not None for run in self.attn]
        return [run is not None and (run.start or 0) < part.stop for run in self.attn]


def ranges_of_starts(
    ages: Sequence[int], attn_ends: Sequence[int], ffn_ends: Sequence[int], *, kv_layers: int | None = None
) -> LayerRanges:
    """Of a continuous batch: each sublayer runs on the youngest rows, of k < end (`layer_ends`). `ages`: k of each row,
    falling."""
    minus_ages = [-k for k in ages]
    starts = [(end, bisect_left(minus_ages, 1 - end)) for end in sorted({*attn_ends, *ffn_ends})]
    return _from_starts(tuple(attn_ends), tuple(ffn_ends), tuple(starts), len(ages), kv_layers)


@lru_cache(maxsize=4096)
def _from_starts(
    attn_ends: tuple[int, ...],
    ffn_ends: tuple[int, ...],
    starts: tuple[tuple[int, int], ...],
    num_rows: int,
    kv_layers: int | None,
) -> LayerRanges:
    """Kept with its groups, which a step of a small model has no time for. `starts`: the first row, by end."""
    runs: dict[int, Run] = {end: None if at == num_rows else slice(at, None) if at else ALL for end, at in starts}
    return LayerRanges(tuple(runs[end] for end in attn_ends), tuple(runs[end] for end in ffn_ends), kv_layers=kv_layers)


@lru_cache(maxsize=256)
def layer_ends(schedule: Schedule, num_steps: int) -> tuple[list[int], list[int]]:
    """[L] of attention, and of feed-forward: the decode step from which on it is left out, or NEVER.

    `num_steps`: as many as there are at most. Kept: thousands of steps, for every batch of a schedule the same.
    """
    plans, counts = [], []  # a plan, and for how many steps: few, where steps are as many as a context has positions
    for plan, steps in groupby(map(schedule.step, range(num_steps))):
        plans.append(plan)
        counts.append(sum(1 for _ in steps))
    assert has_no_kv_holes(plans), f"{schedule} is not nested over its steps"
    return _ends([plan.attn for plan in plans], counts), _ends([plan.ffn for plan in plans], counts)


def _ends(runs: Sequence[Sequence[bool]], counts: Sequence[int]) -> list[int]:
    """[L] the end of each sublayer, of which `runs` says what runs for `counts` steps each."""
    ends = []
    for layer in range(len(runs[0])):
        last = sum(step[layer] for step in runs)
        assert all(step[layer] == (k < last) for k, step in enumerate(runs)), f"layer {layer} is skipped and run again"
        ends.append(NEVER if last == len(runs) else sum(counts[:last]))
    return ends
