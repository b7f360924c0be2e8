"""How a worker cuts a window of rows into batches.

A batch has rows of one schedule and one length bucket, which share prefixes if that saves time. Rows that are only
scored have batches of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from actors.batching.buckets import PlannedBatch, cut_batches
from actors.batching.prompt_scoring import is_scored_alone
from actors.batching.shared_prefixes import PrefillCosts, cut_with_shared_prefixes, prefixes_in, shared_prefixes_of
from skipdecode.cost.roofline import SharedPrefixShape
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import Schedule


@dataclass(frozen=True)
class WindowCutter:
    full: Schedule
    schedule: Callable[[int], Schedule]
    """The schedule of a row with that `max_new_tokens`."""
    batch_size: Callable[..., int]
    """`Generator.batch_size`."""
    buckets: Sequence[int]
    shares_prefixes: bool
    copies_prefixes: bool
    """True if the kernels need a copy of a shared prefix in the cache of every row."""
    prefix_group_rows: int | None
    """`Backend.prefix_group_rows`"""
    prefill_costs: Callable[[Schedule], PrefillCosts]

    def cut(self, requests: Sequence[Request]) -> list[PlannedBatch]:
        """The batches of a window. Cutting the rows of one batch again yields the same batch."""
        scored = [row for row, request in enumerate(requests) if is_scored_alone(request)]
        lengths = [len(requests[row].prompt_tokens) for row in scored]
        size = partial(self.batch_size, max_new_tokens=1)
        batches = _in_window(cut_batches(lengths, [self.full] * len(scored), self.buckets, size), scored)
        longest = max((request.sampling.max_new_tokens for request in requests), default=1)
        by_schedule: dict[Schedule, list[int]] = {}
        for row, request in enumerate(requests):
            if not is_scored_alone(request):
                by_schedule.setdefault(self.schedule(request.sampling.max_new_tokens), []).append(row)
        for schedule, rows in by_schedule.items():
            found = self._cut_group([requests[row].prompt_tokens for row in rows], schedule, longest)
            batches += _in_window(found, rows)
        return batches

    def _cut_group(
        self, prompts: Sequence[Sequence[int]], schedule: Schedule, max_new_tokens: int
    ) -> list[PlannedBatch]:
        """Batches of rows with one schedule."""
        size = partial(self.batch_size, max_new_tokens=max_new_tokens)
        if self.shares_prefixes:
            costs, steps = self.prefill_costs(schedule), max_new_tokens - 1
            found = cut_with_shared_prefixes(prompts, costs, steps, self.buckets, size, copies=self.copies_prefixes)
            if found is not None:
                return found
        return cut_batches([len(prompt) for prompt in prompts], [schedule] * len(prompts), self.buckets, size)

    def shared_prefixes(self, requests: Sequence[Request], schedule: Schedule) -> PrefixSharing | None:
        """The prefixes that the rows of one batch share; None if that does not save time."""
        if not self.shares_prefixes:
            return None
        num_steps = max(request.sampling.max_new_tokens for request in requests) - 1
        prompts = [request.prompt_tokens for request in requests]
        return shared_prefixes_of(prompts, self.prefill_costs(schedule), num_steps)

    def shared_prefix_shape(self, batch: PlannedBatch, requests: Sequence[Request]) -> SharedPrefixShape | None:
        """What the rows of a batch share, for the cost model."""
        prompts = [request.prompt_tokens for request in requests]
        sharing = prefixes_in(batch, prompts)
        return (
            None
            if sharing is None
            else sharing.shape(prompts, copies=self.copies_prefixes, group_rows=self.prefix_group_rows)
        )


def _in_window(batches: Sequence[PlannedBatch], rows: Sequence[int]) -> list[PlannedBatch]:
    """The batches, with indices into `rows` replaced by indices into the window."""
    return [replace(batch, rows=tuple(rows[at] for at in batch.rows)) for batch in batches]
