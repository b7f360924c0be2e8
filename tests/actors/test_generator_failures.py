"""`Generator`: failures cost the row at fault alone.

Where batches must fail, `Generator._run` is wrapped: it raises for chosen rows, else decodes.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.batching.buckets import PlannedBatch
from actors.failures import RowFailure
from actors.generator import Answer, Generator
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.request import InvalidLogits, Request, Row
from skipdecode.engine.results import BatchResult, Completion
from tests.support.random_requests import SKIP, one_by_one, random_requests


def fail_when(
    monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[Sequence[Request]], BaseException | None]
) -> list[int]:
    sizes: list[int] = []

    run = Generator._run

    def flaky(generator: Generator, batch: PlannedBatch, requests: Sequence[Request], *others: Any) -> BatchResult:
        sizes.append(len(requests))
        error = is_bad(requests)
        if error is not None:
            raise error
        return run(generator, batch, requests, *others)

    monkeypatch.setattr(Generator, "_run", flaky)
    return sizes


def check_failures(answers: Sequence[Answer], wanted: Sequence[Completion], bad: set[int], *words: str) -> None:
    for row, (answer, right) in enumerate(zip(answers, wanted, strict=True)):
        if row in bad:
            assert isinstance(answer, RowFailure)
            assert answer.error_code == "engine_error"
            assert all(word in answer.error_message for word in words)
        else:
            assert answer == right


@pytest.mark.parametrize("bad", [{0}, {16}, {3, 4}, {0, 5, 11, 16}, set(range(17))], ids=str)
@pytest.mark.parametrize("batch_size", [4, 17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.grid
def test_a_poisoned_row_fails_alone(
    build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch, bad: set[int], batch_size: int
) -> None:
    generator, requests = build(batch_size=batch_size), random_requests(17)
    wanted, ids = one_by_one(generator, requests), {f"row-{i}" for i in bad}
    fail_when(monkeypatch, lambda rs: RuntimeError("boom") if ids & {r.id for r in rs} else None)
    result = generator(requests)
    check_failures(result.answers, wanted, bad, "RuntimeError", "boom")
    assert sum(record["rows"] for record in result.batches) == 17 - len(bad)  # records are of batches that were decoded


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_row_whose_logits_are_no_numbers_fails_alone(build: Callable[..., Generator], deterministic: bool) -> None:
    """A token whose embedding has flipped, so that every state behind it is NaN. Its neighbours are as without it."""
    generator = build(batch_size=8, length_buckets=(32,), deterministic=deterministic)
    requests = random_requests(8)
    bad = {i for i, request in enumerate(requests) if 7 in request.prompt_tokens} | {5}
    requests[5] = Request("row-5", [2, 7], requests[5].sampling)
    wanted = one_by_one(generator, requests)
    generator.model.embed_tokens.weight.data[7] = torch.nan
    result = generator(requests)
    check_failures(result.answers, wanted, bad, "InvalidLogits: row 'row-", "a logit of new token 1 is NaN")


def test_a_row_whose_logits_were_no_numbers_once_is_tried_again(
    build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, and the others together."""
    for count, tried in ((6, [6, 5, 1]), (1, [1, 1])):
        generator, requests = build(batch_size=8, length_buckets=(32,)), random_requests(count)
        wanted, left = one_by_one(generator, requests), [InvalidLogits("row-0", 3)]
        sizes = fail_when(monkeypatch, lambda _, left=left: left.pop() if left else None)  # type: ignore[misc]
        assert generator(requests).answers == wanted
        assert sizes == tried
        monkeypatch.undo()


@pytest.mark.parametrize("decode", [SKIP, {"method": "full", "lossless": True}], ids=["skipdecode", "lossless"])
def test_a_row_whose_grammar_grows_too_complex_fails_alone(
    build: Callable[..., Generator], decode: dict[str, Any]
) -> None:
    """Its parser has to keep 30 rules for each of the letters so far, and gives up after some fifty of them."""
    pytest.importorskip("llguidance")
    rules = [f'r{number}: "a" start?' for number in range(30)]
    structure = {"grammar": "start: " + " | ".join(f"r{number}" for number in range(30)) + "\n" + "\n".join(rules)}
    generator, requests = build(batch_size=8, length_buckets=(32,), decode=decode), random_requests(6, limits=(40, 90))
    wanted = one_by_one(generator, requests)
    letter = generator.tokenizer.encode(["a"])[0][-1]
    own = requests[3].sampling.with_parameters({"structured_outputs": structure, "logit_bias": {str(letter): 100}})
    requests[3] = replace(requests[3], sampling=own)
    answers = [
        answer if isinstance(answer, RowFailure) else replace(answer, layers_run=0, ffns_run=0)
        for answer in generator(requests).answers
    ]
    wanted = [replace(one, layers_run=0, ffns_run=0) for one in wanted]  # drafts run layers of their own
    check_failures(answers, wanted, {3}, "GrammarTooComplex: row 'row-3': structured_outputs: Parser Error")


