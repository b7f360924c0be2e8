"""The adaptive speculation controller: how many tokens a batch drafts in its next round, and whether it drafts any.

The number of draft tokens maximises expected tokens per second, from a moving-average acceptance rate per source and
predicted pass times (`skipdecode.speculative.latency_model`). In adaptive mode, rounds with drafts are also compared
with timed plain steps at a similar batch size. Until drafts have proved faster, the time they may lose is capped at a
share of the total; after each negative verdict the pause doubles.

A decision affects speed only, never the tokens. Under `sampling.deterministic` no clock decides.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.answer_index import ANSWERS, AnswerIndex
from skipdecode.speculative.draft import LAYERS, Source
from skipdecode.speculative.draft_vocab import DraftVocabulary
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.ngram import LONGEST, SHORTEST

MAX_DRAFT_TOKENS = 8  # per row and round, unless `decode.draft_tokens` gives the number
NGRAMS: Sequence[Source] = (*range(SHORTEST, LONGEST + 1), ANSWERS)
PRIOR: Mapping[Source, float] = {LAYERS: 0.8, ANSWERS: 0.5, 2: 0.3, 3: 0.5, 4: 0.7}  # prior acceptance rate
SMOOTHING = 0.04  # weight of the newest draft in the moving average
MIN_SPEEDUP = 1.02  # below it, drafts are not worth the added variance in latency
MIN_MEASURED = 1.05  # by DRAFTED_ROUNDS, which others may have disturbed, before drafts are believed to pay
PLAIN_ROUNDS = 4  # plain steps timed per comparison; the first runs with cold CPU caches and does not count
DRAFTED_ROUNDS = 32  # rounds with drafts per verdict
RECHECK_EVERY = 256  # rounds with drafts after which plain steps are timed again, while drafts pay
FIRST_PAUSE, LONGEST_PAUSE = 128, 4096  # plain steps after a negative verdict
LOSS_SHARE, LOSS_STEPS = 0.01, 0.5  # time a trial may lose: a share of total time, plus this many plain steps
LEAST_WAIT = 32  # plain steps until it is asked again whether a trial may lose enough: asking takes time, too
DECIDE_EVERY = 8  # an estimate serves this many rounds

Outcome = Literal["drafted", "timing_plain", "slower", "no_gain"]
"""`drafted`: a round with drafts. The others are plain steps: `timing_plain`, to time plain steps for the comparison;
`slower`, because drafts were measured to be slower, or not yet shown to be faster; `no_gain`, because at the present
acceptance none are expected to pay."""


@dataclass(frozen=True)
class Decision:
    """What the rows of a batch draft in a round."""

    outcome: Outcome
    layer_tokens: int = 0
    """Tokens to draft by skipped layers."""
    ngram_tokens: dict[Source, int] = field(default_factory=dict)
    """Tokens to draft after an n-gram that has occurred before: in the row, by its length, or in other answers. Only
    where these are expected to pay at least as well as skipped layers."""
    num_rounds: int = 1
    """Rounds for which the decision holds, as long as there are about as many rows. Several only without drafts: a
    small model makes a token in the time that some decisions take."""

    @property
    def has_drafts(self) -> bool:
        return bool(self.layer_tokens or self.ngram_tokens)


class Acceptance:
    """The share of draft tokens that full depth accepts, as a moving average for each source."""

    def __init__(self, known: float | None = None) -> None:
        """`known`: the acceptance rate of skipped layers that a calibration measured; None: a prior."""
        self._prior = {**PRIOR} if known is None else {**PRIOR, LAYERS: known}
        self.rates = dict(self._prior)
        self._used = set[Source]()

    def observe(self, sources: Sequence[Source], num_accepted: int) -> None:
        """Learns from the draft tokens of a row up to the first rejected one; those after it continue a wrong text."""
        for i, source in enumerate(sources[: num_accepted + 1]):
            self.rates[source] += SMOOTHING * ((i < num_accepted) - self.rates[source])
            self._used.add(source)

    def expected_tokens(self, source: Source, num_drafts: int) -> float:
        """Expected tokens of a row from a round with `num_drafts` drafts, including the one that verification adds."""
        rate = self.rates[source]
        return num_drafts + 1.0 if rate > 0.999 else (1 - rate ** (num_drafts + 1)) / (1 - rate)

    def retry(self) -> None:
        """Resets the rates of sources not used since the last call: the text may suit them better now."""
        self.rates |= {source: rate for source, rate in self._prior.items() if source not in self._used}
        self._used.clear()


@dataclass
class Comparison:
    """Plain steps and rounds with drafts at a similar batch size. Times are divided by the roofline prediction of one
    plain step."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=2 * PLAIN_ROUNDS))
    drafted: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=DRAFTED_ROUNDS))
    """Tokens per row, and time."""
    plain_left: int = PLAIN_ROUNDS
    """Plain steps that are still to be timed."""
    num_drafted: int = 0
    """Rounds with drafts since the last pause."""
    pays: bool = False
    paused: int = 0
    """Plain steps left in the current pause."""
    pause: int = FIRST_PAUSE
    """The length of the next pause."""
    pause_reason: Outcome = "slower"
    waits_until_s: float = 0.0
    """The time spent in all at which a trial may lose enough."""

    @property
    def typical_time(self) -> float:
        """The median time of a round with drafts. A round that takes more than twice as long is taken to have been
        disturbed by other processes."""
        return median(took for _, took in self.drafted)

    @property
    def speedup(self) -> float:
        """Tokens per second of rounds with drafts over those of plain steps."""
        limit = 2 * self.typical_time
        took = sum(min(took, limit) for _, took in self.drafted)
        return sum(tokens for tokens, _ in self.drafted) * median(self.plain) / took

    def stop(self, reason: Outcome) -> None:
        """Pauses, and drops the evidence so that the next trial starts fresh."""
        self.pause_reason, self.pays, self.paused = reason, False, self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.num_drafted = 0
        self.drafted.clear()


