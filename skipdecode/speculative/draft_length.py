"""How many tokens to draft: as many as bring the most tokens per second, by their cost and by how many were accepted.

How many is settled by prices (`skipdecode.speculative.latency_model`) and acceptance, which is counted by source and
place in a draft: a
draft of a skipped pass, or a repetition of so many tokens. Whether any are drafted is also for a clock to say that sees
whole rounds (`skipdecode.speculative.controller`). Under `deterministic` time may decide nothing, and the cost model
decides alone.
One `DraftLength` serves all batches of a schedule, and learns from each.

A decision changes how fast tokens come, never which. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod

from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.controller import HOLDS, RESTS, Budget, Decision, Hold, Pace
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.latency_model import ENOUGH, OLD, Prices, size_of
from skipdecode.speculative.ngram import LONGEST, SHORTEST

MOST = 8  # tokens drafted at a time, where their number is free
# Drafts are to gain as much before any are made; what is below drowns in how exact prices are.
MARGIN = 1.03
# Rounds without drafts until one tries again whether they are accepted, and rounds of a try.
PROBE_EVERY, PROBE = 128, 4
# Verifications of as many rows until a draft fewer or more is tried again, and times what such a pass took it may take
# now: if it were best by that, it is tried.
AGAIN_EVERY, CHEAPER = 64, 0.9
STALE_S = 0.02  # after which drafts are counted anew: prices take 0.2 ms
LEAST_CHANCE = 0.1  # of a repeated token: below it, looking for it costs more than it brings
KEEP = 0.998  # of what was counted, at each count: old text says little about new
# What acceptance is taken for before anything is known, as if so many drafts had been seen: of skipped passes (a tuned
# model's; an untuned one is soon known better), and of repeats of 2, 3 and 4 tokens.
PRIOR, PRIOR_WEIGHT = {0: 0.8, 2: 0.3, 3: 0.5, 4: 0.7}, 8.0
SKIPPED = 0
"""The source of a draft by a skipped pass; that of a repeat is how many tokens repeat."""
Source = tuple[int, int]
"""Where a drafted token comes from: SKIPPED or the length of a repeat, and how many of that kind come before."""


@dataclass
class Acceptance:
    """Counts by source, of drafts whose predecessors were all accepted: the others say nothing."""

    known: Sequence[float] = ()
    """Of skipped passes, by place: what a calibration measured, to start from
    (`skipdecode.schedules.lossless.StoredDrafts`)."""
    tried: dict[Source, float] = field(default_factory=dict)
    accepted: dict[Source, float] = field(default_factory=dict)

    def see(self, sources: Sequence[Source], num_accepted: int) -> None:
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.tried[source] = self.tried.get(source, 0.0) * KEEP + 1.0
            self.accepted[source] = self.accepted.get(source, 0.0) * KEEP + (i < num_accepted)

    def rates(self, kind: int, most: int) -> list[float]:
        """The share of drafts of that kind that full depth makes too, at places 0, 1, .. `most` - 1."""
        rates, known = list[float](), self.known if kind == SKIPPED else ()
        for place in range(min(most, 2 * MOST)):
            prior = known[place] if place < len(known) else rates[-1] if rates else PRIOR[kind]
            tried, accepted = self.tried.get((kind, place), 0.0), self.accepted.get((kind, place), 0.0)
            rates.append((accepted + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT))
        return rates + rates[-1:] * (most - len(rates))  # behind it all are alike

    def rate(self, kind: int, place: int) -> float:
        return self.rates(kind, place + 1)[place]

    def expected(self, kind: int, most: int) -> list[float]:
        """Tokens of a row's next pass with 0, 1, .. `most` drafts: one, and those accepted."""
        expected, chance = [1.0], 1.0
        for rate in self.rates(kind, most):
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


