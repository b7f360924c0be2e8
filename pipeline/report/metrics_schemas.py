"""Schemas of `metrics/*.parquet`: a record per batch, per part of a window and per start of a worker.

In memory, as workers send them, they are the TypedDicts of `pipeline.cluster.worker_records`. The files are written and
read by `pipeline.report.collector`.
"""

from typing import Final, Literal, TypedDict

import pyarrow as pa

from pipeline.cluster.worker_records import BackendRecord, BatchRecord, WindowRecord, WorkerRecord

Record = BatchRecord | WindowRecord | WorkerRecord


class StoredStart(TypedDict):
    """A `WorkerRecord` as it is read back."""

    worker: str
    host: str
    pid: int
    load_s: float | None
    device: str
    dtype: str
    backend: BackendRecord | None
    """None: the file lacks the column."""
    why_slow: str | None
    ready_at: float


Kind = Literal["batches", "windows", "workers"]
_COST: Final = (  # of a batch, in the run's depth and again at full depth
    ("prompt_columns", pa.int32()),
    ("prompt_padding", pa.int64()),
    ("input_tokens", pa.int64()),
    ("output_tokens", pa.int64()),
    ("decode_steps", pa.int32()),
    ("row_steps", pa.int64()),
    ("layers_run", pa.int64()),
    ("ffns_run", pa.int64()),
    ("layer_row_steps", pa.int64()),
    ("cache_bytes", pa.int64()),
    ("prefix_tokens_saved", pa.int64()),
    ("prefill_s", pa.float64()),
    ("decode_s", pa.float64()),
    ("predicted_prefill_s", pa.float64()),
    ("predicted_decode_s", pa.float64()),
)
BATCH_SCHEMA: Final = pa.schema(
    [
        ("worker", pa.string()),
        ("batch", pa.int32()),
        ("started_at", pa.float64()),
        ("rows", pa.int32()),
        ("layers", pa.int32()),
        *((prefix + name, kind) for prefix in ("", "full_") for name, kind in _COST),
        ("score_s", pa.float64()),
        ("draft_s", pa.float64()),
        ("verify_s", pa.float64()),
        ("drafted_rounds", pa.int64()),
        ("timing_plain_rounds", pa.int64()),
        ("slower_rounds", pa.int64()),
        ("no_gain_rounds", pa.int64()),
        ("drafted_at", pa.list_(pa.int64())),
        ("accepted_at", pa.list_(pa.int64())),
        ("drafted_by", pa.list_(pa.int64())),
        ("accepted_by", pa.list_(pa.int64())),
        ("full_error", pa.string()),
        ("split_error", pa.string()),
        ("exact_rows", pa.int32()),
        ("matched_tokens", pa.int64()),
        ("compared_tokens", pa.int64()),
    ]
)
"""One row per decoded batch. `split_error`: of the larger batch that failed and of which this is a part (out of memory,
mostly). `score_s`: prompts that were scored beside answers. `draft*`, `verify_s`, `accepted_*` and
`*_rounds`: with `decode.lossless` alone. `full_*`, `predicted_*` and the agreement are null unless it was paired."""
WINDOW_SCHEMA: Final = pa.schema(
    [
        ("worker", pa.string()),
        ("started_at", pa.float64()),
        ("ended_at", pa.float64()),
        ("rows", pa.int32()),
        ("failed", pa.int32()),
        ("window", pa.int32()),
    ]
)
"""One row per part of a window that a worker took: when it was busy. `window` counts the worker's own windows from 1;
0: a part of another worker's."""
WORKER_SCHEMA: Final = pa.schema(
    [
        ("worker", pa.string()),
        ("host", pa.string()),
        ("pid", pa.int64()),
        ("load_s", pa.float64()),
        ("device", pa.string()),
        ("dtype", pa.string()),
        ("ready_at", pa.float64()),
        ("backend", pa.struct([("name", pa.string()), ("reason", pa.string())])),
        ("why_slow", pa.string()),
    ]
)
"""One row per start of a worker; a second one for the same worker is a restart."""

SCHEMAS: Final[dict[Kind, pa.Schema]] = {"batches": BATCH_SCHEMA, "windows": WINDOW_SCHEMA, "workers": WORKER_SCHEMA}
