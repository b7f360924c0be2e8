"""Whether drafts pay, by a clock that sees whole rounds: seconds per token with them, and without.

Prices of passes (`skipdecode.speculative.latency_model`) say how many tokens to draft. Where little is to be gained
they are not exact
enough to say whether: passes of one size differ by more than that from one to the next, and the host's work is nobody's
pass. So rounds are timed as they come, all of them, and drafts that did not pay are left alone for longer and longer.
What it costs to find out comes out of a budget, one for batches of all sizes: a batch whose rows end has many.

Seconds per token count in those of a step at full depth by the cost model, so that long contexts do not look slow.
No torch.
"""

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from statistics import median, median_low

HOLDS, RESTS = 8, 32  # rounds of a decision, with drafts and without: prices cost more than looking at a clock
LOOK = 8  # rounds without drafts by which one learns what these take
# Rounds with drafts until such ones are looked at again, and at most: where drafts gain plainly, a look doubles them.
# A machine has slow stretches, and behind one of these drafts seem to gain what they do not. That is found out in about
# the time that it lasted. Where they gain twofold it is four times as many from the first look on.
LOOK_EVERY, SELDOM, PLAIN, PLAIN_AT_FIRST = 64, 768, 1.25, 2.0
# Rounds with drafts before these are judged, of each decision, and rows that must have been in them: how many tokens
# come of one is luck.
TRY, TOLD = 4, 16
# Rounds without drafts until those that did not pay are tried again, and at most, since every vain try doubles them.
TRY_EVERY, AT_MOST = 32, 256
# What tries may lose: of the time so far, and so many of the first rounds. Of those of one row it takes more, until
# drafts are judged.
MAY_LOSE, FIRST, FIRST_ROWS = 0.01, 8, 40
STOPPED = 2  # times as long as the middle one: what is more, other processes took
PROMISED, MOST_PROMISED = 3, 1.15  # as so many decisions what prices promise counts, up to that
# What drafts must gain to be taken up, and what they may lose before they are left: where they come out even, neither
# is worth a change.
PAYS = 1.02
KEPT = 7  # decisions with drafts, of which the middle one counts
NEWEST = 3  # decisions without, by the middle one of which they are judged: a machine's speed drifts within seconds
ENOUGH, MANY = 2, 4  # of them before drafts are judged that plainly gain or lose, and others
PLAINLY = 1.2


@dataclass(frozen=True)
class Decision:
    """For some rounds of a batch."""

    skipped: int
    """Tokens to draft by skipped passes."""
    repeated: dict[int, int]
    """The same by repeats, by how many tokens repeat; none: not even to be looked for."""
    rounds: int = HOLDS
    """That it holds for."""
    continued: dict[int, int] = field(default_factory=dict)
    """As `repeated`, of repeats behind drafts of skipped passes."""
    promised: float = 1.0
    """How many times as fast skipped passes should make tokens come, by prices."""
    is_idle: bool = False
    """Prices speak against drafts (of skipped passes, where there are such)."""
    is_probe: bool = False
    """Some are made all the same, to see whether they are accepted."""
    is_again: bool = False
    """Of another number than the best one, to see what that many take by now."""

    @property
    def has_drafts(self) -> bool:
        return bool(self.skipped or self.repeated)

    def without_drafts(self, rounds: int) -> "Decision":
        return Decision(0, {}, rounds, is_idle=self.is_idle)


@dataclass(frozen=True)
class Rest:
    """What rounds without drafts take, over steps at full depth by the cost model."""

    pace: float
    """Each."""
    laid_out: float = 0.0
    """How much more the first `num_cold` take together where rows have come or gone."""
    num_cold: int = 1


