"""The check `corpus`: prompts of mixed lengths and answers that end by themselves, through a worker's `Generator`.

The model has random weights but counts: its layers add next to nothing, and its head answers each token of a chain with
the next one, up to EOS. So the last token of a prompt decides how long the answer is, every token of it is known, and
what a step costs is what it costs any model of that shape.

B rows, M tokens of the longest answer.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from actors.failures import RowFailure
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.measuring.bench import random_model
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import BatchShape, Ceilings, cache_bytes_per_row, plan_parts, predict_s
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth

TOKENIZER = "models/opt-e2e"
FIRST = 4
"""The first token of the chain; those below are special in most vocabularies."""
LAYERS_ADD = 1e-4
"""By which what layers add to a token's state is scaled, so that the head decides alone."""
CORPUS_S = 25.0
"""Seconds that full depth should take, by which the number of rows is chosen."""
MIN_ROWS, MAX_ROWS = 256, 4096
EXPECTED_OF_CEILING = 0.5
"""The share of the ceiling that full depth is expected to reach, for the number of rows alone."""
MIN_OF_CEILING = 0.3
"""The share below which something is wrong; the aim is AIM_OF_CEILING."""
AIM_OF_CEILING = 0.9
DECODES: dict[str, dict[str, Any]] = {"full": {"method": "full"}, "2x": {"method": "skipdecode", "speedup": 2}}


def chain(config: DecoderConfig, longest: int) -> list[int]:
    """The M + 1 tokens that the model counts through, EOS last. ValueError where the vocabulary is too small."""
    (eos, *_), ends = config.eos_token_ids, set(config.eos_token_ids)
    tokens = [token for token in range(FIRST, config.vocab_size) if token not in ends][:longest]
    if len(tokens) < longest:
        raise ValueError(f"a vocabulary of {config.vocab_size} tokens has no chain of {longest}")
    return [*tokens, eos]


@torch.no_grad()
def counting_model(config: DecoderConfig, longest: int, *, device: str, dtype: torch.dtype) -> Decoder:
    """A model of that shape, not packed, whose greedy answers to `counting_prompt` are known."""
    model = random_model(config, device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "norm.bias")) or parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        elif name.endswith(("out_proj.weight", "fc2.weight")):
            parameter.mul_(LAYERS_ADD)
    if model.embed_positions is not None:
        model.embed_positions.weight.zero_()
    head = nn.Linear(config.embed_dim, config.vocab_size, bias=False, device=device, dtype=dtype)
    head.weight.normal_(0.0, 0.02)
    tokens = torch.tensor(chain(config, longest), device=device)
    head.weight[tokens[1:]] = model.embed_tokens.weight[tokens[:-1]]
    model.lm_head = head.requires_grad_(False)
    return model


def counting_prompt(config: DecoderConfig, longest: int, answer: int, front: Sequence[int]) -> list[int]:
    """`front` with a last token for an answer of so many tokens, EOS included."""
    return [*front, chain(config, longest)[longest - answer]]


def counting_requests(context: CheckContext, config: DecoderConfig, rows: int, seed: int = 0) -> list[Request]:
    """Rows with prompts and answers whose lengths are uniform between those of the context."""
    rng, (shortest, longest) = random.Random(context.seed + seed), context.corpus_answers
    tokens, sampling = chain(config, longest), Sampling(max_new_tokens=longest)
    requests = []
    for number in range(rows):
        columns, answer = rng.randint(*context.corpus_prompts), rng.randint(shortest, longest)
        front = [tokens[rng.randrange(longest)] for _ in range(columns - 1)]
        requests.append(Request(str(number), counting_prompt(config, longest, answer, front), sampling))
    return requests


def right_answer(config: DecoderConfig, request: Request) -> list[int]:
    """The tokens that the model counts through behind the prompt."""
    tokens = chain(config, request.sampling.max_new_tokens)
    return tokens[tokens.index(request.prompt_tokens[-1]) + 1 :]


class CorpusGenerator(Generator):
    """A worker's generator, which also keeps how many rows each step had. In a dry run it decodes by graphs too."""

    def __init__(self, config: GeneratorConfig, model: Decoder, context: CheckContext) -> None:
        self.context, self.step_rows = context, list[int]()
        super().__init__(config, model)

    def _make_graphs(self) -> CudaGraphs | None:
        if not self.context.is_dry:
            return super()._make_graphs()
        assert self.context.cache_bytes is not None
        return CudaGraphs(self.model, self.context.cache_bytes, max_rows=max(self.context.rows))

    def _record(self, started_at: float, result: BatchResult) -> dict[str, Any]:
        self.step_rows += result.stats.batch_rows
        return super()._record(started_at, result)


