"""How many tokens to draft: as many as bring the most tokens per second, by their cost and by how many were accepted.

Costs are those of `skipdecode.cost`, times what measured times say of this machine (not under `deterministic`, where no
decision may depend on time). Acceptance is counted by source and place in a draft: a draft of a skipped pass, or a
repetition of so many tokens. One `DraftLength` serves all batches of a schedule, and learns from each.

A decision changes how fast tokens come, never which. No torch.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from skipdecode.config import DecoderConfig
from skipdecode.cost import Ceilings, Cost, attention_cost, ffn_cost, head_cost
from skipdecode.lossless import Lossless
from skipdecode.plan import LayerPlan
from skipdecode.repeats import LONGEST, SHORTEST
from skipdecode.shortlist import Shortlist

MOST = 8  # tokens drafted at a time, where their number is free
# Rounds that a decision holds: prices cost more than looking at a clock.
HOLDS = 8
FIRST_LOOK = 2  # rounds without drafts by which one learns what these take, where none of so many rows was seen
# Drafts are to gain as much before any are made; what is below drowns in how exact prices are.
MARGIN = 1.03
# Rounds without drafts until one tries again whether they are accepted; so seldom that it costs a percent at most.
PROBE_EVERY = 128
LEAST_CHANCE = 0.1  # of a repeated token: below it, looking for it costs more than it brings
KEPT_TIMES = 7  # of passes of one size
KEEP = 0.998  # of what was counted, at each count: old text says little about new
# What acceptance is taken for before anything is known, as if so many drafts had been seen: of skipped passes (a tuned
# model's; an untuned one is soon known better), and of repeats of 2, 3 and 4 tokens.
PRIOR, PRIOR_WEIGHT = {0: 0.8, 2: 0.3, 3: 0.5, 4: 0.7}, 8.0
SKIPPED = 0
"""The source of a draft by a skipped pass; that of a repeat is how many tokens repeat."""
# A machine to decide by where the one at hand is not to be measured: 2 cores with matrix units, by order of magnitude.
REFERENCE = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=3e-6)
Source = tuple[int, int]
"""Where a drafted token comes from: SKIPPED or the length of a repeat, and how many of the same draft come before."""


@dataclass
class Acceptance:
    """Counts by source, of drafts whose predecessors were all accepted: the others say nothing."""

    known: Sequence[float] = ()
    """Of skipped passes, by place: what a calibration measured, to start from (`skipdecode.lossless.StoredDrafts`)."""
    tried: dict[Source, float] = field(default_factory=dict)
    accepted: dict[Source, float] = field(default_factory=dict)

    def see(self, sources: Sequence[Source], num_accepted: int) -> None:
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.tried[source] = self.tried.get(source, 0.0) * KEEP + 1.0
            self.accepted[source] = self.accepted.get(source, 0.0) * KEEP + (i < num_accepted)

    def rate(self, kind: int, place: int) -> float:
        """The share of drafts of that kind and place that full depth makes too."""
        place = min(place, 2 * MOST)  # behind it all are alike
        if kind == SKIPPED and place < len(self.known):
            prior = self.known[place]
        else:
            prior = PRIOR[kind] if place == 0 else self.rate(kind, place - 1)
        tried = self.tried.get((kind, place), 0.0)
        return (self.accepted.get((kind, place), 0.0) + PRIOR_WEIGHT * prior) / (tried + PRIOR_WEIGHT)

    def expected(self, kind: int, most: int) -> list[float]:
        """Tokens of a row's next pass with 0, 1, .. `most` drafts: one, and those accepted."""
        expected, chance = [1.0], 1.0
        for place in range(most):
            chance *= self.rate(kind, place)
            expected.append(expected[-1] + chance)
        return expected


