"""What a plan costs: FLOPs, bytes, cache memory, and the time a device should need for them. No torch.

A roofline with two more terms. Each sublayer takes max(FLOPs / peak, bytes / bandwidth); attention over the cache comes
after the products that make its queries, and takes its own; each call of an operator costs a fixed overhead that small
models cannot hide. Predictions are bounds to print beside measurements, not results.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipdecode.config.model import HEAD_BYTES, DecoderConfig
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import Schedule, kv_capacities, kv_owner_of_layers, steps_per_layer

# Operator calls per sublayer of a packed model's decode step on a CPU, views included: norms, products with what is
# fused into them, attention. A model that is not packed makes up to three times as many.
ATTN_CALLS, FFN_CALLS, STEP_CALLS = 7, 3, 10
# Beside a deferred feed-forward block (`skipdecode.model.ffn_executor`): finding its rows; and if there are any, moving
# them and comparing their states.
FIND_CALLS, ROW_CALLS = 7, 8


@dataclass(frozen=True)
class Cost:
    flops: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    cache_flops: float = 0.0
    """The part of `flops` that is attention over the cache, which has to wait for the queries."""
    cache_bytes: float = 0.0
    """The part of `bytes` that is keys and values read."""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.calls + other.calls,
            self.cache_flops + other.cache_flops,
            self.cache_bytes + other.cache_bytes,
        )


@dataclass(frozen=True)
class Ceilings:
    """What the device can do at best, measured on it (`actors.ceilings`)."""

    flops_per_s: float
    bytes_per_s: float
    call_s: float

    def seconds(self, cost: Cost) -> float:
        def bound(flops: float, moved: float) -> float:
            return max(flops / self.flops_per_s, moved / self.bytes_per_s)

        rest = bound(cost.flops - cost.cache_flops, cost.bytes - cost.cache_bytes)
        return rest + bound(cost.cache_flops, cost.cache_bytes) + cost.calls * self.call_s


@dataclass(frozen=True)
class SharedPrefixShape:
    """The prefixes that rows of a batch share (`skipdecode.engine.prefix_sharing`), as far as they change its cost."""

    passes: tuple[tuple[int, int, int], ...]
    """(rows, tokens fed, tokens attended to) of each forward pass over prompts, shared prefixes first."""
    columns_read_once: int
    """KV columns, summed over rows, that a decode step finds in a core's cache because another row has read them."""


@dataclass(frozen=True)
class BatchShape:
    """What a batch decodes, as far as it has a cost. Padding of prompts counts, though not every kernel runs it."""

    prompt_columns: int
    batch_rows: Sequence[int]
    """Rows at each decode step."""
    rows: int | None = None
    """Prompts; None: as many as rows at step 0, which is too few where rows ended with their first token."""
    deferred_ffn_rows: Sequence[Sequence[int]] | None = None
    """By step, the rows of the feed-forward blocks that plans leave open (`BatchStats.deferred_ffn_rows`)."""
    shared_prefixes: SharedPrefixShape | None = None

    @property
    def num_prompts(self) -> int:
        if self.rows is not None:
            return self.rows
        return self.batch_rows[0] if self.batch_rows else 1


def attention_cost(
    config: DecoderConfig,
    *,
    rows: int,
    new_columns: int,
    context: int,
    itemsize: int,
    weight_itemsize: float | None = None,
    kv_itemsize: int | None = None,
    kv_columns: int | None = None,
    columns_read_once: float = 0.0,
) -> Cost:
    """One attention block for `new_columns` columns of `rows` rows that see `context` columns (FLOPs, bytes moved).

    `weight_itemsize`, here and below: bytes of a weight where they differ from `itemsize` (int8, fp8, int4).
    `kv_itemsize`: likewise of keys and values in the cache (fp8). `kv_columns`: the columns for which keys and values
    are projected, where they are not `new_columns`: all columns of a prompt of which only the last goes on, or 0 where
    SwiftKV has made them already. `columns_read_once`: columns that are not read from memory because another row shares
    them (`skipdecode.engine.prefix_sharing`).
    """
    d, q, kv = config.hidden_size, config.q_dim, config.kv_dim
    tokens, kv_tokens = rows * new_columns, rows * (new_columns if kv_columns is None else kv_columns)
    cache_flops, columns_read = 4 * tokens * context * q, rows * context - columns_read_once
    cache_bytes = (kv_itemsize or itemsize) * 2 * columns_read * kv
    flops = 4 * (tokens * q + kv_tokens * kv) * d + cache_flops
    moved = (weight_itemsize or itemsize) * (2 * q + (2 * kv if kv_tokens else 0)) * d + cache_bytes
    moved += itemsize * (2 * tokens * (d + q) + 2 * kv_tokens * kv)  # activations
    return Cost(flops, moved, ATTN_CALLS, cache_flops, cache_bytes)


