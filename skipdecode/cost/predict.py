"""Predicts throughput and price on a GPU that is not at hand, from its data sheet. No torch.

It is the roofline of `skipdecode.cost.roofline` at the shares of peak that good kernels reach, with launches at nothing
because decode steps are CUDA graphs. A model that is larger than one GPU has its layers on several, and as many
micro-batches keep all of them busy (`skipdecode.model.pipeline_parallel`). Nothing here is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from skipdecode.config.model import DecoderConfig
from skipdecode.cost.batch_sizes import row_rounding, rows_within
from skipdecode.cost.gpu_specs import GPU, MEMORY_SHARE
from skipdecode.cost.roofline import BatchShape, Ceilings, cache_bytes_per_row, plan_parts, predict_s
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule

BANDWIDTH_REACHED = 0.8
"""The share of a data sheet's bandwidth. Published streaming reads on A100 and H100 reach 0.8 to 0.93."""
FLOPS_REACHED = 0.6
"""The share of a data sheet's FLOPS. cuBLAS in bfloat16 reaches 0.6 to 0.8 on large shapes under a power limit."""
FP8_FLOPS = 2
"""FLOPS of products in FP8 over those in bfloat16, on all data sheets."""
PREFILL_CALL_S = 5e-6
"""Prompts are launched kernel by kernel."""
MODELS = (
    "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b", "opt-66b", "llama-3.2-1b", "llama-3.2-3b",
    "llama-3.1-8b", "llama-3.1-70b",
)  # fmt: skip
MAX_GPUS = 8
MIN_ROWS = 16  # a model that leaves room for fewer takes another GPU
ITEMSIZE = 2
PROMPT_ROWS = 32


@dataclass(frozen=True)
class Workload:
    num_prompt_tokens: int = 256
    new_tokens: int = 512
    weight_itemsize: float | None = None
    """Bytes of a weight of the layers and the head, where they differ from those of a number (fp8)."""
    kv_itemsize: int | None = None
    """Likewise of keys and values in the cache."""

    @property
    def sizes(self) -> dict[str, float | None]:
        return {"itemsize": ITEMSIZE, "weight_itemsize": self.weight_itemsize, "kv_itemsize": self.kv_itemsize}


@dataclass(frozen=True)
class Prediction:
    """What batches should achieve whose rows all make `new_tokens` tokens."""

    model: str
    schedule: str
    num_gpus: int
    """GPUs that the layers are spread over."""
    rows: int
    """Rows of a batch, on all of these GPUs together."""
    ms_per_step: float
    """From one token of a row to its next, in the middle of an answer."""
    prefill_s: float
    tokens_per_s: float
    """New tokens per second of all the model's GPUs together, with prefill in the time."""
    cost_per_million: float
    """Dollars per million new tokens."""
    speedup: float
    """Over full depth with as many rows as fit then, prefill included."""


def num_weights(config: DecoderConfig) -> int:
    """Weights of embedding, layers and head, without norms and biases."""
    mlp = (3 if config.is_gated else 2) * config.hidden_size * config.ffn_dim
    attention = config.hidden_size * 2 * (config.q_dim + config.kv_dim)
    positions = config.max_position_embeddings * config.hidden_size if config.has_learned_positions else 0
    head = config.vocab_size * config.embed_dim
    return config.num_hidden_layers * (attention + mlp) + head * (1 if config.has_tied_head else 2) + positions


def ceilings_of(gpu: GPU, work: Workload = Workload()) -> Ceilings:
    """The ceilings that kernels should reach on a GPU."""
    flops_per_s = gpu.flops_per_s * (1 if work.weight_itemsize is None else FP8_FLOPS)
    return Ceilings(FLOPS_REACHED * flops_per_s, BANDWIDTH_REACHED * gpu.bytes_per_s, PREFILL_CALL_S)


def rows_that_fit(
    config: DecoderConfig,
    schedule: Schedule,
    memory_bytes: int,
    num_gpus: int,
    work: Workload,
    share: float = MEMORY_SHARE,
    itemsize: int = ITEMSIZE,
) -> int:
    """Rows of a batch that fit beside the weights on `num_gpus` GPUs of `memory_bytes` each; 0 if none does. Only a
    single GPU uses CUDA graphs."""
    kv_itemsize = work.kv_itemsize or itemsize
    per_row = cache_bytes_per_row(
        config, schedule, prompt_columns=work.num_prompt_tokens, num_new=work.new_tokens, itemsize=kv_itemsize
    )
    weights = (work.weight_itemsize or itemsize) * num_weights(config)
    if work.weight_itemsize is not None:  # the embedding stays as it is, also where the head has its weights
        embedding = config.vocab_size * config.embed_dim
        weights += (itemsize - (0 if config.has_tied_head else work.weight_itemsize)) * embedding
    room = int(share * memory_bytes) * num_gpus - int(weights)
    price = per_row + row_rounding(config, kv_itemsize)
    return rows_within(max(0, room), price, num_gpus=num_gpus, has_graphs=num_gpus == 1)


