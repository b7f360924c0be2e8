"""The figures of a report on hand-made records, where the right answer is known."""

import math
import statistics
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from pipeline.cluster.progress import describe
from pipeline.report import batches as report_batches
from pipeline.report.batches import BatchTotals
from pipeline.report.data_files import DataTotals, layers_by_step, lengths
from pipeline.report.metrics_schemas import BATCH_SCHEMA
from pipeline.report.page import speed_text
from skipdecode.schedules.from_config import complete_ffn_skip, make_schedule


def batch(ours_s: float, full_s: float | None, **more: Any) -> dict[str, Any]:
    """10 rows of 5 tokens, 24 layers of which 8 run."""
    record: dict[str, Any] = {
        "rows": 10, "layers": 24, "output_tokens": 50, "layers_run": 8 * 40, "prefill_s": 0.0, "decode_s": ours_s,
        "predicted_prefill_s": 0.1, "predicted_decode_s": 0.4, "full_predicted_prefill_s": 0.1,
        "full_predicted_decode_s": 1.15, "exact_rows": 7, "matched_tokens": 40, "compared_tokens": 50,
    }  # fmt: skip
    full = {"full_output_tokens": 50, "full_prefill_s": 0.0, "full_decode_s": full_s}
    return record | (full if full_s is not None else dict.fromkeys(full)) | more


def totals(*batches: dict[str, Any]) -> BatchTotals:
    """Added up one record at a time, as from many files."""
    return BatchTotals.of(pa.Table.from_pylist([one], schema=BATCH_SCHEMA) for one in batches)


def speedup(*batches: dict[str, Any]) -> dict[str, Any]:
    return report_batches.speedup(totals(*batches))


def agreement(*batches: dict[str, Any]) -> dict[str, Any]:
    return report_batches.agreement(totals(*batches))


def test_speedup_is_the_geometric_mean_of_paired_batches() -> None:
    s = speedup(batch(1.0, 2.0), batch(1.0, 3.0), batch(1.0, 4.5), batch(9.0, None))
    assert s["measured"] == pytest.approx(3.0)
    # log 2, log 3 and log 4.5 are log 1.5 apart, which is their standard deviation; t(2) = 4.303
    half = 4.303 * math.log(1.5) / math.sqrt(3)
    assert s["ci95"] == pytest.approx([3.0 / math.exp(half), 3.0 * math.exp(half)])
    assert s["layers"] == 3.0
    assert s["predicted"] == pytest.approx(1.25 / 0.5)
    assert s["batches"] == 3


@pytest.mark.parametrize("ratios", [[2.0], [2.0, 3.0]])
def test_fewer_than_three_pairs_have_no_interval(ratios: list[float]) -> None:
    s = speedup(*(batch(1.0, ratio) for ratio in ratios))
    assert s["measured"] == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
    assert s["ci95"] is None


@pytest.mark.parametrize(("pairs", "t"), [(31, 2.042), (32, 1.96)])
def test_the_interval_of_many_pairs(pairs: int, t: float) -> None:
    logs = [i % 2 for i in range(pairs)]
    s = speedup(*(batch(1.0, math.exp(log)) for log in logs))
    half = t * statistics.stdev(logs) / math.sqrt(pairs)
    assert s["ci95"] == pytest.approx([s["measured"] / math.exp(half), s["measured"] * math.exp(half)])


def test_speedup_is_per_token_when_lengths_differ() -> None:
    s = speedup(batch(1.0, 1.0, full_output_tokens=25))
    assert s["measured"] == pytest.approx(2.0)


def test_without_pairs_nothing_is_claimed() -> None:
    s = speedup(batch(1.0, None))
    assert (s["measured"], s["ci95"], s["predicted"]) == (None, None, None)
    assert agreement(batch(1.0, None)) == {"exact_rows": None, "token_match": None, "rows": 0}


def test_agreement_counts_paired_rows_only() -> None:
    assert agreement(batch(1.0, 2.0), batch(1.0, None)) == {"exact_rows": 0.7, "token_match": 0.8, "rows": 10}


def test_a_column_that_an_earlier_version_did_not_write_gives_no_figure() -> None:
    found = totals(batch(1.0, 2.0) | {"layers_run": None, "predicted_decode_s": None})
    assert report_batches.speedup(found)["layers"] is None
    assert report_batches.speedup(found)["predicted"] is None
    assert report_batches.speedup(found)["measured"] == pytest.approx(2.0)
    assert found.total("layers_run") is None
    assert found.total("output_tokens") == 50
    assert totals().decode_steps is None


SKIP = {"method": "skipdecode", "speedup": 2}


