"""A window's way through walk, sharing and parts, with the real ledger and leftovers in this process and no model.

Handles are stood in for by direct calls. Deaths of real processes are in test_poison.py and test_leftovers.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import ray

from actors.generator import RowFailure, WindowResult
from pipeline.cluster.ray_handles import Process, WindowRecord
from pipeline.stages import window_sharing as sharing_module
from pipeline.stages.attempt_tracker import AttemptTracker, StopRun
from pipeline.stages.poison_isolation import PoisonIsolation
from pipeline.stages.window_parts import Parts
from pipeline.stages.window_sharing import Helper, Sharing
from pipeline.stages.work_stealing import Leftovers
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion


class Died(BaseException):
    """In place of a signal."""


class Handle:
    """`handle.method.remote(...)` calls at once, and the result is its own reference."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return type("Method", (), {"remote": staticmethod(method)})


class Collector:
    def __init__(self) -> None:
        self.windows: list[WindowRecord] = []

    def window_done(self, worker: str, window: WindowRecord, batches: Sequence[Any]) -> None:
        self.windows.append(window)


class FakeDecoder:
    """Two rows a batch; dies of poison, and calls `meanwhile` before each answer."""

    def __init__(self, poison: Sequence[str] = (), meanwhile: Callable[[], None] = lambda: None) -> None:
        self.poison, self.meanwhile = set(poison), meanwhile
        self.decoded: list[list[str]] = []
        self.num_checks = 0

    def decode(self, requests: Sequence[Request], may_measure: bool = True) -> WindowResult:
        self.decoded.append([request.id for request in requests])
        if self.poison & set(self.decoded[-1]):
            raise Died
        self.meanwhile()
        return WindowResult([Completion([len(request.prompt_tokens)], "stop", 1, 1) for request in requests])

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        return [list(requests[at : at + 2]) for at in range(0, len(requests), 2)]

    def check(self) -> None:
        self.num_checks += 1


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)


class Worker:
    def __init__(self, name: str, attempts: AttemptTracker, decoder: FakeDecoder, leftovers: Any = None) -> None:
        attempts.starting(name, Process("node", "host", 1))
        attempts.ready(name)
        self.collector = Collector()
        self.parts = Parts(name, decoder, Handle(attempts), Handle(self.collector))  # type: ignore[arg-type]
        self.sharing = Sharing(leftovers and Handle(leftovers), self.parts)  # type: ignore[arg-type]
        self.walk = PoisonIsolation(self.parts, self.sharing)


def requests(count: int) -> list[Request]:
    """Row `r<n>` has n + 1 prompt tokens, and is answered with that number."""
    return [Request(f"r{row}", [2] * (row + 1)) for row in range(count)]


def tokens(answers: Sequence[Any]) -> list[Any]:
    return [answer.tokens[0] if isinstance(answer, Completion) else answer.error_code for answer in answers]


def test_a_row_that_kills_its_worker_is_parked_and_the_others_are_answered_in_order() -> None:
    attempts, decoder, wanted, deaths = AttemptTracker(2, 8, 1.0), FakeDecoder(["r5"]), requests(8), 0
    told: list[WindowRecord] = []
    while True:
        worker = Worker("w", attempts, decoder)
        try:
            answers = worker.walk.answers(wanted)
            break
        except Died:
            deaths += 1
        finally:
            told += worker.collector.windows
    assert tokens(answers) == [1, 2, 3, 4, 5, "poison_row", 7, 8]
    assert isinstance(answers[5], RowFailure)
    assert deaths == 3 + 2
    good = [row for part in decoder.decoded for row in part if "r5" not in part]
    assert len(good) - len(set(good)) <= deaths, "but for controls no row is decoded twice"
    assert sum(window["rows"] for window in told) == 8, "each row is told of once"
    assert sum(window["failed"] for window in told) == 1


def test_the_ledgers_verdict_ends_the_run() -> None:
    attempts = AttemptTracker(2, 8, 0.0)
    worker = Worker("w", attempts, FakeDecoder())
    attempts.finished("w", "earlier", ["x"], 1)
    with pytest.raises(StopRun, match="1 rows have failed"):
        worker.walk.answers(requests(2))


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> tuple[AttemptTracker, Leftovers]:
    """A ledger, and leftovers that always know of an idle worker."""
    leftovers = Leftovers()
    monkeypatch.setattr(leftovers, "num_idle", lambda: 1)
    monkeypatch.setattr(sharing_module, "HELP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(sharing_module, "MIN_SHARED_ROWS", 2)
    return AttemptTracker(2, 8, 1.0), leftovers


def test_a_helper_takes_a_part_and_its_owner_gets_the_answers(
    crowd: tuple[AttemptTracker, Leftovers], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, leftovers = crowd
    monkeypatch.setattr(Helper, "_loop", lambda self: None)
    theirs = FakeDecoder()
    other = Worker("other", attempts, theirs, leftovers)
    helper = Helper(other.sharing, other.parts, None)  # type: ignore[arg-type]
    mine = FakeDecoder(meanwhile=lambda: helper._help_once())
    owner = Worker("owner", attempts, mine, leftovers)
    assert tokens(owner.walk.answers(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert theirs.decoded
    assert sorted(row for part in mine.decoded + theirs.decoded for row in part) == [f"r{row}" for row in range(8)]
    assert mine.decoded[0] == ["r6", "r7"], "what takes longest is first"
    assert {window["window"] for window in other.collector.windows} == {0}, "rows of another worker's"
    assert not helper._help_once()


def test_what_a_helper_does_not_bring_the_owner_makes(crowd: tuple[AttemptTracker, Leftovers]) -> None:
    attempts, leftovers = crowd
    lent: list[Any] = []
    mine = FakeDecoder(meanwhile=lambda: lent.append(leftovers.ask("lost")) if not lent else None)
    owner = Worker("owner", attempts, mine, leftovers)
    assert tokens(owner.walk.answers(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(lent) == 1
    assert sorted(row for part in mine.decoded for row in part) == [f"r{row}" for row in range(8)]


def test_without_its_leftovers_a_worker_goes_on_alone(
    crowd: tuple[AttemptTracker, Leftovers], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, leftovers = crowd
    owner = Worker("owner", attempts, FakeDecoder(), leftovers)

    def gone(*_: Any) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(leftovers, "offer", gone)
    assert tokens(owner.walk.answers(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not owner.sharing.is_on
    assert tokens(owner.walk.answers(requests(3))) == [1, 2, 3]
