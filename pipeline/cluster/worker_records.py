"""What workers report to the metrics collector, and the collector's running totals. Types only.

`pipeline.report.metrics_schemas` has these records as Parquet columns, and some more of them.
"""

from typing import NotRequired, TypedDict


class BackendRecord(TypedDict):
    """Whose kernels a worker decodes with."""

    name: str
    """`skipdecode.backends.choice.Choice.name`."""
    reason: str
    """Why it was chosen, and why faster ones were not."""


class ModelRecord(TypedDict):
    """What a worker decodes with."""

    load_s: float
    device: str
    dtype: str
    backend: BackendRecord
    why_slow: str | None
    """Why it decodes slower than it could (`Generator.why_slow`); None if it does not."""


class WorkerRecord(ModelRecord):
    """One start of a worker (`report.metrics_schemas.WORKER_SCHEMA`)."""

    host: str
    pid: int
    ready_at: float


class WindowRecord(TypedDict):
    """A part of a window that a worker took (`report.metrics_schemas.WINDOW_SCHEMA`); times in s since the epoch."""

    started_at: float
    ended_at: float
    rows: int
    failed: int
    window: int
    """Numbered from 1 by the worker; 0: a part of another worker's."""


class BatchRecord(TypedDict):
    """One decoded batch and what it cost (`report.metrics_schemas.BATCH_SCHEMA`)."""

    batch: int
    started_at: float
    rows: int
    layers: int
    prompt_columns: int
    prompt_padding: int
    input_tokens: int
    output_tokens: int
    decode_steps: int
    row_steps: int
    layers_run: int
    ffns_run: int
    layer_row_steps: int
    cache_bytes: int
    prefix_tokens_saved: int
    prefill_s: float
    decode_s: float
    """Both are 0 where an endpoint decoded the rows beside others, and no time is theirs alone."""
    score_s: NotRequired[float]
    draft_s: NotRequired[float]
    verify_s: NotRequired[float]
    drafted_at: NotRequired[list[int]]
    accepted_at: NotRequired[list[int]]
    drafted_by: NotRequired[list[int]]
    accepted_by: NotRequired[list[int]]
    split_error: NotRequired[str]
    full_error: NotRequired[str]
    # what follows only of a batch that was decoded at full depth too
    full_output_tokens: NotRequired[int]
    full_prefill_s: NotRequired[float]
    full_decode_s: NotRequired[float]
    predicted_prefill_s: NotRequired[float]
    predicted_decode_s: NotRequired[float]
    full_predicted_prefill_s: NotRequired[float]
    full_predicted_decode_s: NotRequired[float]
    exact_rows: NotRequired[int]
    matched_tokens: NotRequired[int]
    compared_tokens: NotRequired[int]


class Counts(TypedDict):
    """Totals of a session so far."""

    rows: int
    failed: int
    input_tokens: int
    output_tokens: int
    workers: int
    restarts: int
    sitting_out: int
    """Workers that cannot work, and whose windows others decode."""
    working_s: float
    """Since the first worker was ready."""


class Pace(TypedDict):
    """Seconds that the batches of a session took, with those at full depth counted separately."""

    rows: int
    failed: int
    output_tokens: int
    workers: int
    batches: int
    pairs: int
    own_s: float
    full_s: float
