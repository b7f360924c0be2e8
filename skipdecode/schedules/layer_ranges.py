"""Which part of the hidden states each sublayer runs on in one pass through the layers, as data for the layer loop.

Ranges come from a plan (all rows alike), from the ages of rows (continuous batches), or from the plans of all steps
(teacher-forced passes). No torch.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import Schedule, has_no_kv_holes

Range = slice | None
"""The rows or tokens that run a sublayer; None: it does not run."""
ALL = slice(None)
NEVER = 1 << 30
"""The end of a sublayer that every decode step runs."""


@dataclass(frozen=True)
class LayerRanges:
    """The part of the states that each sublayer runs on: [L] each."""

    attn: tuple[Range, ...]
    ffn: tuple[Range, ...]
    deferred_ffns: tuple[bool, ...] = ()
    """Blocks of `ffn` that an `FFNExecutor` runs, never one call with attention; empty if none."""
    swiftkv_from: int | None = None
    """SwiftKV: K/V of the layers from here on come from the state that enters the first executed one of them."""
    axis: int = 0
    """What `attn` and `ffn` are ranges of. 0: a suffix of the rows; 1: a prefix of the tokens."""
    last_token_from: int | None = None
    """The layer at which a prompt, once K/V are stored (with SwiftKV, those of all layers above too), goes on with its
    last token only."""

    @classmethod
    @lru_cache(maxsize=4096)
    def of_plan(
        cls, plan: LayerPlan, deferred_ffns: tuple[bool, ...] = (), *, is_prompt: bool = False
    ) -> "LayerRanges":
        """Ranges that are equal for all rows. `is_prompt`: only the last token's state is needed (deferred blocks,
        which are recorded for calibration, still see all tokens)."""
        attn, ffn = (tuple(ALL if runs else None for runs in part) for part in (plan.attn, plan.ffn))
        last_token_from = None
        if is_prompt and not deferred_ffns:
            first = len(plan.attn) if plan.swiftkv_from is None else plan.swiftkv_from
            upper = [i for i in plan.layers if i >= first and plan.attn[i]]
            last_token_from = min(upper) if upper else max(plan.layers, default=None)
        return cls(attn, ffn, deferred_ffns, plan.swiftkv_from, last_token_from=last_token_from)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers that run, in order. Layers of a group run both sublayers on the same range with nothing to do in
        between, so a back end may run them in one call."""
        found: list[list[int]] = []
        for i, (attn, ffn) in enumerate(zip(self.attn, self.ffn, strict=True)):
            if attn is None and ffn is None:
                continue
            if found and self._can_join(found[-1][0], i):
                found[-1].append(i)
            else:
                found.append([i])
        return tuple(map(tuple, found))

    def _can_join(self, first: int, layer: int) -> bool:
        """True if `layer` can be in the group that begins with `first`."""
        part = self.attn[first]
        if part is None or not part == self.ffn[first] == self.attn[layer] == self.ffn[layer]:
            return False
        is_deferred = bool(self.deferred_ffns) and (self.deferred_ffns[first] or self.deferred_ffns[layer])
        is_swiftkv_entry = self.swiftkv_from is not None and first < self.swiftkv_from <= layer
        return not is_deferred and not is_swiftkv_entry and layer != self.last_token_from

    def entering(self, layer: int, upper_kv_written: slice | None) -> Range:
        """SwiftKV: the tokens for which `layer` is the first upper layer, whose upper K/V are to be written now;
        `upper_kv_written`: the tokens for which they are."""
        part = self.attn[layer]
        assert part is not None, "a layer that does not run"
        if upper_kv_written is None:
            return part if self.axis == 0 else ALL  # tokens all at once: their states stay until they run a layer
        if self.axis == 1 or (part.start or 0) >= (upper_kv_written.start or 0):
            return None
        return slice(part.start, upper_kv_written.start)

    def layers_of(self, part: slice) -> list[bool]:
        """[L] whether each layer's attention runs on any of `part`."""
        if self.axis == 1 or part.stop is None:
            return [run is not None for run in self.attn]
        return [run is not None and (run.start or 0) < part.stop for run in self.attn]


def ranges_by_age(
    ages: Sequence[int], attn_ends: Sequence[int], ffn_ends: Sequence[int], *, swiftkv_from: int | None = None
) -> LayerRanges:
    """The ranges of a continuous batch: each sublayer runs on the rows at steps k < end (`layer_ends`), the last ones.

    `ages`: k of each row, descending.
    """
    minus_ages = [-k for k in ages]
    starts = [(end, bisect_left(minus_ages, 1 - end)) for end in sorted({*attn_ends, *ffn_ends})]
    return _ranges_from_starts(tuple(attn_ends), tuple(ffn_ends), tuple(starts), len(ages), swiftkv_from)


@lru_cache(maxsize=4096)
def _ranges_from_starts(
    attn_ends: tuple[int, ...],
    ffn_ends: tuple[int, ...],
    starts: tuple[tuple[int, int], ...],
    num_rows: int,
    swiftkv_from: int | None,
) -> LayerRanges:
    """`starts`: the first row for each end. Cached with its groups, which take too long for a step of a small model."""
    runs: dict[int, Range] = {end: None if at == num_rows else slice(at, None) if at else ALL for end, at in starts}
    attn, ffn = (tuple(runs[end] for end in ends) for ends in (attn_ends, ffn_ends))
    return LayerRanges(attn, ffn, swiftkv_from=swiftkv_from)


@lru_cache(maxsize=256)
def layer_ends(schedule: Schedule, num_steps: int) -> tuple[list[int], list[int]]:
    """[L] for attention and [L] for feed-forward: the decode step from which on it is skipped, or NEVER.

    `num_steps` is an upper bound. Cached, since it walks thousands of steps and is the same for every batch.
    """
    plans, counts = [], []  # each plan and for how many steps; plans are few, steps as many as a context has positions
    for plan, steps in groupby(map(schedule.step, range(num_steps))):
        plans.append(plan)
        counts.append(sum(1 for _ in steps))
    assert has_no_kv_holes(plans), f"{schedule} is not nested over its steps"
    return _ends([plan.attn for plan in plans], counts), _ends([plan.ffn for plan in plans], counts)


def _ends(runs: Sequence[Sequence[bool]], counts: Sequence[int]) -> list[int]:
    """[L] the end of each sublayer, where `runs` says what runs for `counts` steps each."""
    ends = []
    for layer in range(len(runs[0])):
        last = sum(step[layer] for step in runs)
        assert all(step[layer] == (k < last) for k, step in enumerate(runs)), f"layer {layer} is skipped and run again"
        ends.append(NEVER if last == len(runs) else sum(counts[:last]))
    return ends
