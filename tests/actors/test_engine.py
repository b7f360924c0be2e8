"""The engine without HTTP: both schedulers against the offline generator, failures, limits, turns. Float32."""

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
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
from skipdecode.cohort import Cohort
from skipdecode.generate import Request
from skipdecode.logprobs import score_prompt
from skipdecode.sampling import Sampling
from tests.support.naive import greedy, random_prompts
from tests.support.processes import wait_for

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


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_prompt_that_cannot_be_scored_hurts_no_other(
    generator: Generator, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with others of its kind, while older rows run; they are not even started anew."""
    pool = [Request(str(i), p, greedy(12, ignore_eos=True)) for i, p in enumerate(random_prompts([6] * 7, seed=2))]
    wanted, _ = offline(generator, pool)
    scored = [replace(r, sampling=greedy(1), top_logprobs=1, score_prompt=True) for r in pool[4:]]
    wanted |= {r.id: wanted[r.id][:1] for r in scored}

    def raising(model: Any, tokens: Sequence[int], num_top: int) -> Any:
        if tokens == pool[5].prompt_tokens:
            raise RuntimeError("out of memory, so to speak")
        return score_prompt(model, tokens, num_top)

    monkeypatch.setattr("actors.engine.score_prompt", raising)
    engine = engine_of(generator, scheduler=scheduler, batch_size=8, max_cohorts=4)
    older = [engine.add(request) for request in pool[:4]]
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    num_scored: dict[str, list[int]] = {}
    for turn in range(30):
        if turn == 3:
            for request in scored:
                engine.add(request)
        progress = engine.turn()
        for one in progress:
            num_scored.setdefault(one.ticket.request.id, []).append(len(one.prompt_logprobs))
        collect(made, ends, progress)
    assert engine.is_idle
    assert ends.pop("5").startswith("error: RuntimeError: out of memory")
    assert made.pop("5") == []
    assert made == {name: tokens for name, tokens in wanted.items() if name != "5"}
    assert sorted(ends) == ["0", "1", "2", "3", "4", "6"]
    assert num_scored["4"] == num_scored["6"] == [5]
    assert not any(num_scored["0"])
    assert all(ticket.max_company is None for ticket in older)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_rows_that_end_in_a_step_that_fails_are_answered(
    generator: Generator, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of row 2 cannot be decoded, in the step in which row 0 ends."""
    prompts = random_prompts([6] * 5, seed=2)
    stops: list[tuple[str, ...]] = [(), (), ("\0never",), (), ("\0never",)]
    pool = [
        Request(str(i), p, greedy(6 if i == 0 else 12, ignore_eos=True, stop=stop))
        for i, (p, stop) in enumerate(zip(prompts, stops, strict=True))
    ]
    wanted, _ = offline(generator, pool)
    bad = wanted["2"][5]
    assert bad not in (*wanted["2"][:5], *wanted["4"]), "choose other prompts"
    decode = generator.tokenizer.decode

    def raising(tokens: Sequence[int]) -> str:
        if bad in tokens:
            raise RuntimeError("the tokenizer panicked, so to speak")
        return decode(tokens)

    monkeypatch.setattr(generator.tokenizer, "decode", raising)
    made, ends = run(engine_of(generator, scheduler=scheduler, batch_size=8), {0: pool})
    assert ends.pop("2").startswith("error: RuntimeError: the tokenizer")
    assert ends == dict.fromkeys("0134", "length")
    assert {name: made[name] for name in "0134"} == {name: wanted[name] for name in "0134"}


def test_rows_that_end_before_the_cache_cannot_be_copied_are_answered(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cohort would shrink, and there is no memory for it: with the first token of row 0, and later."""

    def out_of_memory(*_: object) -> None:
        raise RuntimeError("out of memory, so to speak")

    pool = [
        Request(str(i), p, greedy(1 + 4 * i, ignore_eos=True)) for i, p in enumerate(random_prompts([6] * 4, seed=2))
    ]
    wanted = offline(generator, pool)
    monkeypatch.setattr(Cohort, "_keep", out_of_memory)
    assert run(engine_of(generator), {0: pool}) == wanted


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_row_that_is_started_anew_may_end_earlier(
    generator: Generator, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another shape bits differ, and so may tokens: here what was its second token is the EOS now."""
    pool = [Request(str(i), p, greedy(12)) for i, p in enumerate(random_prompts([6] * 2, seed=2))]
    wanted, _ = offline(generator, pool)
    assert len(wanted["0"]) == 12
    assert wanted["0"][1] != wanted["0"][0]
    engine = engine_of(generator, scheduler=scheduler)
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for request in pool:
        engine.add(request)
    for _ in range(5):
        collect(made, ends, engine.turn())
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "head_states", lambda h: 1 / 0)
        assert engine.turn() == []
    monkeypatch.setattr(generator.model, "config", replace(generator.model.config, eos_token_id=wanted["0"][1]))
    for _ in range(20):
        collect(made, ends, engine.turn())
    assert engine.is_idle
    assert ends["0"] == "stop"
    assert made["0"] == wanted["0"][:6]
    assert sorted(ends) == ["0", "1"]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_newcomers_do_not_wait_for_those_whose_batch_failed(
    generator: Generator, scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves of a batch that failed decode side by side, and neither holds up who comes later."""
    engine = engine_of(generator, scheduler=scheduler, batch_size=8, max_cohorts=6)
    pool = [Request(str(i), p, greedy(60, ignore_eos=True)) for i, p in enumerate(random_prompts([6] * 9, seed=2))]
    for request in pool[:8]:
        engine.add(request)
    engine.turn()
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "head_states", lambda h: 1 / 0)
        engine.turn()
    engine.add(pool[8])
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for _ in range(3):
        collect(made, ends, engine.turn())
    assert engine.num_running == 9
    assert made["8"]
    while not engine.is_idle:
        collect(made, ends, engine.turn())
    assert set(ends.values()) == {"length"}


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
    collect(made, ends, engine.turn())
    assert engine.num_running == 16
    budget = int(1.1 * engine.cache_bytes)
    monkeypatch.setattr(engine._batches, "cache_budget", budget)
    for request in pool[16:]:
        engine.add(request)
    while not engine.is_idle:
        collect(made, ends, engine.turn())
        assert engine.cache_bytes <= budget
    assert (made, ends) == offline(generator, pool)


def test_ended_rows_of_a_cohort_hold_no_cache(generator: Generator) -> None:
    """Neither in the figures nor for whoever wants to start."""
    engine = engine_of(generator)
    for i, prompt in enumerate(random_prompts([6] * 4, seed=2)):
        engine.add(Request(str(i), prompt, greedy(12 if i == 0 else 3, ignore_eos=True)))
    engine.turn()
    whole = engine.cache_bytes
    while engine.num_running > 1:
        engine.turn()
    assert 0 < engine.cache_bytes <= whole / 4  # nor do layers that no later step runs


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("when", ["prompt", "step"])
def test_all_who_wait_are_known_when_the_device_is_lost(
    generator: Generator, scheduler: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers whose prompts it was lost with, too, and an answer that was complete but not yet given out."""
    monkeypatch.setattr("actors.engine.is_lost", lambda error, _device: isinstance(error, ZeroDivisionError))
    engine = engine_of(generator, scheduler=scheduler, max_cohorts=4)
    pool = [
        Request(str(i), p, greedy(1 if i == 1 else 12, ignore_eos=True))
        for i, p in enumerate(random_prompts([6, 6, 6, 60], seed=2))
    ]
    engine.add(pool[0])
    engine.turn()
    for request in pool[1:]:
        engine.add(request)
    embed = generator.model.embed

    def raising(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if (tokens.shape[1] > 1) == (when == "prompt"):
            raise ZeroDivisionError
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)
    with pytest.raises(ZeroDivisionError):
        engine.turn()
    assert sorted(ticket.request.id for ticket in engine.open) == ["0", "1", "2", "3"]


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
    monkeypatch.setattr(engine, "turn", lambda: ended)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread = EngineThread(engine, heard.extend, max_waiting=5, stall_s=60)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            assert thread.retry_after_s() >= 1
        thread.check()
        thread.stop()
    finally:
        sys.setswitchinterval(interval)
    assert len(heard) > 1000


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_dead_engine_tells_all_who_wait(
    generator: Generator, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, engine = Heard(), engine_of(generator)

    def dying() -> list[Progress]:
        raise error

    monkeypatch.setattr(engine, "turn", dying)
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
    turn = engine.turn
    monkeypatch.setattr(engine, "turn", lambda: turn() if go_on.wait(20) else [])
    thread = EngineThread(engine, told.extend, max_waiting=5, stall_s=0.1)
    thread.submit(pool_of(2), nothing)
    thread.check()
    time.sleep(0.2)
    for _ in range(2):
        with pytest.raises(EngineDead, match=r"more than 0.1 s"):
            thread.check()
    assert [one.ticket.request.id for one in told if one.is_dead] == ["0", "1"]
    go_on.set()
    wait_for(lambda: not thread._thread.is_alive(), timeout_s=20)
    assert [one.ticket.request.id for one in told if one.is_dead] == ["0", "1"]
    with pytest.raises(EngineDead, match=r"more than 0.1 s"):
        thread.check()
