"""Decodes small batches when a model loads, so that thread pools start and kernels are compiled before the first rows.

Some kernels are compiled for certain numbers of rows (`Backend.warm_up_batch_sizes`). Steps that are captured as CUDA
graphs compile theirs at capture; those of prompts and of steps without graphs are compiled here.
"""

from contextlib import suppress

from skipdecode.backends.device import backend_on
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.kv.graph_cache import PoolFull
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import Schedule
from skipdecode.speculative.generate_lossless import generate_lossless

ROWS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 4


def warm_up(model: Decoder, schedule: Schedule, graphs: CudaGraphs | None = None, *, max_rows: int = ROWS) -> None:
    """Decodes small batches. `max_rows`: the most rows that later batches will have."""
    for _ in range(2):
        _decode(model, schedule, graphs, ROWS)
    _try_rows(model, schedule, graphs, max_rows)
    if isinstance(schedule, Lossless):
        for _ in range(2):
            generate_lossless(model, [_request(model)] * ROWS, schedule)


def _try_rows(model: Decoder, schedule: Schedule, graphs: CudaGraphs | None, max_rows: int) -> None:
    """Decodes batches of all numbers of rows that kernels are compiled for."""
    parts = 1 if model.placement is None else model.placement.num_parts
    if not (sizes := backend_on(model.device).warm_up_batch_sizes(-(-max_rows // parts))):
        return
    _decode(model, schedule, graphs, ROWS, temperature=1.0)
    if graphs is None or not schedule.is_static:
        for rows in sizes:
            _decode(model, schedule, None, rows * parts)
            if schedule.is_static and model.placement is None:
                generate_continuous(model, [_request(model)] * rows, schedule, max_rows=rows)
    if graphs is not None:
        with suppress(PoolFull):  # then there will never be such a batch
            for rows in sizes:
                _decode(model, schedule, graphs, rows, num_new=1)


def _decode(
    model: Decoder,
    schedule: Schedule,
    graphs: CudaGraphs | None,
    rows: int,
    *,
    temperature: float = 0.0,
    num_new: int = NEW_TOKENS,
) -> None:
    generate(model, [_request(model, temperature, num_new)] * rows, schedule, graphs=graphs)


def _request(model: Decoder, temperature: float = 0.0, num_new: int = NEW_TOKENS) -> Request:
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True, temperature=temperature)
    return Request("warm-up", [model.config.filler_token_id] * PROMPT_TOKENS, sampling)
