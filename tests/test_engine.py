"""The engine without HTTP: both schedulers against the offline generator, failures, limits, turns. Float32."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.batches import EngineConfig, Ticket
from actors.cohort_batches import CohortBatches
from actors.engine import Engine, Progress
from actors.engine_thread import EngineDead, EngineThread, Overloaded
from actors.generator import Generator, GeneratorConfig
from skipdecode.generate import Request
from skipdecode.sampling import Sampling
from tests.naive import greedy, random_prompts

SCHEDULERS = ["cohort", "continuous"]
DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "warmup_layers": 1, "horizon": 12}


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    return Generator(GeneratorConfig(str(tiny_checkpoint), DECODE, dtype="float32", num_threads=1))


def engine_of(generator: Generator, **keys: Any) -> Engine:
    return Engine(generator, EngineConfig(**({"batch_size": 4, "max_cohorts": 2} | keys)))


def pool_of(count: int, num_new: int = 10) -> list[Request]:
    prompts = random_prompts([1 + i % 40 for i in range(count)], seed=6)
    return [
        Request(str(i), p, Sampling(num_new + i % 7, temperature=float(i % 2), seed=i)) for i, p in enumerate(prompts)
    ]


def collect(made: dict[str, list[int]], ends: dict[str, str], progress: Sequence[Progress]) -> None:
    for one in progress:
        made.setdefault(one.ticket.request.id, []).extend(one.tokens)
        assert len(one.tokens) == len(one.layers)
        if one.finish_reason or one.error:
            assert one.ticket.request.id not in ends, "ended twice"
            ends[one.ticket.request.id] = one.finish_reason or f"error: {one.error}"


def run(engine: Engine, arrivals: dict[int, list[Request]]) -> tuple[dict[str, list[int]], dict[str, str]]:
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    turn = 0
    while turn <= max(arrivals) or not engine.is_idle:
        for request in arrivals.get(turn, []):
            engine.add(request)
        collect(made, ends, engine.turn())
        turn += 1
        assert turn < 5000
    return made, ends


def offline(generator: Generator, requests: Sequence[Request]) -> tuple[dict[str, list[int]], dict[str, str]]:
    answers = generator(list(requests)).answers
    made = {r.id: a.tokens for r, a in zip(requests, answers, strict=True)}  # type: ignore[union-attr]
    return made, {r.id: a.finish_reason for r, a in zip(requests, answers, strict=True)}  # type: ignore[union-attr]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=8)
@given(turns=st.lists(st.integers(0, 30), min_size=14, max_size=14))
def test_tokens_are_those_of_the_offline_generator(generator: Generator, scheduler: str, turns: list[int]) -> None:
    pool = pool_of(14)
    arrivals: dict[int, list[Request]] = {}
    for request, turn in zip(pool, turns, strict=True):
        arrivals.setdefault(turn, []).append(request)
    engine = engine_of(generator, scheduler=scheduler)
    assert run(engine, arrivals) == offline(generator, pool)
    assert engine.counts.finished == 14
    assert engine.cache_bytes == 0


def test_deterministic_cohorts_are_the_offline_ones_in_bfloat16(tiny_checkpoint: Path) -> None:
    """Equal tokens for any arrival, where rounding would change them in other shapes."""
    fixed = Generator(
        GeneratorConfig(
            str(tiny_checkpoint), DECODE, dtype="bfloat16", num_threads=1, batch_size=4, deterministic=True
        )
    )  # fmt: skip
    pool = pool_of(10)
    wanted = offline(fixed, pool)
    assert run(engine_of(fixed), {0: pool}) == wanted
    assert run(engine_of(fixed), {3 * i: [request] for i, request in enumerate(pool)}) == wanted


def test_continuous_refuses_fixed_shapes(tiny_checkpoint: Path) -> None:
    fixed = Generator(GeneratorConfig(str(tiny_checkpoint), DECODE, dtype="float32", deterministic=True))
    with pytest.raises(ValueError, match=r"sampling.deterministic"):
        engine_of(fixed, scheduler="continuous")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_different_schedules_do_not_share_batches(tiny_checkpoint: Path, scheduler: str) -> None:
    """Without a horizon the depth follows max_tokens."""
    free = Generator(GeneratorConfig(str(tiny_checkpoint), DECODE | {"horizon": None}, dtype="float32", num_threads=1))
    pool = pool_of(9)
    assert run(engine_of(free, scheduler=scheduler), {0: pool[:5], 4: pool[5:]}) == offline(free, pool)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_newcomer_does_not_wait_for_a_long_answer(generator: Generator, scheduler: str) -> None:
    engine = engine_of(generator, scheduler=scheduler)
    engine.add(Request("long", [2, 9], greedy(100, ignore_eos=True)))
    for _ in range(5):
        engine.turn()
    engine.add(Request("short", [2, 7], greedy(5, ignore_eos=True)))
    made: dict[str, list[int]] = {}
    collect(made, {}, engine.turn())
    assert made["short"], "no first token in the turn it came"
    for _ in range(10):
        collect(made, {}, engine.turn())
    assert len(made["short"]) == 5
    assert not engine.is_idle


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_cancelled_row_leaves_and_its_neighbours_stay(generator: Generator, scheduler: str) -> None:
    engine = engine_of(generator, scheduler=scheduler)
    pool = [Request(str(i), p, greedy(30, ignore_eos=True)) for i, p in enumerate(random_prompts([5] * 4, seed=2))]
    tickets = [engine.add(request) for request in pool]
    made: dict[str, list[int]] = {}
    for turn in range(40):
        if turn == 6:
            engine.cancel(tickets[1])
            engine.cancel(tickets[1])  # twice does no harm
        collect(made, {}, engine.turn())
        if turn == 6:
            assert engine.num_running == 3
    assert engine.is_idle
    wanted, _ = offline(generator, pool)
    assert {name: made[name] for name in "023"} == {name: wanted[name] for name in "023"}
    assert len(made["1"]) < 10
    assert engine.counts.cancelled == 1


def test_a_request_that_waits_can_be_cancelled(generator: Generator) -> None:
    engine = engine_of(generator)
    ticket = engine.add(pool_of(1)[0])
    engine.cancel(ticket)
    assert engine.is_idle
    assert engine.turn() == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("when", ["prompt", "step"])
def test_one_bad_request_hurts_no_other(
    generator: Generator, scheduler: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose embedding raises stands for whatever a row may do to its batch."""
    pool = [Request(str(i), p, greedy(12, ignore_eos=True)) for i, p in enumerate(random_prompts([6] * 7, seed=2))]
    wanted, _ = offline(generator, pool)
    bad = pool[3].prompt_tokens[2] if when == "prompt" else wanted["3"][4]
    hurt = {
        name
        for name, tokens in wanted.items()
        if bad in (pool[int(name)].prompt_tokens if when == "prompt" else tokens[:-1])
    }
    assert "3" in hurt
    assert len(hurt) < 5
    embed = generator.model.embed

    def raising(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if (tokens.shape[1] > 1) == (when == "prompt") and bool((tokens == bad).any()):
            raise RuntimeError("out of memory, so to speak")
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)
    made, ends = run(engine_of(generator, scheduler=scheduler, batch_size=8), {0: pool})
    assert {name for name, end in ends.items() if end.startswith("error: RuntimeError: out of memory")} == hurt
    assert {n: t for n, t in made.items() if n not in hurt} == {n: t for n, t in wanted.items() if n not in hurt}
    assert all(ends[name] == "length" for name in wanted if name not in hurt)


