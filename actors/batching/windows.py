"""How a worker cuts a window of rows into batches, and what the rows of a batch share.

Rows with one schedule and one length bucket go together (`actors.batching.buckets`). Where it pays they share what
they begin
with (`actors.batching.prefix_batches`). Rows of which only the prompt is scored have batches of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from actors.batching.buckets import Batch, cut_batches
from actors.batching.prefix_batches import PromptPrices, cut_window, share_batch
from actors.batching.prompt_scoring import is_scored_alone
from skipdecode.cost.roofline import SharedShape
from skipdecode.engine.prefix_sharing import PrefixSharing, share_prefixes
from skipdecode.engine.request import Request
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import LayerPlan, Schedule


class RowsPerBatch(Protocol):
    """`Generator.batch_size`."""

    def __call__(self, bucket: int, max_new_tokens: int, *, head_columns: int = 0) -> int: ...


@dataclass(frozen=True)
class Cutting:
    """What decides on the batches of one worker."""

    full: Schedule
    schedule: Callable[[int], Schedule]
    """Of a row with that many new tokens at most."""
    batch_size: RowsPerBatch
    buckets: Sequence[int]
    shares: bool
    """Whether rows may share what they begin with."""
    copies_prefixes: bool
    """Whether kernels need heads that rows share copied to each of them."""
    price: Callable[[Schedule], PromptPrices]
    known_prices: dict[LayerPlan, PromptPrices]
    """By the plan of the prompt; filled here."""

    def cut(self, requests: Sequence[Request]) -> list[Batch]:
        """The batches that a window is decoded in; a batch by itself is cut no further, unless less is shared in it."""
        alone = [row for row, request in enumerate(requests) if is_scored_alone(request)]
        if not alone:
            return self._cut(requests)
        lengths = [len(requests[row].prompt_tokens) for row in alone]
        size = partial(self.batch_size, max_new_tokens=1)
        scored = cut_batches(lengths, [self.full] * len(alone), self.buckets, size)
        others = [row for row, request in enumerate(requests) if not is_scored_alone(request)]
        return [*_moved(scored, alone), *_moved(self._cut([requests[row] for row in others]), others)]

    def _cut(self, requests: Sequence[Request]) -> list[Batch]:
        """Of rows that get tokens."""
        schedules = [self.schedule(request.sampling.max_new_tokens) for request in requests]
        lengths = [len(request.prompt_tokens) for request in requests]
        longest = max((r.sampling.max_new_tokens for r in requests), default=1)
        size = partial(self.batch_size, max_new_tokens=longest)
        if not self.shares:
            return cut_batches(lengths, schedules, self.buckets, size)
        members: dict[Schedule, list[int]] = {}
        for row, schedule in enumerate(schedules):
            members.setdefault(schedule, []).append(row)
        batches = []
        for schedule, rows in members.items():
            own = [requests[row] for row in rows]
            for batch in self._cut_sharing(own, schedule, longest) or cut_batches(
                [lengths[row] for row in rows], [schedule] * len(rows), self.buckets, size
            ):
                batches += _moved([batch], rows)
        return batches

    def _cut_sharing(self, requests: Sequence[Request], schedule: Schedule, max_new_tokens: int) -> list[Batch] | None:
        """Batches in which rows with one schedule share what they begin with; None where it does not pay."""
        prompts, steps = [request.prompt_tokens for request in requests], max_new_tokens - 1
        size = partial(self.batch_size, max_new_tokens=max_new_tokens)
        return cut_window(prompts, self.prices(schedule), steps, self.buckets, size, copies=self._copies(schedule))

    def sharing_of(self, requests: Sequence[Request], schedule: Schedule) -> PrefixSharing | None:
        """What a batch of whoever waits together shares; None: nothing that pays."""
        if not self.shares:
            return None
        steps = max(request.sampling.max_new_tokens for request in requests) - 1
        return share_batch([request.prompt_tokens for request in requests], self.prices(schedule), steps)

    def prices(self, schedule: Schedule) -> PromptPrices:
        """What prompts cost under that schedule."""
        plan = schedule.prefill()
        if plan not in self.known_prices:
            self.known_prices[plan] = self.price(schedule)
        return self.known_prices[plan]

    def shared_shape(self, batch: Batch, chosen: Sequence[Request], schedule: Schedule) -> SharedShape | None:
        """What the rows of a batch share, for the cost model."""
        sharing = sharing_in(batch, chosen)
        prompts = [request.prompt_tokens for request in chosen]
        return None if sharing is None else sharing.shape(prompts, copies=self._copies(schedule))

    def _copies(self, schedule: Schedule) -> bool:
        """Whether heads that rows share are copied to each of them."""
        return self.copies_prefixes or isinstance(schedule, Lossless)


def sharing_in(batch: Batch, chosen: Sequence[Request]) -> PrefixSharing | None:
    """What the rows `chosen` of a batch share, by its marks."""
    return share_prefixes([request.prompt_tokens for request in chosen], batch.marks) if batch.marks else None


def _moved(batches: Sequence[Batch], rows: Sequence[int]) -> list[Batch]:
    """Batches of some rows of a window as those of the window."""
    return [replace(batch, rows=tuple(rows[at] for at in batch.rows)) for batch in batches]
