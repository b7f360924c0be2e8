import random

import pytest

from benchmarks.lossless import expected_speedup, passes
from skipdecode.cost import Ceilings
from skipdecode.draft_length import DraftLength
from skipdecode.families import released
from skipdecode.lossless import Lossless
from skipdecode.plan import SkipDecode
from skipdecode.prices import Prices
from skipdecode.request import Request
from skipdecode.sampling import Sampling


@pytest.mark.parametrize("tokens", [0, 1, 5, 38])
@pytest.mark.parametrize("rates", [[], [0.0], [1.0] * 3, [0.9, 0.8, 0.2]])
def test_passes_until_a_row_ends(tokens: int, rates: list[float]) -> None:
    rng, rows, ran = random.Random(tokens), 4000, 0
    for _ in range(rows):
        have = 0
        while have < tokens:
            have += 1 + next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))
            ran += 1
    assert passes(tokens, rates) == pytest.approx(ran / rows, rel=0.03)


def test_what_a_batch_begins_with_counts_on_both_sides() -> None:
    """Half as fast a start as the rest of the batch takes, for one side alone and for both."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 64), None, True)
    prices = Prices(released("opt-1.3b"), 2, ceilings=Ceilings(1e12, 1e10, 1e-6))
    length, requests, texts = DraftLength(schedule, prices), [Request("0", [5] * 9, Sampling(64))], [63]
    full_s = 63 * prices.seconds("full", schedule.prefill(), 1, 1, 9 + 32)

    def expected(*begins: float) -> float:
        return expected_speedup(
            "auto", schedule, length, prices, requests, texts, (begins[0] * full_s, begins[1] * full_s)
        )

    without = expected(0.0, 0.0)
    assert without > 1.5
    assert expected(0.0, 0.5) == pytest.approx(max(1.0, 1 / (1 / without + 0.5)))
    assert expected(0.5, 0.5) == pytest.approx(1.5 / (1 / without + 0.5))
