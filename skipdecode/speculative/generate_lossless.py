"""Lossless decoding from prompts to completions: a `SpeculativeBatch` run to its end."""

from collections.abc import Sequence

import torch

from skipdecode.engine.prefill import rounded_columns
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request, complete
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import synchronized_time
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.speculative_batch import SpeculativeBatch


@torch.inference_mode()
def generate_lossless(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Lossless,
    *,
    decode_text: DecodeText | None = None,
    controller: SpeculationController | None = None,
    sharing: PrefixSharing | None = None,
) -> BatchResult:
    """Continues every request with the tokens of full depth; completions in the order of the requests."""
    start = synchronized_time(model.device)
    batch = SpeculativeBatch(model, schedule, decode_text=decode_text, controller=controller, is_closed=True)
    return run_to_the_end(batch, requests, sharing, start=start)


@torch.inference_mode()
def run_to_the_end(
    batch: SpeculativeBatch,
    requests: Sequence[Request],
    sharing: PrefixSharing | None = None,
    *,
    start: float | None = None,
) -> BatchResult:
    """`generate_lossless` by an empty batch, which was begun at `start` (`synchronized_time`); None: now."""
    model, stats = batch.model, batch.stats
    start = synchronized_time(model.device) if start is None else start
    rows = batch.join(requests, sharing)
    stats.prefix_tokens_saved = 0 if sharing is None else sharing.tokens_saved
    stats.rows, stats.input_tokens = len(rows), sum(len(r.prompt_tokens) for r in requests)
    stats.prompt_columns = rounded_columns(max(len(r.prompt_tokens) for r in requests))
    stats.cache_bytes, stats.prefill_s = batch.cache_bytes, synchronized_time(model.device) - start
    while not batch.is_done:
        batch.step()
    stats.decode_s = synchronized_time(model.device) - start - stats.prefill_s
    completions = complete(rows, batch.schedule)
    lengths = [len(c.tokens) for c in completions]
    stats.batch_rows = [sum(n > k + 1 for n in lengths) for k in range(max(lengths) - 1)]  # as full depth has them
    return BatchResult.of(completions, stats)