Kind = TypeVar("Kind", bound=CorpusGenerator)


def corpus_generator(context: CheckContext, config: DecoderConfig, kind: type[Kind]) -> Kind:
    """A generator of a counting model at full depth, with all of its memory and graphs."""
    dtype = torch.float32 if context.is_dry else torch.bfloat16
    model = counting_model(config, context.corpus_answers[1], device=str(context.device), dtype=dtype).pack()
    options: dict[str, Any] = {"batch_size": max(context.rows)} if context.is_dry else {}
    settings = GeneratorConfig("", DECODES["full"], tokenizer=TOKENIZER, device=str(context.device), **options)
    return kind(settings, model, context)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and answers of a corpus, by row."""

    prompts: Sequence[int]
    answers: Sequence[int]

    @classmethod
    def of(cls, config: DecoderConfig, requests: Sequence[Request]) -> "Lengths":
        return cls([len(one.prompt_tokens) for one in requests], [len(right_answer(config, one)) for one in requests])


def ceiling_s(config: DecoderConfig, lengths: Lengths, ceilings: Ceilings, cache_bytes: int, itemsize: int) -> float:
    """Seconds that the corpus takes any engine that runs all layers, at least: no row is padded, none waits, and as
    many decode at a time as `cache_bytes` hold of keys and values; causal attention computes half of its products.

    Weights, keys and values are of `itemsize` bytes: an engine that stores smaller ones has another ceiling.
    """
    full = FullDepth(config.num_hidden_layers)
    plain = replace(ceilings, call_s=0.0)
    prompts_s = 0.0
    for columns in lengths.prompts:
        parts = plan_parts(
            config, full.prefill(), rows=1, new_columns=columns, context=columns // 2 + 1, itemsize=itemsize
        )
        prompts_s += sum(part.flops for part in parts) / ceilings.flops_per_s
    steps = [answer - 1 for answer in lengths.answers]
    if not sum(steps):
        return prompts_s
    seen = sum(n * (prompt + n / 2 + 1) for prompt, n in zip(lengths.prompts, steps, strict=True)) / sum(steps)
    row_bytes = cache_bytes_per_row(config, full, prompt_columns=int(seen), num_new=1, itemsize=itemsize)
    rows = max(1, min(len(steps), cache_bytes // row_bytes))
    step = plan_parts(config, full.step(0), rows=rows, new_columns=1, context=int(seen), itemsize=itemsize)
    return prompts_s + sum(steps) / rows * sum(map(plain.seconds, step))


def num_rows(context: CheckContext, config: DecoderConfig, cache_bytes: int, itemsize: int) -> int:
    """Rows that full depth is expected to decode in CORPUS_S."""
    if context.is_dry:
        return 3 * max(context.rows)
    few = counting_requests(context, config, MIN_ROWS)
    least = ceiling_s(config, Lengths.of(config, few), context.ceilings, cache_bytes, itemsize)
    rows = int(CORPUS_S * EXPECTED_OF_CEILING / (least / MIN_ROWS))
    return max(MIN_ROWS, min(MAX_ROWS, rows - rows % MIN_ROWS))


def check_corpus(context: CheckContext) -> Found:
    """Every answer of a corpus is right, and how fast it was beside what any engine at full depth could do."""
    context.release()
    config = context.config
    ceilings = context.ceilings  # before the generator takes the memory
    generator = corpus_generator(context, config, CorpusGenerator)
    assert generator.graphs is not None
    itemsize, cache_bytes = generator.dtype.itemsize, generator.graphs.nbytes
    requests = counting_requests(context, config, num_rows(context, config, cache_bytes, itemsize))
    lengths = Lengths.of(config, requests)
    tokens = sum(lengths.answers)
    ceiling = tokens / ceiling_s(config, lengths, ceilings, cache_bytes, itemsize)
    found: Found = {"rows": len(requests), "prompt_tokens": sum(lengths.prompts), "answer_tokens": tokens}
    found |= {"ceiling_tokens_per_s": ceiling, "schedules": {}, "predicted_tokens_per_s": {}}
    for name, decode in DECODES.items():
        found["predicted_tokens_per_s"][name] = predicted(generator, lengths, decode, ceilings)  # type: ignore[index]
    context.note(found)
    speeds: dict[str, float] = {}
    for name, decode in DECODES.items():
        found["schedules"][name] = one = run(generator, requests, decode)  # type: ignore[index]
        context.note(found)
        if wrong := one["wrong_rows"]:
            raise CheckFailed(f"{name}: {wrong} of {len(requests)} answers are wrong", found)
        speeds[name] = float(str(one["tokens_per_s"]))
    found["of_ceiling"] = {name: speed / ceiling for name, speed in speeds.items()}
    found["aims"] = {
        f"full depth reaches {AIM_OF_CEILING:g} of the ceiling": speeds["full"] >= AIM_OF_CEILING * ceiling,
        "2x is above the ceiling of any engine at full depth": speeds["2x"] > ceiling,
    }
    if context.device.type == "cuda" and speeds["full"] < MIN_OF_CEILING * ceiling:
        share = speeds["full"] / ceiling
        raise CheckFailed(f"full depth reaches {share:.0%} of what the device could do, less than 30 %", found)
    return found


def run(generator: CorpusGenerator, requests: Sequence[Request], decode: dict[str, Any]) -> dict[str, Any]:
    """Decodes the corpus as one window under a schedule, and says what that took."""
    worker = generator.with_decode(decode)
    worker.step_rows = []
    start = time.perf_counter()
    result = worker(requests)
    if worker.device.type == "cuda":
        torch.cuda.synchronize(worker.device)
    seconds = time.perf_counter() - start
    config, graphs = worker.model.config, worker.graphs
    assert graphs is not None
    pairs = list(zip(requests, result.answers, strict=True))
    made = sum(len(answer.tokens) for _, answer in pairs if not isinstance(answer, RowFailure))
    prefill, decoding = (sum(float(batch[key]) for batch in result.batches) for key in ("prefill_s", "decode_s"))
    padded = sum(map(graphs.rows_for, worker.step_rows))
    return {
        "seconds": seconds,
        "tokens_per_s": made / seconds,
        "batches": len(result.batches),
        "wrong_rows": sum(
            isinstance(answer, RowFailure) or answer.tokens != right_answer(config, request)
            for request, answer in pairs
        ),
        "useful_rows": (made - len(requests)) / padded if padded else 1.0,
        "rows_per_step": padded / max(1, len(worker.step_rows)),
        "share_of_prompts": prefill / (prefill + decoding),
        "share_between_batches": 1 - (prefill + decoding) / seconds,
        "splits": sum("split_error" in batch for batch in result.batches),
        "graphs": graphs.describe(),
    }


def predicted(generator: CorpusGenerator, lengths: Lengths, decode: dict[str, Any], ceilings: Ceilings) -> float:
    """Tokens per second of the cost model, for batches as the generator would cut them and rows that end as they do.

    Rows that have ended stay until half of the batch has, as in `StaticBatch`.
    """
    config, longest, worker = generator.model.config, max(lengths.answers), generator
    assert worker.graphs is not None
    schedule = make_schedule(decode, num_layers=config.num_hidden_layers, max_new_tokens=longest)
    order = sorted(range(len(lengths.prompts)), key=lambda row: lengths.prompts[row])
    seconds, at, size = 0.0, 0, worker.batch_size(max(lengths.prompts), longest)
    while at < len(order):
        rows, at = order[at : at + size], at + size
        columns = max(lengths.prompts[row] for row in rows)
        carried = carried_rows([lengths.answers[row] for row in rows])
        shape = BatchShape(columns, [worker.graphs.rows_for(n) for n in carried], rows=len(rows))
        itemsize = worker.dtype.itemsize
        seconds += sum(predict_s(config, schedule, ceilings, shape, itemsize=itemsize, in_graphs=True))
    return sum(lengths.answers) / seconds


def carried_rows(answers: Sequence[int]) -> list[int]:
    """Rows of a batch at each step: those that have ended are dropped once at most half of it is running."""
    size, found = len(answers), []
    for step in range(1, max(answers)):
        running = sum(answer > step for answer in answers)
        size = running if running <= size / 2 else size
        found.append(size)
    return found
