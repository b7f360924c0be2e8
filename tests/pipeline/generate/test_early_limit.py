"""When failed rows end a run before its end: never while they are few."""

import pytest

from pipeline.generate.stopping import MIN_EARLY_LIMIT, TooManyFailed, check_budget, early_limit


@pytest.mark.parametrize(
    ("limit", "num_rows", "max_failures"),
    [(0, 20, MIN_EARLY_LIMIT), (0.0, 20, MIN_EARLY_LIMIT), (500, 1_000_000, 500), (0.01, 1_000_000, 10_000)],
)
def test_few_failed_rows_end_nothing(limit: int | float, num_rows: int, max_failures: float) -> None:
    assert early_limit(limit, num_rows) == max_failures
    check_budget(int(max_failures), early_limit(limit, num_rows))
    with pytest.raises(TooManyFailed):
        check_budget(int(max_failures) + 1, early_limit(limit, num_rows))