class DraftLength:
    """Decides for the batches of one schedule, and learns from them."""

    def __init__(
        self,
        schedule: Lossless,
        prices: Prices,
        known: Sequence[float] = (),
        *,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """`known`: the acceptance of skipped passes by place that it starts from; empty: PRIOR. `vocabulary`: None for
        one that learns from these batches alone."""
        self.schedule, self.prices = schedule, prices
        self.vocabulary = DraftVocabulary(prices.vocab_size) if vocabulary is None else vocabulary
        self.listed: int | None = None
        """Tokens that drafts of the batch at hand choose among; None: all, by the head of the model."""
        self.acceptance = Acceptance(known)
        self._paces: dict[int, Pace] = {}  # by size of batches
        self._budget = Budget()
        self._made: dict[tuple[bool, bool], tuple[float, float]] = {}  # by what drafts: tokens, and by acceptance
        self._tries: dict[int, tuple[int, int]] = {}  # by size of batches: the last drafts, verifications before them
        self._idle = 0  # rounds in which prices were against drafts

    def hold(self, rows: int, k: int, context: int, *, is_anew: bool = False) -> Hold:
        """The next rounds of `rows` rows, in the middle at decode step k with `context` columns; `is_anew` as there."""
        return Hold(self.decide(rows, k, context), rows, context, is_anew)

    def step_s(self, rows: int, context: int) -> float:
        """Of a step at full depth, by the cost model."""
        return self.prices.model_s(self.schedule.prefill(), rows, rows, context)

    def again(self, hold: Hold, rows: int, k: int, context: int) -> None:
        """Before a later round of that hold: counts drafts anew, where that is cheap beside rounds."""
        decision = hold.decision
        if not self.prices.is_timed or not decision.has_drafts or decision.is_probe:
            return
        if hold.took_s - hold.counted_s < STALE_S:
            return
        hold.counted_s, counted = hold.took_s, self._wanted(rows, k, context)
        if counted.has_drafts:
            hold.decision = replace(counted, rounds=decision.rounds, is_idle=decision.is_idle)

    def saw(self, hold: Hold) -> None:
        """What these came to, all or as many as there were."""
        self._idle = self._idle + hold.num_rounds if hold.decision.is_idle else 0
        if self.prices.is_timed and hold.num_rounds:
            self._pace(hold.rows).saw(self._without_luck(hold))

    def _without_luck(self, hold: Hold) -> Hold:
        """With as many tokens as such rounds make by what was accepted so far: how many come of a few is luck. What
        acceptance leaves out, repeats and the ends of rows, is in how many more or fewer there were than by it."""
        if hold.decision.is_probe or not hold.decision.has_drafts:
            return hold
        made, by_rates = self._made.get(kind := (hold.decision.skipped > 0, bool(hold.decision.repeated)), (0.0, 0.0))
        expected = self.acceptance.expected(SKIPPED, max(hold.fed_by_drafts))
        likely = sum(rows * expected[drafts] for drafts, rows in hold.fed_by_drafts.items())
        kept = KEEP**hold.num_fed
        made, by_rates = self._made[kind] = kept * made + hold.num_made, kept * by_rates + likely
        return replace(hold, num_made=likely * made / by_rates)

    def decide(self, rows: int, k: int, context: int) -> Decision:
        """What prices want, as far as it may rest and the clock has nothing against it."""
        if self.schedule.adaptive and self.prices.is_timed and self._pace(rows).must_rest:
            return Decision(0, {}, RESTS, is_idle=self._idle > 0)
        drafts_by_skipping, wanted = self.schedule.drafts_by_skipping, self._wanted(rows, k, context)
        if not self.schedule.adaptive:
            return wanted
        wanted = replace(wanted, is_idle=not wanted.skipped if drafts_by_skipping else not wanted.repeated)
        if wanted.is_idle and self._idle >= PROBE_EVERY and self._budget.is_left:  # what was not accepted may be by now
            number = self.schedule.draft_tokens or 1
            repeated = dict.fromkeys(range(SHORTEST, LONGEST + 1), number)
            return Decision(number if drafts_by_skipping else 0, repeated, PROBE, is_probe=True)
        if not (wanted.has_drafts and self.prices.is_timed):
            return wanted
        is_likely = any(pace.is_plain for size, pace in self._paces.items() if size > size_of(rows))
        return self._pace(rows).judge(wanted, is_likely=is_likely)

    def _wanted(self, rows: int, k: int, context: int) -> Decision:
        """The drafts that prices speak for; a schedule that may not rest has some in any case."""
        drafts_by_skipping, number = self.schedule.drafts_by_skipping, self.schedule.draft_tokens
        lengths = range(SHORTEST, LONGEST + 1)
        if number is not None and not self.schedule.adaptive:
            return Decision(number if drafts_by_skipping else 0, dict.fromkeys(lengths, number))
        wanted = self._by_prices(rows, k, context)
        if self.schedule.adaptive:
            return wanted
        if drafts_by_skipping:
            return replace(wanted, skipped=max(wanted.skipped, 1), rounds=min(wanted.rounds, HOLDS))
        return Decision(0, {length: wanted.repeated.get(length, 1) for length in lengths})

    def _pace(self, rows: int) -> Pace:
        return self._paces.setdefault(size_of(rows), Pace(rows, self._budget))

    def _by_prices(self, rows: int, k: int, context: int) -> Decision:
        number = self.schedule.draft_tokens
        passes_s = self._passes_s(rows, number or MOST, context)
        skipped, rate, is_again = 0, (full := rows / self._full_s(rows, context)), False
        if self.schedule.drafts_by_skipping:
            skipped, rate, is_again = self._skipped(rows, k, context, passes_s)
        lengths = range(SHORTEST, LONGEST + 1)
        repeated = {length: number or n for length in lengths if (n := self._repeated(length, rows, rate, passes_s))}
        continued = dict[int, int]()
        if skipped and number is None:
            behind = {length: self._repeated(length, rows, rate, passes_s, skipped) for length in lengths}
            continued = {length: n for length, n in behind.items() if n}
        rounds = ENOUGH if is_again else HOLDS if skipped or repeated else RESTS
        return Decision(skipped, repeated, rounds, continued, promised=rate / full, is_again=is_again)

    def _full_s(self, rows: int, context: int) -> float:
        return self.prices.seconds("full", self.schedule.prefill(), rows, rows, context)

    def _passes_s(self, rows: int, most: int, context: int) -> list[float]:
        """Seconds of a verification of 0, 1, .. `most` drafts of each row: of fewer ones it never takes longer, though
        it may have been seen on a bad day."""
        full = self.schedule.prefill()
        seen = [self.prices.seconds("verify", full, rows, rows * (1 + n), context) for n in range(most + 1)]
        return list(accumulate(reversed(seen), min))[::-1]

    def _skipped(self, rows: int, k: int, context: int, passes_s: Sequence[float]) -> tuple[int, float, bool]:
        """Tokens to draft by skipped passes, the tokens per second with the best number of them, and whether it is
        another number that is tried again."""
        expected = self.acceptance.expected(SKIPPED, len(passes_s) - 1)
        rates, best, number = self._rates(rows, k, context, passes_s, expected), 0, self.schedule.draft_tokens
        for n in range(1, len(rates)):
            if number in (None, n) and rates[n] > rates[best] * (MARGIN if best == 0 else 1.0):
                best = n
        tried = best
        if best and number is None and self.prices.is_timed:
            tried = self._tried_again(rows, best, expected, rates, passes_s)
        return tried, rates[best], tried != best

    def _tried_again(
        self, rows: int, best: int, expected: Sequence[float], rates: Sequence[float], passes_s: Sequence[float]
    ) -> int:
        """A draft fewer or more than the `best` number where that is due and may be better; else `best`."""
        last, _ = self._tries.get(size_of(rows), (0, 0))
        for n in sorted((best - 1, best + 1), key=lambda n: n == last):  # by turns
            if 0 < n < len(rates):
                least_s = rows * expected[n] / rates[n] - (1 - CHEAPER) * passes_s[n]
                if rows * expected[n] / least_s > rates[best] and self._is_due(rows, n, best):
                    return n
        return best

    def _is_due(self, rows: int, n: int, best: int) -> bool:
        """Whether verifications of `n` drafts are to be tried again: there was none of late, and there is no other way
        to see whether they became cheaper than by a few of them. Rows may have fewer drafts than were wanted, so a try
        ends in any case."""
        count = self.prices.num_verified(rows)
        last, since = self._tries.get(size_of(rows), (0, -AGAIN_EVERY))
        if self.prices.num_seen_since(rows, rows * (1 + best), 0) < ENOUGH:
            return False
        if count - since < AGAIN_EVERY:
            is_done = count - since >= 2 * ENOUGH or self.prices.num_seen_since(rows, rows * (1 + n), since) == ENOUGH
            return n == last and not is_done
        if self.prices.num_seen_since(rows, rows * (1 + n), count - OLD) == ENOUGH:
            return False
        self._tries[size_of(rows)] = n, count
        return True

    def _rates(
        self, rows: int, k: int, context: int, passes_s: Sequence[float], expected: Sequence[float]
    ) -> list[float]:
        """Tokens per second with 0, 1, .. drafts of skipped passes. `expected`: tokens that a pass gives a row then."""
        rates = [rows / self._full_s(rows, context)]
        before_s = self.prices.round_s(rows)  # and drafts
        for n, tokens in enumerate(expected[1:], start=1):
            before_s += self.prices.seconds(
                "draft", self.schedule.drafts.step(k + n - 1), rows, rows, context, self.listed
            )
            rates.append(rows * tokens / (before_s + passes_s[n]))
        return rates

    def speedups(self, rows: int, k: int, context: int, expected: Sequence[float] | None = None) -> list[float]:
        """What 0, 1, .. MOST drafts of skipped passes gain over decoding at full depth. `expected`: tokens that a pass
        gives a row behind so many drafts; None: by the acceptance that it knows so far."""
        passes_s = self._passes_s(rows, MOST, context)
        rates = self._rates(rows, k, context, passes_s, expected or self.acceptance.expected(SKIPPED, MOST))
        return [rate / rates[0] for rate in rates]

    def _repeated(self, length: int, rows: int, rate: float, passes_s: Sequence[float], behind: int = 0) -> int:
        """Tokens to draft by a repeat of `length`, `behind` so many of skipped passes: each of which is to bring more
        than the time it costs could."""
        chance, count = prod(self.acceptance.rates(SKIPPED, behind)), 0
        for n, of_place in enumerate(self.acceptance.rates(length, len(passes_s) - 1 - behind), start=1):
            chance *= of_place
            token_s = (passes_s[behind + n] - passes_s[behind]) / n / rows  # in the mean: prices are not that exact
            if chance < LEAST_CHANCE or chance / rate < MARGIN * token_s:
                break
            count = n
        return count
