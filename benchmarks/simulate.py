"""A run on 1 to 1,024 workers, simulated batch by batch from measured step times: hours, cost, and where the time goes.

`python benchmarks/simulate.py [--result benchmarks/results/...json] [--workers 1 8 64 256 1024] [--rows 10000000] ...`

A worker loads the model, takes windows of batches, and loses what it has in hand when it dies. Step times are those of
`jobs.bench` for one schedule: time of a step = a + b * rows, fitted over the batch sizes measured; a batch gets smaller
by halves as its rows end, as the decoder does. Lengths of answers are log-normal. Workers differ in speed, some are
stragglers, and fail at random. The driver hands out windows one after the other. At the end whoever is idle takes
batches that nobody has begun (`actors.share_leftovers`), or with `--naive` stands still.
Not simulated: the network, reading the corpus, nodes that die with several workers, prices that change.
"""

import argparse
import heapq
import json
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RESULT = Path(__file__).parent / "results/2026-11-21-bench-opt-125m-cpu.json"


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
    """Between two windows of a worker: handing rows on, taking the next."""
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


@dataclass
class Worker:
    speed: float
    dies_at: float
    left: deque[float] = field(default_factory=deque)
    """Batches of its window that it has not begun, seconds at speed 1."""
    window: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True)
class Outcome:
    workers: int
    hours: float
    cost: float
    efficiency: float
    """Seconds of decoding that was needed over seconds paid for."""
    load: float
    """Shares of the time paid for: loading, waiting for the driver and writing, waiting at the end, lost to deaths."""
    driver: float
    tail: float
    restarts: float
    stragglers: float
    """Decoding that took longer than at speed 1."""


class Simulation:
    def __init__(self, plan: Plan, times: StepTimes, workers: int) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.batches = self._pool_of_batches(times)
        num_batches = -(-plan.rows // plan.batch_rows)
        per_window = max(1, min(plan.window_batches, -(-num_batches // (2 * workers))))
        rest = num_batches % per_window
        self.windows = [per_window] * (num_batches // per_window) + [rest] * (rest > 0)
        self.workers = [self._worker() for _ in range(workers)]
        self.driver_free_at = self.needed_s = self.decoded_s = self.lost_s = self.waited_s = 0.0
        self.starts = workers

    def run(self) -> Outcome:
        plan, events = self.plan, list[tuple[float, int, float]]()  # (time, worker, batch that ends then; 0: none)
        for number in range(len(self.workers)):
            heapq.heappush(events, (plan.load_s, number, 0.0))
        while events:
            now, number, batch = heapq.heappop(events)
            worker = self.workers[number]
            if now >= worker.dies_at and (batch or worker.left):
                heapq.heappush(events, (self._die(worker, now, batch), number, 0.0))
                continue
            if batch:
                self._end(worker, batch, now)
            start = self._next(worker, now)
            if start is not None:
                heapq.heappush(events, (start[0] + start[1] * worker.speed, number, start[1]))
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
        return Worker(speed, self._lifetime(0.0), ended_at=plan.load_s)

    def _lifetime(self, now: float) -> float:
        rate = self.plan.failures_per_worker_hour
        return now + 3600 * self.rng.expovariate(rate) if rate else float("inf")

    def _next(self, worker: Worker, now: float) -> tuple[float, float] | None:
        """When the worker begins its next batch, and which; None: there is no more for it."""
        if not worker.left and self.windows:
            worker.window = [self.rng.choice(self.batches) for _ in range(self.windows.pop())]
            worker.left = deque(sorted(worker.window, reverse=True))  # what takes longest first
            self.needed_s += sum(worker.window)
            handed_at = max(self.driver_free_at, now) + self.plan.driver_s
            self.driver_free_at = handed_at
            start = max(now + self.plan.write_s, handed_at)
            self.waited_s += start - now
            return start, worker.left.popleft()
        if worker.left:
            return now, worker.left.popleft()
        if self.plan.shares:
            richest = max(self.workers, key=lambda other: len(other.left))
            if richest.left:
                return now, richest.left.popleft()
        return None

    def _end(self, worker: Worker, batch: float, now: float) -> None:
        worker.busy_s += batch * worker.speed
        self.decoded_s += batch * worker.speed
        worker.ended_at = now

    def _die(self, worker: Worker, now: float, batch: float) -> float:
        """Its window is decoded again from the start; when it is back."""
        done = [b for b in worker.window if b not in worker.left]
        self.lost_s += sum(done) * worker.speed
        worker.left = deque(sorted([*worker.left, *done], reverse=True))
        if batch and batch not in done:  # somebody else's
            worker.left.appendleft(batch)
        self.starts += 1
        worker.dies_at = self._lifetime(now)
        return now + self.plan.restart_s + self.plan.load_s

    def _outcome(self) -> Outcome:
        plan, count = self.plan, len(self.workers)
        end = max(worker.ended_at for worker in self.workers)
        paid_s = end * count
        tail_s = sum(end - worker.ended_at for worker in self.workers)
        restarts_s = self.lost_s + (self.starts - count) * (plan.restart_s + plan.load_s)
        return Outcome(
            count, end / 3600, count * end / 3600 * plan.price_per_hour, self.needed_s / paid_s,
            plan.load_s * count / paid_s, self.waited_s / paid_s, tail_s / paid_s, restarts_s / paid_s,
            max(0.0, self.decoded_s - self.lost_s - self.needed_s) / paid_s,
        )  # fmt: skip


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
    print("workers     hours        cost  efficiency   load  driver   tail  deaths  stragglers", file=sys.stderr)
    outcomes = []
    for workers in arguments.workers:
        found = simulate(plan, times, workers)
        outcomes.append(asdict(found))
        shares = (found.efficiency, found.load, found.driver, found.tail, found.restarts, found.stragglers)
        cells = "  ".join(f"{100 * share:6.2f}%" for share in shares)
        print(f"{workers:7}  {found.hours:8.2f}  {found.cost:10,.0f}  {cells}", file=sys.stderr)
    source = {"result": arguments.result.name, "schedule": arguments.schedule}
    print(json.dumps(source | {"plan": asdict(plan), "outcomes": outcomes}))


if __name__ == "__main__":
    main()