class SpeculationController:
    """Decides how many tokens the batches of one schedule draft, and learns from them."""

    def __init__(
        self,
        schedule: Lossless,
        latency: LatencyModel,
        known_acceptance: Sequence[float] = (),
        *,
        vocabulary: DraftVocabulary | None = None,
        answers: AnswerIndex | None = None,
    ) -> None:
        """`known_acceptance`: the acceptance of skipped layers that a calibration measured, by position in a draft.
        `vocabulary`, `answers`: None for new ones, which learn from these batches alone."""
        self.schedule, self.latency = schedule, latency
        self.vocabulary = vocabulary or DraftVocabulary(latency.config.vocab_size)
        self.answers = answers or AnswerIndex()
        self.num_draft_outputs: int | None = None
        """The size of the draft vocabulary for skipped layers; None for all tokens."""
        mean = sum(known_acceptance) / len(known_acceptance) if known_acceptance else None
        self.acceptance = Acceptance(mean)
        self._comparisons: dict[int, Comparison] = {}  # by the binary logarithm of the rows
        self._spent_s = 0.0
        self._lost_s = 0.0
        """Time lost against plain steps, in seconds; disturbed rounds are clipped at 2x the median."""
        self._estimated: tuple[int, int, Decision] | None = None  # rows, rounds left, the decision
        self._estimated_s: tuple[list[float], list[float]] = [], []
        """What `_round_seconds` gave for that decision."""

    def decide(self, rows: int, k: int, context: int) -> Decision:
        """Decides on the next round of `rows` rows. `k`: median decode step; `context`: mean context length."""
        if not self.schedule.adaptive:
            return self._estimate(rows, k, context)
        comparison = self._comparison(rows)
        if comparison.paused:
            return Decision(comparison.pause_reason, num_rounds=comparison.paused)
        if self._spent_s < comparison.waits_until_s and not self._has_proof(rows):
            return Decision("slower", num_rounds=LEAST_WAIT)
        if comparison.plain_left and self.latency.is_timed:
            return Decision("timing_plain")
        estimate = self._estimate(rows, k, context)
        if not estimate.has_drafts:
            self._stop(rows, "no_gain")
        elif self.latency.is_timed and not self._has_proof(rows):
            return self._within_budget(estimate, rows, context)
        return estimate

    def _within_budget(self, estimate: Decision, rows: int, context: int) -> Decision:
        """The estimate, with drafts cut so that a round in which none is accepted loses no more than trials may lose;
        or plain steps until they may lose enough for the shortest draft."""
        plain_s = self._plain_s(rows, context)
        allowed_s = LOSS_SHARE * self._spent_s + LOSS_STEPS * plain_s - self._lost_s
        ngram_s, layers_s = ([took_s - took[0] for took_s in took] for took in self._estimated_s)
        by_ngrams, by_layers = (sum(lost_s <= allowed_s for lost_s in lost[1:]) for lost in (ngram_s, layers_s))
        shortest = self.schedule.draft_tokens or 1  # where the number is given, exactly that or none
        by_ngrams, by_layers = (most * (most >= shortest) for most in (by_ngrams, by_layers))
        ngram_tokens = {source: min(n, by_ngrams) for source, n in estimate.ngram_tokens.items() if by_ngrams}
        decision = Decision("drafted", min(estimate.layer_tokens, by_layers), ngram_tokens)
        if decision.has_drafts:
            return decision
        wanted = ([ngram_s] if estimate.ngram_tokens else []) + ([layers_s] if estimate.layer_tokens else [])
        missing_s = min(lost[shortest] for lost in wanted) - allowed_s
        self._comparison(rows).waits_until_s = self._spent_s + min(missing_s / LOSS_SHARE, FIRST_PAUSE * plain_s)
        return Decision("slower", num_rounds=LEAST_WAIT)

    def observe(
        self, decision: Decision, rows: int, context: int, num_tokens: int, took_s: float, num_rounds: int = 1
    ) -> None:
        """Learns from rounds that followed `decision` and took `took_s` together; a single one with drafts gave all
        rows together `num_tokens` tokens."""
        if not self.schedule.adaptive:
            return
        comparison = self._comparison(rows)
        took = took_s / num_rounds / self.latency.roofline_s(self.schedule.full_plan, rows, rows, context)
        self._spent_s += took_s
        if not decision.has_drafts:
            self._observe_plain(comparison, took, num_rounds)
            return
        comparison.drafted.append((num_tokens / rows, took))
        if not self._has_proof(rows):
            lost = min(took, 2 * comparison.typical_time) - num_tokens / rows * median(comparison.plain or [1.0])
            self._lost_s = max(0.0, self._lost_s + lost * took_s / took)
        comparison.num_drafted += 1
        if comparison.num_drafted % DRAFTED_ROUNDS == 0:
            threshold = 1.0 if comparison.pays else MIN_MEASURED
            comparison.pays = not self.latency.is_timed or comparison.speedup >= threshold
            if not comparison.pays:
                self._stop(rows, "slower")
                return
            comparison.pause = FIRST_PAUSE
        if comparison.num_drafted % (RECHECK_EVERY if comparison.pays else DRAFTED_ROUNDS // 2) == 0:
            self._begin_plain(comparison)

    def _observe_plain(self, comparison: Comparison, took: float, num_rounds: int) -> None:
        if 0 < comparison.plain_left < PLAIN_ROUNDS:
            comparison.plain.append(took)
        comparison.plain_left = max(0, comparison.plain_left - num_rounds)
        if comparison.paused:
            comparison.paused = max(0, comparison.paused - num_rounds)
            if not comparison.paused:
                self._begin_plain(comparison)

    def _stop(self, rows: int, reason: Outcome) -> None:
        """Pauses, and drops the evidence so that the next trial starts fresh."""
        self._comparison(rows).stop(reason)
        self.latency.forget_drafts(rows)
        self._retry()

    def _begin_plain(self, comparison: Comparison) -> None:
        comparison.plain_left = PLAIN_ROUNDS
        self._retry()

    def _retry(self) -> None:
        self.acceptance.retry()
        self._estimated = None

    def _comparison(self, rows: int) -> Comparison:
        return self._comparisons.setdefault(rows.bit_length(), Comparison())

    def _has_proof(self, rows: int) -> bool:
        """True if drafts pay at a similar or a larger batch size; the larger the batch, the less drafts gain."""
        size = rows.bit_length()
        return any(one.pays for other, one in self._comparisons.items() if other >= size)

    def _plain_s(self, rows: int, context: int) -> float:
        predicted_s = self.latency.roofline_s(self.schedule.full_plan, rows, rows, context)
        return predicted_s * median(self._comparison(rows).plain or [1.0])

    def _estimate(self, rows: int, k: int, context: int) -> Decision:
        """The drafts that are expected to give the most tokens per second, at least one if the schedule is not
        adaptive."""
        if self._estimated is not None:
            known_rows, left, known = self._estimated
            if known_rows == rows and left:
                self._estimated = rows, left - 1, known
                return known
        ngram_s, layers_s = self._estimated_s = self._round_seconds(rows, k, context)
        layer_tokens, by_layers = self._best(LAYERS, layers_s) if self.schedule.drafts_by_skipping else (0, 0.0)
        found = {source: self._best(source, ngram_s) for source in NGRAMS}
        ngram_tokens = {source: n for source, (n, speedup) in found.items() if n and speedup >= by_layers}
        made = Decision("drafted", layer_tokens, ngram_tokens)
        if not made.has_drafts:
            made = Decision("no_gain")
        self._estimated = rows, DECIDE_EVERY - 1, made
        return made

    def speedups(self, rows: int, k: int, context: int) -> list[float]:
        """The expected speedup over plain steps of rounds with 0, 1, .. drafts by skipped layers."""
        return self._speedups(LAYERS, self._round_seconds(rows, k, context)[1])

    def _speedups(self, source: Source, rounds_s: Sequence[float]) -> list[float]:
        expected = self.acceptance.expected_tokens
        return [expected(source, n) * rounds_s[0] / took_s for n, took_s in enumerate(rounds_s)]

    def _round_seconds(self, rows: int, k: int, context: int) -> tuple[list[float], list[float]]:
        """Seconds of a round with 0, 1, .. drafts per row: by n-grams, and by skipped layers."""
        full, drafts, seconds = self.schedule.full_plan, self.schedule.drafts, self.latency.seconds
        ngram_s = [seconds("plain", full, rows, rows, context)]
        layers_s, drafts_s = list(ngram_s), 0.0
        for n in range(1, (self.schedule.draft_tokens or MAX_DRAFT_TOKENS) + 1):
            ngram_s.append(seconds("verify", full, rows, rows * (1 + n), context))
            drafts_s += seconds("draft", drafts.step(k + n - 1), rows, rows, context, self.num_draft_outputs)
            layers_s.append(drafts_s + ngram_s[n])
        return ngram_s, layers_s

    def _best(self, source: Source, rounds_s: Sequence[float]) -> tuple[int, float]:
        """The number of draft tokens with the best speedup, and that speedup; 0 and 0.0 if none pays. `rounds_s[n]`:
        seconds of a round with n."""
        speedups = self._speedups(source, rounds_s)
        best = self.schedule.draft_tokens or max(range(1, len(speedups)), key=speedups.__getitem__)
        pays = not self.schedule.adaptive or speedups[best] >= MIN_SPEEDUP
        return (best, speedups[best]) if pays else (0, 0.0)
