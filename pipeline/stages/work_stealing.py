"""Work left over at the end of a run, split over workers that have none.

A worker takes a window of rows at a time, and the last windows end one after the other: whoever is done early would
stand still. So a worker that has had nothing to do for IDLE_AFTER_S asks here; one that sees somebody waiting, between
two batches, offers what it has not begun, takes them back one by one as it goes on, and
gets the answers of those that others took. Rows stay rows of its window: only it hands them on, so each comes out once.

Plain Python; `start_leftovers` makes it an actor on the driver's node. Nothing here is needed for the result: an answer
that does not come (the helper died, or was released, or this actor did) is made by the owner.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray

from pipeline.cluster.pool import on_this_node
from pipeline.cluster.ray_handles import Collected, LeftoversHandle, Loan

if TYPE_CHECKING:  # this process needs no torch
    from actors.generator import Answer
    from skipdecode.engine.request import Request

IDLE_AFTER_S = 0.3  # without a row, before a worker counts as idle: between two windows there is always a moment
FIRST_WINDOW_S = 5.0  # the same before a worker's first window: at the start of a run those come one by one
FORGOTTEN_AFTER_S = 3.0  # a worker that has not asked for so long is busy again, or gone


@dataclass
class Offer:
    """What one worker has to give away of its window."""

    owner: str
    parts: "Sequence[Sequence[Request]]"
    next: int = 0
    """The first part that nobody has begun."""
    lent: dict[int, str] = field(default_factory=dict)
    """Part -> the worker that decodes it."""
    answers: "dict[str, Answer]" = field(default_factory=dict)


class Leftovers:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._offers: dict[str, Offer] = {}
        self._waiting: dict[str, tuple[float, float]] = {}  # worker -> since when, and when it asked last
        self._seasoned: set[str] = set()  # workers that have had a window

    def started(self, worker: str) -> None:
        """A worker's process is new: what its predecessor offered or had in hand is lost."""
        self._offers = {key: offer for key, offer in self._offers.items() if offer.owner != worker}
        for offer in self._offers.values():
            offer.lent = {part: helper for part, helper in offer.lent.items() if helper != worker}

    def began(self, worker: str) -> None:
        """A worker has a window of its own."""
        self._waiting.pop(worker, None)
        self._seasoned.add(worker)

    def num_idle(self) -> int:
        """Workers that have waited for work for a while and still do."""
        now = self._clock()
        return sum(
            asked - since >= (IDLE_AFTER_S if worker in self._seasoned else FIRST_WINDOW_S)
            and now - asked < FORGOTTEN_AFTER_S
            for worker, (since, asked) in self._waiting.items()
        )

    def ask(self, worker: str) -> Loan | None:
        """An idle worker asks for work."""
        now = self._clock()
        since, asked = self._waiting.get(worker, (now, now))
        if now - asked >= FORGOTTEN_AFTER_S:
            since = now
        self._waiting[worker] = (since, now)
        open_offers = [(offer, key) for key, offer in self._offers.items() if offer.next < len(offer.parts)]
        if not open_offers:
            return None
        offer, key = max(open_offers, key=lambda item: len(item[0].parts) - item[0].next)
        part = self._take(offer)
        assert part is not None
        offer.lent[part] = worker
        del self._waiting[worker]
        return Loan(key, part, offer.parts[part])

    def offer(self, key: str, owner: str, parts: "Sequence[Sequence[Request]]") -> None:
        """Parts of a window, in the order in which they are to be begun."""
        self._offers[key] = Offer(owner, parts)

    def take(self, key: str) -> int | None:
        """The owner's next part, or None: all are begun."""
        return self._take(self._offers[key])

    def give(self, loan: Loan, answers: "dict[str, Answer]") -> None:
        """A helper is done with a part: all of its rows. Too late, and nobody wants it."""
        offer = self._offers.get(loan.offer)
        if offer is not None and offer.lent.pop(loan.part, None) is not None:
            offer.answers |= answers

    def collect(self, key: str) -> Collected:
        offer = self._offers[key]
        found = Collected(offer.answers, len(offer.lent))
        offer.answers = {}
        return found

    def close(self, key: str) -> "dict[str, Answer]":
        """The offer is over; gives back what has come since it was collected."""
        return self._offers.pop(key).answers

    def _take(self, offer: Offer) -> int | None:
        if offer.next == len(offer.parts):
            return None
        offer.next += 1
        return offer.next - 1


def split_parts(parts: "Sequence[Sequence[Request]]", num_workers: int, min_rows: int) -> "list[Sequence[Request]]":
    """Halves the dearest parts until none costs more than half a worker's share, or has 2 * `min_rows` rows; in order.

    Cost: prompt tokens and tokens to make, as far as one can know before.
    """
    result, costs = list(parts), [cost(part) for part in parts]
    limit = sum(costs) / (2 * num_workers)
    while True:
        large = [at for at, part in enumerate(result) if costs[at] > limit and len(part) >= 2 * min_rows]
        if num_workers == 1 or not large:
            return result
        at = max(large, key=lambda place: costs[place])
        middle = len(result[at]) // 2
        halves = [result[at][:middle], result[at][middle:]]
        result[at : at + 1], costs[at : at + 1] = halves, [cost(half) for half in halves]


def cost(requests: "Sequence[Request]") -> int:
    return sum(len(request.prompt_tokens) + request.sampling.max_new_tokens for request in requests)


def start_leftovers() -> LeftoversHandle:
    """The leftovers as an actor on this node; it takes no CPU from the pool."""
    handle: LeftoversHandle = ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(Leftovers).remote()
    return handle
