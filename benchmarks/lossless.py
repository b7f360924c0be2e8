"""Lossless decoding beside full depth: tokens per second, acceptance, and what was expected; in turns.

Expected goes by passes that are timed one by one, in rounds with drafts, by the acceptance that was seen, by where rows
end, and by what a batch's first steps or rounds take more (`lossless_expected`). Passes are timed in turns with the
batches, and count by medians, as these do. A machine drifts: each part of the batches is expected by the passes beside
it. `by_cost_model` is what the ceilings of the machine alone say, without the host's work.

`demo`: the demo model on made prompts, with its own drafts. `own`: likewise any checkpoint (`--source`, `--adapter`),
on the prompts of a JSONL file, with the drafts that it carries or `--draft`. Each round takes other prompts, as a run
does. `opt-1.3b` and `tinyllama-1.1b`: random weights in these shapes, whose drafts are scripted: a drafted token is
that of full depth with probability ACCEPTED, else another; the passes that make it run all the same. The last line on
stdout is one JSON document.

    python -m benchmarks.lossless --models demo opt-1.3b tinyllama-1.1b --output benchmarks/results/x.json
    python -m benchmarks.lossless --models own --source MODEL --adapter ADAPTER --prompts FILE --draft '{"method": ...}'
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

from actors.measuring.bench import random_model
from actors.measuring.draft_times import VERIFIED, time_drafts, time_steps
from actors.memory import freeze_gc
from benchmarks.lossless_expected import Part, Typical
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from pipeline.demo.corpus import make_prompts
from skipdecode.checkpoint.hub import DEMO
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import BatchShape, Ceilings, measure_ceilings, predict_s
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import now
from skipdecode.families import config_of, released
from skipdecode.model.decoder import Decoder
from skipdecode.model.pipeline_parallel import choose_dtype, dtype_name
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.lossless import Lossless, stored_drafts
from skipdecode.schedules.plan import FullDepth
from skipdecode.speculative.draft import Chain
from skipdecode.speculative.draft_length import MOST, DraftLength
from skipdecode.speculative.generate import run_to_the_end
from skipdecode.speculative.latency_model import Prices
from skipdecode.speculative.speculative_batch import SpeculativeBatch

ACCEPTED, PROMPT_TOKENS = 0.93, 64
PARTS = 9  # of all batches
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


class Scripted(SpeculativeBatch):
    """Drafts that are those of `wanted` (tokens by id) as often as a tuned model's would be."""

    wanted: dict[str, list[int]]
    rng: random.Random

    def _drafted(self, chains: Sequence[Chain], made: Tensor) -> Tensor:
        drafts = []
        for chain in chains:
            tokens, k = self.wanted[self._members[chain.at].row.request.id], chain.k + chain.num_drafts + 1
            token = tokens[k] if k < len(tokens) else 0
            drafts.append(token if self.rng.random() < ACCEPTED else (token + 1) % self.model.config.vocab_size)
        return torch.tensor(drafts)


