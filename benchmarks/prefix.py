"""What shared prefixes bring: a window decoded with `decode.prefix: auto` and `off`, in turns, as a worker decodes it.

Random weights, greedy but for the samples. `head`: documents behind one head of few-shot examples. `samples`: eight
samples at temperature 1 of each document. `nested`: both. `none`: nothing is shared. The ratio of rows per second is
taken within each round and is beside what the cost model predicts. Every round draws other tokens, so that no cache of
a peer knows them. The last line on stdout is one JSON document.

    python -m benchmarks.prefix --output benchmarks/results/x.json
    python -m benchmarks.prefix --corpora head --model FOLDER --vllm-python .venv-vllm/bin/python

With `--model` (a folder in Hugging Face layout) the peer is vLLM with its prefix caching, for greedy corpora: the same
tokens in, as many out. Not here: Ray, files, text.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actors.batching.buckets import PlannedBatch, cut_batches
from actors.batching.shared_prefixes import PrefillCosts, cut_with_shared_prefixes
from actors.ceilings import measure_ceilings
from actors.generator_config import GeneratorConfig
from actors.measuring.bench import random_model
from actors.memory import MAX_BATCH_ROWS
from benchmarks.peer_engines import Spec
from benchmarks.peer_worker import Contestant, PeerError
from pipeline.cluster.machine import provenance
from pipeline.cluster.pool import num_cores
from skipdecode.backends.device import backend_on
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.engine.generate import generate
from skipdecode.engine.prefix_sharing import PrefixSharing, share_prefixes
from skipdecode.engine.request import Request
from skipdecode.families import released
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import choose_dtype, dtype_name
from skipdecode.schedules.schedule import FullDepth

BUCKETS = GeneratorConfig("", {}).length_buckets


@dataclass(frozen=True)
class Corpus:
    documents: int
    head: int
    """Tokens that all documents begin with."""
    own: int
    samples: int = 1

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed).randrange
        head = [draw(4, vocabulary) for _ in range(self.head)]
        documents = [head + [draw(4, vocabulary) for _ in range(self.own)] for _ in range(self.documents)]
        return [document for document in documents for _ in range(self.samples)]

    def requests(self, prompts: list[list[int]], num_new: int) -> list[Request]:
        sampling = Sampling(num_new, temperature=1.0 if self.samples > 1 else 0.0, ignore_eos=True)
        return [Request(str(row), prompt, sampling) for row, prompt in enumerate(prompts)]


CORPORA = {
    "head": Corpus(512, 400, 60),
    "samples": Corpus(64, 0, 300, 8),
    "nested": Corpus(64, 400, 60, 8),
    "none": Corpus(512, 0, 300),
}


class Worker:
    """What `actors.generator.Generator` does with a window, for a model of its own."""

    def __init__(self, model: Decoder, ceilings: Ceilings, batch_rows: int, num_new: int) -> None:
        self.model, self.ceilings, self.batch_rows, self.num_new = model, ceilings, batch_rows, num_new
        self.full = FullDepth(model.config.num_hidden_layers)
        self.sizes = {"itemsize": model.dtype.itemsize, "weight_itemsize": model.weight_itemsize}

    def cut(self, requests: list[Request], *, shares: bool) -> list[PlannedBatch]:
        prompts = [request.prompt_tokens for request in requests]
        if shares:
            costs = PrefillCosts.of(self.model.config, self.full, self.ceilings, **self.sizes)
            copies = not self.model.supports_shared_prefix
            found = cut_with_shared_prefixes(prompts, costs, self.num_new - 1, BUCKETS, self._size, copies=copies)
            if found is not None:
                return found
        return cut_batches([len(p) for p in prompts], [None] * len(prompts), BUCKETS, self._size)

    def _size(self, bucket: int, *, prefix_columns: int = 0) -> int:
        return self.batch_rows

    def decode(self, requests: list[Request], *, shares: bool) -> dict[str, float]:
        """Seconds, planning included, as measured and as predicted; bytes of the largest cache."""
        start = time.perf_counter()
        made = dict.fromkeys(("prefill_s", "decode_s", "predicted_s", "prefix_tokens_saved", "cache_mb"), 0.0)
        for batch in self.cut(requests, shares=shares):
            chosen = [requests[row] for row in batch.rows]
            prompts = [request.prompt_tokens for request in chosen]
            sharing = share_prefixes(prompts, batch.prefix_lengths) if batch.prefix_lengths else None
            stats = generate(self.model, chosen, self.full, sharing=sharing).stats
            made["prefill_s"] += stats.prefill_s
            made["decode_s"] += stats.decode_s
            made["prefix_tokens_saved"] += stats.prefix_tokens_saved
            made["cache_mb"] = max(made["cache_mb"], stats.cache_bytes / 1e6)
            made["predicted_s"] += self._predicted(prompts, sharing, stats.batch_rows)
        return made | {"seconds": time.perf_counter() - start}

    def _predicted(self, prompts: list[list[int]], sharing: PrefixSharing | None, batch_rows: list[int]) -> float:
        shape = (
            None
            if sharing is None
            else sharing.shape(
                prompts,
                copies=not self.model.supports_shared_prefix,
                group_rows=backend_on(self.model.device).prefix_group_rows,
            )
        )
        batch = BatchShape(max(map(len, prompts)), batch_rows, rows=len(prompts), shared_prefixes=shape)
        return sum(predict_s(self.model.config, self.full, self.ceilings, batch, **self.sizes))


def compare(worker: Worker, corpus: Corpus, rounds: int, peer: Contestant | None) -> dict[str, Any]:
    """One corpus: medians over the rounds, ratios within each."""
    runs: dict[str, list[dict[str, float]]] = {"auto": [], "off": []}
    peers: list[float] = []
    for number in range(rounds + 1):  # the first is the warm-up
        prompts = corpus.prompts(worker.model.config.vocab_size, seed=number)
        prompts = prompts[: worker.batch_rows] if number == 0 else prompts
        requests = corpus.requests(prompts, worker.num_new)
        order = ("auto", "off") if number % 2 else ("off", "auto")
        found = {way: worker.decode(requests, shares=way == "auto") for way in order}
        peer_s = None if peer is None or corpus.samples > 1 else peer.run(prompts, worker.num_new)[0]
        if number == 0:
            continue
        for way, made in found.items():
            runs[way].append(made)
        if peer_s is not None:
            peers.append(peer_s)
        print(f"round {number}: { ({way: round(made['seconds'], 1) for way, made in found.items()}) }", file=sys.stderr)
    rows = corpus.documents * corpus.samples
    result: dict[str, Any] = {"rows": rows} | {
        way: {key: median(run[key] for run in made) for key in made[0]} | {
            "rows_per_s": rows / median(run["seconds"] for run in made)
        }
        for way, made in runs.items()
    }  # fmt: skip
    pairs = list(zip(runs["off"], runs["auto"], strict=True))
    result["speedup"] = median(off["seconds"] / auto["seconds"] for off, auto in pairs)
    result["speedup_range"] = sorted(off["seconds"] / auto["seconds"] for off, auto in pairs)[:: max(1, len(pairs) - 1)]
    result["speedup_predicted"] = median(off["predicted_s"] / auto["predicted_s"] for off, auto in pairs)
    if peers:
        result["vllm_rows_per_s"] = rows / median(peers)
        ratios = [peer_s / run["seconds"] for peer_s, run in zip(peers, runs["auto"], strict=True)]
        result["speedup_over_vllm"] = median(ratios)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--model", help="a folder in Hugging Face layout, in place of a shape")
    parser.add_argument("--vllm-python", help="the interpreter of an environment with vLLM")
    parser.add_argument("--corpora", nargs="+", default=["head", "samples", "none"], choices=sorted(CORPORA))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batch-size", type=int, default=MAX_BATCH_ROWS["cpu"])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="documents of each corpus at most, to try it out")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(num_cores())
    dtype = choose_dtype(args.dtype, torch.device("cpu"))
    name = dtype_name(dtype)
    if args.model:
        model = load_model(args.model, device=torch.device("cpu"), dtype=dtype).pack()
    else:
        model = random_model(released(args.shape), device="cpu", dtype=dtype).pack()
    worker = Worker(model, measure_ceilings("cpu", name), args.batch_size, args.new_tokens)
    document: dict[str, Any] = {
        "model": args.model or args.shape,
        "dtype": name,
        "batch_size": args.batch_size,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        **provenance(model.device),
    }
    with ExitStack() as stack:
        peer = None
        if args.vllm_python and args.model:
            work = stack.enter_context(tempfile.TemporaryDirectory())
            spec = Spec("vllm-prefix", args.model, work, name, "cpu", num_cores(), args.batch_size)
            try:
                peer = stack.enter_context(Contestant(spec, args.vllm_python))
            except PeerError as error:
                document["vllm"] = f"left out: {error}"
        found = {}
        for kind in args.corpora:
            corpus = CORPORA[kind]
            if args.rows:
                corpus = Corpus(min(corpus.documents, args.rows), corpus.head, corpus.own, corpus.samples)
            print(kind, file=sys.stderr)
            found[kind] = compare(worker, corpus, args.rounds, peer)
    document["corpora"] = found
    text = json.dumps(document, indent=2)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