def shared_kv_cost(
    config: DecoderConfig, plan: LayerPlan, *, tokens: int, itemsize: int, weight_itemsize: float | None = None
) -> Cost:
    """SwiftKV's norm and its projections to the K and V of every group of layers of which `plan` runs one."""
    assert config.swiftkv is not None
    first, size, d, kv = config.swiftkv.kv_layers, config.swiftkv.group_size, config.hidden_size, config.kv_dim
    groups = len({(layer - first) // size for layer in range(first, len(plan.attn)) if plan.attn[layer]})
    moved = (weight_itemsize or itemsize) * 2 * groups * d * kv + itemsize * tokens * (2 * d + 4 * groups * kv)
    return Cost(4.0 * tokens * groups * d * kv, moved, 4)


def ffn_cost(config: DecoderConfig, *, tokens: int, itemsize: int, weight_itemsize: float | None = None) -> Cost:
    weights = (3 if config.is_gated else 2) * config.hidden_size * config.ffn_dim
    moved = (weight_itemsize or itemsize) * weights + itemsize * tokens * (4 * config.hidden_size + 2 * config.ffn_dim)
    return Cost(2.0 * tokens * weights, moved, FFN_CALLS)


def head_cost(
    config: DecoderConfig, *, rows: int, itemsize: int, weight_itemsize: float | None = None, outputs: int | None = None
) -> Cost:
    """The LM head and the choice of a token. Logits are written and read, though a kernel for greedy tokens does
    without. `outputs`: tokens to choose from; None: the whole vocabulary."""
    outputs = outputs or config.vocab_size
    weights = outputs * config.embed_dim
    head_itemsize = itemsize if weight_itemsize is None else weight_itemsize if weight_itemsize >= 1 else HEAD_BYTES
    moved = head_itemsize * weights + 8.0 * rows * outputs
    return Cost(2.0 * rows * weights, moved, STEP_CALLS)


def plan_parts(
    config: DecoderConfig,
    plan: LayerPlan,
    *,
    rows: int,
    new_columns: int,
    context: int,
    itemsize: int,
    weight_itemsize: float | None = None,
    kv_itemsize: int | None = None,
    deferred_ffn_rows: Sequence[int] | None = None,
    columns_read_once: float = 0.0,
) -> list[Cost]:
    """The costs of one forward call, one entry per sublayer that runs, the head last.

    `deferred_ffn_rows`: the rows of each feed-forward block that `plan` leaves to the rows; None: all of them.
    `columns_read_once`: see `attention_cost`.
    """
    first = config.num_hidden_layers if plan.swiftkv_from is None else plan.swiftkv_from
    top, settled = max(plan.layers, default=0), plan.static_ffns
    sizes: dict[str, Any] = {"itemsize": itemsize, "weight_itemsize": weight_itemsize}
    parts = []
    for layer in plan.layers:
        columns = 1 if layer >= min(first, top) else new_columns  # above the last K/V only a prompt's last token runs
        if plan.attn[layer]:
            kv_columns = new_columns if layer < first else 0
            seen = min(context, config.layer_window(layer) or context)
            shape = {"rows": rows, "new_columns": columns, "kv_columns": kv_columns, "context": seen}
            cached: dict[str, Any] = {"kv_itemsize": kv_itemsize, "columns_read_once": columns_read_once}
            parts.append(attention_cost(config, **shape, **sizes, **cached))
        if settled[layer]:
            parts.append(ffn_cost(config, tokens=rows * columns, **sizes))
    if any(plan.attn[first:]):
        parts.append(shared_kv_cost(config, plan, tokens=rows * new_columns, **sizes))
    for n in [rows] * (sum(plan.ffn) - sum(settled)) if deferred_ffn_rows is None else deferred_ffn_rows:
        parts.append(Cost(calls=FIND_CALLS))
        if n:
            parts += [Cost(calls=ROW_CALLS), ffn_cost(config, tokens=n, **sizes)]
    return [*parts, head_cost(config, rows=rows, **sizes)]


def predict_s(
    config: DecoderConfig,
    schedule: Schedule,
    ceilings: Ceilings,
    batch: BatchShape,
    *,
    itemsize: int,
    weight_itemsize: float | None = None,
    kv_itemsize: int | None = None,
    in_graphs: bool = False,
) -> tuple[float, float]:
    """(prefill, decode) seconds of a batch. `in_graphs`: a decode step is one launch, and its calls cost nothing."""
    sizes: dict[str, Any] = {"itemsize": itemsize, "weight_itemsize": weight_itemsize, "kv_itemsize": kv_itemsize}
    passes: Sequence[tuple[int, int, int]] = [(batch.num_prompts, batch.prompt_columns, batch.prompt_columns)]
    read_once = 0.0
    if batch.shared_prefixes is not None:
        passes, read_once = batch.shared_prefixes.passes, batch.shared_prefixes.columns_read_once / batch.num_prompts
    prefill = 0.0
    for rows, new_columns, context in passes:
        parts = plan_parts(config, schedule.prefill(), rows=rows, new_columns=new_columns, context=context, **sizes)
        prefill += sum(map(ceilings.seconds, parts))
    in_step = replace(ceilings, call_s=0.0) if in_graphs else ceilings
    decode = 0.0
    for k, rows in enumerate(batch.batch_rows):
        parts = plan_parts(
            config,
            schedule.step(k),
            rows=rows,
            new_columns=1,
            context=batch.prompt_columns + k + 1,
            **sizes,
            deferred_ffn_rows=batch.deferred_ffn_rows[k] if batch.deferred_ffn_rows else None,
            columns_read_once=rows * read_once,
        )
        decode += sum(map(in_step.seconds, parts))
    return prefill, decode


def training_flops(
    config: DecoderConfig, schedule: Schedule, *, rows: int, num_prompt_tokens: int, new_tokens: int
) -> float:
    """Forward and backward (twice) of one teacher-forced pass, as `skipdecode.training.loss` makes it.

    Its ratio to full depth bounds what training under `schedule` can gain. Under SwiftKV a prompt stops where
    it does in decoding, but for its last token; keys and values that are projected there are left out.
    """
    total, stop = head_cost(config, rows=rows * new_tokens, itemsize=4).flops, schedule.prefill().swiftkv_from
    for layer, steps in enumerate(steps_per_layer(schedule, new_tokens - 1)):
        columns = steps + (num_prompt_tokens if stop is None or layer < stop else 1)
        context = num_prompt_tokens + steps
        total += attention_cost(config, rows=rows, new_columns=columns, context=context, itemsize=4).flops
        total += ffn_cost(config, tokens=rows * columns, itemsize=4).flops
    return 3 * total


def cache_bytes_per_row(
    config: DecoderConfig, schedule: Schedule, *, prompt_columns: int, num_new: int, itemsize: int
) -> int:
    """Bytes of K and V that one row needs under `schedule`: per layer the prompt and the steps that run the layer."""
    columns = kv_capacities(kv_owner_of_layers(schedule, config.kv_group_size), schedule, prompt_columns, num_new)
    return 2 * sum(columns.values()) * config.kv_dim * itemsize
