"""What drafts should gain in whole batches, by passes that were timed one by one.

Each draft is accepted by chance, as often as was seen. Rows end where theirs do. Full depth carries rows that have
ended until half of its batch has; a lossless batch drops them at once, and lasts until its unluckiest row ends.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import mul
from statistics import median

from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import carried_rows
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.draft_length import MOST, SKIPPED, DraftLength
from skipdecode.speculative.latency_model import Prices

TRIED = 512  # batches of chance, so many of each that was measured, or one


def expected_speedup(
    way: str,
    schedule: Lossless,
    learnt: DraftLength,
    timed: Prices,
    requests: Sequence[Request],
    batches: Sequence[Sequence[int]],
    begins: tuple[float, float],
) -> float:
    """Of that way, had it known acceptance and prices from the start. `batches`: tokens of each row behind its first.
    `begins`: what first steps take more, and first rounds with drafts, in s."""
    length = DraftLength(schedule, timed)
    length.acceptance, length.listed = learnt.acceptance, learnt.listed
    half = requests[0].sampling.max_new_tokens // 2
    context = sum(len(request.prompt_tokens) for request in requests) // len(requests) + half
    rates = length.acceptance.rates(SKIPPED, MOST)

    @cache
    def rounds_s(rows: int) -> list[float]:
        """Of a round of so many rows with 0, 1, .. MOST drafts each."""
        step_s = timed.seconds("full", schedule.prefill(), rows, rows, context)
        return [step_s / gain for gain in length.speedups(rows, half, context, [1.0] * (MOST + 1))]

    def drafted_s(drafts: int) -> float:
        rng, trials = random.Random(drafts), max(1, TRIED // len(batches))
        rounds = (rows_by_round(texts, rates[:drafts], rng) for texts in batches for _ in range(trials))
        took_s = sum(rounds_s(rows)[drafts] for running in rounds for rows in running)
        return len(batches) * begins[drafts > 0] + took_s / trials

    steps = [rows for texts in batches for rows in carried_rows([1 + text for text in texts])]
    full_s = len(batches) * begins[0] + sum(rounds_s(rows)[0] for rows in steps)
    if schedule.draft_tokens is not None:
        return full_s / drafted_s(schedule.draft_tokens)
    return max(full_s / drafted_s(drafts) for drafts in range(way != "auto", MOST + 1))


def rows_by_round(texts: Sequence[int], rates: Sequence[float], rng: random.Random) -> list[int]:
    """Rows that run in the first round of a batch, the second, .. until all have their `texts` tokens. `rates`: the
    chance of each draft to be accepted where those before it are."""
    refused = [1.0 - reached for reached in accumulate(rates, mul)]  # at the first draft, the second, .. or before

    def rounds(text: int) -> int:
        count = 0
        while text > 0:
            text -= 1 + bisect_left(refused, 1.0 - rng.random())
            count += 1
        return count

    needed = [rounds(text) for text in texts]
    return [sum(own > done for own in needed) for done in range(max(needed))]


class Typical(Prices):
    """Of what passes take in the middle, as batches are compared: the least of few is luck on a shared machine."""

    def _least(self, ratios: Sequence[float]) -> float:
        return median(ratios)


@dataclass
class Part:
    """Batches one behind the other, and the passes that were timed beside them."""

    timed: Prices
    begun: list[tuple[float, float]] = field(default_factory=list)
    """What first steps take more, and first rounds with drafts."""
    requests: list[Request] = field(default_factory=list)
    """Of one of the batches."""
    made: dict[str, list[BatchResult]] = field(default_factory=dict)

    def speedup(self, way: str) -> float:
        return median(
            a.stats.decode_s / b.stats.decode_s for a, b in zip(self.made["full"], self.made[way], strict=True)
        )

    def expected(self, way: str, schedule: Lossless, learnt: DraftLength) -> float:
        begins = median(plain for plain, _ in self.begun), median(drafted for _, drafted in self.begun)
        texts = [[len(row.tokens) - 1 for row in made.completions] for made in self.made["full"]]
        return expected_speedup(way, schedule, learnt, self.timed, self.requests, texts, begins)
