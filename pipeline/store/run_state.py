"""`run.json` and `lease.json`: what they hold, by key. Types only.

A key that is `NotRequired` may be missing in a folder that an earlier version wrote. Left out: `report.json`, whose
figures `report.figures` makes.
"""

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from pipeline.formatting import Json

Phase: TypeAlias = Literal["running", "interrupted", "retrying", "committing", "finished"]
"""committing: a retry is exchanging rows, and the folder has some of them twice."""

Fingerprint: TypeAlias = dict[str, Json]
"""Everything that decides the rows, by dotted key (`generate.fingerprint`)."""

FileEntry: TypeAlias = list[str | int | None]
"""A file of the input: name, size in bytes, time of the last change in ns, etag, documents."""


FileRecord: TypeAlias = list[int | str]
"""Of a data file: rows, and the sum of their ids in hex."""


class Books(TypedDict):
    """Rows in against rows out; `closed`: they agree."""

    input: int
    ok: int | None
    """None: not counted yet."""
    failed: int | None
    closed: bool


class Session(TypedDict):
    """One driver's time at the run, epoch seconds."""

    id: str
    started_at: float
    ended_at: float | None
    """None: it runs, or was killed."""


class ModelState(TypedDict):
    """The checkpoint as the configuration names it."""

    source: str
    adapter: NotRequired[str | None]
    layers: int
    quantization: NotRequired[str | None]


class InputState(TypedDict):
    """The input as it was listed at the start."""

    format: str
    files: list[FileEntry]
    documents: NotRequired[int]
    """Rows of the input; each may become several of the output."""


class RetryState(TypedDict):
    """What a retry did: rows `tried`, of which `ok` and `failed`."""

    session: str
    at: float
    overrides: list[str]
    tried: int
    ok: int
    failed: int


class CommitState(TypedDict):
    """What is left to do of an exchange of rows; paths relative to the folder."""

    moves: list[list[str]]
    """[from, to] of files."""
    removes: list[str]


class EstimateState(TypedDict):
    """What a session expected of itself, once its first rows were decoded."""

    rows: int
    seen_rows: int
    """That were decoded by then."""
    input_tokens: int
    output_tokens: int
    duration_s: float
    cost: float | None


class RunState(TypedDict):
    """`run.json`."""

    state: Phase
    fingerprint: Fingerprint
    config: dict[str, dict[str, Any]]
    """`JobConfig`, by section."""
    model: ModelState
    decode: dict[str, Json]
    """The schedule that holds, as it was settled."""
    input: InputState
    columns: list[list[str]]
    """Name and type of each column of the data files."""
    sessions: list[Session]
    retries: NotRequired[list[RetryState]]
    books: Books
    commit: NotRequired[CommitState]
    known: NotRequired[list[str]]
    """Of a run that is not finished: the data files that its last session found."""
    files: NotRequired[dict[str, FileRecord]]
    """The data files as the books were closed."""
    ids: NotRequired[dict[str, str | None]]
    """Sums of the ids of the `input` (None: not known) and of the `output`, in hex: equal where each row is there
    once."""
    answers: NotRequired[dict[str, list[int]]]
    """Lines and bytes of each OpenAI batch file."""
    former: NotRequired[list[str]]
    """Sessions of runs that were in the folder before, and of holders that it was taken from."""
    estimate: NotRequired[EstimateState]
    """Of a run of one session."""
    report: NotRequired[dict[str, Any]]
    """`report.json`, once the run is finished."""


class LeaseState(TypedDict):
    """`lease.json`: who works in the folder."""

    session: str
    host: str
    machine: str
    """Where a process id means the same process."""
    pid: int
    beat: int