DRAFT = {"method": "skipdecode", "max_layers": 4, "min_layers": 4}
SCRIPTED = ("opt-1.3b", "tinyllama-1.1b")


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
    model: Decoder, requests: Sequence[Request], schedule: Lossless, length: DraftLength, wanted: dict[str, list[int]]
) -> BatchResult:
    """`wanted`: of full depth, for scripted drafts; none: the model's own drafts."""
    kind = Scripted if wanted else SpeculativeBatch
    start = now(model.device)
    batch = kind(model, schedule, length=length, is_closed=True)
    if isinstance(batch, Scripted):
        batch.wanted, batch.rng = wanted, random.Random(0)
    return run_to_the_end(batch, requests, start=start)


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
    most_new = pool[0].sampling.max_new_tokens
    layers = model.config.num_hidden_layers
    full = FullDepth(layers)
    parts = [Part(Typical.of(model, ceilings, keep=None)) for _ in range(min(PARTS, repeats))]
    drafts = make_schedule(draft, num_layers=layers, max_new_tokens=most_new)
    results: dict[str, list[BatchResult]] = {"full": [], **{way: [] for way in ways}}
    lengths: dict[str, tuple[Lossless, DraftLength]] = {}
    for way in ways:
        schedule = make_schedule(draft | WAYS[way], num_layers=layers, max_new_tokens=most_new)
        assert isinstance(schedule, Lossless)
        lengths[way] = schedule, DraftLength(schedule, Prices.of(model, ceilings))
    wanted: dict[str, list[int]] = {}
    sizes = sorted({rows, max(1, rows // 4)})  # as rows end
    for repeat in range(repeats + 1):  # the first warms up
        requests = pool[repeat * rows : (repeat + 1) * rows]
        if name in SCRIPTED:
            alone = generate(model, requests, full).completions
            wanted = {request.id: text.tokens for request, text in zip(requests, alone, strict=True)}
        part = parts[(repeat - 1) * len(parts) // repeats] if repeat else Part(Typical.of(model, ceilings, keep=None))
        part.requests = requests
        prompts, temperature = [request.prompt_tokens for request in requests], requests[0].sampling.temperature
        plain = [time_steps(model, prompts, size, most_new, part.timed, temperature) for size in sizes][-1]
        listed = lengths[ways[-1]][1].vocabulary.tokens()
        for drafted in VERIFIED:  # verifications behind drafts: what these read is no longer in the caches
            given = {"temperature": temperature, "drafted": drafted, "listed": listed}
            more = time_drafts(model, prompts, sizes, most_new, drafts, part.timed, **given)
            part.begun.append((plain, more[rows]))
        order = list(results)[repeat % len(results) :] + list(results)[: repeat % len(results)]
        for way in order if repeat else ["full", *ways]:
            made = generate(model, requests, full) if way == "full" else decode(model, requests, *lengths[way], wanted)
            if repeat:
                results[way].append(made)
                part.made.setdefault(way, []).append(made)
            for size in sizes:  # again: memory may be fast or slow for seconds
                time_steps(model, prompts, size, most_new, part.timed, temperature)
    return [
        _line(name, way, results, ceilings, model, [(part.speedup(way), part.expected(way, *length)) for part in parts])
        for way, length in lengths.items()
    ]


def _line(
    name: str,
    way: str,
    results: dict[str, list[BatchResult]],
    ceilings: Ceilings,
    model: Decoder,
    parts: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    """`parts`: the speedup of each, and what was expected of it."""
    full, ours = results["full"], results[way]
    rates = [median((r.stats.output_tokens - r.stats.rows) / r.stats.decode_s for r in own) for own in (full, ours)]
    speedups = [a.stats.decode_s / b.stats.decode_s for a, b in zip(full, ours, strict=True)]
    every: list[Any] = [result.stats for result in ours]
    stats = every[-1]
    counts = [zip_longest(*(getattr(s, name) for s in every), fillvalue=0) for name in ("accepted_at", "drafted_at")]
    accepted, drafted = (list(map(sum, count)) for count in counts)
    itemsize = model.dtype.itemsize
    _, full_s = predict_s(
        model.config,
        FullDepth(model.config.num_hidden_layers),
        ceilings,
        BatchShape(stats.prompt_columns, stats.batch_rows, stats.rows),
        itemsize=itemsize,
        weight_itemsize=model.weight_itemsize,
    )
    pairs = [pair for a, b in zip(full, ours, strict=True) for pair in zip(a.completions, b.completions, strict=True)]
    line = {
        "model": name,
        "batch": stats.rows,
        "drafts": way,
        "full_tokens_per_s": rates[0],
        "tokens_per_s": rates[1],
        "speedup": median(speedups),
        "expected": median(expected for _, expected in parts),
        "of_expected": median(speedup / expected for speedup, expected in parts),
        "parts": parts,
        "by_cost_model": full_s / stats.model_decode_s,
        "speedups": speedups,
        "rows": len(pairs),
        "rows_equal": sum(a.tokens == b.tokens for a, b in pairs),
        "tokens_per_pass": sum(s.output_tokens - s.rows for s in every) / sum(s.row_steps for s in every),
        "acceptance_by_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
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
    if arguments.new_tokens < 2 * MOST:
        parser.error(f"--new-tokens: at least {2 * MOST}, room for a few drafts")
    if "own" in arguments.models and not (arguments.source and arguments.prompts):
        parser.error("--models own needs --source and --prompts")
    torch.set_num_threads(num_cores())
    device = torch.device("cpu")
    dtype = choose_dtype(arguments.dtype, device)
    kind = dtype_name(dtype)
    ceilings, results = measure_ceilings("cpu", kind), list[dict[str, Any]]()
    for name in arguments.models:
        batches = arguments.batches or BATCHES[name]
        num_requests = max(batches) * (arguments.repeats + 1)
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
