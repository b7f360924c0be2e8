"""What a batch costs the online requests beside it, and what both get out of the machine together.

    python -m benchmarks.batches_beside_online --rounds 3 --seconds 60 --rate 4 [key=value ...]

One application of Ray Serve with a storage. Each round has three phases, in turns: `online`, an open load of streamed
completions with no batch in the queue; `batch`, a batch alone; `both`, the same load beside the batch. All answers have
the same number of tokens. Measured are p50 and p99 of the load's time to the first token, over the requests of all
rounds, and a batch's output tokens per second, between the first and the last file of rows that came in the phase.
`key=value` are dotted keys of the application. The last line on stdout is one JSON document.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import openai
import torch

from pipeline.batches.status import TERMINAL
from pipeline.bench.load import Outcome, Work, figures, make_work, offer
from pipeline.bench.service import ServeBenchConfig, System, started
from pipeline.cluster.machine import provenance
from pipeline.config.tree import read_override
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.formatting import Json
from skipdecode.checkpoint.hub import DEMO

LOOK_S = 0.25
PATIENCE_S = 600.0
MIN_LINES = 256  # answered before a batch counts as running
NO_SLO_S = 1e9
ARGS: dict[str, Json] = {"batches.actors.batch_size": 64, "batches.actors.window_batches": 1}


@dataclass
class Progress:
    """How many lines of a batch were answered when."""

    seen: list[tuple[float, int]] = field(default_factory=list)

    def add(self, at: float, lines: int) -> None:
        if not self.seen or lines != self.seen[-1][1]:
            self.seen.append((at, lines))

    def lines_per_s(self, began: float, ended: float) -> float:
        """Between the first and the last time in the phase at which lines were new; ValueError if there are no two."""
        inside = [one for one in self.seen if began <= one[0] <= ended]
        if len(inside) < 2:
            raise ValueError(f"{len(inside)} files of rows came in {ended - began:.0f} s; give --seconds for several")
        (first_at, first), (last_at, last) = inside[0], inside[-1]
        return (last - first) / (last_at - first_at)


class Batch:
    """A batch of so many lines, which is watched."""

    def __init__(self, url: str, num_lines: int, tokens: int) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
        body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "model": "bench"}
        prompts = [row["prompt"] for row in make_prompts(512, seed=1)]
        lines = (
            {
                "custom_id": f"r{n}",
                "method": "POST",
                "url": "/v1/completions",
                "body": body | {"prompt": prompts[n % 512]},
            }
            for n in range(num_lines)
        )
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = self._client.files.create(file=("in.jsonl", content), purpose="batch")
        made = self._client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        self._id, self.progress = made.id, Progress()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _look(self) -> Any:
        return self._client.batches.retrieve(self._id)

    def _watch(self) -> None:
        while not self._stops.wait(LOOK_S):
            counts = self._look().request_counts
            self.progress.add(time.perf_counter(), counts.completed)

    def wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.progress.seen or self.progress.seen[-1][1] < MIN_LINES:
            batch = self._look()
            if batch.status in TERMINAL or time.monotonic() > deadline:
                raise RuntimeError(f"the batch does not run: {batch.status}, {batch.errors}")
            time.sleep(LOOK_S)

    def check_it_runs(self) -> None:
        if (status := self._look().status) != "in_progress":
            raise RuntimeError(f"the batch is {status} before the end of the phase; give more --lines")

    def end(self) -> None:
        self._stops.set()
        self._thread.join()
        self._client.batches.cancel(self._id)
        deadline = time.monotonic() + PATIENCE_S
        while (status := self._look().status) not in TERMINAL:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the batch is still {status}")
            time.sleep(LOOK_S)


@contextmanager
def batch_running(url: str, num_lines: int, tokens: int) -> Iterator[Batch]:
    batch = Batch(url, num_lines, tokens)
    try:
        batch.wait_until_it_runs()
        yield batch
    finally:
        batch.end()


def load(url: str, work: Sequence[Work]) -> list[Outcome]:
    """The answers of a load; RuntimeError if one has failed."""
    body: dict[str, Json] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    made = asyncio.run(offer(url, work, body))
    if bad := [one for one in made if not one.is_good]:
        raise RuntimeError(f"{len(bad)} of {len(made)} requests failed, the first with {bad[0].error or bad[0].status}")
    return made


def measure(url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    work = make_work(arguments.rate, arguments.seconds, tokens=[arguments.tokens], weights=[1.0], seed=arguments.seed)
    load(url, make_work(4, 5, tokens=[arguments.tokens], weights=[1.0], seed=99))  # warms up
    outcomes: dict[str, list[Outcome]] = {"online": [], "both": []}
    rates: dict[str, list[float]] = {"batch": [], "both": [], "online": [], "online beside": []}

    def online(phase: str) -> float:
        made = load(url, work)
        outcomes[phase] += made
        found = figures(made, slo_ttft_s=NO_SLO_S, slo_tpot_s=NO_SLO_S)
        print(json.dumps({"phase": phase} | asdict(found)), file=sys.stderr, flush=True)
        return found.output_throughput

    def with_batch(phase: str, batch: Batch) -> None:
        began = time.perf_counter()
        if phase == "both":
            rates["online beside"].append(online("both"))
        else:
            time.sleep(arguments.seconds)
        batch.check_it_runs()
        pace = arguments.tokens * batch.progress.lines_per_s(began, time.perf_counter())
        rates[phase].append(pace)
        print(json.dumps({"phase": phase, "batch_tokens_per_s": pace}), file=sys.stderr, flush=True)

    for turn in range(arguments.rounds):
        if turn % 2 == 0:
            rates["online"].append(online("online"))
        with batch_running(url, arguments.lines, arguments.tokens) as batch:
            for phase in ("batch", "both") if turn % 2 == 0 else ("both", "batch"):
                with_batch(phase, batch)
        if turn % 2:
            rates["online"].append(online("online"))
    return {"rates": rates} | summary(outcomes, rates)


def summary(outcomes: dict[str, list[Outcome]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of all rounds; `throughput_ratio`: of both together, compared with a batch alone, in each round."""
    ttft = {
        phase: dict(zip(("p50", "p99"), np.percentile([1e3 * one.ttft_s for one in made], [50, 99]), strict=True))
        for phase, made in outcomes.items()
    }
    sums = zip(rates["both"], rates["online beside"], rates["batch"], strict=True)
    ratios = [(beside + online) / alone for beside, online, alone in sums]
    return {
        "requests": {phase: len(made) for phase, made in outcomes.items()},
        "ttft_ms": ttft,
        "ttft_ratio": {name: ttft["both"][name] / ttft["online"][name] for name in ("p50", "p99")},
        "throughput_ratio": {"median": median(ratios), "rounds": ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests per second")
    parser.add_argument("--tokens", type=int, default=32, help="of every answer")
    parser.add_argument("--lines", type=int, default=50_000, help="of a batch, which must outlast its phases")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of the application")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        args = ARGS | {"storage.path": folder} | dict(map(read_override, arguments.overrides))
        system = System(name="batches", args=args)
        source = str(args.pop("model.source", DEMO))
        with started(system, source, ServeBenchConfig(systems=(system,))) as url:
            found = measure(url, arguments)
    print(
        json.dumps(
            provenance(torch.device("cpu"), ("torch", "ray"))
            | vars(arguments)
            | {"source": source, "args": args}
            | found
        )
    )


if __name__ == "__main__":
    main()
