import random

import pytest

from benchmarks.lossless import passes


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
