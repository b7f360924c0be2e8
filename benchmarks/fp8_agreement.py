"""What keys and values, and weights, in FP8 do to the tokens of a model: `python -m benchmarks.fp8_agreement`.

Greedy bfloat16 answers of one model, plain and with FP8, on a CPU: the CUDA back end with torch's operators in place of
its kernels, which round the same numbers. It says nothing about speed. Prints one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from pipeline.cluster.machine import provenance
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends import device
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.schedules.from_config import make_schedule

KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8 keys and values": {"kv_cache_dtype": "fp8"},
    "fp8 weights": {"quantization": "fp8"},
    "both": {"kv_cache_dtype": "fp8", "quantization": "fp8"},
}
SCHEDULES: dict[str, dict[str, Any]] = {"full depth": {"method": "full"}, "2x": {"method": "skipdecode", "speedup": 2}}


def answers(
    source: str,
    kind: dict[str, Any],
    schedules: Sequence[dict[str, Any]],
    texts: Sequence[str],
    num_new: int,
    rows: int,
) -> list[list[list[int]]]:
    """The tokens of each answer, by schedule."""
    folder = resolve_source(source)
    model = load_model(folder, dtype=torch.bfloat16).pack(**kind)
    prompts = Tokenizer(folder, model.config).encode(texts)
    sampling, found = Sampling(max_new_tokens=num_new), []
    for decode in schedules:
        schedule = make_schedule(decode, num_layers=model.config.num_hidden_layers, max_new_tokens=num_new)
        made: list[list[int]] = []
        for at in range(0, len(prompts), rows):
            batch = [Request(str(at + i), prompt, sampling) for i, prompt in enumerate(prompts[at : at + rows])]
            made += [completion.tokens for completion in generate(model, batch, schedule).completions]
        found.append(made)
    return found


def agreement(made: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]) -> dict[str, float]:
    """The share of answers that are the same, and the mean share of an answer before it first differs."""
    same = sum(list(a) == list(b) for a, b in zip(made, plain, strict=True))
    first = [next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))) / len(b)
             for a, b in zip(made, plain, strict=True)]  # fmt: skip
    return {"same": same / len(made), "before_first_difference": sum(first) / len(first)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/opt-e2e")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=50)
    given = parser.parse_args()
    device.CPU = CudaBackend(TorchKernels())  # type: ignore[assignment]
    texts = [str(row["prompt"]) for row in make_prompts(given.prompts)]
    found: dict[str, dict[str, dict[str, float]]] = {}
    plain: list[list[list[int]]] = []
    for name, kind in KINDS.items():
        print(name, file=sys.stderr)
        made = answers(given.model, kind, list(SCHEDULES.values()), texts, given.new_tokens, given.rows)
        plain = plain or made
        found[name] = {
            schedule: agreement(own, other) for schedule, own, other in zip(SCHEDULES, made, plain, strict=True)
        }
    print(
        json.dumps(
            {"model": given.model, "prompts": given.prompts, "agreement": found} | provenance(torch.device("cpu")),
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
