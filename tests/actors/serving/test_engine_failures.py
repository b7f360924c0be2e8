"""The engine without HTTP: who fails hurts no other, and who waits is answered, in both schedulers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.generator import Generator
from skipdecode.engine.logprobs import score_prompt
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from tests.support.engine_helpers import SCHEDULERS, collect, engine_of, offline, run
from tests.support.naive import greedy, random_prompts


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

    monkeypatch.setattr("actors.serving.engine.score_prompt", raising)
    engine = engine_of(generator, scheduler=scheduler, batch_size=8, max_cohorts=4)
    older = [engine.add(request) for request in pool[:4]]
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    num_scored: dict[str, list[int]] = {}
    for step in range(30):
        if step == 3:
            for request in scored:
                engine.add(request)
        progress = engine.step()
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
    assert all(ticket.max_batch_rows is None for ticket in older)


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
    monkeypatch.setattr(StaticBatch, "_keep", out_of_memory)
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
        collect(made, ends, engine.step())
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "head_states", lambda h: 1 / 0)
        assert engine.step() == []
    monkeypatch.setattr(generator.model, "config", replace(generator.model.config, eos_token_id=wanted["0"][1]))
    for _ in range(20):
        collect(made, ends, engine.step())
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
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(generator.model, "head_states", lambda h: 1 / 0)
        engine.step()
    engine.add(pool[8])
    made: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    for _ in range(3):
        collect(made, ends, engine.step())
    assert engine.num_running == 9
    assert made["8"]
    while not engine.is_idle:
        collect(made, ends, engine.step())
    assert set(ends.values()) == {"length"}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("when", ["prompt", "step"])
def test_all_who_wait_are_known_when_the_device_is_lost(
    generator: Generator, scheduler: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newcomers whose prompts it was lost with, too, and an answer that was complete but not yet given out."""
    monkeypatch.setattr(
        "actors.serving.engine.is_device_lost", lambda error, _device: isinstance(error, ZeroDivisionError)
    )
    engine = engine_of(generator, scheduler=scheduler, max_cohorts=4)
    pool = [
        Request(str(i), p, greedy(1 if i == 1 else 12, ignore_eos=True))
        for i, p in enumerate(random_prompts([6, 6, 6, 60], seed=2))
    ]
    engine.add(pool[0])
    engine.step()
    for request in pool[1:]:
        engine.add(request)
    embed = generator.model.embed

    def raising(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if (tokens.shape[1] > 1) == (when == "prompt"):
            raise ZeroDivisionError
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert sorted(ticket.request.id for ticket in engine.open) == ["0", "1", "2", "3"]
