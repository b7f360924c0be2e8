"""Batch sizes on GPUs, for workers (`actors.memory`) and for predictions (`skipdecode.cost.predict`). No torch.

There are only a few sizes, so that shapes repeat and CUDA graphs can be reused (`skipdecode.engine.cuda_graphs`).
"""

from collections.abc import Sequence

from skipdecode.config.model import KV_ALIGNMENT, DecoderConfig

MAX_ROWS = 256
"""Larger batches gain little on a GPU."""
FINEST = 2
"""The ladder with all of its sizes."""
QUARTERED_FROM = 128
"""Below it a step reads mostly weights, and rows that pad a batch cost little."""
GROWTH = 2
"""Memory that a cache may grow to without graphs: rows that stay are copied while the old ones still exist."""


def ladder(max_rows: int, fineness: int = FINEST) -> tuple[int, ...]:
    """Batch sizes that batches are padded to: powers of two and `max_rows` itself; from a `fineness` of 1 on also the
    midpoints of powers; at 2 also the quarters above QUARTERED_FROM (160 and 224)."""
    rungs, power = [1], 1
    while rungs[-1] < max_rows:
        parts = 4 if fineness >= 2 and power >= QUARTERED_FROM else 2 if fineness >= 1 and power >= 2 else 1
        rungs += [power + power * part // parts for part in range(1, parts + 1)]
        power *= 2
    return *(rung for rung in rungs if rung < max_rows), max_rows


def rung_within(rows: int) -> int:
    """The largest size of the finest ladder up to MAX_ROWS that is at most `rows`, and at least 1."""
    return max((rung for rung in ladder(MAX_ROWS) if rung <= rows), default=1)


def row_rounding(config: DecoderConfig, itemsize: int) -> int:
    """Bytes that a row may need on top because its layers' columns are rounded up for graphs (`kv.graph_cache`)."""
    return 2 * config.num_hidden_layers * (KV_ALIGNMENT - 1) * config.kv_dim * itemsize


def rows_within(
    cache_bytes: int, per_row: int, *, num_gpus: int = 1, has_graphs: bool, rungs: Sequence[int] | None = None
) -> int:
    """The largest batch that fits into `cache_bytes` of all GPUs together and needs no padding; 0 if none does.

    A batch has as many micro-batches as there are GPUs. `per_row`: bytes of a row, `row_rounding` included. `rungs`:
    the batch sizes that graphs were captured for; None: any of the ladder.
    """
    most = min(MAX_ROWS, cache_bytes // (num_gpus if has_graphs else num_gpus * GROWTH) // per_row)
    if rungs is None:
        return num_gpus * rung_within(most) if most > 0 else 0
    return num_gpus * max((rung for rung in rungs if rung <= most), default=0)
