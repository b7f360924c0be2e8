"""Which batches of a worker are decoded at full depth too, and what is recorded of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest
import torch

from actors.batching.full_depth_sample import FIRST_PAIRS, FullDepthSample, agreement, paired_batches
from actors.generator import Generator
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult, BatchStats, Completion
from skipdecode.schedules.schedule import FullDepth
from tests.support.random_requests import one_by_one, random_requests


def pairs(batches: int, fraction: float, first_row: str = "") -> list[int]:
    sample, found = FullDepthSample(first_row=first_row), []
    for place in range(batches):
        is_pair = sample.is_due(fraction)
        found += [place] * is_pair
        sample = sample.after("", counts_as_sample=True, is_pair=is_pair)
    return found


@pytest.mark.parametrize("fraction", [0.0, 1e-7, 0.02, 0.1, 0.3, 0.7, 1.0])
def test_as_many_as_the_estimate_counts(fraction: float) -> None:
    found = pairs(300, fraction)
    for batches in range(1, 300):
        assert paired_batches(batches, fraction) == sum(place < batches for place in found), batches


@pytest.mark.parametrize(("fraction", "length"), [(0.02, 50), (0.05, 20), (0.25, 4), (0.5, 2), (1.0, 1)])
def test_the_first_few_and_one_of_each_part(fraction: float, length: int) -> None:
    found = pairs(1000, fraction)
    assert set(FIRST_PAIRS) <= set(found)
    late = Counter(place // length for place in found if place > max(FIRST_PAIRS))
    parts = range(max(FIRST_PAIRS) // length + 1, 1000 // length)
    assert all(late[part] == 1 for part in parts)


@pytest.mark.parametrize("fraction", [0.02, 0.05, 0.25, 0.5])
@pytest.mark.parametrize("workers", [1, 500])
@pytest.mark.grid
def test_no_place_in_a_window_is_preferred(fraction: float, workers: int) -> None:
    """Batches of a window may come longest first: every length is sampled, with many workers at once."""
    found = [pairs(20_000 // workers, fraction, f"row {worker}" if workers > 1 else "") for worker in range(workers)]
    places = Counter(place % 4 for own in found for place in own if place > max(FIRST_PAIRS))
    assert sorted(places) == [0, 1, 2, 3]
    assert max(places.values()) < 1.6 * min(places.values())


def test_the_first_row_of_all_decides() -> None:
    sample = (
        FullDepthSample()
        .after("a", counts_as_sample=False, is_pair=False)
        .after("b", counts_as_sample=True, is_pair=True)
    )
    assert (sample.batches, sample.counted, sample.pairs, sample.first_row) == (2, 1, 1, "a")


FIGURES = {one.name for one in fields(BatchStats)} - {"batch_rows", "deferred_ffn_rows"}
PREDICTED = {"predicted_prefill_s", "predicted_decode_s", "full_predicted_prefill_s", "full_predicted_decode_s"}


def test_baseline_pairs(build: Callable[..., Generator], calls: list[tuple[list[str], dict[str, Any]]]) -> None:
    """Batches 0, 2 and 4 always, and one of each ten; the passes change order from pair to pair; answers are ours."""
    generator = build(baseline_fraction=0.1, batch_size=1, length_buckets=(32,), deterministic=True)
    calls.clear()
    requests = random_requests(24)
    result = generator(requests)
    assert result.answers == one_by_one(generator, requests)
    assert [record["batch"] for record in result.batches] == list(range(24))
    paired = [record["batch"] for record in result.batches if "full_decode_s" in record]
    assert paired[:3] == [0, 2, 4]
    orders = []
    for (ids, keys), (next_ids, _) in pairwise(calls):
        if ids == next_ids:
            orders.append("full first" if keys["schedule"] == FullDepth(6) else "ours first")
    assert len(paired) > 3
    assert orders == [("ours first", "full first")[number % 2] for number in range(len(paired))]
    for record in result.batches:
        assert FIGURES | {"layers", "started_at", "batch"} <= record.keys()
        assert record["layers"] == 6
        extra = {f"full_{key}" for key in FIGURES} | {"exact_rows", "matched_tokens", "compared_tokens"} | PREDICTED
        assert (record.keys() & extra == extra) is (record["batch"] in paired)
        if record["batch"] in paired:
            assert record["full_layers_run"] == 6 * (record["full_output_tokens"] - record["rows"])
            assert record["full_layers_run"] > 0
            assert record["predicted_decode_s"] < record["full_predicted_decode_s"] or record["decode_steps"] == 0
    again = generator(requests)  # counting goes on from window to window
    assert [record["batch"] for record in again.batches] == list(range(24, 48))
    paired += [record["batch"] for record in again.batches if "full_decode_s" in record]
    assert [place // 10 for place in paired[3:] if place < 40] == [0, 1, 2, 3]


def test_all_others_are_decoded_as_one_batch(build: Callable[..., Generator]) -> None:
    generator, requests = build(baseline_fraction=0.1, batch_size=1, length_buckets=(32,)), random_requests(24)
    result = generator(requests)
    assert result.answers == one_by_one(generator, requests)
    *paired, others = result.batches
    assert len(paired) > 3
    assert all(record["rows"] == 1 and "full_decode_s" in record for record in paired)
    assert others["rows"] == 24 - len(paired)
    assert "full_decode_s" not in others
    assert others["decode_steps"] == others["row_steps"], "one row at a time"
    assert [record["batch"] for record in result.batches] == list(range(len(result.batches)))


def test_baseline_agreement_is_that_of_the_two_passes(build: Callable[..., Generator]) -> None:
    generator = build(baseline_fraction=1.0, batch_size=8, length_buckets=(32,))
    requests = random_requests(8)
    (record,) = generator(requests).batches
    ours = [c.tokens for c in one_by_one(generator, requests)]
    full = [generate(generator.model, [r], FullDepth(6)).completions[0].tokens for r in requests]
    assert record["exact_rows"] == sum(a == b for a, b in zip(ours, full, strict=True)) < 8
    assert record["matched_tokens"] == sum(
        x == y for a, b in zip(ours, full, strict=True) for x, y in zip(a, b, strict=False)
    )
    assert record["compared_tokens"] == sum(max(len(a), len(b)) for a, b in zip(ours, full, strict=True))
    assert 0 < record["matched_tokens"] < record["compared_tokens"]


def test_no_baseline_at_full_depth_or_fraction_zero(build: Callable[..., Generator]) -> None:
    for keys in ({"decode": {"method": "full"}, "baseline_fraction": 1.0}, {"baseline_fraction": 0.0}):
        records = build(**keys)(random_requests(9)).batches
        assert records
        assert not any(key.startswith("full_") for record in records for key in record)


@pytest.mark.slow
def test_full_depth_under_another_name_is_no_pair(build: Callable[..., Generator]) -> None:
    records = build(decode={"speedup": 1}, baseline_fraction=1.0)(random_requests(5)).batches
    assert not any("full_decode_s" in record for record in records)


def completions(*rows: list[int]) -> BatchResult:
    return BatchResult([Completion(tokens, "length", 0, 0) for tokens in rows], BatchStats())


@pytest.mark.parametrize(
    ("ours", "full", "wanted"),
    [
        ([[1, 2, 3]], [[1, 2, 3]], (1, 3, 3)),
        ([[1, 2, 3]], [[1, 9, 3]], (0, 2, 3)),
        ([[1, 2]], [[1, 2, 3, 4]], (0, 2, 4)),  # a row that ended early misses the rest
        ([[1, 2, 3, 4]], [[1, 2]], (0, 2, 4)),
        ([[5], [1, 2]], [[6], [1, 2]], (1, 2, 3)),
        ([[2, 1]], [[1, 2]], (0, 0, 2)),  # position by position, no alignment
    ],
)
def test_agreement_by_hand(ours: list[list[int]], full: list[list[int]], wanted: tuple[int, int, int]) -> None:
    keys = ("exact_rows", "matched_tokens", "compared_tokens")
    assert agreement(completions(*ours), completions(*full)) == dict(zip(keys, wanted, strict=True))


def test_a_failing_baseline_costs_no_row(build: Callable[..., Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    generator, requests = build(baseline_fraction=1.0), random_requests(9)
    wanted = one_by_one(build(), requests)

    run = Generator._run

    def shallow_only(self: Generator, batch: Any, rows: Sequence[Request], schedule: Any, *others: Any) -> BatchResult:
        if schedule == generator.full:
            raise torch.OutOfMemoryError("no room at full depth")
        return run(self, batch, rows, schedule, *others)

    monkeypatch.setattr(Generator, "_run", shallow_only)
    result = generator(requests)
    assert result.answers == wanted
    assert {record["full_error"] for record in result.batches} == {"OutOfMemoryError: no room at full depth"}
    assert not any("full_output_tokens" in record for record in result.batches)


def test_parts_of_another_workers_window_are_not_measured(build: Callable[..., Generator]) -> None:
    """Nor do they count for the sample of the worker's own batches."""
    generator, requests = build(baseline_fraction=0.01), random_requests(9)
    borrowed = generator(requests, may_measure=False)
    assert borrowed.answers == build()(requests).answers
    assert not any("full_output_tokens" in record for record in borrowed.batches)
    own = generator(requests)
    assert "full_output_tokens" in own.batches[0], "the first of its own"
    assert own.batches[0]["batch"] == len(borrowed.batches), "batches are counted through"


@pytest.mark.slow
def test_the_first_pairs_are_not_those_of_the_shortest_prompts(build: Callable[..., Generator]) -> None:
    generator = build(baseline_fraction=0.1, batch_size=2, length_buckets=(32,))
    records = generator(random_requests(40)).batches
    paired = [record["prompt_columns"] for record in records if "full_output_tokens" in record]
    assert max(paired[:3]) >= 10, "in order of length these would have 5 at most"


@pytest.mark.slow
def test_nor_are_they_in_windows_of_two(build: Callable[..., Generator]) -> None:
    generator = build(baseline_fraction=1e-6, batch_size=2, length_buckets=(32,))
    windows = [generator(random_requests(4, seed=seed)).batches for seed in range(3)]
    assert ["full_output_tokens" in record for records in windows for record in records] == 3 * [True, False]
    assert {first["prompt_columns"] < second["prompt_columns"] for first, second in windows} == {True, False}
