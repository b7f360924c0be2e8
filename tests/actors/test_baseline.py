"""Which batches of a worker are decoded at full depth too."""

from collections import Counter

import pytest

from actors.baseline import FIRST_PAIRS, Turns, paired_batches


def pairs(batches: int, fraction: float, first_row: str = "") -> list[int]:
    turns, found = Turns(first_row=first_row), []
    for place in range(batches):
        is_pair = turns.is_next(fraction)
        found += [place] * is_pair
        turns = turns.after("", counts=True, is_pair=is_pair)
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
def test_no_place_in_a_window_is_preferred(fraction: float, workers: int) -> None:
    """Batches of a window may come longest first: every length has its turns, with many workers at once."""
    found = [pairs(20_000 // workers, fraction, f"row {worker}" if workers > 1 else "") for worker in range(workers)]
    places = Counter(place % 4 for own in found for place in own if place > max(FIRST_PAIRS))
    assert sorted(places) == [0, 1, 2, 3]
    assert max(places.values()) < 1.6 * min(places.values())


def test_the_first_row_of_all_decides() -> None:
    turns = Turns().after("a", counts=False, is_pair=False).after("b", counts=True, is_pair=True)
    assert (turns.batches, turns.counted, turns.pairs, turns.first_row) == (2, 1, 1, "a")