@dataclass
class Hold:
    """Rounds under one decision, and what they came to."""

    decision: Decision
    rows: int
    context: int
    """Columns that a row saw in the mean. Both when it was made."""
    is_anew: bool = False
    """Rows have come or gone: whatever the first round does, it lays calls out for it."""
    num_rounds: int = 0
    fed_by_drafts: Counter[int] = field(default_factory=Counter)
    """Rows of all rounds by how many drafts of skipped passes were wanted: that is counted anew within a hold."""
    num_made: float = 0
    """Tokens of these."""
    took_s: float = 0.0
    step_s: float = 0.0
    """Of as many steps at full depth, by the cost model."""
    counted_s: float = 0.0
    """Of `took_s`, up to when drafts were counted last."""
    _each: list[float] = field(default_factory=list)
    """Seconds of each round over those of a step at full depth with these rows, by the cost model."""

    def add(self, rows: int, made: int, took_s: float, step_s: float) -> None:
        """One round."""
        self._each.append(took_s / step_s)
        self.num_rounds += 1
        self.fed_by_drafts[self.decision.skipped] += rows
        self.num_made += made
        self.took_s += took_s
        self.step_s += step_s

    @property
    def num_fed(self) -> int:
        """Rows of all rounds."""
        return self.fed_by_drafts.total()

    @property
    def has_pace(self) -> bool:
        """Whether there is a round behind the first, which is in no pace."""
        return len(self._each) > 1

    @property
    def num_cold(self) -> int:
        """Rounds that are in no pace: the first, and of the others the first half, up to so many. Behind prompts and
        drafts they find little in the caches, and take up to twice as long as others."""
        return 1 + min(LOOK // 2, (len(self._each) - 1) // 2)

    @property
    def pace(self) -> float:
        """Of a hold without drafts: what the middle round takes, of which each does the same."""
        return median(self._each[self.num_cold :])

    @property
    def laid_out(self) -> float:
        """What rounds that are in no pace took more, of a hold without drafts."""
        return max(0.0, sum(self._each[: self.num_cold]) - self.num_cold * self.pace)

    def rested(self, rest: Rest) -> float:
        """What as many tokens would have taken without drafts."""
        rounds = self.num_made * self.num_rounds / self.num_fed
        return rest.pace * rounds + rest.laid_out * self.is_anew * min(1.0, rounds / rest.num_cold)

    def spent(self, rest: Rest) -> float:
        """What all rounds took, the first among them, as far as other processes stopped none."""
        first, *others = self._each
        most = max(first, STOPPED * median(others)) if others else 0.0  # near the ends of rows others do little
        return min(first + sum(min(one, most) for one in others), STOPPED * self.rested(rest))

    def lost_s(self, rest: Rest) -> float:
        """Seconds that it took more than rounds without drafts for as many tokens."""
        return (self.spent(rest) - self.rested(rest)) * self.step_s / self.num_rounds


class Budget:
    """What drafts may lose that were not found to pay."""

    def __init__(self) -> None:
        self._lost_s = self._may_lose_s = 0.0

    def saw(self, hold: Hold, lost_s: float) -> None:
        """`lost_s`: of its seconds."""
        first = 0.0 if self._may_lose_s else max(FIRST, FIRST_ROWS / hold.rows)
        self._may_lose_s += (MAY_LOSE + first / hold.num_rounds) * hold.took_s
        self._lost_s = max(0.0, self._lost_s + lost_s)

    @property
    def is_left(self) -> bool:
        return self._lost_s <= self._may_lose_s


class Pace:
    """Of batches of about one size."""

    def __init__(self, rows: int, budget: Budget) -> None:
        """`budget`: of all sizes."""
        self._budget = budget
        self._try = max(TRY, -(-TOLD // rows))  # rounds
        self._resting: deque[float] = deque(maxlen=NEWEST)
        self._has_whole = False  # looks that were not cut short, among these
        self._gains: deque[float] = deque(maxlen=KEPT)  # of rounds with drafts, over those without of about that time
        self._short: list[Hold] = []  # rounds with drafts that are too few yet
        self._drafted = self._rested = 0  # rounds since the last that did not
        self._agreed = 0  # looks, one behind the other, by which drafts gain plainly
        self._laid_outs: deque[tuple[float, int]] = deque(maxlen=KEPT)  # and of how many rounds
        self._patience, self._pays, self._is_vain = TRY_EVERY, False, False

    def saw(self, hold: Hold) -> None:
        rest = self._rest
        # what one size is known to gain pays for no tries of another
        is_try = hold.decision.has_drafts and not self._is_found
        self._budget.saw(hold, hold.lost_s(rest) if is_try and rest is not None else 0.0)
        if hold.decision.is_probe:
            return
        if hold.decision.has_drafts:
            self._short.append(hold)
            if sum(one.num_fed for one in self._short) >= TOLD:
                if rest is not None:
                    spent = sum(one.spent(rest) for one in self._short)
                    self._gains.append(sum(one.rested(rest) for one in self._short) / spent)
                self._short = []
            self._drafted, self._rested = self._drafted + hold.num_rounds, 0
        else:
            self._look_at(hold)
            self._drafted, self._rested = 0, self._rested + hold.num_rounds

    def _look_at(self, hold: Hold) -> None:
        """Learns from rounds without drafts. Those that were cut short are cold, but where rows have few tokens there
        are no others."""
        is_whole, is_first = hold.num_rounds > LOOK // 2, not self._resting
        if not hold.has_pace or not (is_whole or is_first or (hold.is_anew and not self._has_whole)):
            return
        if is_whole and not self._has_whole:
            self._resting.clear()
            self._laid_outs.clear()
        self._has_whole |= is_whole
        self._resting.append(hold.pace)
        if hold.is_anew and not is_first:  # the very first finds even less
            self._laid_outs.append((hold.laid_out, hold.num_cold))
        if self._drafted:
            self._agreed = self._agreed + 1 if self._newest_gain >= PLAIN else 0

    @property
    def _rest(self) -> Rest | None:
        if not self._resting:
            return None
        return Rest(median(self._resting), *(median_low(self._laid_outs) if self._laid_outs else ()))

    @property
    def must_rest(self) -> bool:
        """Whatever prices want: who asks for them takes as long as half a step of a small model."""
        is_vain = self._is_vain and self._rested < self._patience
        return bool(self._resting) and (is_vain or not (self._is_found or self._budget.is_left))

    @property
    def _is_found(self) -> bool:
        """Whether drafts pay by the clock, without what prices promise."""
        return self._pays and len(self._gains) >= MANY and (self.gain or 0.0) >= PAYS

    @property
    def gain(self) -> float | None:
        """How many times as fast tokens come with drafts as without; None: too little is known."""
        if len(self._gains) < ENOUGH:
            return None
        gain = median(self._gains)
        return None if len(self._gains) < MANY and 1 / PLAINLY < gain < PLAINLY else gain

    @property
    def _newest_gain(self) -> float:
        """By the newest look alone: others may be of a slow stretch that is over."""
        return (self.gain or 0.0) * self._resting[-1] / median(self._resting) if self._resting else 0.0

    @property
    def is_plain(self) -> bool:
        """Whether drafts gain so much that there is little to ask."""
        return self._newest_gain >= (PLAIN if self._agreed >= NEWEST - 1 else PLAIN_AT_FIRST)

    @property
    def _look_every(self) -> int:
        """Rounds with drafts."""
        if self._newest_gain < PLAIN:
            return LOOK_EVERY
        return min(SELDOM, LOOK_EVERY << self._agreed + 2 * (self._newest_gain >= PLAIN_AT_FIRST))

    def judge(self, wanted: Decision, *, is_likely: bool = False) -> Decision:
        """The drafts that prices want, or none. `is_likely`: batches of more rows gain plainly, so fewer do; then one
        need not look at rounds without drafts first."""
        gain = self.gain
        if not (self._resting or is_likely) or self._drafted >= self._look_every:
            return wanted.without_drafts(LOOK)
        if self.must_rest:
            return wanted.without_drafts(RESTS)
        if gain is None:
            return wanted if wanted.is_again else replace(wanted, rounds=self._try)
        count, promised = len(self._gains), min(wanted.promised, MOST_PROMISED)
        gain = (promised**PROMISED * gain**count) ** (1 / (PROMISED + count))
        self._pays = gain >= (1 / PAYS if self._pays else PAYS)
        if self._pays:
            self._patience = TRY_EVERY
            return wanted
        self._agreed = 0
        self._is_vain = self._rested < self._patience
        if self._is_vain:
            return wanted.without_drafts(RESTS)
        self._patience = min(2 * self._patience, AT_MOST)
        self._gains.clear()  # what they gained then is not what they gain now
        self._short = []
        return wanted if wanted.is_again else replace(wanted, rounds=self._try)
