"""Lossless decoding from prompts to completions: a `SpeculativeBatch` that rows join as others end."""

from collections.abc import Sequence

from skipdecode.engine.generate import refill
from skipdecode.engine.prefix_sharing import PrefixSharing
from skipdecode.engine.request import DecodeText, Request
from skipdecode.engine.results import BatchResult
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import SpeculationController
from skipdecode.speculative.speculative_batch import SpeculativeBatch


def generate_lossless(
    model: Decoder,
    requests: Sequence[Request],
    schedule: Lossless,
    *,
    max_rows: int | None = None,
    decode_text: DecodeText | None = None,
    controller: SpeculationController | None = None,
    sharing: PrefixSharing | None = None,
) -> BatchResult:
    """Continues every request with the tokens of full depth, at most `max_rows` at a time (None: all at once);
    completions are in the order of the requests."""
    batch = SpeculativeBatch(model, schedule, decode_text=decode_text, controller=controller)
    return refill(batch, requests, max_rows=max_rows or len(requests), sharing=sharing)
