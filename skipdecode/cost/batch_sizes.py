"""Batch sizes on GPUs, for workers (`actors.memory`) and for predictions (`skipdecode.cost.predict`). No torch.

There are only a few sizes, so that shapes repeat and CUDA graphs can be reused (`skipdecode.engine.cuda_graphs`).
"""

from collections.abc import Sequence

from skipdecode.config.model import KV_ALIGNMENT, DecoderConfig

MAX_ROWS = 256
"""Larger batches gain little on a GPU."""
GROWTH = 2
"""Memory that a cache may grow to without graphs: rows that stay are copied while the old ones still exist."""


def ladder(max_rows: int, *, has_midpoints: bool = True) -> tuple[int, ...]:
    """Batch sizes that batches are padded to: powers of two, their midpoints, and `max_rows` itself."""
    rungs, power = [1], 2
    while rungs[-1] < max_rows:
        middle = [power * 3 // 4] if has_midpoints and power > 2 else []
        rungs += [rung for rung in (*middle, power) if rung > rungs[-1]]
        power *= 2
    return *(rung for rung in rungs if rung < max_rows), max_rows


def rung_within(rows: int) -> int:
    """The largest size of the ladder that is at most `rows`, and at least 1."""
    power = 1 << (max(rows, 1).bit_length() - 1)
    return power * 3 // 2 if power >= 2 and power * 3 // 2 <= rows else power


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
