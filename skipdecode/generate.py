"""Decoding one batch from prompts to completions: a `Cohort` run to its end.

Splitting rows into batches is the caller's work (`actors.cutting`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skipdecode.cohort import CHECK_EVERY, COMPACT_AT, BatchStats, Cohort, now
from skipdecode.decoder import Decoder
from skipdecode.plan import Schedule
from skipdecode.prefix import Sharing
from skipdecode.prompts import allocate_cache, pad_prompts
from skipdecode.request import Completion, DecodeText, Request, complete
from skipdecode.step_graphs import StepGraphs

__all__ = [
    "CHECK_EVERY",
    "BatchResult",
    "BatchStats",
    "Completion",
    "Request",
    "allocate_cache",
    "generate",
    "pad_prompts",
]


@dataclass(frozen=True)
class BatchResult:
    completions: list[Completion]
    stats: BatchStats


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
    graphs: StepGraphs | None = None,
    sharing: Sharing | None = None,
) -> BatchResult:
    """Continues every request under `schedule`; completions in the order of the requests.

    `decode_text` is needed for stop strings only. `prompt_columns` and `batch_rows` fix the shape (padding columns,
    empty rows) and `compact=False` keeps it, for results that do not depend on who else is in the batch. `graphs`: of
    this model, for steps on CUDA. `sharing`: the heads of prompts that are run once; not with a fixed shape.
    """
    cohort = Cohort(
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
    start = now(model.device)
    cohort.prefill()
    while not cohort.is_done:
        cohort.step()
    stats = cohort.stats
    stats.decode_s = now(model.device) - start - stats.prefill_s
    completions = complete(cohort.rows, schedule)
    stats.output_tokens = sum(len(c.tokens) for c in completions)
    stats.layers_run = sum(c.layers_run for c in completions)
    stats.ffns_run = sum(c.ffns_run for c in completions)
    return BatchResult(completions, stats)
