"""A run on 1 to 1,024 workers, simulated batch by batch from measured step times: hours, cost, and where the time goes.

`python benchmarks/simulate.py [--result benchmarks/results/...json] [--workers 1 8 64 256 1024] [--rows 10000000] ...`

A worker loads the model and takes windows of batches; a window is written once all of its batches are done, whoever did
them, and when its worker dies before, all of it is decoded again. Who dies over a batch of another's loses that batch.
Step times are those of
`jobs.bench` for one schedule: time of a step = a + b * rows, fitted over the batch sizes measured; a batch gets smaller
by halves as its rows end, as the decoder does. Lengths of answers are log-normal. Workers differ in speed, some are
stragglers, and fail at random. The driver hands out windows one after the other. At the end whoever is idle takes
batches that nobody has begun (`actors.share_leftovers`), or with `--naive` stands still. The shares printed add up to
the time paid for.
Not simulated: the network, reading the corpus, nodes that die with several workers, prices that change.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

RESULT = Path(__file__).parent / "results/2026-11-22-bench-opt-125m-cpu.json"


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a decode step with so many rows, and of a prompt token."""

    step_s: float
    step_row_s: float
    prompt_token_s: float

    @classmethod
    def from_result(cls, path: Path, schedule: str) -> "StepTimes":
        rows = [row for row in json.loads(path.read_text())["rows"] if row["schedule"] == schedule]
        if len({row["batch_size"] for row in rows}) < 2:
            raise SystemExit(f"{path}: needs two batch sizes or more of schedule {schedule!r}")
        sizes, times = [row["batch_size"] for row in rows], [row["ms_per_step"] / 1e3 for row in rows]
        mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
        slope = sum((s - mean_size) * (t - mean_time) for s, t in zip(sizes, times, strict=True))
        slope = max(slope / sum((s - mean_size) ** 2 for s in sizes), 0.0)
        largest = max(rows, key=lambda row: row["batch_size"])
        per_token = largest["prefill_ms"] / 1e3 / (largest["batch_size"] * largest["prompt_tokens"])
        return cls(mean_time - slope * mean_size, slope, per_token)

    def batch_s(self, lengths: Sequence[int], prompt_tokens: int) -> float:
        """Time of a batch whose rows make so many tokens; halved when half of its rows have ended."""
        size, done, total = len(lengths), 0, self.prompt_token_s * prompt_tokens * len(lengths)
        ends = sorted(lengths)
        for ended, end in enumerate(ends, start=1):
            total += (end - done) * (self.step_s + self.step_row_s * size)
            done = end
            if len(ends) - ended <= size / 2:
                size = max(len(ends) - ended, 1)
        return total


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
class Batch:
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
    window: list[Batch] = field(default_factory=list)
    """Until it is written."""
    left: list[Batch] = field(default_factory=list)
    """Of the window, what nobody has begun, the shortest first: they are taken from the end."""
    done: dict[int, float] = field(default_factory=dict)
    """Of the window, batch -> seconds that it took."""
    in_hand: Batch | None = None
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
    def __init__(self, plan: Plan, times: StepTimes, workers: int) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.batches = self._pool_of_batches(times)
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
            if worker.in_hand is None:
                self._begin(number, now)
            elif now == worker.dies_at:
                self._die(number, worker.in_hand, now)
            else:
                self._end(number, worker.in_hand, now)
                self._begin(number, now)
        return self._outcome()

    def _pool_of_batches(self, times: StepTimes) -> list[float]:
        """Times of a few hundred batches of random lengths, from which all are drawn."""
        plan = self.plan
        mu = _log_mean(plan)
        lengths = [
            min(plan.max_new_tokens, max(1, round(self.rng.lognormvariate(mu, plan.sigma))))
            for _ in range(400 * plan.batch_rows)
        ]
        batches = [lengths[i : i + plan.batch_rows] for i in range(0, len(lengths), plan.batch_rows)]
        return [times.batch_s(one, plan.prompt_tokens) for one in batches]

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
        worker.is_idle, worker.in_hand, worker.began_at = False, source.left.pop(), begins_at
        if worker.dies_at <= begins_at:  # while it stood still, with nothing to lose
            worker.dies_at = self._lifetime(begins_at)
        self._at(number, min(begins_at + worker.in_hand.seconds * worker.speed, worker.dies_at))

    def _hand_out(self, number: int, now: float) -> float:
        """Gives the worker a window; when it can begin."""
        worker, plan = self.workers[number], self.plan
        for _ in range(self.windows.pop()):
            worker.window.append(Batch(self.num_batches, self.rng.choice(self.batches), number))
            self.num_batches += 1
        worker.left = sorted(worker.window, key=lambda batch: batch.seconds)  # what takes longest is begun first
        self.needed_s += sum(batch.seconds for batch in worker.window)
        self.driver_free_at = max(self.driver_free_at, now) + plan.driver_s
        begins_at = max(now + plan.write_s, self.driver_free_at)
        self.written_s += plan.write_s
        self.waited_s += begins_at - now - plan.write_s
        return begins_at

    def _end(self, number: int, batch: Batch, now: float) -> None:
        worker, owner = self.workers[number], self.workers[batch.owner]
        took = now - worker.began_at
        worker.in_hand, worker.free_at = None, now
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

    def _die(self, number: int, batch: Batch, now: float) -> None:
        """Its window is decoded again from the start; a batch of another's goes back."""
        plan, worker, owner = self.plan, self.workers[number], self.workers[batch.owner]
        worker.in_hand = None
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


def simulate(plan: Plan, times: StepTimes, workers: int) -> Outcome:
    return Simulation(plan, times, workers).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT, help="of jobs.bench: where step times come from")
    parser.add_argument("--schedule", default="skipdecode 2", help="as it is named there")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--naive", action="store_true", help="idle workers take nothing over at the end")
    for name, value in asdict(Plan()).items():
        if name != "shares":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    times = StepTimes.from_result(arguments.result, arguments.schedule)
    keys = {name: getattr(arguments, name) for name in asdict(Plan()) if name != "shares"}
    plan = Plan(**keys, shares=not arguments.naive)
    print(f"workers     hours        cost  {'  '.join(f'{name:>11}' for name in SHARES)}", file=sys.stderr)
    outcomes = []
    for workers in arguments.workers:
        found = simulate(plan, times, workers)
        outcomes.append(asdict(found))
        cells = "  ".join(f"{100 * getattr(found, name):10.2f}%" for name in SHARES)
        print(f"{workers:7}  {found.hours:8.2f}  {found.cost:10,.0f}  {cells}", file=sys.stderr)
    source = {"result": arguments.result.name, "schedule": arguments.schedule}
    print(json.dumps(source | {"plan": asdict(plan), "outcomes": outcomes}))


if __name__ == "__main__":
    main()
