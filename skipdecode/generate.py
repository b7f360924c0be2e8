"""Decoding one batch: prefill, decode steps, stop checks, compaction. Reads from top to bottom.

All rows share positions and therefore plans. The host decides (plans, who has ended), the device runs; tokens are
looked at on the host every `check_every` steps, and what a row made past its end is cut, so looking late is exact.
Splitting rows into batches is the caller's work (`actors.generator`).

B rows, P prompt columns, N new tokens.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from skipdecode.cache import KVCache
from skipdecode.ffn_rows import RowFFNs, row_ffns
from skipdecode.model import OPT
from skipdecode.plan import Schedule, kv_columns, kv_owners
from skipdecode.sampler import Sampler
from skipdecode.sampling import Sampling, stop_length

COMPACT_AT = 0.5  # drop ended rows when at most this share of the batch still runs
CHECK_EVERY = {"cpu": 1, "cuda": 8}  # steps between looks at the tokens; a look waits for the device


@dataclass(frozen=True)
class Request:
    id: str
    prompt_tokens: list[int]
    """With BOS; at least one."""
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class Completion:
    tokens: list[int]
    """With the EOS that ended the row, or the token that completed a stop string."""
    finish_reason: str
    """`stop` (EOS or a stop string) or `length`."""
    layers_run: int
    """Layers, summed over the row's decode steps."""
    ffns_run: int
    """Feed-forward blocks, likewise; fewer than `layers_run` under FFN-SkipLLM only."""


@dataclass
class BatchStats:
    """What one batch cost. Token counts are real tokens; `row_steps` also count ended rows that were carried along."""

    rows: int = 0
    prompt_columns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Decode steps times rows in the batch at that time."""
    layers_run: int = 0
    """Layers of the steps that rows needed: the sum of the rows' `layers_run`."""
    ffns_run: int = 0
    """Feed-forward blocks, likewise."""
    layer_row_steps: int = 0
    """Layers of all `row_steps`, wasted ones included."""
    cache_bytes: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    batch_rows: list[int] = field(default_factory=list)
    """Rows in the batch at each decode step."""
    ffn_rows: list[list[int]] = field(default_factory=list)
    """At each decode step, the rows that each block in the plan's `by_row` ran on."""


@dataclass(frozen=True)
class BatchResult:
    completions: list[Completion]
    stats: BatchStats


class _Row:
    """One request on the host: what it has made, and whether it has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.ffns: list[int] = []
        """Blocks in question that ran, per decode step; longer than needed once the row has ended."""
        self.finish_reason: str | None = None

    def take(self, new: Sequence[int], eos: int, decode: Callable[[Sequence[int]], str] | None) -> None:
        sampling, checked = self.request.sampling, len(self.tokens)
        self.tokens += new[: sampling.max_new_tokens - checked]
        if len(self.tokens) == sampling.max_new_tokens:
            self.finish_reason = "length"
        if not sampling.ignore_eos and eos in self.tokens[checked:]:
            del self.tokens[self.tokens.index(eos, checked) + 1 :]
            self.finish_reason = "stop"
        if sampling.stop:
            assert decode is not None, "a request has stop strings, and there is no decoder of text"
            end = stop_length(self.tokens, checked, sampling.stop, decode)
            if end is not None:
                del self.tokens[end:]
                self.finish_reason = "stop"


@torch.inference_mode()
def generate(
    model: OPT,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    decode_text: Callable[[Sequence[int]], str] | None = None,
    prompt_columns: int | None = None,
    batch_rows: int | None = None,
    compact: bool = True,
) -> BatchResult:
    """Continues every request under `schedule`; completions in the order of the requests.

    `decode_text` is needed for stop strings only. `prompt_columns` and `batch_rows` fix the shape (padding columns,
    empty rows) and `compact=False` keeps it, for results that do not depend on who else is in the batch.
    """
    assert requests, "an empty batch"
    _refuse_too_long(requests, model.config.max_position_embeddings)
    rows = [_Row(request) for request in requests]
    num_new = max(row.request.sampling.max_new_tokens for row in rows)
    tokens, num_pad = pad_prompts(model, requests, prompt_columns, batch_rows)
    cache = allocate_cache(model, num_pad, tokens.shape[1], schedule, num_new, is_masked=batch_rows is not None)
    sampler = _sampler(requests, len(num_pad), num_new, model.device)
    ffns = _row_ffns(schedule, requests, len(num_pad), num_new, model.device, has_fixed_shape=batch_rows is not None)
    num_input = sum(len(r.prompt_tokens) for r in requests)
    stats = BatchStats(len(rows), tokens.shape[1], num_input, cache_bytes=cache.nbytes)

    start = _now(model.device)
    positions = (torch.arange(tokens.shape[1], device=model.device) - num_pad[:, None]).clamp(min=-1)
    newest = sampler(model(tokens, positions, cache, schedule.prefill()), 0)  # y_0, [B]
    made = [newest]  # not yet seen by the host
    stats.prefill_s = _now(model.device) - start

    start = _now(model.device)
    check_every, last = CHECK_EVERY[model.device.type], model.config.max_position_embeddings - 1
    live = list(range(len(rows)))  # batch row -> index into `rows`; fixed-shape padding rows follow
    for k in range(num_new):
        if len(made) == check_every or k == num_new - 1:
            live, newest, cache = _check(rows, live, made, cache, sampler, ffns, model, decode_text, compact)
            made = []
            if not live:
                break
        if k == num_new - 1:
            break
        plan = schedule.step(k)
        stats.decode_steps += 1
        stats.row_steps += len(newest)
        stats.layer_row_steps += len(newest) * plan.num_layers_run
        stats.batch_rows.append(len(newest))
        if ffns is not None:
            ffns.start(k) if plan.by_row else ffns.rest()
        positions = (cache.length - cache.num_pad)[:, None].clamp(max=last)  # [B, 1]; only ended rows get that far
        newest = sampler(model(newest[:, None], positions, cache, plan, ffns), k + 1)
        made.append(newest)
        stats.ffn_rows.append([] if ffns is None else ffns.rows_run)
    stats.decode_s = _now(model.device) - start

    completions = _complete(rows, schedule)
    stats.output_tokens = sum(len(c.tokens) for c in completions)
    stats.layers_run = sum(c.layers_run for c in completions)
    stats.ffns_run = sum(c.ffns_run for c in completions)
    return BatchResult(completions, stats)


def pad_prompts(
    model: OPT, requests: Sequence[Request], prompt_columns: int | None, batch_rows: int | None
) -> tuple[Tensor, Tensor]:
    """Left-padded prompts [B, P] int64 and the padding of each row [B] int64, on the model's device."""
    columns = prompt_columns or max(len(r.prompt_tokens) for r in requests)
    config = model.config
    lines = [r.prompt_tokens for r in requests]
    lines += [[config.bos_token_id]] * ((batch_rows or len(lines)) - len(lines))
    longest = max(len(line) for line in lines)
    assert min(len(line) for line in lines) > 0, "a prompt without a token"
    assert longest <= columns, (longest, columns)
    padded = [[config.pad_token_id] * (columns - len(line)) + line for line in lines]
    num_pad = torch.tensor([columns - len(line) for line in lines])
    return torch.tensor(padded).to(model.device), num_pad.to(model.device)