def test_out_of_memory_halves_the_batch(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    generator, requests = build(batch_size=16, length_buckets=(32,)), random_requests(16)
    wanted = one_by_one(generator, requests)
    sizes = fail_when(monkeypatch, lambda rs: torch.OutOfMemoryError("CUDA out of memory") if len(rs) > 3 else None)
    result = generator(requests)
    assert result.answers == wanted
    assert {record["split_error"] for record in result.batches} == {"OutOfMemoryError: CUDA out of memory"}
    assert sizes[:4] == [16, 8, 4, 2]
    assert max(sizes[3:]) <= 8


def test_a_dead_batch_lets_go_of_its_memory(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception holds the frames it went through, and these the cache: its halves would run out of memory too."""
    generator, requests = build(batch_size=16, length_buckets=(32,)), random_requests(16)
    caches: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    run = Generator._run

    def exhausted(generator: Generator, batch: PlannedBatch, requests: Sequence[Request], *others: Any) -> BatchResult:
        alive.append(sum(ref() is not None for ref in caches))
        cache = torch.empty(1000)
        caches.append(weakref.ref(cache))
        if len(requests) > 2:
            raise torch.OutOfMemoryError(f"no room for {len(cache)}")
        return run(generator, batch, requests, *others)

    monkeypatch.setattr(Generator, "_run", exhausted)
    generator(requests)
    assert len(alive) > 8
    assert set(alive) == {0}


def test_a_row_that_does_not_fit_the_model_fails_alone(shared: Generator) -> None:
    requests = random_requests(6)
    requests[2] = Request("long", [2] * 125, Sampling(max_new_tokens=12))
    requests[4] = Request("alien", [2, 5000], Sampling(max_new_tokens=12))
    answers = shared(requests).answers
    good = [r for i, r in enumerate(requests) if i not in (2, 4)]
    assert [a for i, a in enumerate(answers) if i not in (2, 4)] == one_by_one(shared, good)
    for row, words in ((2, "128 positions"), (4, "IndexError")):
        answer = answers[row]
        assert isinstance(answer, RowFailure)
        assert words in answer.error_message


def test_interrupts_are_not_swallowed(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = build()
    fail_when(monkeypatch, lambda rs: KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        generator(random_requests(3))


def test_long_messages_are_cut(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = build()
    fail_when(monkeypatch, lambda rs: RuntimeError("x" * 10_000))
    (answer,) = generator(random_requests(1)).answers
    assert isinstance(answer, RowFailure)
    assert len(answer.error_message) <= 2000


def test_rows_that_have_ended_are_not_decoded_again(
    build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose steps fail late: those that were whole by then are, and each is recorded once."""
    generator, requests = build(decode=SKIP | {"horizon": 9}, batch_size=4), random_requests(16, limits=(12, 2, 3, 12))
    wanted = one_by_one(generator, requests)
    feed, join = ContinuousBatch._feed_newest, ContinuousBatch.join
    joined: list[str] = []

    def fails_late(batch: ContinuousBatch) -> None:
        if any(member.row.request.id == "row-7" and len(member.row.tokens) > 4 for member in batch._members):
            raise RuntimeError("boom")
        feed(batch)

    def noted(batch: ContinuousBatch, given: Sequence[Request], *others: Any) -> list[Row]:
        joined.extend(request.id for request in given)
        return join(batch, given, *others)

    assert len(wanted[7].tokens) > 5, "the case has lost its point"
    monkeypatch.setattr(ContinuousBatch, "_feed_newest", fails_late)
    monkeypatch.setattr(ContinuousBatch, "join", noted)
    result = generator(requests)
    check_failures(result.answers, wanted, {7}, "RuntimeError", "boom")
    once = [request.id for request in requests if joined.count(request.id) == 1]
    assert len(once) >= 4
    assert sum(record["rows"] for record in result.batches) == 15
    assert sum(record["output_tokens"] for record in result.batches) == sum(
        len(one.tokens) for row, one in enumerate(wanted) if row != 7
    )


def test_what_has_not_begun_is_left_when_no_more_is_wanted(build: Callable[..., Generator]) -> None:
    generator, requests = build(decode=SKIP | {"horizon": 9}, batch_size=4), random_requests(16)
    wanted, asked = one_by_one(generator, requests), iter([True, False])
    result = generator(requests, should_continue=lambda: next(asked))
    assert 4 < len(result.answers) < 16
    assert result.answers == [wanted[row] for row in range(16) if row not in result.left]
    assert len(result.answers) + len(result.left) == 16
    assert sum(record["rows"] for record in result.batches) == len(result.answers)
