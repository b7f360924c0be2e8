"""The model of `benchmarks/simulate.py`: workers, windows and batches, event by event. No file, no measurement.

A batch of the pool is as long as `batch_s` of the plan's lengths says; who owns, begins, loses and writes it is here.
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

BatchTime = Callable[[Sequence[int], int], float]
"""Seconds of a batch whose rows make so many tokens, at so many prompt tokens each."""


@dataclass(frozen=True)
class Plan:
    """What is simulated; times in seconds."""

    rows: int = 10_000_000
    batch_rows: int = 32
    window_batches: int = 4
    prompt_tokens: int = 64
    mean_new_tokens: float = 64.0
    sigma: float = 0.6
    """Of the logarithm of an answer's length."""
    max_new_tokens: int = 256
    load_s: float = 60.0
    write_s: float = 0.012
    """Between two windows of a worker: handing rows on to be written, which goes on beside the decoding."""
    driver_s: float = 0.02
    """The driver's own time per window; it hands out one after the other."""
    straggler_share: float = 0.01
    straggler_factor: float = 2.0
    speed_sigma: float = 0.03
    failures_per_worker_hour: float = 0.02
    restart_s: float = 30.0
    """From a death to a new process, without loading."""
    price_per_hour: float = 2.0
    """Of one worker."""
    shares: bool = True
    seed: int = 0


@dataclass(frozen=True)
class SimulatedBatch:
    number: int
    seconds: float
    """At speed 1."""
    owner: int
    """The worker whose window it is of."""
    attempt: int = 0
    """How often that worker has died over it."""