def ran(limit: int, length: int) -> int:
    """Layers that a row of so many tokens runs whose `max_new_tokens` is `limit`."""
    schedule = make_schedule(SKIP, num_layers=24, max_new_tokens=limit)
    return sum(schedule.step(k).num_layers_run for k in range(length - 1))


def test_layers_by_position_of_rows_of_one_schedule() -> None:
    found = DataTotals(layers_by_length={n: (ran(64, n), ran(64, n)) for n in (1, 10, 64)})
    steps = layers_by_step(found, SKIP, 24, 64)
    assert steps["reason"] is None
    assert [(piece["first"], piece["last"]) for piece in steps["run"]] == [(0, 8), (9, 62)]
    for piece in steps["run"]:
        planned = steps["planned"][piece["first"] : piece["last"] + 1]
        assert piece["layers"] == pytest.approx(sum(planned) / len(planned))


@pytest.mark.parametrize("limits", [{10: 64, 12: 12}, {10: 64, 80: 80}, {12: 12}])
def test_layers_by_position_are_not_shown_where_rows_had_other_schedules(limits: dict[int, int]) -> None:
    """By differences of their sums a row of 64 that ended at 10 and one of 12 ran -3.5 layers at positions 9 and 10."""
    found = DataTotals(layers_by_length={n: (ran(limit, n), ran(limit, n)) for n, limit in limits.items()})
    steps = layers_by_step(found, SKIP, 24, 64)
    assert steps["run"] is None
    assert "max_tokens of their own" in steps["reason"]


def report(decode: dict[str, Any], prefill: str = "full", errors: int = 0) -> dict[str, Any]:
    """What the section on speed reads, of a run without a measurement."""
    planned = layers_by_step(DataTotals(), decode, 24, 8)
    return {
        "speedup": speedup(batch(1.0, None)), "agreement": agreement(), "decode": decode, "prefill": prefill,
        "baseline_errors": {"count": errors, "first": "OutOfMemoryError: 3 < 4" if errors else None},
        "layers_by_step": planned, "model": {"layers": 24},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("found", "fraction", "said"),
    [
        (report(SKIP), 0.0, "set baseline.fraction above 0"),
        (report({"method": "full"}), 0.02, "at full depth itself"),
        (report({"method": "skipdecode", "speedup": 1}), 0.02, "at full depth itself"),
        (
            report({"method": "full", "ffn_skip": complete_ffn_skip({"mode": "row"})}),
            0.0,
            "set baseline.fraction above 0",
        ),
        (report({"method": "full"}, "swiftkv"), 0.0, "set baseline.fraction above 0"),
        (report(SKIP, errors=3), 0.02, "every pass at full depth failed. Of the passes at full depth 3 failed, the"),
        (report(SKIP, errors=3), 0.02, "OutOfMemoryError: 3 < 4"),
    ],
)
def test_the_page_says_why_nothing_was_measured(found: dict[str, Any], fraction: float, said: str) -> None:
    text = speed_text(found, fraction)
    assert said in text
    assert ("baseline.fraction" in text) == ("baseline.fraction" in said)


def test_a_few_very_long_rows_do_not_squeeze_the_histogram() -> None:
    usual = Counter(dict.fromkeys(range(10, 50), 100))
    found = lengths(usual + Counter({1900: 3}))
    assert found is not None
    assert (found["edges"][-1], found["rows"], found["beyond"]) == (50, [100] * 40, 3)
    assert (found["max"], found["mean"]) == (1900, pytest.approx((100 * sum(range(10, 50)) + 3 * 1900) / 4003))
    found = lengths(usual + Counter({100: 3}))
    assert found is not None
    assert (sum(found["rows"]), found["beyond"]) == (4003, 0)


def test_the_progress_line() -> None:
    counts = dict.fromkeys(("rows", "failed", "output_tokens", "workers", "restarts", "sitting_out", "working_s"), 0)
    assert "loading model" in describe(counts, 100, 3.0)
    assert "0 output tokens/s   0 failed   1 actor   60 s   ETA ?" in describe(counts | {"workers": 1}, 100, 60.0)
    some = {"workers": 1, "rows": 25, "failed": 2, "output_tokens": 500, "working_s": 10.0}
    line = describe(counts | some, 100, 70.0)  # the model took a minute to load
    assert "25/100 rows (25 %)   50 output tokens/s   2 failed   1 actor   70 s   ETA 30 s" in line
    assert "2 actors (1 restart)" in describe(counts | {"workers": 2, "restarts": 1}, 100, 10.0)
    sick = counts | {"workers": 2, "restarts": 1, "sitting_out": 1}
    assert "2 actors (1 restart, 1 out of work)" in describe(sick, 100, 10.0)
