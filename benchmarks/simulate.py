"""A run on 1 to 1,024 workers, simulated batch by batch from measured step times: hours, cost, and where the time goes.

`python benchmarks/simulate.py [--result benchmarks/results/...json] [--workers 1 8 64 256 1024] [--rows 10000000] ...`

A worker loads the model and takes windows of batches; a window is written once all of its batches are done, whoever did
them, and when its worker dies before, all of it is decoded again. Who dies over a batch of another's loses that batch.
Step times are those of
`jobs.bench` for one schedule, or predicted for a GPU (`--gpu h100`): time of a step = a + b * rows, fitted over the
batch sizes measured; a batch gets smaller
by halves as its rows end, as the decoder does. Lengths of answers are log-normal. Workers differ in speed, some are
stragglers, and fail at random. The driver hands out windows one after the other. At the end whoever is idle takes
batches that nobody has begun (`actors.share_leftovers`), or with `--naive` stands still. The shares printed add up to
the time paid for.
Not simulated: the network, reading the corpus, nodes that die with several workers, prices that change.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `python benchmarks/simulate.py`

from benchmarks.simulation import SHARES, Plan, simulate  # noqa: E402
from skipdecode.cost.gpu_specs import gpu_named  # noqa: E402
from skipdecode.cost.predict import Workload, prompt_token_s, step_s  # noqa: E402
from skipdecode.families import released  # noqa: E402
from skipdecode.schedules.from_config import make_schedule  # noqa: E402

FIT_ROWS = (8, 64)  # between which a step's time is nearly a line
RESULT = ROOT / "benchmarks/results/2026-11-22-bench-opt-125m-cpu.json"


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

    @classmethod
    def of_gpu(cls, gpu: str, shape: str, schedule: str, work: Workload) -> "StepTimes":
        """Predicted from a data sheet (`skipdecode.cost.predict`), in the middle of answers of `work.new_tokens`."""
        config, device = released(shape), gpu_named(gpu)
        method, _, speedup = schedule.partition(" ")
        decode: dict[str, object] = {"method": method} | ({"speedup": float(speedup)} if speedup else {})
        plans = make_schedule(decode, num_layers=config.num_hidden_layers, max_new_tokens=work.new_tokens)
        few, many = (step_s(config, plans, device, work, rows) for rows in FIT_ROWS)
        slope = (many - few) / (FIT_ROWS[1] - FIT_ROWS[0])
        return cls(few - slope * FIT_ROWS[0], slope, prompt_token_s(config, plans, device, work))

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT, help="of jobs.bench: where step times come from")
    parser.add_argument("--gpu", help="in place of --result: step times predicted for such a GPU (h100, l4, ...)")
    parser.add_argument("--shape", default="opt-1.3b", help="with --gpu: of the model")
    parser.add_argument("--schedule", default="skipdecode 2", help="as it is named there")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--naive", action="store_true", help="idle workers take nothing over at the end")
    for name, value in asdict(Plan()).items():
        if name != "shares":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    arguments = parser.parse_args()
    keys = {name: getattr(arguments, name) for name in asdict(Plan()) if name != "shares"}
    plan = Plan(**keys, shares=not arguments.naive)
    source: dict[str, object] = {"schedule": arguments.schedule}
    if arguments.gpu:
        work = Workload(plan.prompt_tokens, plan.max_new_tokens)
        times = StepTimes.of_gpu(arguments.gpu, arguments.shape, arguments.schedule, work)
        source |= {"gpu": arguments.gpu, "shape": arguments.shape, "measured": False}
    else:
        times = StepTimes.from_result(arguments.result, arguments.schedule)
        source["result"] = arguments.result.name
    print(f"workers     hours        cost  {'  '.join(f'{name:>11}' for name in SHARES)}", file=sys.stderr)
    outcomes = []
    for workers in arguments.workers:
        found = simulate(plan, times.batch_s, workers)
        outcomes.append(asdict(found))
        cells = "  ".join(f"{100 * getattr(found, name):10.2f}%" for name in SHARES)
        print(f"{workers:7}  {found.hours:8.2f}  {found.cost:10,.0f}  {cells}", file=sys.stderr)
    print(json.dumps(source | {"plan": asdict(plan), "outcomes": outcomes}))


if __name__ == "__main__":
    main()
