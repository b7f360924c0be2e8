"""`report.json`: what it holds, by key. Types only; `pipeline.report.figures` makes it.

Times are seconds unless a key says otherwise. Nothing reads a report back: it is made anew from the files of the run.
"""

from typing import TypedDict

from pipeline.cluster.worker_records import BackendRecord
from pipeline.formatting import Json
from pipeline.store.run_state import Books, ModelState


class Speedup(TypedDict):
    """Time per output token at full depth over that of the run (`batches.speedup`)."""

    measured: float | None
    ci95: list[float] | None
    """Low, high."""
    measured_decode: float | None
    layers: float | None
    predicted: float | None
    batches: int


class Agreement(TypedDict):
    """Shares that equal full depth, of the rows decoded both ways."""

    exact_rows: float | None
    token_match: float | None
    rows: int


class Cost(TypedDict):
    """Amounts are in the currency of `price_per_hour`."""

    price_per_hour: float
    total: float
    per_million_output_tokens: float | None
    per_million_tokens: float | None


class Estimated(TypedDict):
    """The estimate that the run made of itself, compared with the outcome."""

    seen_rows: int
    """Rows that had been decoded when the estimate was made."""
    input_tokens: int
    output_tokens: int
    duration_s: float
    cost: float | None
    duration_ratio: float
    """Estimated over actual."""
    output_tokens_ratio: float | None


class DecodedAgain(TypedDict):
    """Beyond what the data files hold."""

    rows: int
    output_tokens: int


class Histogram(TypedDict):
    """Rows by a length in tokens."""

    mean: float
    min: int
    p50: int
    p95: int
    max: int
    edges: list[int]
    """Edges of the bins, one more than there are bins; the last edge is exclusive."""
    rows: list[int]
    """Rows in each bin."""
    beyond: int
    """Rows longer than the last edge."""


class Lengths(TypedDict):
    """None: no row."""

    input: Histogram | None
    output: Histogram | None


class LayerPiece(TypedDict):
    """Decode steps `first` to `last`, both included, and the mean of the layers that they ran."""

    first: int
    last: int
    layers: float


class LayersByStep(TypedDict):
    planned: list[int]
    """Layers of each decode step, by the schedule."""
    run: list[LayerPiece] | None
    reason: str | None
    """Why `run` is None."""


class Example(TypedDict):
    """A failed row."""

    id: str
    message: str


class ErrorCount(TypedDict):
    count: int
    first: str | None
    """The message of the first error."""


class ActorFigures(TypedDict):
    """One worker, over its restarts."""

    worker: str
    host: str
    device: str
    dtype: str
    backend: BackendRecord | None
    """None: the metrics lack the column."""
    why_slow: str | None
    """Why it decoded slower than it could; None if it did not."""
    load_s: float
    busy_s: float
    idle_s: float
    restarts: int
    rows: int
    left: bool


class Tail(TypedDict):
    """The end of the last session, when some workers had nothing left."""

    duration_s: float
    idle_s: float
    idle_share: float
    left: int


class Rates(TypedDict):
    """Output tokens per second in equal parts of the run."""

    bin_s: float
    output_tokens_per_s: list[float]


class Drafts(TypedDict):
    """Drafts of a lossless run."""

    drafted: int
    """Tokens."""
    accepted: int
    acceptance_by_position: list[float]
    """The share of the first, second, .. drafted token that was accepted, with all before it."""
    drafted_by: dict[str, int]
    """Tokens drafted by `layers`, by a match in the `row`, and from other `answers`."""
    acceptance_by: dict[str, float | None]
    """The share of them that was accepted; null where none was drafted."""
    rounds: dict[str, int]
    """`drafted`: rounds with drafts. Plain steps instead of them: `measured`, timed for comparison; `slower`, because
    drafts were slower by the clock or not yet found to be faster; `no_gain`, because none were expected to pay at their
    acceptance."""
    draft_s: float
    verify_s: float
    """Seconds of `decode_s` in passes at full depth."""


class Reasoning(TypedDict):
    """What models wrote before their answers (`<think>`)."""

    tokens: int | None
    """Output tokens that are reasoning; None without `output.reasoning_parser`."""
    unfinished: float
    """The share of good rows that are reasoning alone, which did not end; of a sample."""


class CountedFigures(TypedDict):
    """The part of `report.json` that is counted from data files and batch records."""

    duration_s: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    decode_output_throughput: float | None
    speedup: Speedup
    agreement: Agreement
    draft_acceptance: float | None
    """None: nothing was drafted. None in the next two: no batch was lossless."""
    tokens_per_pass: float | None
    drafts: Drafts | None
    layers_per_token: float | None
    ffns_per_token: float | None
    padding_fraction: float
    prefill_s: float
    decode_s: float
    prefix_tokens_saved: int
    """Prompt tokens that were not run, since another row's run of them served (`decode.prefix`)."""
    prefix_saved_s: float
    """Estimated time that those tokens would have taken."""
    baseline_s: float
    cost: Cost | None
    estimate: Estimated | None
    """None: too few rows for one, or a run that was resumed."""
    decoded_again: DecodedAgain
    lengths: Lengths
    layers_by_step: LayersByStep
    finish_reasons: dict[str, int]
    """Good rows by `finish_reason`."""
    reasoning: Reasoning
    errors: dict[str, int]
    error_examples: dict[str, list[Example]]
    split_batches: ErrorCount
    baseline_errors: ErrorCount
    books: Books
    documents: int
    model: ModelState
    decode: dict[str, Json]
    prefill: str


class Figures(CountedFigures):
    """`report.json`."""

    version: str
    """Version of skipdecode-ray that made the report."""
    actors: list[ActorFigures]
    tail: Tail | None
    throughput: Rates


class Lane(TypedDict):
    """One worker in the plot of the workers; not part of `report.json`."""

    worker: str
    load: list[tuple[float, float]]
    """Start and length, in seconds of the run."""
    busy: list[tuple[float, float]]
    restarts: list[float]
