"""Offline, a corpus whose answers differ in length: fixed batches with compaction against the continuous batch.

Same rows, same schedule, interleaved repeats; the last line on stdout is one JSON document.

    python benchmarks/continuous.py > benchmarks/results/2026-11-22-continuous-e2e-cpu.json
"""

import json
import random
import sys
import time
from statistics import median
from typing import Any

import torch

from pipeline.demo_corpus import make_prompts
from pipeline.machine import provenance
from skipdecode.continuous import generate_continuous
from skipdecode.generate import Request, generate
from skipdecode.plan import FullDepth, Schedule
from skipdecode.sampling import Sampling
from skipdecode.schedule import make_schedule
from skipdecode.weights import load_opt

ROWS, BATCH, REPEATS, MODEL = 256, 32, 5, "models/opt-e2e"
LENGTHS = {"even": ([64], [1.0]), "skewed": ([16, 32, 256], [0.6, 0.3, 0.1])}  # new tokens, shares


def requests_of(model: Any, tokenizer: Any, kind: str) -> list[Request]:
    rng, (lengths, shares) = random.Random(0), LENGTHS[kind]
    prompts = tokenizer.encode([row["prompt"] for row in make_prompts(ROWS, seed=0)])
    return [
        Request(str(n), p, Sampling(rng.choices(lengths, shares)[0], ignore_eos=True)) for n, p in enumerate(prompts)
    ]


def cohorts(model: Any, requests: list[Request], schedule: Schedule) -> tuple[list[list[int]], int]:
    """Batches sorted by prompt length, as the offline job cuts them."""
    order = sorted(range(len(requests)), key=lambda n: len(requests[n].prompt_tokens))
    made: dict[int, list[int]] = {}
    row_steps = 0
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        result = generate(model, [requests[n] for n in chosen], schedule)
        made |= {n: c.tokens for n, c in zip(chosen, result.completions, strict=True)}
        row_steps += result.stats.row_steps
    return [made[n] for n in range(len(requests))], row_steps


def continuous(model: Any, requests: list[Request], schedule: Schedule) -> tuple[list[list[int]], int]:
    order = sorted(range(len(requests)), key=lambda n: len(requests[n].prompt_tokens))
    rows, batch = generate_continuous(model, [requests[n] for n in order], schedule, max_rows=BATCH)
    made = {n: row.tokens for n, row in zip(order, rows, strict=True)}
    return [made[n] for n in range(len(requests))], batch.row_steps


def main() -> None:
    from actors.tokenizer import OPTTokenizer

    torch.set_num_threads(2)
    model = load_opt(MODEL)
    tokenizer = OPTTokenizer(MODEL, model.config)
    schedules: dict[str, Schedule] = {"full": FullDepth(24)}
    for speedup in (2, 3, 5):
        decode = {"method": "skipdecode", "speedup": speedup, "horizon": 63}
        schedules[f"skipdecode {speedup}"] = make_schedule(decode, num_layers=24, max_new_tokens=64)
    rows = []
    for kind in LENGTHS:
        requests = requests_of(model, tokenizer, kind)
        for name, schedule in schedules.items():
            runs: dict[str, list[float]] = {"cohorts": [], "continuous": []}
            tokens: dict[str, Any] = {}
            steps = {}
            for repeat in range(REPEATS):
                pair = [("cohorts", cohorts), ("continuous", continuous)]
                for way, run in pair if repeat % 2 else pair[::-1]:
                    start = time.perf_counter()
                    tokens[way], steps[way] = run(model, requests, schedule)
                    runs[way].append(time.perf_counter() - start)
            same = sum(a == b for a, b in zip(tokens["cohorts"], tokens["continuous"], strict=True))
            ratios = [a / b for a, b in zip(runs["cohorts"], runs["continuous"], strict=True)]
            total = sum(map(len, tokens["cohorts"]))
            row = {
                "lengths": kind,
                "schedule": name,
                "rows": ROWS,
                "batch": BATCH,
                "new_tokens": total,
                "equal_rows": same,
                "row_steps": steps,
                "tokens_per_s": {way: total / median(seconds) for way, seconds in runs.items()},
                "continuous_over_cohorts": {"median": median(ratios), "low": min(ratios), "high": max(ratios)},
            }
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps(provenance(torch.device("cpu")) | {"model": MODEL, "dtype": "float32", "rows": rows}))


if __name__ == "__main__":
    main()
