"""The engine where tokens are looked at late, as on a GPU, forced on a CPU: what callers hear is the same. Float32."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.serving.engine import Engine, Progress
from actors.serving.scheduler import EngineConfig, Ticket
from skipdecode.config.sampling import Sampling
from skipdecode.engine import static_batch as cohort
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.request import Request
from tests.support.naive import greedy, random_prompts

DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "warmup_layers": 1, "horizon": 12}
Heard = dict[str, tuple[list[int], str | None]]


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    return Generator(GeneratorConfig(str(tiny_checkpoint), DECODE, dtype="float32", num_threads=1))


@pytest.fixture(scope="module", autouse=True)
def _late() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cohort.MAX_PENDING, "cpu", 1)
        yield


def engine_of(generator: Generator, **keys: Any) -> Engine:
    return Engine(generator, EngineConfig(**({"scheduler": "continuous", "batch_size": 4, "max_cohorts": 2} | keys)))


def pool_of(count: int) -> list[Request]:
    """Greedy and drawn, with stop strings and penalties and without, short and long; every fifth is over with its first
    token."""
    prompts = random_prompts([1 + i % 40 for i in range(count)], seed=6)
    return [
        Request(
            str(i),
            p,
            Sampling(
                1 if i % 5 == 4 else 10 + i % 7,
                float(i % 2),
                seed=i,
                stop=("e", "a") if i % 3 == 0 else (),
                repetition_penalty=1.5 if i % 6 == 1 else 1.0,
            ),
            top_logprobs=2 if i % 4 == 0 else None,
        )
        for i, p in enumerate(prompts)
    ]


def hear(heard: Heard, progress: Sequence[Progress]) -> None:
    for one in progress:
        name = one.ticket.request.id
        tokens, end = heard.get(name, ([], None))
        assert end is None, "something new behind the end"
        assert one.error is None
        assert len(one.tokens) == len(one.layers)
        assert len(one.logprobs) == (0 if one.ticket.request.top_logprobs is None else len(one.tokens))
        heard[name] = ([*tokens, *one.tokens], one.finish_reason)


def run(engine: Engine, arrivals: dict[int, list[Request]]) -> Heard:
    heard: Heard = {}
    step = 0
    while step <= max(arrivals) or not engine.is_idle:
        for request in arrivals.get(step, []):
            engine.add(request)
        hear(heard, engine.step())
        step += 1
        assert step < 2000
    return heard


def offline(generator: Generator, requests: Sequence[Request]) -> Heard:
    answers = generator(list(requests)).answers
    return {r.id: (a.tokens, a.finish_reason) for r, a in zip(requests, answers, strict=True)}  # type: ignore[union-attr]


@settings(max_examples=8)
@given(steps=st.lists(st.integers(0, 30), min_size=14, max_size=14))
def test_tokens_are_those_of_the_offline_generator(generator: Generator, steps: list[int]) -> None:
    pool, arrivals = pool_of(14), {}
    for request, step in zip(pool, steps, strict=True):
        arrivals.setdefault(step, []).append(request)
    engine = engine_of(generator)
    assert run(engine, arrivals) == offline(generator, pool)
    assert engine.counts.finished == 14
    assert engine.cache_bytes == 0


def test_lossless_rows_are_looked_at_at_once(tiny_checkpoint: Path) -> None:
    """Drafts stand on what was made."""
    lossless = Generator(
        GeneratorConfig(str(tiny_checkpoint), DECODE | {"lossless": True}, dtype="float32", num_threads=1)
    )
    pool = pool_of(9)
    assert run(engine_of(lossless), {0: pool[:5], 3: pool[5:]}) == offline(lossless, pool)


def test_tokens_come_a_step_late_and_the_first_one_in_the_turn_it_came(generator: Generator) -> None:
    engine = engine_of(generator)
    engine.add(Request("0", [2, 9], greedy(5, ignore_eos=True)))
    counts = [sum(len(one.tokens) for one in engine.step()) for _ in range(4)]
    assert counts == [1, 1, 1, 2]
    assert engine.is_idle


def test_a_cancelled_row_is_heard_of_no_more(generator: Generator) -> None:
    engine, heard = engine_of(generator), {}
    pool = [Request(str(i), p, greedy(12, ignore_eos=True)) for i, p in enumerate(random_prompts([5] * 3, seed=2))]
    tickets: list[Ticket] = [engine.add(request) for request in pool]
    for step in range(30):
        if step == 4:
            engine.cancel(tickets[1])
            before = list(heard["1"][0])
        hear(heard, engine.step())
    assert engine.is_idle
    assert heard.pop("1") == (before, None)
    assert heard == offline(generator, [pool[0], pool[2]])


@pytest.mark.parametrize("fails_at", [1, 3, 9])
def test_a_step_that_fails_costs_no_token(generator: Generator, fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that nobody had looked at yet are made again."""
    feed, calls = ContinuousBatch._feed_newest, []

    def failing(batch: ContinuousBatch) -> None:
        calls.append(batch)
        if len(calls) == fails_at:
            raise RuntimeError("a step")
        feed(batch)

    monkeypatch.setattr(ContinuousBatch, "_feed_newest", failing)
    pool = pool_of(4)
    assert run(engine_of(generator), {0: pool[:3], 2: pool[3:]}) == offline(generator, pool)
    assert len(calls) > fails_at
