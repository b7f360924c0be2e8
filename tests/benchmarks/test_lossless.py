import random

import pytest

from benchmarks.lossless_expected import expected_speedup, rows_by_round
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.request import Request
from skipdecode.families import released
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import SkipDecode
from skipdecode.speculative.draft_length import MOST, DraftLength
from skipdecode.speculative.latency_model import Prices

SCHEDULE = Lossless(24, SkipDecode(24, 4, 4, 1, 64), None, True)


@pytest.mark.parametrize("tokens", [0, 1, 5, 38])
@pytest.mark.parametrize("rates", [[], [0.0], [1.0] * 3, [0.9, 0.8, 0.2]])
def test_rounds_until_all_rows_end(tokens: int, rates: list[float]) -> None:
    """As many as drafts make that are accepted one by one."""
    rng, rows, rounds = random.Random(tokens), 4000, list[int]()
    for _ in range(rows):
        have, ran = 0, 0
        while have < tokens:
            have += 1 + next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))
            ran += 1
        rounds.append(ran)
    running = rows_by_round([tokens] * rows, rates, rng)
    assert sum(running) == pytest.approx(sum(rounds), rel=0.03)
    assert running == sorted(running, reverse=True)
    assert abs(len(running) - max(rounds)) <= 2


def expected(way: str, prices: Prices, batches: list[list[int]], accepted: float = 0.9) -> float:
    length = DraftLength(SCHEDULE, prices, [accepted] * MOST)
    return expected_speedup(way, SCHEDULE, length, prices, [Request("0", [5] * 9, Sampling(64))], batches, (0.0, 0.0))


def test_a_batch_lasts_until_its_unluckiest_row_ends() -> None:
    """Where weights bind, and a round of one row takes as long as one of four."""
    prices = Prices(released("opt-1.3b"), 2, ceilings=Ceilings(1e15, 1e10, 0.0))
    one, four = (expected("auto", prices, [[63] * rows] * 20) for rows in (1, 4))
    assert 0.8 * one < four < 0.95 * one
    sure = [expected("auto", prices, [[63] * rows], accepted=1.0) for rows in (1, 4)]
    assert sure[1] == pytest.approx(sure[0], rel=0.05)


def test_rows_that_end_are_dropped_at_once() -> None:
    """Full depth carries them until half of the batch has ended; where drafts are never accepted, that is the gain."""
    prices = Prices(released("opt-1.3b"), 2, ceilings=Ceilings(1e10, 1e15, 0.0))  # a step takes as long as it has rows
    texts = [10, 20, 40, 40]
    gain = expected("auto", prices, [texts], accepted=0.0)
    assert gain == pytest.approx((20 * 4 + 20 * 2) / sum(texts), rel=0.02)
    assert expected("true", prices, [texts], accepted=0.0) < 1.0


def test_what_a_batch_begins_with_counts_on_both_sides() -> None:
    """Half as fast a start as the rest of the batch takes, for one side alone and for both."""
    prices = Prices(released("opt-1.3b"), 2, ceilings=Ceilings(1e12, 1e10, 1e-6))
    length, requests, texts = DraftLength(SCHEDULE, prices), [Request("0", [5] * 9, Sampling(64))], [[63]]
    full_s = 63 * prices.seconds("full", SCHEDULE.prefill(), 1, 1, 9 + 32)

    def begun(*begins: float) -> float:
        return expected_speedup(
            "auto", SCHEDULE, length, prices, requests, texts, (begins[0] * full_s, begins[1] * full_s)
        )

    without = begun(0.0, 0.0)
    assert without > 1.5
    assert begun(0.0, 0.5) == pytest.approx(max(1.0, 1 / (1 / without + 0.5)))
    assert begun(0.5, 0.5) == pytest.approx(1.5 / (1 / without + 0.5))
