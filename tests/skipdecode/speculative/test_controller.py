"""Whether drafts pay, by a clock of whole rounds: simulated machines, and how much is lost until it is known."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from skipdecode.speculative.controller import (
    AT_MOST,
    FIRST,
    HOLDS,
    LOOK,
    LOOK_EVERY,
    MANY,
    MAY_LOSE,
    RESTS,
    SELDOM,
    TRY,
    TRY_EVERY,
    Budget,
    Decision,
    Hold,
    Pace,
    Rest,
)
from tests.support.holds import NONE, WANTED, hold


def simulate(pace: Pace, gain: float, rounds: int, noise: float = 0.0, seed: int = 0) -> tuple[float, int]:
    """Seconds per token over those of a batch that never drafts, and rounds with drafts, of `rounds` in all. Drafts
    bring 3 tokens a round and are `gain` times as fast."""
    rng, took, tokens, drafted, done = random.Random(seed), 0.0, 0.0, 0, 0
    while done < rounds:
        decision = pace.judge(WANTED)
        own, per_round = (3.0, 3.0 / gain) if decision.has_drafts else (1.0, 1.0)
        one = Hold(decision, 4, 100)
        for _ in range(decision.rounds):
            slow = 1 + noise * rng.random()
            one.add(4, round(4 * own), per_round * slow, 1.0)
            took, tokens = took + per_round, tokens + own
        drafted += decision.rounds * decision.has_drafts
        done += decision.rounds
        pace.saw(one)
    return took / tokens, drafted


def test_a_hold_counts_tokens_and_seconds() -> None:
    made = hold(WANTED, 2.0, tokens=3.0)
    assert (made.num_rounds, made.num_fed, made.num_made) == (HOLDS, 4 * HOLDS, 12 * HOLDS)
    assert made.spent(Rest(1.0)) == 2.0 * HOLDS
    assert made.rested(Rest(1.0, 9.0)) == 3.0 * HOLDS, "rounds of one token of each row"
    assert hold(NONE, 1.5).pace == pytest.approx(1.5)
    assert not NONE.has_drafts
    assert Decision(0, {4: 1}).has_drafts


def test_a_pace_leaves_out_rounds_that_find_nothing_in_the_caches() -> None:
    """Behind prompts, and behind drafts: of rounds without drafts the later half counts."""
    made = Hold(NONE, 4, 100, is_anew=True)
    for round_s in (9.0, 3.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0):
        made.add(4, 4, round_s, 1.0)
    assert made.pace == 1.0
    assert made.laid_out == 9 + 3 + 3 + 3 - 4
    assert [hold(NONE, 3.0, rounds=rounds).has_pace for rounds in (1, 2)] == [False, True]
    assert hold(NONE, 3.0, rounds=2).pace == 3.0


def test_rounds_with_drafts_count_from_the_first_on() -> None:
    """It makes tokens, too: without its time drafts of rows that end soon would look far better than they are."""
    made = Hold(WANTED, 4, 100, is_anew=True)
    rest = Rest(0.5, 2.0, 4)
    made.add(4, 28, 5.0, 1.0)
    assert (made.spent(rest), made.rested(rest)) == (5.0, 7 * 0.5 + 2.0)
    assert made.rested(Rest(0.5, 2.0, 14)) == 7 * 0.5 + 1.0, "its tokens are worth half of the cold rounds"
    made.add(4, 4, 0.5, 1.0)
    assert (made.spent(rest), made.rested(rest)) == (5.5, 8 * 0.5 + 2.0)
    for round_s in (0.5, 90.0):
        made.add(4, 4, round_s, 1.0)
    assert made.spent(rest) == 5.0 + 0.5 + 0.5 + 5.0, "what stopped the machine behind it counts as much at most"
    assert made.spent(Rest(0.3)) == 2 * 0.3 * 10, "and all as twice of what it was without"


def test_what_prompts_cost_any_first_rounds_is_not_held_against_drafts() -> None:
    pace = Pace(16, Budget())
    for first_s in (99.0, 9.0, 7.0):  # the very first of a process finds even less
        made = Hold(NONE, 16, 100, is_anew=True)
        for round_s in (first_s, *[1.0] * 7):
            made.add(16, 16, round_s, 1.0)
        pace.saw(made)
    for is_anew in (True, False) * 2:
        made = Hold(WANTED, 16, 100, is_anew)
        for _ in range(2):
            made.add(16, 16 * 3, 3.0, 1.0)
        pace.saw(made)
    assert list(pace._gains) == [2.0, 1.0] * 2


def test_drafts_that_pay_are_kept_until_they_plainly_lose() -> None:
    pace, is_taken = Pace(4, Budget()), list[bool]()
    for gain in (1.04, 0.99, 0.95):
        for _ in range(30):
            decision = pace.judge(WANTED)
            pace.saw(hold(decision, 3 / gain, 3.0) if decision.has_drafts else hold(decision, 1.0))
        is_taken.append(pace._pays)
    assert is_taken == [True, True, False]


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_drafts_of_few_tokens_that_lose_are_left(rows: int) -> None:
    """Of eight tokens the first round makes seven and takes longest; all take 5.5 s, and 4 s without drafts."""
    pace, drafted = Pace(rows, Budget()), list[bool]()
    for _ in range(400):
        decision = pace.judge(WANTED)
        made = Hold(decision, rows, 100, is_anew=True)
        for own, round_s in [(7, 5.0), (1, 0.5)] if decision.has_drafts else [(1, 0.5)] * min(decision.rounds, 8):
            made.add(rows, rows * own, round_s, 1.0)
        drafted.append(decision.has_drafts)
        pace.saw(made)
    assert sum(drafted) < 80
    assert sum(drafted[200:]) < 20


def test_short_answers_have_a_pace_of_their_own() -> None:
    """Looks of four rounds are all there are, and a slow first one does not stay."""
    pace = Pace(4, Budget())
    for round_s in (2.5, 1.0, 1.0, 1.0):
        made = hold(NONE, round_s, rounds=4)
        made.is_anew = True
        pace.saw(made)
    for _ in range(MANY):
        pace.saw(hold(WANTED, 1 / 0.9, rounds=4))
    assert pace.gain == pytest.approx(0.9)


@pytest.mark.parametrize(("rounds", "slow"), [(LOOK // 2, False), (LOOK, True)])
def test_a_look_that_was_cut_short_says_nothing_beside_a_whole_one(rounds: int, slow: bool) -> None:
    pace = Pace(4, Budget())
    for round_s, count in ((1.0, LOOK), (2.0, rounds), (2.0, rounds)):
        pace.saw(hold(NONE, round_s, rounds=count))
    for _ in range(MANY):
        pace.saw(hold(WANTED, 3 / 0.9, tokens=3.0))
    assert pace.gain == pytest.approx(1.8 if slow else 0.9)


def test_rounds_without_drafts_are_looked_at_first_and_again() -> None:
    pace = Pace(4, Budget())
    assert pace.judge(WANTED) == Decision(0, {}, LOOK)
    pace.saw(hold(Decision(0, {}, LOOK), 1.0))
    rounds = 0
    while (decision := pace.judge(WANTED)).has_drafts:
        assert decision.rounds == (TRY if rounds < MANY * TRY else HOLDS)
        pace.saw(hold(decision, 2.7, tokens=3.0))  # they gain a tenth
        rounds += decision.rounds
    assert decision == Decision(0, {}, LOOK)
    assert LOOK_EVERY <= rounds < LOOK_EVERY + HOLDS


@pytest.mark.parametrize(
    ("gain", "loss"), [(3.0, 0.01), (1.4, 0.01), (1.1, 0.01), (1.0, 0.001), (0.9, 0.012), (0.5, 0.02)]
)
def test_little_is_lost_of_what_is_best(gain: float, loss: float) -> None:
    """In the long run; where drafts lose they are tried less and less often."""
    per_token, _ = simulate(Pace(4, Budget()), gain, 6000)
    assert per_token <= min(1.0, 1 / gain) * (1 + loss)


def test_few_rounds_lose_little_where_drafts_cost_twice() -> None:
    per_token, drafted = simulate(Pace(4, Budget()), 0.5, 1000)
    assert drafted <= 2 * TRY * 6  # two decisions until they are judged, and five tries
    assert per_token < 1.25


def test_vain_tries_become_rare() -> None:
    pace, at, tries = Pace(4, Budget()), 0, list[int]()
    while at < 4 * AT_MOST:
        decision = pace.judge(WANTED)
        if decision.has_drafts:
            tries.append(at)
        pace.saw(hold(decision, 3.05 if decision.has_drafts else 1.0, tokens=3.0 if decision.has_drafts else 1.0))
        at += decision.rounds
    waits = [after - before for before, after in pairwise(tries) if after - before > HOLDS]
    assert waits[0] >= TRY_EVERY
    assert waits == sorted(waits)
    assert waits[-1] <= AT_MOST + 3 * HOLDS


@pytest.mark.parametrize("gain", [0.5, 0.7, 0.95])
def test_batches_of_all_sizes_lose_no_more_than_one(gain: float) -> None:
    """Rows of a batch end one by one: every few rounds it is another size, and each would be tried by itself."""
    budget, rng, took, tokens = Budget(), random.Random(0), 0.0, 0.0
    paces = {rows: Pace(rows, budget) for rows in (8, 6, 4, 3, 2, 1)}
    for _ in range(200):
        for rows, pace in paces.items():
            decision = pace.judge(WANTED)
            own, per_round = (3.0, 3.0 / gain) if decision.has_drafts else (1.0, 1.0)
            one = Hold(decision, rows, 100)
            for _ in range(rounds := min(decision.rounds, rng.randrange(1, 12))):
                one.add(rows, round(rows * own), per_round, 1.0)
            took, tokens = took + rounds * per_round, tokens + rounds * own
            pace.saw(one)
    longest_try = max(8, TRY) * 3.0 / gain  # is known when it is over
    assert took <= tokens * (1 + MAY_LOSE) + FIRST + longest_try


def test_what_drafts_gain_pays_for_no_more_than_was_lost() -> None:
    budget = Budget()
    budget.saw(hold(WANTED, 1.0, tokens=3.0, rounds=100), -200.0)
    budget.saw(hold(WANTED, 6.0, tokens=3.0, rounds=4), 12.0)
    assert not budget.is_left, "1 % of 124 s and ten rounds of 1 s may be lost"
    budget.saw(hold(WANTED, 1.0, tokens=3.0, rounds=2), -4.0)
    assert budget.is_left


def test_what_a_hold_lost() -> None:
    assert hold(WANTED, 6.0, tokens=3.0, rounds=4).lost_s(Rest(1.0)) == 12.0
    assert hold(WANTED, 1.5, tokens=3.0, rounds=4).lost_s(Rest(0.5)) == 0.0
    anew = hold(WANTED, 1.0, tokens=1.0, rounds=4)
    anew.is_anew = True
    assert anew.lost_s(Rest(0.5, 2.0)) == 0.0, "calls would have been laid out without drafts, too"
    assert hold(WANTED, 90.0, rounds=4).lost_s(Rest(1.0)) == 4.0, "whatever stopped the machine"


@pytest.mark.parametrize("stalled_at", [LOOK + MANY * TRY, 40, 200])
def test_a_slow_stretch_does_not_end_drafts_that_pay(stalled_at: int) -> None:
    pace, done, drafted = Pace(32, Budget()), 0, 0
    while done < 1500:
        decision = pace.judge(WANTED)
        one = Hold(decision, 32, 100)
        own, round_s = (3, 1.5) if decision.has_drafts else (1, 1.0)
        for _ in range(decision.rounds):
            one.add(32, 32 * own, round_s * (8 if stalled_at <= done < stalled_at + 8 else 1), 1.0)
            done += 1
        drafted += decision.rounds * decision.has_drafts
        pace.saw(one)
    assert drafted > 0.9 * done


def test_sizes_whose_drafts_lose_do_not_stop_those_that_gain() -> None:
    budget, drafted = Budget(), {2: 0, 32: 0}
    paces = {rows: Pace(rows, budget) for rows in drafted}
    for turn in range(400):
        rows = 2 if turn < 50 or turn % 2 else 32
        decision = paces[rows].judge(WANTED)
        round_s = {2: 1.5, 32: 7.0}[rows] if decision.has_drafts else 1.0
        drafted[rows] += decision.rounds * decision.has_drafts
        paces[rows].saw(hold(replace(decision), round_s, 3.0 if decision.has_drafts else 1.0))
    assert drafted[2] > 1500
    assert drafted[32] < 100


def test_promises_count_as_some_decisions() -> None:
    """What prices promise decides where the clock says nothing, and not against it."""
    for promised, per_token, is_taken in ((1.15, 1.0, True), (1.0, 1.0, False), (9.0, 1.15, False), (1.0, 0.95, True)):
        pace, wanted = Pace(4, Budget()), replace(WANTED, promised=promised)
        for _ in range(12):
            decision = pace.judge(wanted)
            pace.saw(
                hold(decision, 3.0 * per_token if decision.has_drafts else 1.0, 3.0 if decision.has_drafts else 1.0)
            )
        assert pace._pays == is_taken


def test_rounds_that_lay_calls_out_are_not_the_pace() -> None:
    pace = Pace(4, Budget())
    for first_s in (1.0, 5.0):
        one = Hold(NONE, 4, 100)
        one.add(4, 4, first_s, 1.0)
        assert not one.has_pace
        pace.saw(one)
        one.add(4, 4, 1.0, 1.0)
        assert one.pace == 1.0
    assert not pace._resting


def test_drafts_that_begin_to_pay_are_taken_up_again() -> None:
    pace = Pace(4, Budget())
    simulate(pace, 0.8, 800)
    _, drafted = simulate(pace, 2.0, 3000)
    assert drafted > 2000
    _, drafted = simulate(pace, 0.8, 1000)
    assert drafted < 300, "and left when they pay no more"


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_with_other_work_does_not_sway_it(seed: int) -> None:
    """Rounds take up to half as long again, at random."""
    for gain in (0.8, 1.25):
        per_token, _ = simulate(Pace(4, Budget()), gain, 8000, noise=0.5, seed=seed)
        assert per_token == pytest.approx(min(1.0, 1 / gain), rel=0.03)


@pytest.mark.parametrize(
    ("gain", "waits"),
    [(3.0, [256, 512, SELDOM, SELDOM]), (1.8, [64, 128, 256, 512, SELDOM, SELDOM]), (1.2, [64, 64, 64, 64])],
)
def test_where_drafts_plainly_pay_one_looks_less_and_less(gain: float, waits: list[int]) -> None:
    pace, async_output, at = Pace(4, Budget()), list[int](), 0
    while len(async_output) <= len(waits):
        decision = pace.judge(WANTED)
        async_output += [] if decision.has_drafts else [at]
        pace.saw(hold(decision, 3 / gain, 3.0) if decision.has_drafts else hold(decision, 1.0))
        at += decision.rounds
    between = [after - before - LOOK for before, after in pairwise(async_output)]
    assert [wait - wait % HOLDS for wait in between] == waits


def test_what_drafts_gained_once_says_nothing_of_later_ones() -> None:
    """They gain plainly for long, are left, and seem to gain behind a slow stretch of rests."""
    pace = Pace(4, Budget())
    simulate(pace, 1.8, 1200)
    simulate(pace, 0.9, 600)
    assert not pace._pays
    for _ in range(3):
        pace.saw(hold(replace(NONE, rounds=RESTS), 2.0))
    _, drafted = simulate(pace, 0.9, 1000)
    assert drafted < 250


def test_looks_of_batches_in_turns_are_one() -> None:
    """Those that were asked for before the first was over."""
    pace = Pace(4, Budget())
    simulate(pace, 1.8, LOOK + LOOK_EVERY)
    async_output = [pace.judge(WANTED) for _ in range(8)]
    assert async_output == [Decision(0, {}, LOOK)] * 8
    for look in async_output:
        pace.saw(hold(look, 1.0))
    drafted = 0
    while (decision := pace.judge(WANTED)).has_drafts:
        pace.saw(hold(decision, 3 / 1.8, 3.0))
        drafted += decision.rounds
    assert drafted == 2 * LOOK_EVERY


def test_looks_that_were_cut_short_give_way_to_whole_ones() -> None:
    """Also where rows had come or gone: they are cold."""
    pace = Pace(4, Budget())
    for rounds, round_s in ((4, 3.0), (4, 3.0), (LOOK, 1.0), (4, 3.0), (4, 3.0)):
        made = hold(NONE, round_s, rounds=rounds)
        made.is_anew = True
        pace.saw(made)
    for _ in range(MANY):
        pace.saw(hold(WANTED, 3 / 0.9, tokens=3.0))
    assert pace.gain == pytest.approx(0.9)


@pytest.mark.parametrize("slow", [1.45, 2.0])
@pytest.mark.parametrize("length", range(60, 420, 40))
@pytest.mark.parametrize("gain", [0.9, 1.8])
def test_a_slow_stretch_that_ends_does_not_flatter_drafts_for_long(gain: float, length: int, slow: float) -> None:
    """Looks and rests within it make drafts that lose behind it look like those that gain. Those that gain stay."""
    pace, done, drafted = Pace(4, Budget()), 0, list[bool]()
    while done < 3000:
        decision = pace.judge(WANTED)
        own, round_s = (3.0, 3.0 / gain) if decision.has_drafts else (1.0, 1.0)
        one = Hold(decision, 4, 100)
        for _ in range(decision.rounds):
            one.add(4, round(4 * own), round_s * (slow if 800 <= done < 800 + length else 1.0), 1.0)
            done += 1
        drafted += [decision.has_drafts] * decision.rounds
        pace.saw(one)
    behind = drafted[800 + length :]
    assert sum(behind) < 0.2 * len(behind) if gain < 1 else sum(behind) > 0.85 * len(behind)


def test_one_slow_look_does_not_flatter_drafts_for_long() -> None:
    """Drafts of 0.9 that the first look, at a slow moment, makes those of 1.8: looked at again soon, and left."""
    pace, drafted, looked = Pace(4, Budget()), list[bool](), False
    while len(drafted) < 1000:
        decision = pace.judge(WANTED)
        rested_s = 1.0 if looked else 2.0
        pace.saw(hold(decision, 3 / 0.9, 3.0) if decision.has_drafts else hold(decision, rested_s))
        looked = looked or not decision.has_drafts
        drafted += [decision.has_drafts] * decision.rounds
    assert not all(drafted[LOOK : LOOK + LOOK_EVERY + HOLDS + TRY])
    assert sum(drafted[:500]) < 250
    assert sum(drafted[500:]) < 50


def test_rows_that_join_or_end_change_no_pace() -> None:
    """Where weights bind a step takes as long with more rows; so it does by the cost model."""
    few, more = Hold(NONE, 7, 100), Hold(NONE, 7, 100)
    for n in range(10):
        few.add(7, 7, 1.0, 1.0)
        more.add(7 + n // 5, 7 + n // 5, 1.0, 1.0)
    assert few.pace == more.pace == 1.0