class Prices:
    """Seconds of passes of one model."""

    def __init__(
        self,
        config: DecoderConfig,
        itemsize: int,
        weight_itemsize: int | None = None,
        ceilings: Ceilings | None = None,
        *,
        keep: int | None = KEPT_TIMES,
    ) -> None:
        """`ceilings`: of this machine, whose measured times then count, too; None: decide without a clock. `keep`: the
        newest times of each size of pass; None: all."""
        self._config, self._sizes = config, {"itemsize": itemsize, "weight_itemsize": weight_itemsize}
        self._ceilings, self.is_timed, self._keep = ceilings or REFERENCE, ceilings is not None, keep
        self._ratios: dict[tuple[str, int, int], deque[float]] = {}
        self._rounds_s: dict[int, deque[float]] = {}

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def model_s(self, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None) -> float:
        """By the cost model: `tokens` new columns of `rows` rows that see `context` columns, and the head on each.
        `outputs`: tokens that it chooses among; None: all."""
        shape = {"rows": tokens, "new_columns": 1, "context": context}
        attn = attention_cost(self._config, **shape, **self._sizes)  # type: ignore[arg-type]
        read_once = attn.cache_bytes * (1 - rows / tokens)  # columns of a row read its cache together
        attn = Cost(attn.flops, attn.bytes - read_once, attn.calls, attn.cache_flops, attn.cache_bytes - read_once)
        ffn = ffn_cost(self._config, tokens=tokens, **self._sizes)  # type: ignore[arg-type]
        head = head_cost(self._config, rows=tokens, outputs=outputs, **self._sizes)  # type: ignore[arg-type]
        seconds = self._ceilings.seconds
        return sum(plan.attn) * seconds(attn) + sum(plan.ffn) * seconds(ffn) + seconds(head)

    def seconds(
        self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, outputs: int | None = None
    ) -> float:
        """The same as this machine has it: `kind` is draft or verify, or full for a step without any of that."""
        return self.model_s(plan, rows, tokens, context, outputs) * self._ratio(kind, rows, tokens)

    def saw(
        self, kind: str, plan: LayerPlan, rows: int, tokens: int, context: int, took_s: float,
        model_s: float | None = None,
    ) -> None:  # fmt: skip
        """What such a pass took. `model_s`: by the cost model, where that is known."""
        if self.is_timed:
            ratios = self._ratios.setdefault((kind, *_size(rows, tokens)), deque(maxlen=self._keep))
            ratios.append(took_s / (model_s or self.model_s(plan, rows, tokens, context)))

    def saw_round(self, rows: int, took_s: float) -> None:
        """What a round of so many rows took beside its passes: the host's work, whatever the model."""
        if self.is_timed:
            self._rounds_s.setdefault(_size(rows, rows)[0], deque(maxlen=self._keep)).append(took_s)

    def round_s(self, rows: int) -> float:
        """The least of that, for the nearest number of rows that was seen; 0 for none."""
        if not self._rounds_s:
            return 0.0
        size = _size(rows, rows)[0]
        return min(self._rounds_s[min(self._rounds_s, key=lambda other: abs(other - size))])

    def learn(self, other: "Prices") -> None:
        """Takes over the times that `other`, of the same model, has seen."""
        self._ratios |= other._ratios
        self._rounds_s |= other._rounds_s

    def spread(self, kind: str) -> float:
        """How many times as long as the shortest pass of a size the middle one took, of the size where these are
        farthest apart; 1 without any."""
        seen = [ratios for (one, *_), ratios in self._ratios.items() if one == kind]
        return max((median(ratios) / min(ratios) for ratios in seen), default=1.0)

    def has_seen(self, kind: str, rows: int, tokens: int) -> bool:
        """Whether a pass of about that size was timed."""
        return (kind, *_size(rows, tokens)) in self._ratios

    def _ratio(self, kind: str, rows: int, tokens: int) -> float:
        """Measured over predicted for passes of about that size: the nearest that were seen. The least of the last,
        since other processes make passes longer, never shorter, and one size may have met them where another did not.
        """
        size, drafted = _size(rows, tokens)
        near = [
            (abs(other_size - size) + abs(other_drafted - drafted) + 100 * (other != kind), ratios)
            for (other, other_size, other_drafted), ratios in self._ratios.items()
        ]
        return min(min(near, key=lambda pair: pair[0])[1]) if near else 1.0


def _size(rows: int, tokens: int) -> tuple[int, int]:
    """Passes that are priced alike: half as many rows again are others, and so is a draft more for each."""
    return round(2 * math.log2(rows)), round(tokens / rows) - 1


@dataclass(frozen=True)
class Decision:
    """For some rounds of a batch."""

    skipped: int
    """Tokens to draft by skipped passes."""
    repeated: dict[int, int]
    """The same by repeats, by how many tokens repeat; none: not even to be looked for."""
    rounds: int = HOLDS
    """That it holds for."""


