"""When failed rows end a run before its end: never while they are few."""

import pytest

from pipeline.generate.stopping import ENDS_EARLY_AT, TooManyFailed, check_budget, early_limit


@pytest.mark.parametrize(
    ("limit", "num_rows", "ends_at"),
    [(0, 20, ENDS_EARLY_AT), (0.0, 20, ENDS_EARLY_AT), (500, 1_000_000, 500), (0.01, 1_000_000, 10_000)],
)
def test_few_failed_rows_end_nothing(limit: int | float, num_rows: int, ends_at: float) -> None:
    assert early_limit(limit, num_rows) == ends_at
    check_budget(int(ends_at), early_limit(limit, num_rows))
    with pytest.raises(TooManyFailed):
        check_budget(int(ends_at) + 1, early_limit(limit, num_rows))
