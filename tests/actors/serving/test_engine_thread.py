"""The engine in a thread: callers from many, a full queue, an engine that dies or hangs."""

import sys
import threading
import time
from collections.abc import Sequence

import pytest

from actors.generator import Generator
from actors.serving.engine import Progress
from actors.serving.engine_thread import EngineDead, EngineThread, Overloaded
from actors.serving.scheduler import Ticket
from skipdecode.engine.request import Request
from tests.support.engine_helpers import collect, engine_of, offline, pool_of
from tests.support.naive import greedy
from tests.support.processes import wait_for


class Heard:
    def __init__(self) -> None:
        self.made: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.dead: list[str] = []

    def __call__(self, progress: Sequence[Progress]) -> None:
        self.dead += [p.ticket.request.id for p in progress if p.is_dead]
        collect(self.made, self.ends, progress)


def nothing(_: list[Ticket]) -> None:
    pass


def test_requests_from_many_threads(generator: Generator) -> None:
    heard, pool = Heard(), pool_of(30)
    thread = EngineThread(engine_of(generator, scheduler="continuous"), heard, max_waiting=100, stall_s=60)
    callers = [threading.Thread(target=thread.submit, args=([request], nothing)) for request in pool]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(heard.ends) == 30, timeout_s=20)
    assert (heard.made, heard.ends) == offline(generator, pool)
    thread.stop()
    with pytest.raises(EngineDead, match="stopped"):
        thread.check()


def test_a_full_queue_says_when_to_come_back(generator: Generator) -> None:
    heard = Heard()
    thread = EngineThread(engine_of(generator, max_cohorts=1), heard, max_waiting=5, stall_s=60)
    long = [Request(f"long {i}", [2, 5 + i], greedy(100, ignore_eos=True)) for i in range(30)]

    def flood() -> None:
        for request in long:
            thread.submit([request], nothing)

    with pytest.raises(Overloaded) as caught:
        flood()
    assert 1 <= caught.value.retry_after_s <= 60
    wait_for(lambda: len(heard.ends) >= 5, timeout_s=20)
    thread.submit(pool_of(1), nothing)  # there is room again
    thread.stop()


def test_the_time_to_come_back_is_that_of_the_places_needed(generator: Generator) -> None:
    thread = EngineThread(engine_of(generator), Heard(), max_waiting=5, stall_s=60)
    assert thread.retry_after_s(5) == 1  # nothing known
    thread._count(15)
    thread._count(5)  # 2 per second
    assert [thread.retry_after_s(n) for n in (1, 2, 3, 20, 1000)] == [1, 1, 2, 10, 60]
    with pytest.raises(ValueError, match=r"6 prompts in one request, and at most 5 may wait \(limits.max_waiting\)"):
        thread.submit(pool_of(6), nothing)
    thread.submit(pool_of(5), nothing)
    thread.stop()


def test_asking_when_to_come_back_disturbs_nobody(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of answers a second end while others are refused."""
    heard: list[Progress] = []
    engine = engine_of(generator)
    ended = [Progress(engine.add(request), [], [], [], "length") for request in pool_of(50)]
    monkeypatch.setattr(engine, "step", lambda: ended)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = EngineThread(engine, heard.extend, max_waiting=5, stall_s=60)
        deadline = time.monotonic() + 60
        while len(heard) <= 1000:
            assert thread.retry_after_s() >= 1
            assert time.monotonic() < deadline
        thread.check()
        thread.stop()
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_dead_engine_tells_all_who_wait(
    generator: Generator, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, engine = Heard(), engine_of(generator)

    def dying() -> list[Progress]:
        raise error

    monkeypatch.setattr(engine, "step", dying)
    thread = EngineThread(engine, heard, max_waiting=5, stall_s=60)
    thread.submit(pool_of(3), nothing)
    wait_for(lambda: len(heard.dead) == 3, timeout_s=20)
    with pytest.raises(EngineDead, match=error.__name__):
        thread.check()
    with pytest.raises(EngineDead):
        thread.submit(pool_of(1), nothing)


def test_a_step_that_hangs_is_noticed(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits hears of it, once, and the thread ends when the step comes to its end after all."""
    engine, go_on = engine_of(generator), threading.Event()
    told: list[Progress] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: step() if go_on.wait(60) else [])
    thread = EngineThread(engine, told.extend, max_waiting=5, stall_s=50)
    thread.submit(pool_of(2), nothing)
    wait_for(lambda: thread._step_started is not None, timeout_s=20)
    thread.check()
    thread._step_started = time.monotonic() - 51
    for _ in range(2):
        with pytest.raises(EngineDead, match=r"more than 50 s"):
            thread.check()
    assert [one.ticket.request.id for one in told if one.is_dead] == ["0", "1"]
    go_on.set()
    wait_for(lambda: not thread._thread.is_alive(), timeout_s=20)
    assert [one.ticket.request.id for one in told if one.is_dead] == ["0", "1"]
    with pytest.raises(EngineDead, match=r"more than 50 s"):
        thread.check()
