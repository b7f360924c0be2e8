"""What a batch costs the online requests beside it, and what both get out of the machine together.

    python -m benchmarks.batches_beside_online --rounds 3 --seconds 60 --rate 2 [key=value ...]

One application of Ray Serve with a storage. Each round has three phases, in turns: `online`, an open load of streamed
completions with no batch in the queue; `batch`, a batch alone; `both`, the same load beside the batch. Requests arrive
as those of many users who do not know of each other do: by a Poisson process, whatever the server does; a time to the
first token counts from when its request was due. All answers have the same number of tokens.

Measured are p50 and p99 of the load's time to the first token, over the requests of all rounds, and a batch's output
tokens per second, by the files of rows that came in the phase. Nobody asks for the batch meanwhile: files and their
times are read from the storage afterwards. `key=value` are dotted keys of the application.
The last line on stdout is one JSON document.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import openai
import pyarrow.parquet as pq
import torch

from pipeline.batches.status import TERMINAL
from pipeline.bench.load import Outcome, Work, figures, make_work, offer
from pipeline.bench.service import ServeBenchConfig, System, started
from pipeline.cluster.machine import provenance
from pipeline.config.tree import read_override
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.formatting import Json
from skipdecode.checkpoint.hub import DEMO

LOOK_S = 1.0
PATIENCE_S = 600.0
MIN_LINES = 256  # answered before a batch counts as running
NO_SLO_S = 1e9
ARGS: dict[str, Json] = {"batches.actors.batch_size": 64, "batches.actors.window_batches": 1}


class Batch:
    """A batch of so many lines."""

    def __init__(self, url: str, storage: Path, num_lines: int, tokens: int) -> None:
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
        self._id = made.id
        (record,) = storage.glob(f"*/batches/{made.id}.json")
        self.data = record.with_suffix("") / "data" / "status=ok"

    def _look(self) -> Any:
        return self._client.batches.retrieve(self._id)

    def wait_until_it_runs(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (batch := self._look()).request_counts.completed < MIN_LINES:
            if batch.status in TERMINAL or time.monotonic() > deadline:
                raise RuntimeError(f"the batch does not run: {batch.status}, {batch.errors}")
            time.sleep(LOOK_S)

    def check_it_runs(self) -> None:
        if (status := self._look().status) != "in_progress":
            raise RuntimeError(f"the batch is {status} before the end of the phase; give more --lines")

    def end(self) -> None:
        self._client.batches.cancel(self._id)
        deadline = time.monotonic() + PATIENCE_S
        while (status := self._look().status) not in TERMINAL:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the batch is still {status}")
            time.sleep(LOOK_S)


def lines_per_s(folder: Path, began: float, ended: float) -> float:
    """The slope of a straight line through rows over time, at the files of rows of a phase (seconds since 1970);
    ValueError if there are no two. Windows that a replica decodes side by side come home in bursts, so neither the
    first file nor the last may decide.
    """
    times = sorted((path.stat().st_mtime, path) for path in folder.glob("*.parquet"))
    inside = [(at, path) for at, path in times if began <= at <= ended]
    if len(inside) < 2:
        raise ValueError(f"{len(inside)} files of rows came in {ended - began:.0f} s; give --seconds for several")
    arrived = [at - began for at, _ in inside]
    rows = np.cumsum([pq.read_metadata(path).num_rows for _, path in inside])
    return float(np.polyfit(arrived, rows, 1)[0])


@contextmanager
def batch_running(url: str, storage: Path, num_lines: int, tokens: int) -> Iterator[Batch]:
    batch = Batch(url, storage, num_lines, tokens)
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


def measure(url: str, storage: Path, arguments: argparse.Namespace) -> dict[str, Any]:
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
        began = time.time()
        if phase == "both":
            rates["online beside"].append(online("both"))
        else:
            time.sleep(arguments.seconds)
        batch.check_it_runs()
        pace = arguments.tokens * lines_per_s(batch.data, began, time.time())
        rates[phase].append(pace)
        print(json.dumps({"phase": phase, "batch_tokens_per_s": pace}), file=sys.stderr, flush=True)

    for turn in range(arguments.rounds):
        if turn % 2 == 0:
            rates["online"].append(online("online"))
        with batch_running(url, storage, arguments.lines, arguments.tokens) as batch:
            for phase in ("batch", "both") if turn % 2 == 0 else ("both", "batch"):
                with_batch(phase, batch)
        if turn % 2:
            rates["online"].append(online("online"))
    return {"rates": rates} | summary(outcomes, rates)


def summary(outcomes: dict[str, list[Outcome]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """The figures of all rounds; `throughput_ratio`: of both together, compared with a batch alone, in each round;
    `late_p99_ms`: how late requests were sent, which is the fault of this program."""
    ttft = {
        phase: dict(zip(("p50", "p99"), np.percentile([1e3 * one.ttft_s for one in made], [50, 99]), strict=True))
        for phase, made in outcomes.items()
    }
    late = {
        phase: 1e3 * float(np.percentile([one.sent_s - one.work.due_s for one in made], 99))
        for phase, made in outcomes.items()
    }
    sums = zip(rates["both"], rates["online beside"], rates["batch"], strict=True)
    ratios = [(beside + online) / alone for beside, online, alone in sums]
    return {
        "requests": {phase: len(made) for phase, made in outcomes.items()},
        "late_p99_ms": late,
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
            found = measure(url, Path(str(args["storage.path"])), arguments)
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
