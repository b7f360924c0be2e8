"""The figures of a report on hand-made records, where the right answer is known."""

import math
from typing import Any

import pytest

from pipeline.progress import describe
from pipeline.report import agreement, speedup


def batch(ours_s: float, full_s: float | None, **more: Any) -> dict[str, Any]:
    """10 rows of 5 tokens, 24 layers of which 8 run."""
    record: dict[str, Any] = {
        "rows": 10, "layers": 24, "output_tokens": 50, "layers_run": 8 * 40, "prefill_s": 0.0, "decode_s": ours_s,
        "predicted_prefill_s": 0.1, "predicted_decode_s": 0.4, "full_predicted_prefill_s": 0.1,
        "full_predicted_decode_s": 1.15, "exact_rows": 7, "matched_tokens": 40, "compared_tokens": 50,
    }  # fmt: skip
    full = {"full_output_tokens": 50, "full_prefill_s": 0.0, "full_decode_s": full_s}
    return record | (full if full_s is not None else dict.fromkeys(full)) | more


def test_speedup_is_the_geometric_mean_of_paired_batches() -> None:
    s = speedup([batch(1.0, 2.0), batch(1.0, 4.5), batch(9.0, None)])
    assert s["measured"] == pytest.approx(3.0)
    # n = 2: t(1) = 12.706, standard error of log 2 and log 4.5 is half their distance
    half = 12.706 * (math.log(4.5) - math.log(2.0)) / 2
    assert s["ci95"] == pytest.approx([3.0 / math.exp(half), 3.0 * math.exp(half)])
    assert s["layers"] == 3.0
    assert s["predicted"] == pytest.approx(1.25 / 0.5)
    assert s["batches"] == 2


def test_speedup_is_per_token_when_lengths_differ() -> None:
    s = speedup([batch(1.0, 1.0, full_output_tokens=25)])
    assert s["measured"] == pytest.approx(2.0)
    assert s["ci95"] is None, "one pair has no interval"


def test_without_pairs_nothing_is_claimed() -> None:
    s = speedup([batch(1.0, None)])
    assert (s["measured"], s["ci95"], s["predicted"]) == (None, None, None)
    assert agreement([batch(1.0, None)]) == {"exact_rows": None, "token_match": None, "rows": 0}


def test_agreement_counts_paired_rows_only() -> None:
    assert agreement([batch(1.0, 2.0), batch(1.0, None)]) == {"exact_rows": 0.7, "token_match": 0.8, "rows": 10}


def test_the_progress_line() -> None:
    counts = {"rows": 0, "failed": 0, "input_tokens": 0, "output_tokens": 0, "workers": 0, "restarts": 0}
    assert "loading model" in describe(counts, 100, 3.0)
    line = describe(counts | {"workers": 1, "rows": 25, "failed": 2, "output_tokens": 500}, 100, 10.0)
    assert "25/100 rows (25 %)   50 output tokens/s   2 failed   1 actor   10 s   ETA 30 s" in line
    assert "2 actors (1 restart)" in describe(counts | {"workers": 2, "restarts": 1}, 100, 10.0)
