"""What keys and values, and weights, in FP8 do to the tokens of a model: `python -m benchmarks.fp8_agreement`.

Greedy bfloat16 answers of one model, plain and with FP8, on a CPU: the CUDA back end with torch's operators in place of
its kernels, which round the same numbers. It says nothing about speed. Prints one JSON document.

The demo model gets prompts of its own. `--questions` are asked through the model's chat template, or as they are where
it has none, and the answers that come with them give a perplexity:

    python -m benchmarks.fp8_agreement --model MODEL --questions gsm8k/test.jsonl
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from actors.templates.chat_template_files import load_chat_template
from benchmarks.gpu.corpus import DECODES
from benchmarks.gpu.fp8_checks import KINDS, agreement, answers
from pipeline.cluster.machine import provenance
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends import device
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.prefill import allocate_cache, feed_prompts, pad_prompts
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth

IGNORE = -100
"""What stands behind a response that is shorter than others."""

Item = TypeVar("Item")
Pair = tuple[list[int], list[int]]
"""A prompt and a response."""


@torch.inference_mode()
def perplexity(model: Decoder, pairs: Sequence[Pair], rows: int) -> float:
    """Of the responses at full depth.

    Each token is fed by a decode step, so that it sees the keys and values of a cache. A teacher-forced pass has none.
    """
    full, nats, count = FullDepth(model.config.num_hidden_layers), 0.0, 0
    for batch in batches(pairs, rows):
        longest = max(len(response) for _, response in batch)
        requests = [Request(str(at), prompt, Sampling(longest)) for at, (prompt, _) in enumerate(batch)]
        tokens, num_pad, num_pad_host = pad_prompts(model, requests, None, None)
        cache = allocate_cache(model, num_pad, tokens.shape[1], full, longest, num_pad_host=num_pad_host)
        targets = torch.tensor([[*response, *[IGNORE] * (longest - len(response))] for _, response in batch])
        logits = feed_prompts(model, tokens, cache, full.prefill())
        for k, wanted in enumerate(targets.unbind(dim=1)):  # [B]
            nats += float(F.cross_entropy(logits.float(), wanted, ignore_index=IGNORE, reduction="sum"))
            if k + 1 < longest:
                fed = wanted.clamp(min=0)[:, None]
                logits = model(fed, cache.next_positions[:, None], cache, full.step(k))
        count += sum(len(response) for _, response in batch)
    return math.exp(nats / count)


def batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for at in range(0, len(items), size):
        yield items[at : at + size]


def question_pairs(source: str | Path, questions: Path, count: int) -> list[Pair]:
    """The first questions of a file, as the model is asked them, and their answers."""
    config = read_config(source)
    tokenizer, template = Tokenizer(source, config), load_chat_template(source, config.tokenizer_rules)
    rows = [json.loads(line) for line in questions.read_text(encoding="utf-8").splitlines()[:count]]
    if template is None:
        texts, encode = [f"{row['question']}\n" for row in rows], tokenizer.encode
    else:
        now, encode = datetime.now(UTC), tokenizer.encode_rendered
        texts = [template.render([{"role": "user", "content": row["question"]}], now=now) for row in rows]
    whole = encode([text + row["answer"] for text, row in zip(texts, rows, strict=True)])
    prompts = encode(texts)
    return [(prompt, tokens[len(prompt) :]) for prompt, tokens in zip(prompts, whole, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/opt-e2e")
    parser.add_argument("--questions", type=Path, help="JSONL with `question` and `answer` (GSM8K)")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=50, help="of a batch")
    given = parser.parse_args()
    device.CPU = CudaBackend(TorchKernels())  # type: ignore[assignment]
    source = resolve_source(given.model)
    pairs: list[Pair] = []
    if given.questions is None:
        texts = [str(row["prompt"]) for row in make_prompts(given.prompts)]
        prompts = Tokenizer(source, read_config(source)).encode(texts)
    else:
        pairs = question_pairs(source, given.questions, given.prompts)
        prompts = [prompt for prompt, _ in pairs]
    found: dict[str, dict[str, Any]] = {}
    plain: dict[str, list[list[int]]] = {}
    for name, kind in KINDS.items():
        print(name, file=sys.stderr, flush=True)
        model = load_model(source, dtype=torch.bfloat16).pack(**kind)
        found[name] = {}
        for title, decode in DECODES.items():
            layers = model.config.num_hidden_layers
            schedule = make_schedule(decode, num_layers=layers, max_new_tokens=given.new_tokens)
            parts = [answers(model, part, schedule, given.new_tokens) for part in batches(prompts, given.rows)]
            made = [tokens for part in parts for tokens in part]
            found[name][title] = agreement(made, plain.setdefault(title, made))
        if pairs:
            found[name]["perplexity"] = perplexity(model, pairs, given.rows)
        print(json.dumps(found[name]), file=sys.stderr, flush=True)
    document = {"model": given.model, "prompts": len(prompts), "new_tokens": given.new_tokens, "agreement": found}
    print(json.dumps(document | provenance(torch.device("cpu")), indent=1))


if __name__ == "__main__":
    main()
