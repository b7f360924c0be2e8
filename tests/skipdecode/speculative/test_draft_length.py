"""Decisions on drafts that a clock may overrule: what is asked of prices, probed, and judged."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from skipdecode.cost.roofline import Ceilings
from skipdecode.families import released
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import SkipDecode
from skipdecode.speculative.controller import (
    HOLDS,
    LOOK,
    RESTS,
    TOLD,
    TRY,
    Budget,
    Decision,
    Hold,
    Pace,
)
from skipdecode.speculative.draft_length import PROBE_EVERY, SKIPPED, STALE_S, DraftLength
from skipdecode.speculative.latency_model import ENOUGH, Prices
from tests.support.holds import NONE, WANTED, hold

OPT, CEILINGS = released("opt-1.3b"), Ceilings(1e12, 1e10, 1e-6)


def test_what_must_rest_asks_for_no_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True), Prices(OPT, 2, ceilings=CEILINGS))
    asked = list[int]()
    wanted = length._wanted
    monkeypatch.setattr(length, "_wanted", lambda *where: (asked.append(1), wanted(*where))[1])
    rested = 0
    for _ in range(60):
        before, made = len(asked), length.hold(4, 0, 100)
        for _ in range(made.decision.rounds):
            made.add(4, 4, 9.0 if made.decision.has_drafts else 1.0, 1.0)
        rested += len(asked) == before
        assert len(asked) > before or made.decision == Decision(0, {}, RESTS)
        length.saw(made)
    assert rested > 40


def test_rests_by_the_budget_do_not_keep_acceptance_from_being_probed() -> None:
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True), Prices(OPT, 2, ceilings=CEILINGS))
    length.saw(hold(replace(NONE, rounds=LOOK), 1.0))
    length._idle = PROBE_EVERY - RESTS
    length._budget.saw(hold(NONE, 1.0), 1e9)
    rest = length.hold(4, 0, 100)
    assert rest.decision == Decision(0, {}, RESTS, is_idle=True)
    length.saw(hold(rest.decision, 1.0))
    assert length._idle == PROBE_EVERY


def test_a_length_is_judged_by_its_rounds() -> None:
    """Prices that promise too much, and a clock that has it otherwise; other batch sizes are judged by themselves."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True)
    length = DraftLength(schedule, Prices(OPT, 2, ceilings=CEILINGS))
    drafted = 0
    for _ in range(4):
        made = length.hold(4, 0, 100)
        for _ in range(made.decision.rounds):
            made.add(4, 4, 1.3 if made.decision.has_drafts else 1.0, 1.0)
        drafted += made.decision.rounds * made.decision.has_drafts
        length.saw(made)
    assert drafted == 2 * TRY
    other = length.hold(64, 0, 100)
    assert other.decision == Decision(0, {}, LOOK)
    pinned = DraftLength(Lossless(24, schedule.drafts), length.prices)
    assert pinned.hold(4, 0, 100).decision.skipped > 0, "where nothing may rest drafts are not judged"


def test_what_larger_batches_gain_need_not_be_looked_at_in_smaller_ones() -> None:
    """Rows of a batch end one by one, and every size would be looked at anew."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True)
    for pace, first in ((0.5, 0), (1.0, LOOK)):
        length = DraftLength(schedule, Prices(OPT, 2, ceilings=CEILINGS))
        for _ in range(4):
            made = length.hold(8, 0, 100)
            for _ in range(made.decision.rounds):
                made.add(8, 8, pace if made.decision.has_drafts else 1.0, 1.0)
            length.saw(made)
        decision = length.hold(3, 0, 100).decision
        assert decision.has_drafts == (first == 0)
        assert length.hold(20, 0, 100).decision == Decision(0, {}, LOOK), "of fewer rows nothing follows"


@pytest.mark.parametrize(("round_s", "expected"), [(1.2, 40 * RESTS // (PROBE_EVERY + RESTS)), (9.0, 6)])
def test_probes_say_nothing_of_the_pace(round_s: float, expected: int) -> None:
    """And lose no more than the budget has, 10 s here and 1 % of 1,400; a probe of 4 rounds counts as 4 s at most."""
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True), Prices(OPT, 2, ceilings=CEILINGS))
    for _ in range(300):
        length.acceptance.see([(SKIPPED, 0)], 0)
        for kind in (2, 3, 4):
            length.acceptance.see([(kind, 0)], 0)
    probes = 0
    for _ in range(40):
        made = length.hold(4, 0, 100)
        probe = made.decision
        for _ in range(probe.rounds):
            made.add(4, 4, round_s if probe.has_drafts else 1.0, 1.0)
            length.again(made, 4, 1, 100)
            assert made.decision == probe
        length.saw(made)
        probes += probe.is_probe
        assert length._pace(4).gain is None
    assert probes == expected


def test_slow_rounds_have_drafts_counted_anew() -> None:
    """Acceptance and prices of the rounds before count at once; a decision of short rounds stays."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32))
    for took_s, is_counted in ((STALE_S, True), (STALE_S / 10, False)):
        length = DraftLength(schedule, Prices(OPT, 2, ceilings=CEILINGS))
        made = length.hold(1, 0, 100)
        before = made.decision
        assert before.skipped > 2
        for _ in range(100):
            length.acceptance.see([(SKIPPED, 0)], 0)
        made.add(1, 1, took_s, 1.0)
        length.again(made, 1, 1, 101)
        assert (made.decision.skipped < before.skipped) == is_counted
        assert made.decision.rounds == before.rounds


