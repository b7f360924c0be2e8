"""A step of full depth whose rows draw, beside the same step where they take the likeliest token; in turns.

Rows of the demo model or of another checkpoint (`--source`) write to made prompts, and end at `--new-tokens`. The last
line on stdout is one JSON document.

    python -m benchmarks.draws --batches 1 8 32
    python -m benchmarks.draws --source MODEL --batches 32 --output benchmarks/results/x.json
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.memory import freeze_gc
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.schedule import FullDepth

WAYS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "and top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "and top_k 50, top_p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}

PROMPTS = 512


def compare(model: Decoder, pool: list[Request], rows: int, repeats: int) -> list[dict[str, Any]]:
    """Batches of so many `rows`, each of the next of the pool, which goes round."""
    full, steps_s = FullDepth(model.config.num_hidden_layers), {way: list[float]() for way in WAYS}
    for repeat in range(repeats + 1):  # the first warms up
        for way, keys in WAYS.items():
            at = [(repeat * rows + row) % len(pool) for row in range(rows)]
            requests = [replace(pool[i], sampling=replace(pool[i].sampling, **keys)) for i in at]
            stats = generate(model, requests, full).stats
            if repeat:
                steps_s[way].append(stats.decode_s / stats.decode_steps)
    lines = []
    for way, own in steps_s.items():
        ratios = [drawn / greedy for drawn, greedy in zip(own, steps_s["greedy"], strict=True)]
        line = {"batch": rows, "way": way, "step_ms": 1e3 * median(own), "over_greedy": median(ratios), "steps_s": own}
        print(json.dumps(line | {"steps_s": len(own)}), file=sys.stderr, flush=True)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="models/opt-e2e", help="a checkpoint")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(num_cores())
    dtype = choose_dtype(arguments.dtype, torch.device("cpu"))
    model = load_model(arguments.source, device="cpu", dtype=dtype).pack()
    prompts = Tokenizer(arguments.source, model.config).encode([str(row["prompt"]) for row in make_prompts(PROMPTS)])
    sampling = Sampling(arguments.new_tokens, ignore_eos=True)
    pool = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    freeze_gc()
    document = provenance(torch.device("cpu")) | {
        "source": Path(arguments.source).name,
        "dtype": dtype_name(dtype),
        "new_tokens": arguments.new_tokens,
        "results": [line for rows in arguments.batches for line in compare(model, pool, rows, arguments.repeats)],
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