def test_places_for_cohorts_are_not_all_taken_at_once(generator: Generator) -> None:
    """A burst of arrivals one by one must leave a place for who comes later."""
    engine = engine_of(generator, max_cohorts=4)
    run(engine, {0: pool_of(1, 30)})  # now the life of a cohort is known
    batches = engine._batches
    assert isinstance(batches, CohortBatches)
    batches._mean_life_s = 1e6
    for request in pool_of(8, 60):
        engine.add(request)
        engine.turn()
    assert len(batches.running) == 2
    assert len(engine.waiting) == 6


# In a thread


class Heard:
    def __init__(self) -> None:
        self.made: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.dead: list[str] = []

    def __call__(self, progress: Sequence[Progress]) -> None:
        self.dead += [p.ticket.request.id for p in progress if p.is_dead]
        collect(self.made, self.ends, progress)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def nothing(_: list[Ticket]) -> None:
    pass


def test_requests_from_many_threads(generator: Generator) -> None:
    heard, pool = Heard(), pool_of(30)
    thread = EngineThread(engine_of(generator, scheduler="continuous"), heard, max_waiting=100, stall_s=60)
    callers = [threading.Thread(target=thread.submit, args=([request], nothing)) for request in pool]
    for caller in callers:
        caller.start()
    wait_for(lambda: len(heard.ends) == 30)
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
    wait_for(lambda: len(heard.ends) >= 5)
    thread.submit(pool_of(1), nothing)  # there is room again
    thread.stop()


def test_a_dead_engine_tells_all_who_wait(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    heard, engine = Heard(), engine_of(generator)
    monkeypatch.setattr(engine, "turn", lambda: 1 / 0)
    thread = EngineThread(engine, heard, max_waiting=5, stall_s=60)
    thread.submit(pool_of(3), nothing)
    wait_for(lambda: len(heard.dead) == 3)
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        thread.check()
    with pytest.raises(EngineDead):
        thread.submit(pool_of(1), nothing)


def test_a_step_that_hangs_is_noticed(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, go_on = engine_of(generator), threading.Event()
    monkeypatch.setattr(engine, "turn", lambda: go_on.wait(20) and [])
    thread = EngineThread(engine, Heard(), max_waiting=5, stall_s=0.1)
    thread.submit(pool_of(1), nothing)
    thread.check()
    time.sleep(0.2)
    with pytest.raises(EngineDead, match=r"more than 0.1 s"):
        thread.check()
    go_on.set()
