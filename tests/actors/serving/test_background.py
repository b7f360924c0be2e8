"""Requests in the background of the continuous scheduler: they fill the places that no other request wants. Float32."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from actors.failures import RowFailure
from actors.generator import Answer, Generator
from actors.serving.engine import Engine
from actors.serving.scheduler import BACKGROUND_SHARE, Ticket
from skipdecode.config.sampling import Sampling, StructuredOutputs
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.engine_helpers import collect, engine_of, offline, pool_of
from tests.support.examples import examples
from tests.support.naive import greedy, random_prompts


def long_rows(count: int, num_new: int = 30, length: int = 6) -> list[Request]:
    prompts = random_prompts([length] * count, seed=4)
    return [Request(f"b{i}", p, greedy(num_new, ignore_eos=True)) for i, p in enumerate(prompts)]


class Asked:
    """An engine, the requests given to it, and what came of them."""

    def __init__(self, generator: Generator, **keys: Any) -> None:
        self.engine: Engine = engine_of(generator, **({"scheduler": "continuous", "batch_size": 4} | keys))
        self.answers: dict[str, Answer] = {}
        self.made: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def in_background(self, requests: Sequence[Request]) -> list[Ticket]:
        tickets = []
        for request in requests:

            def answered(answer: Answer, name: str = request.id) -> None:
                assert name not in self.answers, "answered twice"
                self.answers[name] = answer

            tickets.append(self.engine.ticket(request, answered))
            self.engine.enqueue(tickets[-1])
        return tickets

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            collect(self.made, self.ends, self.engine.step())

    def finish(self) -> None:
        for _ in range(5000):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")


def answers_of(generator: Generator, requests: Sequence[Request]) -> dict[str, Answer]:
    return {r.id: a for r, a in zip(requests, generator(list(requests)).answers, strict=True)}


def tokens_of(answer: Answer) -> list[int]:
    assert isinstance(answer, Completion)
    return answer.tokens


def test_a_request_takes_the_place_of_the_youngest_row(generator: Generator) -> None:
    """Its first token needs no step of the background, and the row that gave way is answered as if nothing had been."""
    asked, pool, own = Asked(generator), long_rows(4), pool_of(1, 20)
    tickets = asked.in_background(pool)
    asked.step(9)
    assert asked.engine.num_background == 4
    steps = asked.engine.counts.steps
    asked.engine.add(own[0])
    asked.step()
    assert len(asked.made["0"]) == 1
    assert asked.engine.counts.steps == steps
    assert [ticket.row is None for ticket in tickets] == [False, False, False, True]
    assert (asked.engine.num_running, asked.engine.num_background, asked.engine.counts.gave_way) == (1, 3, 1)
    asked.step()
    assert len(asked.made["0"]) == 2
    asked.finish()
    assert asked.answers == answers_of(generator, pool)
    assert (asked.made, asked.ends) == offline(generator, own)
    counts = asked.engine.counts
    assert (counts.finished, counts.background_finished, counts.background_output_tokens) == (1, 4, 120)
    assert counts.output_tokens == len(asked.made["0"])


def test_a_burst_takes_all_places_and_no_row_joins_while_another_request_waits(generator: Generator) -> None:
    asked, pool = Asked(generator), long_rows(8)
    asked.in_background(pool)
    asked.step(9)
    own = [Request(str(i), p, greedy(10, ignore_eos=True)) for i, p in enumerate(random_prompts([6] * 6, seed=2))]
    for request in own:
        asked.engine.add(request)
    asked.step()
    assert (asked.engine.num_running, asked.engine.num_background) == (4, 0)
    while asked.engine.waiting:
        assert asked.engine.num_background == 0
        asked.step()
    asked.finish()
    assert (asked.made, asked.ends) == offline(generator, own)
    assert asked.answers == answers_of(generator, pool)


def test_prompts_of_the_background_join_a_few_at_a_time(generator: Generator) -> None:
    asked = Asked(generator, batch_size=16, background_prefill_tokens=64)
    (bucket,) = {ticket.bucket for ticket in asked.in_background(long_rows(16))}
    rows = 64 // bucket
    for count in range(1, 4):
        asked.step()
        assert asked.engine.num_background == count * rows
        asked.step()  # of those that have joined


def test_a_request_that_comes_while_prompts_of_the_background_run_is_next(generator: Generator) -> None:
    asked = Asked(generator, batch_size=8, background_prefill_tokens=32)
    asked.in_background(long_rows(8))
    asked.step()
    assert (asked.engine.num_background, asked.engine.counts.steps) == (1, 0)
    asked.engine.add(pool_of(1)[0])
    asked.step()
    assert (len(asked.made["0"]), asked.engine.counts.steps) == (1, 0)
    asked.step()
    assert (len(asked.made["0"]), asked.engine.counts.steps) == (2, 1)


def test_prompts_of_the_background_run_with_those_of_a_request(generator: Generator) -> None:
    """In one pass, within the bound for prompts of the background."""
    asked, own, pool = Asked(generator, batch_size=16, background_prefill_tokens=96), pool_of(1), long_rows(12)
    assert {ticket.bucket for ticket in (asked.engine.ticket(own[0]), *asked.in_background(pool))} == {32}
    asked.engine.add(own[0])
    asked.step()
    assert (len(asked.made["0"]), asked.engine.num_background, asked.engine.counts.steps) == (1, 2, 0)
    asked.finish()
    assert asked.answers == answers_of(generator, pool)
    assert asked.made == offline(generator, own)[0]


def test_prompts_that_run_with_those_of_a_request_leave_a_place_for_the_next_one(generator: Generator) -> None:
    asked, own = Asked(generator), pool_of(2)
    asked.in_background(long_rows(12))
    asked.engine.add(own[0])
    asked.step()
    assert (asked.engine.num_running, asked.engine.num_background) == (1, 2)
    asked.engine.add(own[1])
    asked.step(2)
    assert (asked.engine.num_running, asked.engine.num_background, asked.engine.counts.gave_way) == (2, 2, 0)


def test_the_background_has_a_part_of_the_memory_and_frees_it(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long row does not join beside many, and a long request finds memory at once."""
    asked = Asked(generator, batch_size=16)
    pool, (long,) = long_rows(16), long_rows(1, num_new=100)
    asked.in_background(pool[:12])
    asked.step(6)
    used = asked.engine.cache_bytes
    monkeypatch.setattr(asked.engine._scheduler, "cache_budget", budget := int(used / BACKGROUND_SHARE * 1.1))
    long = replace(long, id="long")
    asked.in_background([long, *pool[12:]])
    asked.step(4)
    assert asked.engine.num_background == 12
    assert asked.engine.cache_bytes <= BACKGROUND_SHARE * budget
    own = Request("own", random_prompts([100], seed=1)[0], greedy(20, ignore_eos=True))
    asked.engine.add(own)
    asked.step()
    assert len(asked.made["own"]) == 1
    assert asked.engine.counts.gave_way > 0
    while not asked.engine.is_idle:
        asked.step()
        assert asked.engine.cache_bytes <= budget
    assert asked.answers == answers_of(generator, [*pool, long])
    assert (asked.made, asked.ends) == offline(generator, [own])
    monkeypatch.setattr(asked.engine._scheduler, "cache_budget", 1000)
    with pytest.raises(ValueError, match="the server has 500"):
        asked.in_background([long])


