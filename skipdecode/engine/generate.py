"""Decoding a batch from prompts to completions.

A batch is static, and its rows start together (`generate`), or it is continuous, and waiting requests join as rows end
(`refill`). The caller splits rows into batches (`actors.batching.windows`). Rows that arrive while others decode are
served by `actors.serving.engine`.
"""

import time
from collections.abc import Callable, Sequence

import torch

from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row, completions_of
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import COMPACT_AT, StaticBatch, synchronized_time
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import Schedule

ShouldContinue = Callable[[], bool]
"""Whether more rows may begin."""


def always() -> bool:
    return True


JOIN_AT = 1 / 8  # of a batch's places free, and waiting rows join: a prompt alone costs nearly as much as several


@torch.inference_mode()
def generate(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    decode_text: DecodeText | None = None,
    prompt_columns: int | None = None,
    batch_rows: int | None = None,
    compact: bool = True,
    graphs: CudaGraphs | None = None,
    sharing: PrefixSharing | None = None,
) -> BatchResult:
    """Continues every request under `schedule`; completions are in the order of the requests.

    `decode_text` is needed for stop strings only. `prompt_columns` and `batch_rows` fix the shape of the batch by
    padding, and `compact=False` keeps it, so that results do not depend on the other rows. `graphs`: the model's CUDA
    graphs. `sharing`: prompt prefixes that are run once; not with a fixed shape.
    """
    start = synchronized_time(model.device)
    batch = StaticBatch(
        model,
        requests,
        schedule,
        decode_text=decode_text,
        prompt_columns=prompt_columns,
        batch_rows=batch_rows,
        compact_at=COMPACT_AT if compact else 0.0,
        graphs=graphs,
        sharing=sharing,
    )
    batch.prefill()
    while not batch.is_done:
        batch.step()
    stats = batch.stats
    stats.decode_s = synchronized_time(model.device) - start - stats.prefill_s
    return BatchResult.of(completions_of(batch.rows, schedule), stats)


def generate_continuous(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    max_rows: int,
    decode_text: DecodeText | None = None,
    sharing: PrefixSharing | None = None,
) -> BatchResult:
    """Continues every request, at most `max_rows` at a time; waiting requests join as rows end. Completions are in the
    order of the requests, in which they also join."""
    batch = ContinuousBatch(model, schedule, decode_text=decode_text)
    return refill(batch, requests, max_rows=max_rows, sharing=sharing)


@torch.inference_mode()
def refill(
    batch: ContinuousBatch,
    requests: Sequence[Request],
    *,
    max_rows: int,
    sharing: PrefixSharing | None = None,
    rows: list[Row] | None = None,
    should_continue: ShouldContinue = always,
) -> BatchResult:
    """Decodes all requests by an empty batch that is kept full: at most `max_rows` rows at a time, whose places go to
    waiting requests as they end. `sharing`: prefixes of the prompts, each run once for the rows that have it together.

    `rows` receives the rows, in the order of the requests, as they join: if this raises, those that have ended are
    whole (`result_of`). `should_continue` is asked before more rows join than the first ones; once it says no, the
    result is that of the rows that have joined. The host waits for nothing but tokens, so on a GPU `prefill_s` is only
    what launching takes.
    """
    rows = [] if rows is None else rows
    batch.reserve(min(max_rows, len(requests)), requests, sharing)
    least = max(1, int(JOIN_AT * max_rows))
    begun = time.perf_counter()
    while len(rows) < len(requests) or not batch.is_done:
        free = max_rows - len(batch.rows)
        if len(rows) < len(requests) and (free >= least or batch.is_done):
            if rows and not should_continue():
                requests = requests[: len(rows)]
                continue
            joining = range(len(rows), min(len(rows) + free, len(requests)))
            start = time.perf_counter()
            own = None if sharing is None else sharing.of_rows(joining)
            rows += batch.join([requests[at] for at in joining], own)
            batch.stats.prefill_s += time.perf_counter() - start
            batch.stats.cache_bytes = max(batch.stats.cache_bytes, batch.cache_bytes)
        batch.step()
        batch.stats.decode_s = time.perf_counter() - begun - batch.stats.prefill_s
    return result_of(batch, rows)


def result_of(batch: ContinuousBatch, rows: Sequence[Row]) -> BatchResult:
    """The completions of ended rows of a batch, and what it cost so far."""
    stats, prompts = batch.stats, [len(row.request.prompt_tokens) for row in rows]
    stats.rows, stats.input_tokens, stats.prompt_columns = len(rows), sum(prompts), max(prompts, default=0)
    return BatchResult.of(completions_of(rows, batch.schedule), stats)
