"""The engine without HTTP: both schedulers against the offline generator, steps, limits. Float32."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.serving.cohort_scheduler import CohortScheduler
from skipdecode.engine.request import Request
from tests.support.engine_helpers import DECODE, SCHEDULERS, collect, engine_of, offline, pool_of, run
from tests.support.naive import greedy, random_prompts


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=8)
@given(steps=st.lists(st.integers(0, 30), min_size=14, max_size=14))
def test_tokens_are_those_of_the_offline_generator(generator: Generator, scheduler: str, steps: list[int]) -> None:
    pool = pool_of(14)
    arrivals: dict[int, list[Request]] = {}
    for request, step in zip(pool, steps, strict=True):
        arrivals.setdefault(step, []).append(request)
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
        engine.step()
    engine.add(Request("short", [2, 7], greedy(5, ignore_eos=True)))
    made: dict[str, list[int]] = {}
    collect(made, {}, engine.step())
    assert made["short"], "no first token in the turn it came"
    for _ in range(10):
        collect(made, {}, engine.step())
    assert len(made["short"]) == 5
    assert not engine.is_idle


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_cancelled_row_leaves_and_its_neighbours_stay(generator: Generator, scheduler: str) -> None:
    engine = engine_of(generator, scheduler=scheduler)
    pool = [Request(str(i), p, greedy(30, ignore_eos=True)) for i, p in enumerate(random_prompts([5] * 4, seed=2))]
    tickets = [engine.add(request) for request in pool]
    made: dict[str, list[int]] = {}
    for step in range(40):
        if step == 6:
            engine.cancel(tickets[1])
            engine.cancel(tickets[1])  # twice does no harm
        collect(made, {}, engine.step())
        if step == 6:
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
    assert engine.step() == []


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_caches_stay_within_the_budget(generator: Generator, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt makes room for itself in every row of a continuous batch: it has to wait."""
    engine = engine_of(generator, scheduler=scheduler, batch_size=32, max_cohorts=4)
    prompts = random_prompts([4] * 16 + [90, 4, 4], seed=2)
    pool = [Request(str(i), p, greedy(12 + i % 5, ignore_eos=True)) for i, p in enumerate(prompts)]
    for request in pool[:16]:
        engine.add(request)
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    collect(made, ends, engine.step())
    assert engine.num_running == 16
    budget = int(1.1 * engine.cache_bytes)
    monkeypatch.setattr(engine._scheduler, "cache_budget", budget)
    for request in pool[16:]:
        engine.add(request)
    while not engine.is_idle:
        collect(made, ends, engine.step())
        assert engine.cache_bytes <= budget
    assert (made, ends) == offline(generator, pool)


def test_ended_rows_of_a_cohort_hold_no_cache(generator: Generator) -> None:
    """Neither in the figures nor for whoever wants to start."""
    engine = engine_of(generator)
    for i, prompt in enumerate(random_prompts([6] * 4, seed=2)):
        engine.add(Request(str(i), prompt, greedy(12 if i == 0 else 3, ignore_eos=True)))
    engine.step()
    whole = engine.cache_bytes
    while engine.num_running > 1:
        engine.step()
    assert 0 < engine.cache_bytes <= whole / 4  # nor do layers that no later step runs


def test_places_for_cohorts_are_not_all_taken_at_once(generator: Generator) -> None:
    """A burst of arrivals one by one must leave a place for who comes later."""
    engine = engine_of(generator, max_cohorts=4)
    run(engine, {0: pool_of(1, 30)})  # now the life of a cohort is known
    scheduler = engine._scheduler
    assert isinstance(scheduler, CohortScheduler)
    scheduler._mean_lifetime_s = 1e6
    for request in pool_of(8, 60):
        engine.add(request)
        engine.step()
    assert len(scheduler.running) == 2
    assert len(engine.waiting) == 6