class DraftLength:
    """Decides for the batches of one schedule, and learns from them."""

    def __init__(
        self,
        schedule: Lossless,
        prices: Prices,
        known: Sequence[float] = (),
        *,
        shortlist: Shortlist | None = None,
    ) -> None:
        """`known`: the acceptance of skipped passes by place that it starts from; empty: PRIOR. `shortlist`: None for
        one that learns from these batches alone."""
        self.schedule, self.prices = schedule, prices
        self.shortlist = Shortlist(prices.vocab_size) if shortlist is None else shortlist
        self.listed: int | None = None
        """Tokens that drafts of the batch at hand choose among; None: all."""
        self.acceptance = Acceptance(known)
        self._resting = 0

    def decide(self, rows: int, k: int, context: int) -> Decision:
        """For `rows` rows, in the middle at decode step k with `context` columns."""
        drafts_by_skipping = self.schedule.drafts_by_skipping
        lengths = range(SHORTEST, LONGEST + 1)
        number = self.schedule.draft_tokens
        if number is not None and not self.schedule.may_rest:
            return Decision(number if drafts_by_skipping else 0, dict.fromkeys(lengths, number))
        if self.schedule.may_rest and self.prices.is_timed and not self.prices.has_seen("verify", rows, rows):
            return Decision(0, {}, FIRST_LOOK)
        passes_s = [self._verify_s(rows, n, context) for n in range((number or MOST) + 1)]
        skipped, rate = self._skipped(rows, k, context, passes_s) if drafts_by_skipping else (0, rows / passes_s[0])
        repeated = {length: number or n for length in lengths if (n := self._repeated(length, rows, rate, passes_s))}
        if not self.schedule.may_rest:
            skipped = max(skipped, 1) if drafts_by_skipping else 0
            repeated = {length: repeated.get(length, 1) for length in lengths} if not drafts_by_skipping else repeated
        self._resting = 0 if skipped or (repeated and not drafts_by_skipping) else self._resting + HOLDS
        if self._resting >= PROBE_EVERY:  # what was not accepted may be by now
            self._resting = 0
            return Decision(1 if drafts_by_skipping else 0, dict.fromkeys(lengths, 1))
        return Decision(skipped, repeated)

    def _verify_s(self, rows: int, drafted: int, context: int) -> float:
        return self.prices.seconds("verify", self.schedule.prefill(), rows, rows * (1 + drafted), context)

    def _skipped(self, rows: int, k: int, context: int, passes_s: Sequence[float]) -> tuple[int, float]:
        """Tokens to draft by skipped passes, and the tokens per second with so many."""
        expected = self.acceptance.expected(SKIPPED, len(passes_s) - 1)
        rates, best, number = self._rates(rows, k, context, passes_s, expected), 0, self.schedule.draft_tokens
        for n in range(1, len(rates)):
            if number in (None, n) and rates[n] > rates[best] * (MARGIN if best == 0 else 1.0):
                best = n
        return best, rates[best]

    def _rates(
        self, rows: int, k: int, context: int, passes_s: Sequence[float], expected: Sequence[float]
    ) -> list[float]:
        """Tokens per second with 0, 1, .. drafts of skipped passes. `expected`: tokens that a pass gives a row then."""
        before_s = self.prices.round_s(rows)  # and drafts
        rates = [rows / (before_s + passes_s[0])]
        for n, tokens in enumerate(expected[1:], start=1):
            before_s += self.prices.seconds(
                "draft", self.schedule.drafts.step(k + n - 1), rows, rows, context, self.listed
            )
            rates.append(rows * tokens / (before_s + passes_s[n]))
        return rates

    def speedups(self, rows: int, k: int, context: int, expected: Sequence[float] | None = None) -> list[float]:
        """What 0, 1, .. MOST drafts of skipped passes gain over decoding at full depth. Where such steps were timed
        they count, else passes that verify nothing, which `decide` compares with. `expected`: tokens that a pass gives
        a row behind so many drafts; None: by the acceptance that it knows so far."""
        passes_s = [self._verify_s(rows, n, context) for n in range(MOST + 1)]
        rates = self._rates(rows, k, context, passes_s, expected or self.acceptance.expected(SKIPPED, MOST))
        full = rates[0]
        if self.prices.has_seen("full", rows, rows):
            full = rows / self.prices.seconds("full", self.schedule.prefill(), rows, rows, context)
        return [rate / full for rate in rates]

    def _repeated(self, length: int, rows: int, rate: float, passes_s: Sequence[float]) -> int:
        """Tokens to draft by a repeat of `length`: each of which is to bring more than the time it costs could."""
        chance, count = 1.0, 0
        for n in range(1, len(passes_s)):
            chance *= self.acceptance.rate(length, n - 1)
            token_s = (passes_s[n] - passes_s[n - 1]) / rows
            if chance < LEAST_CHANCE or chance / rate < MARGIN * token_s:
                break
            count = n
        return count
