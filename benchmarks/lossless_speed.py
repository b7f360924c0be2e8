"""Lossless decoding beside full depth, both as a run decodes: tokens per second, acceptance, rounds by outcome.

Batch by batch, in turns.

`demo`: the demo model on generated prompts, with its own drafts. `own`: any checkpoint (`--source`, `--adapter`) on the
prompts of a JSONL file, with the drafts that it carries or `--draft`. `opt-1.3b` and `tinyllama-1.1b`: random weights
in these shapes, whose drafts are scripted: a drafted token is that of full depth with probability ACCEPTED, else
another; the passes that make it run all the same. Each round takes other prompts, as a run does. The last line on
stdout is one JSON document.

    python -m benchmarks.lossless_speed --models demo opt-1.3b tinyllama-1.1b --output benchmarks/results/x.json
    python -m benchmarks.lossless_speed --models own --source MODEL --prompts FILE --draft '{"method": ...}'
"""

import argparse
import datetime
import json
import random
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from actors.ceilings import measure_ceilings
from actors.measuring.bench import random_model
from actors.memory import freeze_gc
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from pipeline.demo.restaurant_prompts import make_prompts
from pipeline.report.drafts import ROUNDS
from skipdecode.checkpoint.hub import DEMO
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.generate import refill
from skipdecode.engine.request import Request
from skipdecode.engine.results import DRAFT_KINDS, BatchResult
from skipdecode.families import config_of, released
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.lossless import Lossless, stored_drafts
from skipdecode.schedules.schedule import FullDepth
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.draft import Draft
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.speculative_batch import SpeculativeBatch

ACCEPTED, PROMPT_TOKENS = 0.93, 64
TINYLLAMA = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
BATCHES = {"demo": (1, 8, 32), "own": (1, 4, 8, 16), "opt-1.3b": (1, 4, 8, 16), "tinyllama-1.1b": (1, 4, 8, 16)}
WAYS = {
    "4 drafts": {"lossless": True, "draft_tokens": 4},
    "true": {"lossless": True},
    "auto": {"lossless": "auto"},
}
DRAFT = {"method": "skipdecode", "max_layers": 4, "min_layers": 4}
SCRIPTED = ("opt-1.3b", "tinyllama-1.1b")


class Scripted(SpeculativeBatch):
    """Drafts that are those of `wanted` (tokens by id) as often as a tuned model's would be."""

    wanted: dict[str, list[int]]
    rng: random.Random

    def _scripted(self, drafts: Sequence[Draft], made: Tensor) -> Tensor:
        scripted = []
        for draft in drafts:
            tokens, k = self.wanted[draft.member.row.request.id], draft.step + draft.num_drafted + 1
            token = tokens[k] if k < len(tokens) else 0
            scripted.append(token if self.rng.random() < ACCEPTED else (token + 1) % self.model.config.vocab_size)
        return torch.tensor(scripted)