def test_cancelled_rows_of_the_background_are_not_answered(generator: Generator) -> None:
    asked, pool = Asked(generator, batch_size=3), long_rows(6)
    tickets = asked.in_background(pool)
    asked.step(5)
    asked.engine.cancel(tickets[1])
    asked.engine.cancel(tickets[5])
    asked.finish()
    wanted = answers_of(generator, pool)
    assert asked.answers == {name: answer for name, answer in wanted.items() if name not in ("b1", "b5")}
    assert asked.engine.counts.cancelled == 0


@pytest.mark.parametrize("when", ["prompt", "step"])
def test_a_row_of_the_background_that_fails_hurts_no_other(
    generator: Generator, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose embedding raises stands for whatever a row may do to its batch."""
    pool = long_rows(7, num_new=12)
    own = [Request(str(i), p, greedy(40, ignore_eos=True)) for i, p in enumerate(random_prompts([5] * 2, seed=9))]
    wanted, (made, ends) = answers_of(generator, pool), offline(generator, own)
    answer = wanted["b3"]
    assert isinstance(answer, Completion)
    own_tokens = {token for r in own for token in (*r.prompt_tokens, *made[r.id])}
    candidates = pool[3].prompt_tokens if when == "prompt" else answer.tokens[1:-1]
    bad = next(token for token in candidates if token not in own_tokens)
    fed = {r.id: r.prompt_tokens if when == "prompt" else tokens_of(wanted[r.id])[:-1] for r in pool}
    hurt = {name for name, tokens in fed.items() if bad in tokens}
    assert len(hurt) < 4
    embed = generator.model.embed

    def raising(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if (tokens.shape[1] > 1) == (when == "prompt") and bool((tokens == bad).any()):
            raise RuntimeError("out of memory, so to speak")
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)
    asked = Asked(generator, batch_size=8, max_cohorts=4)
    for request in own:
        asked.engine.add(request)
    asked.step()
    asked.in_background(pool)
    asked.finish()
    failed = {name for name, answer in asked.answers.items() if isinstance(answer, RowFailure)}
    assert failed == hurt
    assert {asked.answers[name] for name in failed} == {  # type: ignore[comparison-overlap]
        RowFailure("engine_error", "RuntimeError: out of memory, so to speak")
    }
    assert {n: a for n, a in asked.answers.items() if n not in hurt} == {
        n: a for n, a in wanted.items() if n not in hurt
    }
    assert (asked.made, asked.ends) == (made, ends)


def test_all_that_a_line_may_ask_for_is_answered_as_offline(generator: Generator) -> None:
    prompts, regex = random_prompts([7] * 8, seed=5), StructuredOutputs.of({"regex": "[a-c]{2,6}"})
    samplings = [
        Sampling(9, temperature=0.8, top_k=20, seed=3),
        Sampling(9, temperature=0.8, repetition_penalty=1.3, logit_bias=((5, 4.0),), seed=4),
        Sampling(9, stop=("e",)),
        Sampling(9, structured_outputs=regex),
        greedy(5, ignore_eos=True),
        greedy(5, ignore_eos=True),
        greedy(0),
        greedy(12, min_new_tokens=3),
    ]
    pool = [Request(f"b{i}", p, own) for i, (p, own) in enumerate(zip(prompts, samplings, strict=True))]
    pool[4] = replace(pool[4], top_logprobs=2)
    pool[5] = replace(pool[5], top_logprobs=1, score_prompt=True)
    pool[6] = replace(pool[6], score_prompt=True)
    asked = Asked(generator)
    asked.in_background(pool)
    asked.finish()

    def rounded(answer: Answer) -> Answer:
        assert isinstance(answer, Completion)

        def scores(found: Any) -> Any:
            return found and [
                replace(o, logprob=round(o.logprob, 3), top=[(t, round(v, 3)) for t, v in o.top]) for o in found
            ]

        return replace(answer, logprobs=scores(answer.logprobs), prompt_logprobs=scores(answer.prompt_logprobs))

    wanted = answers_of(generator, pool)
    assert {n: rounded(a) for n, a in asked.answers.items()} == {n: rounded(a) for n, a in wanted.items()}
    assert wanted["b3"].is_valid is not None  # type: ignore[union-attr]
    assert len(wanted["b6"].prompt_logprobs) == 6  # type: ignore[union-attr,arg-type]


def test_cohorts_take_no_background(generator: Generator) -> None:
    with pytest.raises(ValueError, match="cohort has no places"):
        Asked(generator, scheduler="cohort").in_background(long_rows(1))


class Machine(RuleBasedStateMachine):
    """Anything may happen: requests of both kinds, steps, steps that fail, cancellations."""

    generator: Generator
    wanted: dict[str, Answer]
    pool: Sequence[Request]

    def __init__(self) -> None:
        super().__init__()
        self.asked = Asked(self.generator, max_cohorts=4, background_prefill_tokens=64)
        self.left, self.gone = list(self.pool), set[str]()
        self.tickets: dict[str, Ticket] = {}

    @precondition(lambda self: self.left)
    @rule(count=st.integers(1, 4), is_background=st.booleans())
    def ask(self, count: int, is_background: bool) -> None:
        chosen, self.left = self.left[:count], self.left[count:]
        for request in chosen:
            if is_background:
                (ticket,) = self.asked.in_background([request])
            else:
                ticket = self.asked.engine.add(request)
            self.tickets[request.id] = ticket

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        self.asked.step(count)

    @rule()
    def fail(self) -> None:
        """In a step or a prompt, whichever is next."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.generator.model), "head_states", lambda _, h: 1 / 0)
            engine = self.asked.engine
            if sum(len(batch.tickets) for batch in engine._scheduler.running) > 1 and not engine.waiting:
                self.asked.step()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tickets)))
        if self.tickets[name] in self.asked.engine.open:
            self.gone.add(name)
        self.asked.engine.cancel(self.tickets[name])

    @invariant()
    def no_batch_has_too_many_rows(self) -> None:
        assert all(len(batch.tickets) <= 4 for batch in self.asked.engine._scheduler.running)

    def teardown(self) -> None:
        self.asked.finish()
        assert self.asked.engine.cache_bytes == 0
        for name, ticket in self.tickets.items():
            wanted = self.wanted[name]
            assert isinstance(wanted, Completion)
            if name in self.gone:
                assert name not in self.asked.answers
                assert name not in self.asked.ends
            elif ticket.is_background:
                assert self.asked.answers[name] in (wanted, failure())
            elif self.asked.ends[name] != "error: " + failure().error_message:
                assert (self.asked.made[name], self.asked.ends[name]) == (wanted.tokens, wanted.finish_reason)


def failure() -> RowFailure:
    return RowFailure("engine_error", "ZeroDivisionError: division by zero")


def test_whatever_happens_answers_are_those_of_the_offline_generator(generator: Generator) -> None:
    Machine.generator, Machine.pool = generator, pool_of(24)
    Machine.wanted = answers_of(generator, Machine.pool)
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=examples(30), stateful_step_count=20, deadline=None)
    )