@dataclass
class Worker:
    speed: float
    dies_at: float
    free_at: float
    """Since when it has had nothing to do."""
    next_at: float
    """When something happens to it: its batch ends, it dies, it is ready again."""
    window: list[SimulatedBatch] = field(default_factory=list)
    """Until it is written."""
    left: list[SimulatedBatch] = field(default_factory=list)
    """Of the window, what nobody has begun, the shortest first: they are taken from the end."""
    done: dict[int, float] = field(default_factory=dict)
    """Of the window, batch -> seconds that it took."""
    current: SimulatedBatch | None = None
    began_at: float = 0.0
    is_idle: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a run took; the shares are of the time paid for, and add up to 1 with `efficiency`."""

    workers: int
    hours: float
    cost: float
    efficiency: float
    """Decoding that was needed, at speed 1."""
    load: float
    """First loading."""
    driver: float
    """Waiting for the next window."""
    checkpoints: float
    """Handing rows on to be written."""
    tail: float
    """Standing still, at the end."""
    restarts: float
    """Deaths: decoded in vain, started and loaded again."""
    stragglers: float
    """Decoding that took longer than at speed 1; below 0: shorter."""


SHARES = ("efficiency", "load", "driver", "checkpoints", "tail", "restarts", "stragglers")


class Simulation:
    def __init__(self, plan: Plan, batch_s: BatchTime, workers: int) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.batches = self._pool_of_batches(batch_s)
        num_batches = -(-plan.rows // plan.batch_rows)
        per_window = max(1, min(plan.window_batches, -(-num_batches // (2 * workers))))
        rest = num_batches % per_window
        self.windows = [per_window] * (num_batches // per_window) + [rest] * (rest > 0)
        self.workers = [self._worker() for _ in range(workers)]
        self.events = [(plan.load_s, number) for number in range(workers)]  # (time, worker)
        self.written: list[int] = []
        self.restarts: list[tuple[float, float]] = []  # from, to
        self.num_batches = 0
        self.driver_free_at = self.ends_at = 0.0
        self.needed_s = self.decoded_s = self.lost_s = self.waited_s = self.written_s = self.idle_s = 0.0

    def run(self) -> Outcome:
        while self.events:
            now, number = heapq.heappop(self.events)
            worker = self.workers[number]
            if now != worker.next_at:
                continue  # woken before
            if worker.current is None:
                self._begin(number, now)
            elif now == worker.dies_at:
                self._die(number, worker.current, now)
            else:
                self._end(number, worker.current, now)
                self._begin(number, now)
        return self._outcome()

    def _pool_of_batches(self, batch_s: BatchTime) -> list[float]:
        """Times of a few hundred batches of random lengths, from which all are drawn."""
        plan = self.plan
        mu = _log_mean(plan)
        lengths = [
            min(plan.max_new_tokens, max(1, round(self.rng.lognormvariate(mu, plan.sigma))))
            for _ in range(400 * plan.batch_rows)
        ]
        batches = [lengths[i : i + plan.batch_rows] for i in range(0, len(lengths), plan.batch_rows)]
        return [batch_s(one, plan.prompt_tokens) for one in batches]

    def _worker(self) -> Worker:
        plan = self.plan
        speed = self.rng.lognormvariate(0, plan.speed_sigma)
        if self.rng.random() < plan.straggler_share:
            speed *= plan.straggler_factor
        return Worker(speed, self._lifetime(0.0), free_at=plan.load_s, next_at=plan.load_s)

    def _lifetime(self, now: float) -> float:
        rate = self.plan.failures_per_worker_hour
        return now + 3600 * self.rng.expovariate(rate) if rate else float("inf")

    def _at(self, number: int, moment: float) -> None:
        self.workers[number].next_at = moment
        heapq.heappush(self.events, (moment, number))

    def _wake(self, number: int, moment: float) -> None:
        if self.workers[number].is_idle and moment < self.workers[number].next_at:
            self._at(number, moment)

    def _begin(self, number: int, now: float) -> None:
        """The worker begins its next batch, or stands still: there is none for it now."""
        worker, begins_at = self.workers[number], now
        if not worker.window and self.windows:
            begins_at = self._hand_out(number, now)
        source = worker
        if not worker.window and self.plan.shares:  # with a window of its own it waits for its helpers
            source = max(self.workers, key=lambda other: len(other.left))
        if not source.left:
            worker.is_idle, worker.next_at = True, float("inf")
            return
        self.idle_s += now - worker.free_at
        worker.is_idle, worker.current, worker.began_at = False, source.left.pop(), begins_at
        if worker.dies_at <= begins_at:  # while it stood still, with nothing to lose
            worker.dies_at = self._lifetime(begins_at)
        self._at(number, min(begins_at + worker.current.seconds * worker.speed, worker.dies_at))

    def _hand_out(self, number: int, now: float) -> float:
        """Gives the worker a window; when it can begin."""
        worker, plan = self.workers[number], self.plan
        for _ in range(self.windows.pop()):
            worker.window.append(SimulatedBatch(self.num_batches, self.rng.choice(self.batches), number))
            self.num_batches += 1
        worker.left = sorted(worker.window, key=lambda batch: batch.seconds)  # what takes longest is begun first
        self.needed_s += sum(batch.seconds for batch in worker.window)
        self.driver_free_at = max(self.driver_free_at, now) + plan.driver_s
        begins_at = max(now + plan.write_s, self.driver_free_at)
        self.written_s += plan.write_s
        self.waited_s += begins_at - now - plan.write_s
        return begins_at

    def _end(self, number: int, batch: SimulatedBatch, now: float) -> None:
        worker, owner = self.workers[number], self.workers[batch.owner]
        took = now - worker.began_at
        worker.current, worker.free_at = None, now
        self.decoded_s += took
        self.ends_at = now
        if batch not in owner.window:  # the owner has died meanwhile: nobody wants it
            self.lost_s += took
            return
        owner.done[batch.number] = took
        if len(owner.done) == len(owner.window):
            self.written += owner.done
            owner.window, owner.done = [], {}
            self._wake(batch.owner, now)

    def _die(self, number: int, batch: SimulatedBatch, now: float) -> None:
        """Its window is decoded again from the start; a batch of another's goes back."""
        plan, worker, owner = self.plan, self.workers[number], self.workers[batch.owner]
        worker.current = None
        self.decoded_s += now - worker.began_at
        self.lost_s += now - worker.began_at + sum(worker.done.values())
        worker.window = [replace(one, attempt=one.attempt + 1) for one in worker.window]
        worker.left, worker.done = sorted(worker.window, key=lambda one: one.seconds), {}
        if owner is not worker and batch in owner.window:
            owner.left.append(batch)
            self._wake(batch.owner, now)
        worker.free_at = now + plan.restart_s + plan.load_s
        worker.dies_at = self._lifetime(worker.free_at)
        self.restarts.append((now, worker.free_at))
        self._at(number, worker.free_at)
        for other in range(len(self.workers)):  # there is work again, once it is back
            self._wake(other, worker.free_at)

    def _outcome(self) -> Outcome:
        plan, count, end = self.plan, len(self.workers), self.ends_at
        paid_s = end * count
        self.idle_s += sum(max(0.0, end - worker.free_at) for worker in self.workers)
        restarts_s = self.lost_s + sum(max(0.0, min(to, end) - since) for since, to in self.restarts)
        return Outcome(
            workers=count,
            hours=end / 3600,
            cost=paid_s / 3600 * plan.price_per_hour,
            efficiency=self.needed_s / paid_s,
            load=plan.load_s * count / paid_s,
            driver=self.waited_s / paid_s,
            checkpoints=self.written_s / paid_s,
            tail=self.idle_s / paid_s,
            restarts=restarts_s / paid_s,
            stragglers=(self.decoded_s - self.lost_s - self.needed_s) / paid_s,
        )


def _log_mean(plan: Plan) -> float:
    return math.log(plan.mean_new_tokens) - plan.sigma**2 / 2


def simulate(plan: Plan, batch_s: BatchTime, workers: int) -> Outcome:
    return Simulation(plan, batch_s, workers).run()
