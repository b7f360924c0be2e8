"""Decoding from prompts to completions: a `StaticBatch` or a `ContinuousBatch` run to its end.

Splitting rows into batches is the caller's work (`actors.batching.windows`), and so are rows that come and go as
they please
(`actors.serving.engine`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipdecode.engine.batch_stats import BatchStats
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.prefill import allocate_cache, pad_prompts
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import Completion, DecodeText, Request, Row, complete
from skipdecode.engine.static_batch import CHECK_EVERY, COMPACT_AT, StaticBatch, now
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.plan import Schedule

__all__ = [
    "CHECK_EVERY",
    "BatchResult",
    "Completion",
    "Request",
    "allocate_cache",
    "generate",
    "generate_continuous",
    "pad_prompts",
]


@dataclass(frozen=True)
class BatchResult:
    completions: list[Completion]
    stats: BatchStats

    @classmethod
    def of(cls, completions: list[Completion], stats: BatchStats) -> "BatchResult":
        """Counts what the completions have in `stats`."""
        stats.output_tokens = sum(len(c.tokens) for c in completions)
        stats.layers_run = sum(c.layers_run for c in completions)
        stats.ffns_run = sum(c.ffns_run for c in completions)
        return cls(completions, stats)


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
    """Continues every request under `schedule`; completions in the order of the requests.

    `decode_text` is needed for stop strings only. `prompt_columns` and `batch_rows` fix the shape (padding columns,
    empty rows) and `compact=False` keeps it, for results that do not depend on who else is in the batch. `graphs`: of
    this model, for steps on CUDA. `sharing`: the heads of prompts that are run once; not with a fixed shape.
    """
    start = now(model.device)
    cohort = StaticBatch(
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
    cohort.prefill()
    while not cohort.is_done:
        cohort.step()
    stats = cohort.stats
    stats.decode_s = now(model.device) - start - stats.prefill_s
    return BatchResult.of(complete(cohort.rows, schedule), stats)


@torch.inference_mode()
def generate_continuous(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    max_rows: int,
    decode_text: DecodeText | None = None,
) -> tuple[list[Row], ContinuousBatch]:
    """Continues every request, at most `max_rows` at a time, a newcomer for every row that ends."""
    batch = ContinuousBatch(model, schedule, decode_text=decode_text)
    waiting, rows = deque(requests), []
    while waiting or not batch.is_done:
        room = max_rows - len(batch.rows)
        # a prompt alone costs nearly as much as several: wait until a few places are free
        if waiting and (room >= max(1, max_rows // 8) or batch.is_done):
            rows += batch.join([waiting.popleft() for _ in range(min(room, len(waiting)))])
        batch.step()
    return rows, batch