def allocate_cache(
    model: OPT, num_pad: Tensor, columns: int, schedule: Schedule, num_new: int, *, is_masked: bool = False
) -> KVCache:
    """Per layer, the prompt's columns and one for each decode step that runs the layer, or a layer it shares with."""
    owners = kv_owners(schedule, model.config.kv_group_size)
    capacities = kv_columns(owners, schedule, columns, num_new)
    return KVCache.allocate(
        model.config,
        num_pad=num_pad,
        capacities=[capacities[owner] for owner in owners],
        owners=owners,
        dtype=model.dtype,
        is_masked=is_masked,
    )


def _refuse_too_long(requests: Sequence[Request], limit: int) -> None:
    for r in requests:
        if len(r.prompt_tokens) + r.sampling.max_new_tokens - 1 > limit:  # the last new token is not fed
            raise ValueError(
                f"row {r.id!r}: {len(r.prompt_tokens)} prompt tokens and max_new_tokens={r.sampling.max_new_tokens} "
                f"do not fit the model's {limit} positions"
            )


def _sampler(requests: Sequence[Request], batch_rows: int, num_new: int, device: torch.device) -> Sampler:
    empty = batch_rows - len(requests)
    ids = [r.id for r in requests] + [""] * empty
    return Sampler(ids, [r.sampling for r in requests] + [Sampling()] * empty, num_new, device)


def _row_ffns(
    schedule: Schedule,
    requests: Sequence[Request],
    batch_rows: int,
    num_new: int,
    device: torch.device,
    *,
    has_fixed_shape: bool,
) -> RowFFNs | None:
    ids = [r.id for r in requests] + [""] * (batch_rows - len(requests))
    gather = device.type == "cpu" and not has_fixed_shape  # elsewhere finding the rows would wait for the device
    return row_ffns(schedule, ids, num_new - 1, device, gather=gather)


def _check(
    rows: list[_Row],
    live: list[int],
    made: list[Tensor],
    cache: KVCache,
    sampler: Sampler,
    ffns: RowFFNs | None,
    model: OPT,
    decode_text: Callable[[Sequence[int]], str] | None,
    compact: bool,
) -> tuple[list[int], Tensor, KVCache]:
    """Looks at the tokens made since the last time; drops ended rows when enough have ended."""
    newest = made[-1]
    counts = itertools.repeat([]) if ffns is None else ffns.history()
    for index, new, ran in zip(live, torch.stack(made, dim=1).tolist(), counts, strict=False):
        row = rows[index]
        row.ffns += ran
        if row.finish_reason is None:
            row.take(new, model.config.eos_token_id, decode_text)
    running = [at for at, index in enumerate(live) if rows[index].finish_reason is None]
    if not running:
        return [], newest, cache
    if compact and len(running) <= COMPACT_AT * len(newest):
        keep = torch.tensor(running, device=newest.device)
        sampler.keep(keep)
        if ffns is not None:
            ffns.keep(keep)
        return [live[at] for at in running], newest[keep], cache.keep(keep)
    return live, newest, cache


def _complete(rows: Sequence[_Row], schedule: Schedule) -> list[Completion]:
    depth, ffns = [0], [0]  # layers and certain feed-forward blocks of the first n decode steps
    for k in range(max(len(row.tokens) for row in rows) - 1):
        plan = schedule.step(k)
        depth.append(depth[-1] + plan.num_layers_run)
        ffns.append(ffns[-1] + sum(plan.ffn) - sum(plan.by_row))
    completions = []
    for row in rows:
        assert row.finish_reason is not None, f"row {row.request.id!r} never ended"
        steps = len(row.tokens) - 1  # y_0 comes from the prompt
        ran = ffns[steps] + sum(row.ffns[:steps])
        completions.append(Completion(row.tokens, row.finish_reason, depth[steps], ran))
    return completions


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