def test_without_a_clock_rounds_say_nothing() -> None:
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True)
    length = DraftLength(schedule, Prices(OPT, 2))
    for _ in range(8):
        made = length.hold(4, 0, 100)
        assert made.decision.has_drafts
        made.add(4, 4, 100.0, 1.0)
        decision = made.decision
        length.again(made, 4, 1, 101)
        assert made.decision == decision
        length.saw(made)


def test_luck_with_few_rounds_counts_little() -> None:
    """Holds of as many rounds that make many tokens and few have nearly the same pace, once acceptance is known."""
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True), Prices(OPT, 2, ceilings=CEILINGS))
    for _ in range(200):
        length.acceptance.see([(SKIPPED, 0), (SKIPPED, 1), (SKIPPED, 2)], 2)
    paces = list[float]()
    length.saw(hold(replace(NONE, rounds=LOOK), 1.0))
    for tokens in (3.0, 4.0, 2.0) * 20:
        length.saw(hold(replace(WANTED, rounds=HOLDS), 1.0, tokens))
        paces.append(1 / length._pace(4)._gains[-1])
    assert max(paces[-6:]) < 1.05 * min(paces[-6:])
    assert paces[-1] == pytest.approx(1 / 3, rel=0.05)


FIRST_MS, LATER_MS = {1: 90, 2: 95, 3: 115, 4: 150}, {1: 70, 2: 82}


@pytest.mark.parametrize(
    ("first_ms", "later_ms", "best"),
    [
        (FIRST_MS, FIRST_MS | LATER_MS, 2),
        (FIRST_MS | LATER_MS | {3: 110}, FIRST_MS | LATER_MS | {3: 98}, 3),
        (FIRST_MS | LATER_MS, FIRST_MS, 3),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_fewer_and_more_drafts_are_tried_again(
    first_ms: dict[int, int], later_ms: dict[int, int], best: int, is_held: bool
) -> None:
    """As memory becomes faster or slower: what was best before is found not to be, and trying costs few rounds.
    `is_held`: where rounds are short, drafts are counted once for several."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32))
    length = DraftLength(schedule, Prices(OPT, 2, ceilings=Ceilings(4.3e11, 3.2e10, 2e-6)))
    draft, full = schedule.drafts.step(0), schedule.prefill()
    length.prices.saw("full", full, 4, 4, 100, 0.08)
    made, rng, number = [Counter[int](), Counter[int]()], random.Random(0), 0
    while number < 700:
        decision = length._wanted(4, 0, 100)
        for _ in range(decision.rounds if is_held else 1):
            for _ in range(4):
                accepted = next((i for i in range(decision.skipped) if rng.random() > 0.93), decision.skipped)
                length.acceptance.see([(SKIPPED, place) for place in range(decision.skipped)], accepted)
            length.prices.saw("draft", draft, 4, 4, 100, 6.5e-3)
            took_ms = (first_ms if number < 250 else later_ms).get(decision.skipped, 250)
            length.prices.saw("verify", full, 4, 4 * (1 + decision.skipped), 100, took_ms / 1e3)
            if number >= 100:
                made[number >= 450][decision.skipped] += not 250 <= number < 450
            number += 1
    before, after = made
    assert before.most_common(1)[0] == (5 - best, before[5 - best])
    assert before[5 - best] > 0.8 * before.total(), before
    assert after[best] > 0.8 * after.total(), after


def test_a_hold_is_as_likely_as_each_of_its_rounds() -> None:
    """Whatever the last one drafted: drafts are counted anew in between."""
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32), None, True), Prices(OPT, 2, ceilings=CEILINGS))
    for _ in range(400):
        length.acceptance.see([(SKIPPED, 0), (SKIPPED, 1), (SKIPPED, 2)], 3)
    for skipped in (1, 3):
        made = hold(replace(WANTED, skipped=2), 1.0, tokens=3.0)
        made.decision = replace(made.decision, skipped=skipped)
        made.add(4, 4 * (1 + skipped), 1.0, 1.0)
        assert length._without_luck(made).num_made == pytest.approx(made.num_made, rel=0.03)


@pytest.mark.parametrize("rows", [1, 4])
def test_another_number_is_tried_for_few_rounds(rows: int) -> None:
    """Also where drafts are not judged yet, and where some are always made."""
    pace = Pace(rows, Budget())
    look = Hold(replace(NONE, rounds=LOOK), rows, 100)
    for _ in range(LOOK):
        look.add(rows, rows, 1.0, 1.0)
    pace.saw(look)
    tried = replace(WANTED, rounds=ENOUGH, is_again=True)
    assert pace.gain is None
    assert pace.judge(tried) == tried
    assert pace.judge(WANTED).rounds == {1: TOLD, 4: TRY}[rows]
    length = DraftLength(Lossless(24, SkipDecode(24, 4, 4, 1, 32)), Prices(OPT, 2, ceilings=CEILINGS))
    length._by_prices = lambda *where: tried  # type: ignore[method-assign]
    assert length.decide(rows, 0, 100) == tried