def model_and_requests(
    name: str, dtype: torch.dtype, rows: int, given: argparse.Namespace
) -> tuple[Decoder, list[Request]]:
    sampling = Sampling(given.new_tokens, given.temperature, ignore_eos=name in SCRIPTED)
    if name == "demo":
        model = load_model(DEMO, device="cpu", dtype=dtype)
        prompts = [str(row["prompt"]) for row in make_prompts(rows)]
        tokens = Tokenizer(DEMO, model.config).encode(prompts)
    elif name == "own":
        model = load_model(given.source, adapter=given.adapter, device="cpu", dtype=dtype)
        prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text(encoding="utf-8").splitlines()]
        tokens = Tokenizer(given.source, model.config).encode(prompts[:rows])
    else:
        shape = config_of(TINYLLAMA) if name == "tinyllama-1.1b" else released(name)
        model = random_model(shape, device="cpu", dtype=dtype)
        rng = random.Random(0)
        tokens = [[rng.randrange(4, shape.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    return model.pack(), [Request(str(i), prompt, sampling) for i, prompt in enumerate(tokens)]


def decode(
    model: Decoder, requests: Sequence[Request], controller: SpeculationController, wanted: dict[str, list[int]]
) -> BatchResult:
    """`wanted`: of full depth, for scripted drafts; none: the model's own drafts."""
    kind = Scripted if wanted else SpeculativeBatch
    batch = kind(model, controller.schedule, controller=controller)
    if isinstance(batch, Scripted):
        batch.wanted, batch.rng = wanted, random.Random(0)
    return refill(batch, requests, max_rows=len(requests))


def compare(
    name: str,
    model: Decoder,
    pool: list[Request],
    rows: int,
    ceilings: Ceilings,
    repeats: int,
    draft: dict[str, Any],
    ways: Sequence[str],
) -> list[dict[str, Any]]:
    """Batches of so many `rows`, each of the next of the pool; `ways` of WAYS."""
    most_new, layers = pool[0].sampling.max_new_tokens, model.config.num_hidden_layers
    full = FullDepth(layers)

    def at_full_depth(requests: Sequence[Request]) -> BatchResult:
        return refill(ContinuousBatch(model, full), requests, max_rows=len(requests))

    results: dict[str, list[BatchResult]] = {"full": [], **{way: [] for way in ways}}
    controllers: dict[str, SpeculationController] = {}
    for way in ways:
        schedule = make_schedule(draft | WAYS[way], num_layers=layers, max_new_tokens=most_new)
        assert isinstance(schedule, Lossless)
        controllers[way] = SpeculationController(schedule, LatencyModel.of(model, ceilings))
    wanted: dict[str, list[int]] = {}
    for repeat in range(repeats):
        requests = pool[repeat * rows : (repeat + 1) * rows]
        if name in SCRIPTED:
            alone = at_full_depth(requests).completions
            wanted = {request.id: text.tokens for request, text in zip(requests, alone, strict=True)}
        elif not repeat:
            at_full_depth(requests)  # warms up
        for way in list(results)[repeat % len(results) :] + list(results)[: repeat % len(results)]:
            made = at_full_depth(requests) if way == "full" else decode(model, requests, controllers[way], wanted)
            results[way].append(made)
    return [_line(name, way, results["full"], results[way]) for way in ways]


def _line(name: str, way: str, full: list[BatchResult], ours: list[BatchResult]) -> dict[str, Any]:
    rates = [median((r.stats.output_tokens - r.stats.rows) / r.stats.decode_s for r in own) for own in (full, ours)]
    every: list[Any] = [result.stats for result in ours]
    counts = [zip_longest(*(getattr(s, name) for s in every), fillvalue=0) for name in ("accepted_at", "drafted_at")]
    accepted, drafted = (list(map(sum, count)) for count in counts)
    pairs = [pair for a, b in zip(full, ours, strict=True) for pair in zip(a.completions, b.completions, strict=True)]
    line = {
        "model": name,
        "batch": every[-1].rows,
        "drafts": way,
        "full_tokens_per_s": rates[0],
        "tokens_per_s": rates[1],
        "speedup": sum(a.stats.decode_s for a in full) / sum(b.stats.decode_s for b in ours),
        "speedups": [a.stats.decode_s / b.stats.decode_s for a, b in zip(full, ours, strict=True)],
        "rows": len(pairs),
        "rows_equal": sum(a.tokens == b.tokens for a, b in pairs),
        "tokens_per_pass": sum(s.output_tokens - s.rows for s in every) / sum(s.row_steps for s in every),
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "drafted_by": {kind: sum(s.drafted_by[at] for s in every) for at, kind in enumerate(DRAFT_KINDS)},
        "accepted_by": {kind: sum(s.accepted_by[at] for s in every) for at, kind in enumerate(DRAFT_KINDS)},
        "rounds": {outcome: sum(getattr(s, f"{outcome}_rounds") for s in every) for outcome in ROUNDS},
        "draft_s": sum(s.draft_s for s in every),
        "verify_s": sum(s.verify_s for s in every),
    }
    print(json.dumps(line), file=sys.stderr, flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(BATCHES), default=["demo", *SCRIPTED])
    parser.add_argument("--source", help="of `own`: a checkpoint")
    parser.add_argument("--adapter", help="of `own`: a LoRA folder")
    parser.add_argument("--prompts", type=Path, help="of `own`: JSONL with `prompt`")
    parser.add_argument("--draft", type=json.loads, help="of `own`: a `decode:` mapping, in place of what it carries")
    parser.add_argument("--batches", nargs="+", type=int, help="instead of those of each model")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="to draft")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64, help="of a row at most")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if "own" in arguments.models and not (arguments.source and arguments.prompts):
        parser.error("--models own needs --source and --prompts")
    torch.set_num_threads(num_cores())
    device = torch.device("cpu")
    dtype = choose_dtype(arguments.dtype, device)
    kind = dtype_name(dtype)
    ceilings, results = measure_ceilings("cpu", kind), list[dict[str, Any]]()
    for name in arguments.models:
        batches = arguments.batches or BATCHES[name]
        num_requests = max(batches) * arguments.repeats
        model, pool = model_and_requests(name, dtype, num_requests, arguments)
        freeze_gc()  # as a worker does
        if len(pool) < num_requests:
            parser.error(f"--prompts: {arguments.prompts} has {len(pool)}, and {num_requests} are asked for")
        draft = DRAFT
        if name == "own":
            carried = stored_drafts(model.config)
            draft = arguments.draft or (carried.decode if carried else DRAFT)
        for batch in batches:
            results += compare(name, model, pool, batch, ceilings, arguments.repeats, draft, arguments.ways)
        del model
    document = provenance(device) | {
        "date": datetime.date.today().isoformat(),
        "dtype": kind,
        "new_tokens": arguments.new_tokens,
        "temperature": arguments.temperature,
        "scripted_acceptance": ACCEPTED,
        "own": {key: str(getattr(arguments, key)) for key in ("source", "adapter", "prompts", "draft")},
        "results": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
