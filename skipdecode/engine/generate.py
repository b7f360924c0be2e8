"""Decoding a batch from prompts to completions.

The caller splits rows into batches (`actors.batching.windows`). Rows that arrive while others decode are served by
`actors.serving.engine`.
"""

from collections import deque
from collections.abc import Sequence

import torch

from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, Row, complete
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import COMPACT_AT, StaticBatch, synchronized_time
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import Schedule


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
    return BatchResult.of(complete(batch.rows, schedule), stats)


@torch.inference_mode()
def generate_continuous(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    max_rows: int,
    decode_text: DecodeText | None = None,
) -> tuple[list[Row], ContinuousBatch]:
    """Continues every request, at most `max_rows` at a time; waiting requests join as rows end."""
    batch = ContinuousBatch(model, schedule, decode_text=decode_text)
    waiting, rows = deque(requests), []
    while waiting or not batch.is_done:
        num_free = max_rows - len(batch.rows)
        # a prompt alone costs nearly as much as several, so they join several at a time
        if waiting and (num_free >= max(1, max_rows // 8) or batch.is_done):
            rows += batch.join([waiting.popleft() for _ in range(min(num_free, len(waiting)))])
        batch.step()
    return rows, batch