def gpus_needed(
    config: DecoderConfig,
    memory_bytes: int,
    work: Workload,
    share: float = MEMORY_SHARE,
    itemsize: int = ITEMSIZE,
) -> int | None:
    """The fewest GPUs of that memory on which the model has room for MIN_ROWS rows at full depth; None: more than
    MAX_GPUS."""
    full = FullDepth(config.num_hidden_layers)
    fitting = (
        n
        for n in range(1, MAX_GPUS + 1)
        if rows_that_fit(config, full, memory_bytes, n, work, share, itemsize) >= MIN_ROWS
        and n <= config.num_hidden_layers
    )
    return next(fitting, None)


def predict(config: DecoderConfig, schedule: Schedule, gpu: GPU, work: Workload, num_gpus: int) -> Prediction:
    """A prediction whose `model`, `schedule` and `speedup` the caller fills in."""
    most = rows_that_fit(config, schedule, gpu.memory_bytes, num_gpus, work)
    part = max(1, most // num_gpus)  # a GPU works on one part while the others work on theirs
    ceilings, steps = ceilings_of(gpu, work), work.new_tokens - 1
    batch = BatchShape(work.num_prompt_tokens, [part] * steps, part)
    prefill, decode = predict_s(config, schedule, ceilings, batch, **work.sizes, in_graphs=True)  # type: ignore[arg-type]
    # All parts take as long as one part alone would on one GPU: each GPU does its layers of one part at a time.
    tokens_per_s = num_gpus * part * work.new_tokens / (prefill + decode)
    cost = gpu.price_per_hour * num_gpus / 3600 / tokens_per_s * 1e6
    return Prediction("", "", num_gpus, part * num_gpus, 1e3 * decode / steps, prefill, tokens_per_s, cost, 1.0)


def predict_all(gpu: GPU, models: Sequence[tuple[str, DecoderConfig]], work: Workload) -> list[Prediction]:
    """Full depth and SkipDecode 2x of every model that MAX_GPUS such GPUs hold."""
    found = []
    for name, config in models:
        num_gpus = gpus_needed(config, gpu.memory_bytes, replace(work, weight_itemsize=None))  # weights are read whole
        if num_gpus is None:
            continue
        layers = config.num_hidden_layers
        decode = {"method": "skipdecode", "speedup": 2}
        fast = make_schedule(decode, num_layers=layers, max_new_tokens=work.new_tokens)
        full = predict(config, FullDepth(layers), gpu, work, num_gpus)
        ours = predict(config, fast, gpu, work, num_gpus)
        found.append(replace(full, model=name, schedule="full"))
        speedup = ours.tokens_per_s / full.tokens_per_s
        found.append(replace(ours, model=name, schedule="skipdecode 2x", speedup=speedup))
    return found


def step_s(config: DecoderConfig, schedule: Schedule, gpu: GPU, work: Workload, rows: int) -> float:
    """Mean seconds of a decode step with so many rows."""
    ceilings = replace(ceilings_of(gpu, work), call_s=0.0)
    steps = range(0, work.new_tokens - 1, max(1, work.new_tokens // 16))

    def seconds(k: int) -> float:
        context = work.num_prompt_tokens + k + 1
        parts = plan_parts(config, schedule.step(k), rows=rows, new_columns=1, context=context, **work.sizes)  # type: ignore[arg-type]
        return sum(map(ceilings.seconds, parts))

    return sum(map(seconds, steps)) / len(steps)


def prompt_token_s(config: DecoderConfig, schedule: Schedule, gpu: GPU, work: Workload) -> float:
    """Seconds of one token of prompts, PROMPT_ROWS of which go through the model together."""
    rows, n = PROMPT_ROWS, work.num_prompt_tokens
    parts = plan_parts(config, schedule.prefill(), rows=rows, new_columns=n, context=n, **work.sizes)  # type: ignore[arg-type]
    return sum(map(ceilings_of(gpu, work).seconds, parts)) / (rows * n)
