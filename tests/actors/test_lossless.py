"""Lossless decoding through the generator and both schedulers of the engine: the tokens of full depth. Float32."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.serving.engine import Engine
from actors.serving.scheduler import EngineConfig
from skipdecode.backends import choice
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.naive import random_prompts
from tests.support.ties import is_tie

SKIP = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "warmup_layers": 1, "horizon": 12}
LOSSLESS: list[dict[str, Any]] = [
    SKIP | {"lossless": True, "draft_tokens": 3},
    SKIP | {"lossless": "auto"},
    {"method": "full", "lossless": True},
]


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    config = GeneratorConfig(str(tiny_checkpoint), LOSSLESS[0], dtype="float32", num_threads=1, batch_size=8)
    return Generator(config)


def pool_of(count: int, num_new: int = 12) -> list[Request]:
    prompts = random_prompts([1 + i % 40 for i in range(count)], seed=6)
    return [
        Request(str(i), p, Sampling(num_new + i % 7, temperature=float(i % 2), seed=i)) for i, p in enumerate(prompts)
    ]


def assert_full(generator: Generator, made: dict[str, list[int]], requests: list[Request]) -> None:
    for request in requests:
        wanted = generate(generator.model, [request], generator.full).completions[0].tokens
        assert made[request.id] == wanted or is_tie(generator.model, request, made[request.id], wanted)


@pytest.mark.parametrize("decode", [LOSSLESS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in LOSSLESS[1:])])
def test_offline(generator: Generator, decode: dict[str, Any]) -> None:
    requests = pool_of(20)
    one = generator.with_decode(decode)
    result = one(requests)
    answers = {r.id: a for r, a in zip(requests, result.answers, strict=True) if isinstance(a, Completion)}
    assert_full(generator, {name: answer.tokens for name, answer in answers.items()}, requests)
    for record in result.batches:
        assert len(record["drafted_at"]) == len(record["accepted_at"])
        assert all(a <= d for a, d in zip(record["accepted_at"], record["drafted_at"], strict=True))
        assert record["row_steps"] + sum(record["accepted_at"]) >= record["output_tokens"] - record["rows"]
        assert record["draft_s"] + record["verify_s"] <= record["decode_s"]
    assert sum(record["layers_run"] for record in result.batches) == sum(a.layers_run for a in answers.values())


def test_rows_of_different_limits_share_a_batch_as_at_full_depth(generator: Generator) -> None:
    """Drafts without a horizon are made for one, not for that of each limit."""
    one = generator.with_decode({"method": "skipdecode", "speedup": 2, "lossless": "auto"})
    assert one.ceilings is not None, "prices are of this machine, whatever the generator was loaded for"
    prompts = random_prompts([20] * 8, seed=6)
    requests = [Request(str(i), p, Sampling(9 + i, ignore_eos=True)) for i, p in enumerate(prompts)]
    result = one(requests)
    assert [record["rows"] for record in result.batches] == [8]
    made = {r.id: a.tokens for r, a in zip(requests, result.answers, strict=True) if isinstance(a, Completion)}
    assert_full(generator, made, requests)
    assert len(one._controllers) == 1


@pytest.mark.parametrize("rows", [1, 3])
def test_a_cohort_holds_what_it_was_admitted_for(generator: Generator, rows: int) -> None:
    engine = Engine(generator.with_decode(LOSSLESS[0]), EngineConfig("cohort", batch_size=4, max_cohorts=2))
    for i, prompt in enumerate(random_prompts([20] * rows, seed=6)):
        engine.add(Request(str(i), prompt, Sampling(12, ignore_eos=True)))
    engine.step()
    plain = Engine(generator.with_decode({"method": "full"}), EngineConfig("cohort", batch_size=4, max_cohorts=2))
    for i, prompt in enumerate(random_prompts([20] * rows, seed=6)):
        plain.add(Request(str(i), prompt, Sampling(12, ignore_eos=True)))
    plain.step()
    assert 0 < engine.cache_bytes <= 1.5 * plain.cache_bytes


def test_a_run_measures_itself_against_full_depth(tiny_checkpoint: Path) -> None:
    config = GeneratorConfig(
        str(tiny_checkpoint), LOSSLESS[0], dtype="float32", num_threads=1, batch_size=4, baseline_fraction=1.0
    )
    for record in Generator(config)(pool_of(8)).batches:
        assert record["exact_rows"] == record["rows"]
        assert record["full_output_tokens"] == record["output_tokens"]
        assert record["predicted_decode_s"] > 0
        assert record["full_predicted_decode_s"] > 0


KERNELS = choice.choose()


@pytest.mark.skipif(KERNELS.name == "torch", reason="this machine has no kernels")
def test_deterministic_rows_are_those_of_fixed_batches(checkpoint_factory: Callable[..., Path]) -> None:
    """In bfloat16 where there are kernels for it: no tie is forgiven, whatever a window holds, and no clock decides."""
    fixed = GeneratorConfig(
        str(checkpoint_factory("1.3b")), {"method": "full"}, dtype=KERNELS.dtype, num_threads=1, batch_size=4,
        deterministic=True, length_buckets=(16, 64),
    )  # fmt: skip
    requests = pool_of(20)
    wanted = [answer.tokens for answer in Generator(fixed)(requests).answers if isinstance(answer, Completion)]
    ours = Generator(replace(fixed, decode=LOSSLESS[1]))
    for order in (range(20), range(19, -1, -1), [7, 3]):
        answers = ours([requests[i] for i in order]).answers
        assert [a.tokens for a in answers if isinstance(a, Completion)] == [wanted[i] for i in order]
    (controller,) = ours._controllers.values()
    assert not controller.latency.is_timed


def test_deterministic_drafts_need_kernels(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "torch")
    config = GeneratorConfig(str(tiny_checkpoint), LOSSLESS[0], dtype="float32", num_threads=1, deterministic=True)
    with pytest.raises(ValueError, match=r"^decode\.lossless: .* sampling\.deterministic .* need the CPU kernels"):
        Generator(config)
    Generator(replace(config, decode={"method": "full"}))


@pytest.mark.parametrize("scheduler", ["cohort", "continuous"])
@pytest.mark.parametrize("decode", LOSSLESS)
@pytest.mark.grid
def test_online(generator: Generator, scheduler: Any, decode: dict[str, Any]) -> None:
    """Whoever comes when; every token says what it took, and the counts add up."""
    one, requests = generator.with_decode(decode), pool_of(14)
    engine = Engine(one, EngineConfig(scheduler, batch_size=4, max_cohorts=2))
    made: dict[str, list[int]] = {request.id: [] for request in requests}
    layers: dict[str, list[int]] = {request.id: [] for request in requests}
    waiting, step = list(requests), 0
    while waiting or not engine.is_idle:
        for _ in range(1 + step % 3 if waiting else 0):
            engine.add(waiting.pop(0)) if waiting else None
        for progress in engine.step():
            assert progress.error is None
            made[progress.ticket.request.id] += progress.tokens
            layers[progress.ticket.request.id] += progress.layers
        step += 1
        assert step < 2000
    assert_full(one, made, requests)
    assert {name: len(tokens) for name, tokens in made.items()} == {name: len(own) for name, own in layers.items()}
    assert engine.counts.layers_run == sum(sum(own[1:]) for own in layers.values())
    assert engine.counts.layers_run >= 6 * sum(len(own) - 1 for own in layers.values())
    assert engine.counts.finished == len(requests)


def test_a_stream_is_cancelled_between_rounds(generator: Generator) -> None:
    engine = Engine(generator, EngineConfig("continuous", batch_size=4))
    tickets = [engine.add(request) for request in pool_of(3, num_new=40)]
    engine.step()
    engine.cancel(tickets[1])
    made: dict[str, list[int]] = {}
    while not engine.is_idle:
        for progress in engine.step():
            made.setdefault(progress.ticket.request.id, []).extend(progress.tokens)
    assert engine.counts.finished == 2
    assert engine.counts.cancelled == 1
