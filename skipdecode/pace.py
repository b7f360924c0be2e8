"""Whether drafts pay, by a clock that sees whole rounds: seconds per token with them, and without.

Prices of passes (`skipdecode.prices`) say how many tokens to draft. Where little is to be gained they are not exact
enough to say whether: passes of one size differ by more than that from one to the next, and the host's work is nobody's
pass. So rounds are timed as they come, all of them, and drafts that did not pay are left alone for longer and longer.
What it costs to find out comes out of a budget, one for batches of all sizes: a batch whose rows end has many.

Seconds per token count in those of a step at full depth by the cost model, so that long contexts do not look slow.
No torch.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

HOLDS, RESTS = 8, 32  # rounds of a decision, with drafts and without: prices cost more than looking at a clock
LOOK = 4  # rounds without drafts by which one learns what these take
# Rounds with drafts until such ones are looked at again: where drafts gain less than PLAIN, and where they gain more.
LOOK_EVERY, SELDOM, PLAIN = 64, 512, 1.25
# Rounds with drafts before these are judged, of each decision, and rows that must have been in them: how many tokens
# come of one is luck.
TRY, TOLD = 4, 16
# Rounds without drafts until those that did not pay are tried again, and at most, since every vain try doubles them.
TRY_EVERY, AT_MOST = 32, 256
# What tries may lose: of the time so far, and of what the first rounds take.
MAY_LOSE, FIRST = 0.01, 8
STOPPED = 16  # one of so many rounds
# What drafts must gain to be taken up, and what they may lose before they are left: where they come out even, neither
# is worth a change.
PAYS = 1.02
KEPT = 7  # decisions of each kind, of which the middle one counts
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
    is_idle: bool = False
    """Prices speak against drafts (of skipped passes, where there are such)."""
    is_probe: bool = False
    """Some are made all the same, to see whether they are accepted."""

    @property
    def has_drafts(self) -> bool:
        return bool(self.skipped or self.repeated)

    def without_drafts(self, rounds: int) -> "Decision":
        return Decision(0, {}, rounds, is_idle=self.is_idle)


@dataclass
class Hold:
    """Rounds under one decision, and what they came to."""

    decision: Decision
    rows: int
    context: int
    """Columns that a row saw in the mean. Both when it was made."""
    num_rounds: int = 0
    num_fed: int = 0
    """Rows of all rounds."""
    num_made: float = 0
    """Tokens of these."""
    took_s: float = 0.0
    counted_s: float = 0.0
    """Of `took_s`, up to when drafts were counted last."""
    _each: list[float] = field(default_factory=list)
    """Seconds of each round but the first over those of a step at full depth with these rows, by the cost model. Where
    rows have gone, the first lays calls out anew, with drafts or without."""

    def add(self, rows: int, made: int, took_s: float, step_s: float) -> None:
        """One round."""
        if self.num_rounds:
            self._each.append(took_s / step_s)
        self.num_rounds += 1
        self.num_fed += rows
        self.num_made += made
        self.took_s += took_s

    def and_(self, other: "Hold") -> "Hold":
        """Rounds of both, as those of the first decision."""
        return replace(
            self,
            num_rounds=self.num_rounds + other.num_rounds,
            num_fed=self.num_fed + other.num_fed,
            num_made=self.num_made + other.num_made,
            took_s=self.took_s + other.took_s,
            _each=self._each + other._each,
        )

    @property
    def has_pace(self) -> bool:
        return bool(self._each)

    @property
    def pace(self) -> float:
        """Seconds per token over those that the cost model has for full depth. Of rounds without drafts, which are all
        alike, the middle one's; of others the mean of all but the few longest: other processes stop some."""
        ordered = sorted(self._each)
        if self.decision.has_drafts:
            kept = ordered[: len(ordered) - len(ordered) // STOPPED]
            each = sum(kept) / len(kept)
        else:
            each = median(ordered)
        return each * self.num_fed / self.num_made


class Budget:
    """What drafts may lose until it is known whether they pay."""

    def __init__(self) -> None:
        self._lost_s = self._may_lose_s = 0.0

    def saw(self, hold: Hold, resting: float | None) -> None:
        """`resting`: pace of the same rows without drafts; None: not known."""
        first_s = 0.0 if self._may_lose_s else FIRST * hold.took_s / hold.num_rounds
        self._may_lose_s += first_s + MAY_LOSE * hold.took_s
        if hold.decision.has_drafts and hold.has_pace and resting is not None:
            self._lost_s = max(0.0, self._lost_s + hold.took_s * (1 - resting / hold.pace))

    @property
    def is_left(self) -> bool:
        return self._lost_s <= self._may_lose_s


class Pace:
    """Of batches of about one size."""

    def __init__(self, rows: int, budget: Budget) -> None:
        """`budget`: of all sizes."""
        self._budget = budget
        self._try = max(TRY, -(-TOLD // rows))  # rounds
        self._drafting: deque[float] = deque(maxlen=KEPT)
        self._resting: deque[float] = deque(maxlen=KEPT)
        self._short: Hold | None = None  # rounds with drafts that are too few yet
        self._drafted = self._rested = 0  # rounds since the last that did not
        self._patience, self._pays = TRY_EVERY, False

    def saw(self, hold: Hold) -> None:
        self._budget.saw(hold, median(self._resting) if self._resting else None)
        if hold.decision.has_drafts:
            whole = hold if self._short is None else self._short.and_(hold)
            is_short = whole.num_fed < TOLD or not whole.has_pace
            self._short = whole if is_short else None
            if not is_short:
                self._drafting.append(whole.pace)
            self._drafted, self._rested = self._drafted + hold.num_rounds, 0
        else:
            if hold.has_pace:
                self._resting.append(hold.pace)
            self._drafted, self._rested = 0, self._rested + hold.num_rounds

    @property
    def gain(self) -> float | None:
        """How many times as fast tokens come with drafts as without; None: too little is known."""
        if len(self._drafting) < ENOUGH or not self._resting:
            return None
        gain = median(self._resting) / median(self._drafting)
        return None if len(self._drafting) < MANY and 1 / PLAINLY < gain < PLAINLY else gain

    def judge(self, wanted: Decision, *, is_likely: bool = False) -> Decision:
        """The drafts that prices want, or none. `is_likely`: batches of more rows gain plainly, so fewer do; then one
        need not look at rounds without drafts first."""
        gain = self.gain
        if not (self._resting or is_likely) or self._drafted >= (SELDOM if (gain or 0.0) >= PLAIN else LOOK_EVERY):
            return wanted.without_drafts(LOOK)
        if gain is None:
            return replace(wanted, rounds=self._try) if self._budget.is_left else wanted.without_drafts(RESTS)
        self._pays = gain >= (1 / PAYS if self._pays else PAYS)
        if self._pays:
            self._patience = TRY_EVERY
            return wanted
        if self._rested < self._patience or not self._budget.is_left:
            return wanted.without_drafts(RESTS)
        self._patience = min(2 * self._patience, AT_MOST)
        self._drafting.clear()  # what they gained then is not what they gain now
        self._short = None
        return replace(wanted, rounds=self._try)
