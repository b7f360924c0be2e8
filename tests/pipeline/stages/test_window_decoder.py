"""A window's way through `WindowDecoder`, with the real attempt tracker and steal queue in this process and no model.

Handles are stood in for by direct calls. Deaths of real processes are in test_poison.py and test_work_stealing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import ray

from actors.failures import RowFailure
from actors.generator import WindowResult
from pipeline.cluster.worker_records import WindowRecord
from pipeline.stages import delegating_decoder, window_decoder
from pipeline.stages.attempt_tracker import AttemptTracker, StopRun, WorkerProcess
from pipeline.stages.delegating_decoder import DelegatingDecoder
from pipeline.stages.window_decoder import WindowDecoder, prompt_key
from pipeline.stages.work_stealing import StealQueue
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import ShouldContinue, always
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


class FakeModel:
    """Two rows a batch, one after the other; dies of poison, and calls `meanwhile` before each answer."""

    def __init__(self, poison: Sequence[str] = (), meanwhile: Callable[[], None] = lambda: None) -> None:
        self.poison, self.meanwhile = set(poison), meanwhile
        self.decoded: list[list[str]] = []
        self.num_checks = 0
        self.alone: list[list[str]] = []

    def decode_alone(self, requests: Sequence[Request]) -> WindowResult:
        self.alone.append([request.id for request in requests])
        return self.decode(requests)

    def decode(
        self, requests: Sequence[Request], may_measure: bool = True, should_continue: ShouldContinue = always
    ) -> WindowResult:
        if self.poison & {request.id for request in requests}:
            self.decoded.append([request.id for request in requests])
            raise Died
        begun: list[Request] = []
        for batch in self.batches(requests):
            if begun and not should_continue():
                break
            begun += batch
            self.meanwhile()
        self.decoded.append([request.id for request in begun])
        answers = [Completion([len(request.prompt_tokens)], "stop", 1, 1) for request in begun]
        return WindowResult(answers, left=list(range(len(begun), len(requests))))

    def batches(self, requests: Sequence[Request]) -> list[list[Request]]:
        return [list(requests[at : at + 2]) for at in range(0, len(requests), 2)]

    def check(self) -> None:
        self.num_checks += 1


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda found, timeout=None: found)


class Worker:
    def __init__(self, name: str, attempts: AttemptTracker, model: FakeModel, queue: Any = None) -> None:
        attempts.worker_starting(name, WorkerProcess("node", "host", 1))
        attempts.worker_ready(name)
        self.collector = Collector()
        handles = Handle(attempts), Handle(self.collector), queue and Handle(queue)
        self.decoder = WindowDecoder(name, model, *handles)  # type: ignore[arg-type]


def requests(count: int) -> list[Request]:
    """Row `r<n>` has n + 1 prompt tokens, and is answered with that number."""
    return [Request(f"r{row}", [2] * (row + 1)) for row in range(count)]


def tokens(answers: Sequence[Any]) -> list[Any]:
    return [answer.tokens[0] if isinstance(answer, Completion) else answer.error_code for answer in answers]


def test_a_row_that_kills_its_worker_is_quarantined_and_the_others_are_answered_in_order() -> None:
    attempts, decoder, wanted, deaths = AttemptTracker(2, 8, 1.0), FakeModel(["r5"]), requests(8), 0
    told: list[WindowRecord] = []
    while True:
        worker = Worker("w", attempts, decoder)
        try:
            answers = worker.decoder.answer(wanted)
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
    assert decoder.decoded[0] == [request.id for request in wanted], "nobody is a suspect yet"
    assert decoder.alone == decoder.decoded[1:], "an endpoint would not be given these"
    assert sum(window["rows"] for window in told) == 8, "each row is told of once"
    assert sum(window["failed"] for window in told) == 1


def test_samples_of_a_prompt_have_one_key() -> None:
    request = Request("r0-0", [2, 3], Sampling(temperature=1.0, seed=1))
    key = prompt_key(request)
    assert prompt_key(replace(request, id="r0-1", sampling=replace(request.sampling, seed=2))) == key
    others = [
        replace(request, prompt_tokens=[2, 4]),
        replace(request, sampling=replace(request.sampling, temperature=0.5)),
        replace(request, score_prompt=True),
    ]
    assert len({key, *map(prompt_key, others)}) == 4


def test_a_poison_prompt_fails_all_its_samples_soon() -> None:
    attempts, deaths = AttemptTracker(2, 8, 100.0), 0
    wanted = [Request(f"r{row}", [2] * 3, Sampling(temperature=1.0, seed=row)) for row in range(8)]
    while True:
        try:
            answers = Worker("w", attempts, FakeModel([request.id for request in wanted])).decoder.answer(wanted)
            break
        except Died:
            deaths += 1
    assert tokens(answers) == ["poison_row"] * 8
    assert deaths <= 3 + 2 + 2


def test_the_trackers_verdict_ends_the_run() -> None:
    attempts = AttemptTracker(2, 8, 0.0)
    worker = Worker("w", attempts, FakeModel())
    attempts.window_finished("w", "earlier", ["x"], 1)
    with pytest.raises(StopRun, match="1 rows have failed"):
        worker.decoder.answer(requests(2))


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> tuple[AttemptTracker, StealQueue]:
    """A tracker, and a queue that always knows of an idle worker."""
    queue = StealQueue()
    monkeypatch.setattr(queue, "num_idle", lambda: 1)
    monkeypatch.setattr(window_decoder, "STEAL_TIMEOUT_S", 0.0)
    monkeypatch.setattr(window_decoder, "MIN_SHARED_ROWS", 2)
    return AttemptTracker(2, 8, 1.0), queue


def test_a_thief_takes_a_part_and_its_owner_gets_the_answers(
    crowd: tuple[AttemptTracker, StealQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, queue = crowd
    theirs = FakeModel()
    other = Worker("other", attempts, theirs, queue)
    mine = FakeModel(meanwhile=lambda: other.decoder.steal())
    owner = Worker("owner", attempts, mine, queue)
    assert tokens(owner.decoder.answer(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert theirs.decoded
    assert sorted(row for part in mine.decoded + theirs.decoded for row in part) == [f"r{row}" for row in range(8)]
    assert mine.decoded[0] == ["r6", "r7"], "what takes longest is first"
    assert {window["window"] for window in other.collector.windows} == {0}, "rows of another worker's"
    assert not other.decoder.steal()


def test_rows_that_have_not_begun_are_shared_once_a_worker_is_idle(
    crowd: tuple[AttemptTracker, StealQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, queue = crowd
    idle = iter([0, 0, 1])  # before the window, and between its batches
    monkeypatch.setattr(queue, "num_idle", lambda: next(idle, 1))
    theirs = FakeModel()
    other = Worker("other", attempts, theirs, queue)
    mine = FakeModel(meanwhile=lambda: other.decoder.steal())
    owner = Worker("owner", attempts, mine, queue)
    assert tokens(owner.decoder.answer(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert mine.decoded[0] == ["r0", "r1", "r2", "r3"]
    assert theirs.decoded
    assert sorted(row for part in mine.decoded + theirs.decoded for row in part) == [f"r{row}" for row in range(8)]
    assert sum(window["rows"] for window in owner.collector.windows + other.collector.windows) == 8


def test_what_a_thief_does_not_bring_the_owner_makes(crowd: tuple[AttemptTracker, StealQueue]) -> None:
    attempts, queue = crowd
    lent: list[Any] = []
    mine = FakeModel(meanwhile=lambda: lent.append(queue.steal("lost")) if not lent else None)
    owner = Worker("owner", attempts, mine, queue)
    assert tokens(owner.decoder.answer(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(lent) == 1
    assert sorted(row for part in mine.decoded for row in part) == [f"r{row}" for row in range(8)]


def test_without_its_steal_queue_a_worker_goes_on_alone(
    crowd: tuple[AttemptTracker, StealQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts, queue = crowd
    owner = Worker("owner", attempts, FakeModel(), queue)

    def gone(*_: Any) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(queue, "share", gone)
    assert tokens(owner.decoder.answer(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert owner.decoder.steal_queue is None
    assert tokens(owner.decoder.answer(requests(3))) == [1, 2, 3]


def sick_worker(attempts: AttemptTracker, queue: StealQueue) -> DelegatingDecoder:
    attempts.worker_starting("sick", WorkerProcess("node", "host", 2))
    handles = Handle(attempts), Handle(Collector()), Handle(queue)
    return DelegatingDecoder("sick", *handles)  # type: ignore[arg-type]


def test_others_decode_the_window_of_a_worker_that_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, queue, well = AttemptTracker(2, 8, 1.0), StealQueue(), FakeModel()
    other = Worker("other", attempts, well, queue)
    sick = sick_worker(attempts, queue)
    monkeypatch.setattr(delegating_decoder.time, "sleep", lambda _: other.decoder.steal())
    assert tokens(sick.answer(requests(8))) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(row for part in well.decoded for row in part) == [f"r{row}" for row in range(8)]


def test_a_poison_row_of_a_worker_that_sits_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, queue, well = AttemptTracker(2, 8, 1.0), StealQueue(), FakeModel(["r5"])
    deaths = 0
    sick = sick_worker(attempts, queue)
    thief = Worker("other", attempts, well, queue)

    def help_or_die(_: float) -> None:
        nonlocal thief, deaths
        try:
            thief.decoder.steal()
        except Died:
            deaths += 1
            thief = Worker("other", attempts, well, queue)

    monkeypatch.setattr(delegating_decoder.time, "sleep", help_or_die)
    assert tokens(sick.answer(requests(8))) == [1, 2, 3, 4, 5, "poison_row", 7, 8]
    assert deaths <= 3 + 2


def test_a_worker_that_sits_out_hears_that_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, queue = AttemptTracker(2, 8, 0.0), StealQueue()
    sick = sick_worker(attempts, queue)
    monkeypatch.setattr(
        delegating_decoder.time, "sleep", lambda _: attempts.window_finished("sick", "another", ["x"], 1)
    )
    with pytest.raises(StopRun, match="1 rows have failed"):
        sick.answer(requests(2))
