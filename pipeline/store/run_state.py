"""`run.json` and `lease.json`: what they hold, by key, and the refusal of what a version before 1.0 wrote.

`report.json` is described in `pipeline.report.document`.
"""

from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from pipeline.config.job import ConfigError
from pipeline.formatting import Json

IS_RUN = frozenset({"fingerprint", "books", "sessions"})
"""Keys of a `run.json` of ours: other programs write files of that name, too."""

Phase: TypeAlias = Literal["running", "interrupted", "expired", "retrying", "committing", "finished"]
"""expired: the time that `limits.window_s` gave its last session is over; committing: a retry is exchanging rows, and
the folder has some of them twice."""

Fingerprint: TypeAlias = dict[str, Json]
"""Everything that decides the rows, by dotted key (`generate.fingerprint`)."""

FileEntry: TypeAlias = list[str | int | None]
"""A file of the input: name, size in bytes, time of the last change in ns, etag, documents."""


FileRecord: TypeAlias = list[int | str]
"""Rows of a data file, and the sum of their ids in hex."""


class Books(TypedDict):
    """Row accounting: rows in against rows out; `closed` if they agree."""

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
    adapter: str | None
    layers: int
    implementation: NotRequired[str]
    """Whose layers run: `own` or `transformers`. Older runs, which have no such entry, are of the former."""
    quantization: str | None
    kv_cache_dtype: NotRequired[str]
    """`auto` or `fp8`. Older runs, which have no such entry, have the former."""


class InputState(TypedDict):
    """The input as it was listed at the start."""

    format: str
    files: list[FileEntry]
    documents: int
    """Rows of the input; each may become several of the output."""


class RetryState(TypedDict):
    """The result of a retry: rows `tried`, of which `ok` and `failed`."""

    session: str
    at: float
    overrides: list[str]
    tried: int
    ok: int
    failed: int


class CommitState(TypedDict):
    """The rest of an exchange of rows; paths relative to the folder."""

    moves: list[list[str]]
    """[from, to] of files."""
    removes: list[str]


class EstimateState(TypedDict):
    """The estimate of a session, once its first rows were decoded."""

    rows: int
    seen_rows: int
    """Rows that were decoded by then."""
    input_tokens: int
    output_tokens: int
    duration_s: float
    cost: float | None


class LinesRecord(TypedDict):
    """The contents of a file of lines."""

    lines: int
    bytes: int
    sha256: str


class RunState(TypedDict):
    """`run.json`."""

    version: str
    """The project's version in the last session. Versions before 1.0 wrote none (`check_version`)."""
    state: Phase
    fingerprint: Fingerprint
    config: dict[str, dict[str, Any]]
    """`JobConfig`, by section."""
    model: ModelState
    decode: dict[str, Json]
    """The schedule that holds, as it was resolved."""
    input: InputState
    columns: list[list[str]]
    """Name and type of each column of the data files."""
    sessions: list[Session]
    retries: list[RetryState]
    books: Books
    commit: NotRequired[CommitState]
    known: NotRequired[list[str]]
    """The data files of the run that its last session found at its start; missing once the run is finished."""
    files: NotRequired[dict[str, FileRecord]]
    """The data files when the rows were last counted."""
    ids: NotRequired[dict[str, str | None]]
    """Sums of the ids of the `input` (None: not known) and of the `output`, in hex: equal where each row is there
    once."""
    answers: NotRequired[dict[str, LinesRecord]]
    """Each OpenAI batch file as it was written, where there are such files."""
    former: list[str]
    """Sessions of runs that were in the folder before, and of holders that it was taken from."""
    estimate: NotRequired[EstimateState]
    """Only in runs of a single session."""
    report: NotRequired[dict[str, Any]]
    """`report.json`, once the run is finished."""


def check_version(state: Mapping[str, object], shown: str) -> None:
    """ConfigError where a version before 1.0, which did not say its version, wrote this state of the folder `shown`."""
    if "version" not in state:
        raise ConfigError(
            "",
            f"{shown}: made by a version before 1.0, which this version cannot continue; start a new output folder",
        )


class LeaseState(TypedDict):
    """`lease.json`: who works in the folder."""

    session: str
    host: str
    machine: str
    """Identifies where a process id means the same process."""
    pid: int
    beat: int
