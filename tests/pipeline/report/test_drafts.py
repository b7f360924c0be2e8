"""What batches with drafts add up to."""

from typing import Any

import pyarrow as pa
import pytest

from pipeline.report.drafts import DraftTotals
from pipeline.report.metrics_schemas import BATCH_SCHEMA


def totals(*slices: list[dict[str, Any]]) -> DraftTotals:
    added = DraftTotals()
    for records in slices:
        added.add(pa.Table.from_pylist(records, schema=BATCH_SCHEMA))
    return added


def record(drafted: list[int], accepted: list[int], **keys: Any) -> dict[str, Any]:
    base = {"rows": 2, "output_tokens": 12, "row_steps": 4, "draft_s": 1.0, "verify_s": 2.0}
    by = {"drafted_by": [sum(drafted), 0, 0], "accepted_by": [sum(accepted), 0, 0]}
    return base | {"drafted_at": drafted, "accepted_at": accepted} | by | keys


def test_positions_are_added_over_lists_of_any_length() -> None:
    made = totals(
        [record([4, 2], [3, 1], drafted_rounds=4), record([], [], no_gain_rounds=3, slower_rounds=2)],
        [
            record(
                [4, 4, 1],
                [4, 2, 0],
                drafted_rounds=3,
                timing_plain_rounds=1,
                drafted_by=[5, 0, 4],
                accepted_by=[3, 0, 3],
            )
        ],
    )
    assert made.figures() == {
        "drafted": 15,
        "accepted": 10,
        "acceptance_by_position": [7 / 8, 3 / 6, 0.0],
        "drafted_by": {"layers": 11, "row": 0, "answers": 4},
        "acceptance_by": {"layers": 7 / 11, "row": None, "answers": 3 / 4},
        "rounds": {"drafted": 7, "timing_plain": 1, "slower": 2, "no_gain": 3},
        "draft_s": 3.0,
        "verify_s": 6.0,
    }
    assert made.acceptance == pytest.approx(10 / 15)
    assert made.tokens_per_pass == pytest.approx(30 / 12)


def test_batches_without_drafts_do_not_count() -> None:
    plain = {"rows": 5, "output_tokens": 99, "row_steps": 94}
    assert totals([plain, record([4], [3])]).tokens_per_pass == pytest.approx(10 / 4)
    none = totals([plain], [])
    assert (none.figures(), none.acceptance, none.tokens_per_pass) == (None, None, None)
