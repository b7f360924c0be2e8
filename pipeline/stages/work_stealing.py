"""Work stealing at the end of a run: idle workers take parts of the windows that others still decode.

A worker takes a window of rows at a time, and the last windows of a run end one after the other, so workers that finish
early would idle. A worker that has been idle for IDLE_AFTER_S asks the queue for work. Between two batches, the owner
of a window checks whether any worker is idle. If so, it shares the batches that it has not begun, takes them back one
by one as it goes on, and collects the answers of those that were stolen. The rows still belong to its window, and only
the owner passes them on, so that each is emitted once.

Plain Python; `start_steal_queue` makes it an actor on the driver's node. The result does not depend on it: the owner
decodes what a thief does not bring, because it died or was released, or because the queue was lost.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray
from ray.actor import ActorHandle

from pipeline.cluster.pool import on_this_node

if TYPE_CHECKING:  # this process needs no torch
    from actors.generator import Answer
    from skipdecode.engine.request import Request

IDLE_AFTER_S = 0.3  # without rows, before a worker counts as idle: there is always a gap between two windows
FIRST_WINDOW_S = 5.0  # the limit before a worker's first window: at the start of a run these arrive one by one
FORGOTTEN_AFTER_S = 3.0  # a worker that has not asked for this long is busy again, or gone


@dataclass(frozen=True)
class StolenPart:
    """A part of another worker's window."""

    key: str
    part: int
    requests: "Sequence[Request]"


@dataclass(frozen=True)
class CollectedAnswers:
    """Answers that thieves have brought since the last `collect`."""

    answers: "dict[str, Answer]"
    num_stolen: int
    """Parts that others still decode."""
    num_waiting: int
    """Parts that nobody has begun."""


@dataclass
class SharedWindow:
    """The parts of a window that one worker shares."""

    owner: str
    parts: "Sequence[Sequence[Request]]"
    next: int = 0
    """The first part that has not been begun."""
    stolen: dict[int, str] = field(default_factory=dict)
    """Part -> the worker that decodes it."""
    answers: "dict[str, Answer]" = field(default_factory=dict)


class StealQueue:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shared: dict[str, SharedWindow] = {}
        self._waiting: dict[str, tuple[float, float]] = {}  # worker -> since when, and when it asked last
        self._has_begun: set[str] = set()  # workers that have had a window

    def worker_started(self, worker: str) -> None:
        """A worker's process has (re)started: what its predecessor shared or stole is lost."""
        self._shared = {key: window for key, window in self._shared.items() if window.owner != worker}
        for window in self._shared.values():
            window.stolen = {part: thief for part, thief in window.stolen.items() if thief != worker}

    def window_begun(self, worker: str) -> None:
        """A worker has received a window, and is not idle any more."""
        self._waiting.pop(worker, None)
        self._has_begun.add(worker)

    def num_idle(self) -> int:
        """Workers that have waited for work for a while and still do."""
        now = self._clock()
        return sum(
            asked - since >= (IDLE_AFTER_S if worker in self._has_begun else FIRST_WINDOW_S)
            and now - asked < FORGOTTEN_AFTER_S
            for worker, (since, asked) in self._waiting.items()
        )

    def steal(self, worker: str) -> StolenPart | None:
        """A part for an idle worker; None if there is none yet, and the worker counts as waiting."""
        now = self._clock()
        since, asked = self._waiting.get(worker, (now, now))
        if now - asked >= FORGOTTEN_AFTER_S:
            since = now
        self._waiting[worker] = (since, now)
        open_windows = [(window, key) for key, window in self._shared.items() if window.next < len(window.parts)]
        if not open_windows:
            return None
        window, key = max(open_windows, key=lambda item: len(item[0].parts) - item[0].next)
        part = self._next_part(window)
        assert part is not None
        window.stolen[part] = worker
        del self._waiting[worker]
        return StolenPart(key, part, window.parts[part])

    def share(self, key: str, owner: str, parts: "Sequence[Sequence[Request]]") -> None:
        """Offers parts of a window, in the order in which they are to be decoded."""
        self._shared[key] = SharedWindow(owner, parts)

    def take(self, key: str) -> int | None:
        """The number of the owner's next part; None if all parts are begun."""
        return self._next_part(self._shared[key])

    def complete(self, stolen: StolenPart, answers: "dict[str, Answer]") -> None:
        """A thief has decoded all rows of a part. If the owner has stopped waiting, the answers are dropped."""
        window = self._shared.get(stolen.key)
        if window is not None and window.stolen.pop(stolen.part, None) is not None:
            window.answers |= answers

    def collect(self, key: str) -> CollectedAnswers:
        window = self._shared[key]
        found = CollectedAnswers(window.answers, len(window.stolen), len(window.parts) - window.next)
        window.answers = {}
        return found

    def close(self, key: str) -> "dict[str, Answer]":
        """Ends the sharing of a window; returns the answers that came since the last `collect`."""
        return self._shared.pop(key).answers

    def _next_part(self, window: SharedWindow) -> int | None:
        if window.next == len(window.parts):
            return None
        window.next += 1
        return window.next - 1


def split_parts(parts: "Sequence[Sequence[Request]]", num_workers: int, min_rows: int) -> "list[Sequence[Request]]":
    """Halves the most expensive parts until none costs more than half a worker's share or has fewer than 2 * `min_rows`
    rows. Rows keep their order. The cost of a row is its prompt tokens and the tokens that it may generate."""
    result, costs = list(parts), [cost(part) for part in parts]
    limit = sum(costs) / (2 * num_workers)
    while True:
        large = [at for at, part in enumerate(result) if costs[at] > limit and len(part) >= 2 * min_rows]
        if num_workers == 1 or not large:
            return result
        at = max(large, key=lambda index: costs[index])
        middle = len(result[at]) // 2
        halves = [result[at][:middle], result[at][middle:]]
        result[at : at + 1], costs[at : at + 1] = halves, [cost(half) for half in halves]


def cost(requests: "Sequence[Request]") -> int:
    return sum(len(request.prompt_tokens) + request.sampling.max_new_tokens for request in requests)


def start_steal_queue() -> ActorHandle:
    """An actor on this node, which takes no CPU from the pool."""
    return ray.remote(num_cpus=0, scheduling_strategy=on_this_node())(StealQueue).remote()
