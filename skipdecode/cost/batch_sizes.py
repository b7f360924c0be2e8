"""How many rows a batch on GPUs has: one truth for workers (`actors.memory`) and predictions
(`skipdecode.cost.predict`).

Few numbers of rows, so that shapes repeat and CUDA graphs serve (`skipdecode.engine.cuda_graphs`). No torch.
"""

from collections.abc import Sequence

from skipdecode.config.model import DecoderConfig

ALIGNMENT = 16
"""Numbers; of every address and stride of a cache, so that kernels load 16 bytes at a time."""
MAX_ROWS = 256
"""More bring little on a GPU."""
GROWTH = 2
"""Without graphs: rows that stay are copied while the old ones are there, and lossless batches grow at once."""


def ladder(max_rows: int, *, has_midpoints: bool = True) -> tuple[int, ...]:
    """Numbers of rows that batches are padded to: powers of two, and what lies between; then `max_rows` itself."""
    rungs, power = [1], 2
    while rungs[-1] < max_rows:
        middle = [power * 3 // 4] if has_midpoints and power > 2 else []
        rungs += [rung for rung in (*middle, power) if rung > rungs[-1]]
        power *= 2
    return *(rung for rung in rungs if rung < max_rows), max_rows


def rung_within(rows: int) -> int:
    """The most of these numbers up to `rows`: 1 or more."""
    power = 1 << (max(rows, 1).bit_length() - 1)
    return power * 3 // 2 if power >= 2 and power * 3 // 2 <= rows else power


def row_rounding(config: DecoderConfig, itemsize: int) -> int:
    """Bytes of a row that rounding up the columns of its layers may add, where graphs are (`kv.graph_cache`)."""
    return 2 * config.num_hidden_layers * (ALIGNMENT - 1) * config.kv_dim * itemsize


def rows_within(
    cache_bytes: int, per_row: int, *, num_gpus: int = 1, has_graphs: bool, rungs: Sequence[int] | None = None
) -> int:
    """The most rows of a batch that fit into the memory for caches of all these GPUs and need no padding; 0: none does.

    A batch has as many parts as there are GPUs, each with the rows that one alone would have. `per_row`: bytes, with
    `row_rounding`. `rungs`: of the graphs there are; None: any of the ladder.
    """
    most = min(MAX_ROWS, cache_bytes // (num_gpus if has_graphs else num_gpus * GROWTH) // per_row)
    if rungs is None:
        return num_gpus * rung_within(most) if most > 0 else 0
    return num_gpus * max((rung for rung in rungs if rung <= most), default=0)
