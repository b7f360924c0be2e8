"""Handles of the actors that a run starts, as their callers see them: remote methods, their arguments and answers.

Ray makes a handle from a class at run time, so a type checker sees nothing of it. These protocols say it. Left out: the
actors themselves (`stages.attempts`, `stages.leftovers`, `report.collector`).
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NotRequired, ParamSpec, Protocol, TypedDict, TypeVar, cast

import ray

if TYPE_CHECKING:  # the actors' own processes need no torch
    from actors.generator import Answer
    from skipdecode.engine.request import Request

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")


class ObjectRef(Protocol[T_co]):
    """What Ray gives at once for a value that comes later."""

    def hex(self) -> str: ...

    def __await__(self) -> Generator[None, None, T_co]: ...


class RemoteMethod(Protocol[P, T_co]):
    """A method of an actor: called with `.remote(...)`."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[T_co]: ...


def fetch(ref: ObjectRef[T], timeout_s: float | None = None) -> T:
    """`ray.get` with its type. Raises what Ray does: GetTimeoutError, RayActorError, the task's own error."""
    return cast(T, ray.get(ref, timeout=timeout_s))


@dataclass(frozen=True)
class Process:
    """One incarnation of a worker."""

    node_id: str
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"


@dataclass(frozen=True)
class Plan:
    """How a worker is to go about a window."""

    parts: list[tuple[str, ...]]
    """To be decoded one after the other; the first is taken already."""
    answers: "dict[str, Answer]" = field(default_factory=dict)
    """Of rows that need no decoding: an earlier attempt did it."""
    parked: dict[str, str] = field(default_factory=dict)
    """Rows that must not be decoded again, and why."""
    is_clear: bool = True
    """No row is suspected of anything."""


class RunVerdict(TypedDict):
    """Why the ledger ended the run."""

    kind: str
    """budget (of failed rows) or workers."""
    reason: str


class AttemptTrackerHandle(Protocol):
    """Of `stages.attempts.AttemptTracker`."""

    @property
    def starting(self) -> RemoteMethod[[str, Process], str | None]: ...
    @property
    def ready(self) -> RemoteMethod[[str], None]: ...
    @property
    def begin(self) -> RemoteMethod[[str, Sequence[str]], Plan | str]: ...
    @property
    def take(self) -> RemoteMethod[[str, tuple[str, ...]], None]: ...
    @property
    def decoded(self) -> "RemoteMethod[[str, dict[str, Answer] | None], None]": ...
    @property
    def finished(self) -> RemoteMethod[[str, str, Sequence[str], int], None]: ...
    @property
    def dying(self) -> RemoteMethod[[str, str], None]: ...
    @property
    def cannot_load(self) -> RemoteMethod[[str, str], None]: ...
    @property
    def verdict(self) -> RemoteMethod[[], RunVerdict | None]: ...
    @property
    def describe(self) -> RemoteMethod[[], list[str]]: ...


@dataclass(frozen=True)
class Loan:
    """A part of another worker's window."""

    offer: str
    part: int
    requests: "Sequence[Request]"


@dataclass(frozen=True)
class Collected:
    """Since the last time it was asked for."""

    answers: "dict[str, Answer]"
    num_lent: int
    """Parts that others still decode."""


class LeftoversHandle(Protocol):
    """Of `stages.leftovers.Leftovers`."""

    @property
    def started(self) -> RemoteMethod[[str], None]: ...
    @property
    def began(self) -> RemoteMethod[[str], None]: ...
    @property
    def num_idle(self) -> RemoteMethod[[], int]: ...
    @property
    def ask(self) -> RemoteMethod[[str], Loan | None]: ...
    @property
    def offer(self) -> "RemoteMethod[[str, str, Sequence[Sequence[Request]]], None]": ...
    @property
    def take(self) -> RemoteMethod[[str], int | None]: ...
    @property
    def give(self) -> "RemoteMethod[[Loan, dict[str, Answer]], None]": ...
    @property
    def collect(self) -> RemoteMethod[[str], Collected]: ...
    @property
    def close(self) -> "RemoteMethod[[str], dict[str, Answer]]": ...


class BackendRecord(TypedDict):
    """Whose kernels a worker decodes with."""

    name: str
    """As `skipdecode.backends.choice.Choice` has it."""
    reason: str
    """What the machine has, and what is amiss with faster ones."""


class WorkerRecord(TypedDict):
    """One start of a worker (`report.records.WORKER_SCHEMA`)."""

    host: str
    pid: int
    load_s: float
    device: str
    dtype: str
    backend: BackendRecord
    ready_at: float


class WindowRecord(TypedDict):
    """A part of a window that a worker took (`report.records.WINDOW_SCHEMA`); times in s since the epoch."""

    started_at: float
    ended_at: float
    rows: int
    failed: int
    window: int
    """Numbered from 1 by the worker; 0: a part of another worker's."""


class BatchRecord(TypedDict):
    """What one decoded batch was and cost (`report.records.BATCH_SCHEMA`)."""

    batch: int
    started_at: float
    rows: int
    layers: int
    prompt_columns: int
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
    score_s: NotRequired[float]
    draft_s: NotRequired[float]
    verify_s: NotRequired[float]
    drafted_at: NotRequired[list[int]]
    accepted_at: NotRequired[list[int]]
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
    """What has been decoded so far in a session."""

    rows: int
    failed: int
    input_tokens: int
    output_tokens: int
    workers: int
    restarts: int
    working_s: float
    """Since the first worker was ready."""


class Pace(TypedDict):
    """What the batches of a session took, passes at full depth apart."""

    rows: int
    failed: int
    output_tokens: int
    workers: int
    batches: int
    pairs: int
    own_s: float
    full_s: float


class CollectorHandle(Protocol):
    """Of `report.collector.MetricsCollector`."""

    @property
    def worker_started(self) -> RemoteMethod[[str, WorkerRecord], None]: ...
    @property
    def window_done(self) -> RemoteMethod[[str, WindowRecord, Sequence[BatchRecord]], None]: ...
    @property
    def counts(self) -> RemoteMethod[[], Counts]: ...
    @property
    def pace(self) -> RemoteMethod[[], Pace]: ...
    @property
    def flush(self) -> RemoteMethod[[], None]: ...
