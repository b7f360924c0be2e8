"""What each part of batching brings, offline: sorting by length, dropping ended rows, the continuous batch, the cache.

The same rows decoded in several ways, in turns; OPT-125m shape, random weights. `job` is what the offline job does with
a window. `even`: prompts and answers of one length each; `skewed`: prompts of 16 to 256 tokens, one answer in ten of
256 and six in ten of 16. The last line on stdout is one JSON document.

    python -m benchmarks.batching --output benchmarks/results/x.json
"""

import argparse
import datetime
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.measuring.bench import random_model
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.families import released
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule

SHAPE, ROWS, BATCH, HORIZON = "opt-125m", 256, 64, 63
LENGTHS = {"even": ([64], [1.0]), "skewed": ([16, 32, 256], [0.6, 0.3, 0.1])}  # new tokens, shares


def requests_of(kind: str, vocabulary: int) -> list[Request]:
    rng, (lengths, shares) = random.Random(0), LENGTHS[kind]
    columns = [64] if kind == "even" else [16, 32, 64, 128, 256]
    return [
        Request(
            str(row),
            [rng.randrange(4, vocabulary) for _ in range(rng.choice(columns))],
            Sampling(rng.choices(lengths, shares)[0], ignore_eos=True),
        )
        for row in range(ROWS)
    ]


def in_batches(
    model: Decoder, requests: list[Request], schedule: Schedule, *, is_sorted: bool = True, compact: bool = True
) -> int:
    """Fixed batches, by prompt length as the offline job cuts a window; new tokens made."""
    if is_sorted:
        requests = sorted(requests, key=lambda request: len(request.prompt_tokens))
    parts = [requests[at : at + BATCH] for at in range(0, len(requests), BATCH)]
    return sum(generate(model, part, schedule, compact=compact).stats.output_tokens for part in parts)


def continuously(model: Decoder, requests: list[Request], schedule: Schedule) -> int:
    requests = sorted(requests, key=lambda request: len(request.prompt_tokens))
    return generate_continuous(model, requests, schedule, max_rows=BATCH).stats.output_tokens


WAYS: dict[str, Callable[[Decoder, list[Request], Schedule], int]] = {
    "job": in_batches,
    "not sorted": lambda *args: in_batches(*args, is_sorted=False),
    "ended rows kept": lambda *args: in_batches(*args, compact=False),
    "continuous": continuously,
}


def compare(model: Decoder, kind: str, name: str, schedule: Schedule, repeats: int) -> dict[str, Any]:
    requests = requests_of(kind, model.config.vocab_size)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    made: dict[str, int] = {}
    for repeat in range(repeats):
        apply_rotary = list(WAYS)[repeat % len(WAYS) :] + list(WAYS)[: repeat % len(WAYS)]
        for way in apply_rotary:
            start = time.perf_counter()
            made[way] = WAYS[way](model, requests, schedule)
            seconds[way].append(time.perf_counter() - start)
    assert len(set(made.values())) == 1, made
    ratios = {way: [s / job for s, job in zip(own, seconds["job"], strict=True)] for way, own in seconds.items()}
    shape = {"prompt_columns": 64, "num_new": 64, "itemsize": model.dtype.itemsize}
    full = FullDepth(model.config.num_hidden_layers)
    row = {
        "lengths": kind,
        "schedule": name,
        "new_tokens": made["job"],
        "tokens_per_s": {way: made[way] / median(own) for way, own in seconds.items()},
        "time_over_job": {way: [median(own), min(own), max(own)] for way, own in ratios.items()},
        "rows_in_the_memory_of_one_at_full_depth": cache_bytes_per_row(model.config, full, **shape)
        / cache_bytes_per_row(model.config, schedule, **shape),
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", choices=list(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(num_cores())
    device = torch.device("cpu")
    dtype = choose_dtype("auto", device)
    model = random_model(released(SHAPE), device="cpu", dtype=dtype).pack()
    layers = model.config.num_hidden_layers
    schedules: dict[str, Schedule] = {"full": FullDepth(layers)}
    decode = {"method": "skipdecode", "speedup": 2, "horizon": HORIZON}
    schedules["skipdecode 2x"] = make_schedule(decode, num_layers=layers, max_new_tokens=64)
    for schedule in schedules.values():
        in_batches(model, requests_of("even", model.config.vocab_size)[:BATCH], schedule)  # warm up
    document = provenance(device) | {
        "date": datetime.date.today().isoformat(),
        "shape": SHAPE,
        "dtype": dtype_name(dtype),
        "rows": ROWS,
        "batch": BATCH,
        "results": [
            compare(model, kind, name, schedule, arguments.repeats)
            for kind in arguments.lengths
            for name, schedule in schedules.items()
        ],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
