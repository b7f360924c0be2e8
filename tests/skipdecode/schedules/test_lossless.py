"""The schedule that only drafts: what a `decode:` mapping says of it, and how many tokens are drafted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.cost.roofline import Ceilings
from skipdecode.families import config_of
from skipdecode.schedules.from_config import listed_schedule, make_schedule
from skipdecode.schedules.lossless import MOST_DRAFTS, Lossless
from skipdecode.schedules.plan import FullDepth, Schedule, SkipDecode, Unified
from skipdecode.speculative.controller import RESTS, Decision
from skipdecode.speculative.draft import Chain
from skipdecode.speculative.draft_length import MOST, PROBE_EVERY, SKIPPED, DraftLength
from skipdecode.speculative.latency_model import REFERENCE_AMX, Prices

L = 24
OPT = config_of({"model_type": "opt", "num_hidden_layers": L, "hidden_size": 2048, "ffn_dim": 8192,
                 "num_attention_heads": 32, "vocab_size": 50272, "max_position_embeddings": 2048})  # fmt: skip
SKIP = SkipDecode(L, 5, 4, 1, 63)


def made(**decode: Any) -> Schedule:
    return make_schedule(decode, num_layers=L, max_new_tokens=64)


def length(drafts: Schedule = SKIP, tokens: int | None = None, adaptive: bool = True, **prices: Any) -> DraftLength:
    return DraftLength(Lossless(L, drafts, tokens, adaptive), Prices(OPT, 2, reference=REFERENCE_AMX, **prices))


def test_the_mapping_says_what_drafts() -> None:
    skip = {"method": "skipdecode", "max_layers": 5, "min_layers": 4}
    assert made(**skip, lossless=True) == Lossless(L, SKIP, None, False)
    assert made(**skip, lossless="auto", draft_tokens=3) == Lossless(L, SKIP, 3, True)
    assert made(**skip, lossless=False, draft_tokens="auto") == SKIP
    assert made(method="full", lossless=True) == Lossless(L, FullDepth(L))
    assert not Lossless(L, FullDepth(L)).drafts_by_skipping
    assert Lossless(L, SKIP).drafts_by_skipping


def test_it_is_full_depth_to_all_others() -> None:
    schedule = Lossless(L, SKIP)
    assert {schedule.step(k) for k in range(99)} == {FullDepth(L).prefill()} == {schedule.prefill()}
    assert schedule != FullDepth(L)


@pytest.mark.parametrize(
    ("decode", "key"),
    [
        ({"lossless": "yes"}, "decode.lossless"),
        ({"lossless": True, "draft_tokens": 0}, "decode.draft_tokens"),
        ({"lossless": True, "draft_tokens": MOST_DRAFTS + 1}, "decode.draft_tokens"),
        ({"lossless": True, "draft_tokens": "many"}, "decode.draft_tokens"),
        ({"lossless": 1}, "decode.lossless"),
        ({"lossless": False, "draft_tokens": 4}, "decode.draft_tokens"),
        ({"lossless": True, "ffn_skip": {"mode": "row"}}, "decode.ffn_skip.mode"),
    ],
)
def test_what_cannot_be_is_named(decode: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        made(**decode)


def test_swiftkv_and_lists_of_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^decode\.lossless: .*SwiftKV"):
        make_schedule({"lossless": True}, num_layers=L, max_new_tokens=9, kv_layers=12)
    with pytest.raises(ValueError, match=r"^decode\.lossless: .*SwiftKV"):  # the blocks left out do not hide it
        make_schedule(
            {"lossless": True, "ffn_skip": {"mode": "fixed", "layers": [3]}},
            num_layers=L,
            max_new_tokens=9,
            kv_layers=12,
        )
    with pytest.raises(ValueError, match=r"^decode\.lossless: "):
        listed_schedule(OPT, {"method": "full", "lossless": True}, 9)


def test_a_number_is_kept_to() -> None:
    assert length(tokens=3, adaptive=False).decide(512, 0, 9) == Decision(3, {2: 3, 3: 3, 4: 3})
    assert length(FullDepth(L), 3, adaptive=False).decide(1, 0, 9) == Decision(0, {2: 3, 3: 3, 4: 3})
    assert length(tokens=12, adaptive=False).decide(1, 0, 9).skipped == 12


def test_auto_drafts_that_number_or_none() -> None:
    assert length(tokens=3).decide(1, 0, 100).skipped == 3
    assert set(length(tokens=3).decide(1, 0, 100).repeated.values()) <= {3}
    assert length(tokens=3).decide(512, 0, 100) == Decision(0, {}, RESTS, is_idle=True)
    assert length(tokens=1500).decide(1, 0, 100).skipped == 0


def test_few_rows_draft_more_than_many() -> None:
    """Where weights bind drafts are nearly free to verify; where arithmetic does each costs what a token costs."""
    counts = [length().decide(rows, 0, 100).skipped for rows in (1, 4, 16, 64, 512)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 3
    assert counts[-1] == 0
    assert length(adaptive=False).decide(512, 0, 100).skipped == 1


def test_what_is_refused_is_drafted_no_more_but_tried_again() -> None:
    decider = length()
    assert decider.decide(4, 0, 100).skipped > 0
    for _ in range(300):
        decider.acceptance.see([(SKIPPED, 0)], 0)
        for kind in (2, 3, 4):
            decider.acceptance.see([(kind, 0)], 0)
    decisions = []
    for _ in range(2 * (PROBE_EVERY // RESTS + 1)):
        hold = decider.hold(4, 0, 100)
        hold.add(4, 4, 1.0, 1.0)
        hold.num_rounds = hold.decision.rounds
        decider.saw(hold)
        decisions.append(hold.decision)
    assert [decision.is_probe for decision in decisions].count(True) == 2
    assert [decision.has_drafts for decision in decisions].count(True) == 2
    for _ in range(3000):
        decider.acceptance.see([(SKIPPED, place) for place in range(MOST)], MOST)
    assert decider.decide(4, 0, 100).skipped > 4


@given(accepted=st.lists(st.integers(0, MOST), max_size=60), rows=st.integers(1, 600), k=st.integers(0, 200))
def test_without_a_clock_times_decide_nothing(accepted: list[int], rows: int, k: int) -> None:
    one, other = length(), length()
    for n in accepted:
        for decider in (one, other):
            decider.acceptance.see([(SKIPPED, place) for place in range(MOST)], n)
        other.prices.saw("draft", SKIP.step(0), rows, rows, 50, 1e3 * n + 1)
    assert one.decide(rows, k, 50) == other.decide(rows, k, 50)


def test_measured_times_decide() -> None:
    """A machine on which passes of several columns take as much longer as they have columns."""
    decider, full = length(adaptive=False, ceilings=Ceilings(1e12, 1e10, 1e-6)), FullDepth(L).prefill()
    one_s = decider.prices.model_s(full, 4, 4, 100)
    decider.prices.saw("verify", full, 4, 4, 100, one_s)
    assert decider.decide(4, 0, 100).skipped > 1
    for columns in range(2, MOST + 2):
        for _ in range(7):
            decider.prices.saw("verify", full, 4, 4 * columns, 100, columns * one_s)
    assert decider.decide(4, 0, 100).skipped == 1


def test_what_the_host_does_in_a_round_counts_against_drafts() -> None:
    decider, full = length(ceilings=Ceilings(1e12, 1e10, 1e-6)), FullDepth(L).prefill()
    prices, step_s, host_s = decider.prices, decider.step_s(4, 100), 0.5
    prices.saw_round(4, host_s)
    draft_s = prices.seconds("draft", SKIP.step(0), 4, 4, 100)
    with_drafts = [host_s + draft_s + prices.seconds("verify", full, 4, 8, 100)]
    assert decider.speedups(4, 0, 100, [1.0, 1.9])[1:2] == pytest.approx([1.9 * step_s / with_drafts[0]])
    assert decider.decide(4, 0, 100).skipped == 0


def test_other_processes_do_not_sway_prices() -> None:
    decider, full = length(ceilings=Ceilings(1e12, 1e10, 1e-6)), FullDepth(L).prefill()
    model_s = decider.prices.model_s(full, 4, 4, 100)
    for factor in (9.0, 1.5, 30.0):
        decider.prices.saw("verify", full, 4, 4, 100, factor * model_s)
    assert decider.prices.seconds("verify", full, 4, 4, 100) == pytest.approx(1.5 * model_s)


def test_repeats_behind_skipped_passes_are_worth_what_these_are() -> None:
    """They come to nothing where a skipped pass before them is refused, so fewer are drafted than at the front."""
    decider = length()
    for n in range(3000):
        decider.acceptance.see([(4, 0)], int(n % 10 < 6))
        for place in range(MOST):
            decider.acceptance.see([(SKIPPED, place)], int(n % 10 < 7))
    few, many = (decider.decide(rows, 0, 100) for rows in (12, 24))
    assert few.skipped == 2
    assert 0 < few.continued[4] < few.repeated[4]
    assert many.skipped
    assert many.repeated
    assert not many.continued
    assert length(tokens=3).decide(1, 0, 100).continued == {}


def test_a_repeat_behind_others_counts_its_own_places() -> None:
    chain = Chain(0, 0, [7], 9)
    for token in (1, 2):
        chain.add([token], SKIPPED, ())
    chain.add([3, 4], 4, ())
    assert chain.sources == [(SKIPPED, 0), (SKIPPED, 1), (4, 0), (4, 1)]


def test_acceptance_is_counted_up_to_the_first_refusal() -> None:
    acceptance = length().acceptance
    for _ in range(4000):
        acceptance.see([(SKIPPED, place) for place in range(4)], 2)
    assert acceptance.rate(SKIPPED, 0) == pytest.approx(1, abs=0.02)
    assert acceptance.rate(SKIPPED, 1) == pytest.approx(1, abs=0.02)
    assert acceptance.rate(SKIPPED, 2) == pytest.approx(0, abs=0.02)
    assert (SKIPPED, 3) not in acceptance.tried
    assert acceptance.expected(SKIPPED, 3) == pytest.approx([1, 2, 3, 3], abs=0.1)


def test_prices_know_columns_of_a_row_from_rows() -> None:
    """The cache of a row is read once for all of its columns, weights once for all rows."""
    prices, full, few = Prices(OPT, 2, reference=REFERENCE_AMX), FullDepth(L).prefill(), Unified(L, 4).step(0)
    assert prices.model_s(full, 4, 20, 1500) < prices.model_s(full, 20, 20, 1500)
    assert prices.model_s(full, 4, 20, 1500) < 2 * prices.model_s(full, 4, 4, 1500)
    assert prices.model_s(few, 4, 4, 100) < prices.model_s(full, 4, 4, 100) / 2


def test_a_draft_more_than_was_tried_is_tried() -> None:
    """Where the cost model has it too dear: until it was seen itself, it is priced half-way to the one before."""
    prices, full = Prices(OPT, 2, ceilings=Ceilings(1e12, 1e10, 1e-6)), FullDepth(L).prefill()

    def saw(drafted: int, seconds: float, times: int = 2) -> None:
        for _ in range(times):
            prices.saw("verify" if drafted else "full", full, 4, 4 * (1 + drafted), 100, seconds)

    def price(drafted: int) -> float:
        return prices.seconds("verify", full, 4, 4 * (1 + drafted), 100)

    def by_model(drafted: int) -> float:
        return 3 * prices.model_s(full, 4, 4 * (1 + drafted), 100)

    saw(0, by_model(0), times=1)
    assert price(1) == pytest.approx(by_model(1)), "once says little"
    saw(0, by_model(0), times=1)
    assert price(1) == pytest.approx((by_model(0) + by_model(1)) / 2)
    assert price(2) == pytest.approx(by_model(2)), "one at a time"
    saw(1, 1.2 * by_model(1))
    assert price(1) == pytest.approx(1.2 * by_model(1))
    assert price(2) == pytest.approx(1.2 * (by_model(1) + by_model(2)) / 2)
    in_turns = Prices(OPT, 2, ceilings=Ceilings(1e12, 1e10, 1e-6), keep=None)
    for _ in range(2):
        in_turns.saw("full", full, 4, 4, 100, by_model(0))
    assert in_turns.seconds("verify", full, 4, 8, 100) == pytest.approx(by_model(1)), "it speaks for itself"


def test_one_slow_pass_does_not_speak_for_its_size() -> None:
    """Until a size was seen a few times, its neighbours say what it may take: else nobody would try it again. Where all
    times are kept, they were taken in turns, and each size speaks for itself."""
    prices, full = Prices(OPT, 2, ceilings=Ceilings(1e12, 1e10, 1e-6)), FullDepth(L).prefill()
    in_turns = Prices(OPT, 2, ceilings=Ceilings(1e12, 1e10, 1e-6), keep=None)

    def saw(drafted: int, ratio: float) -> None:
        tokens = 4 * (1 + drafted)
        for own in (prices, in_turns):
            own.saw("verify", full, 4, tokens, 100, ratio * prices.model_s(full, 4, tokens, 100))

    def ratio(drafted: int, of: Prices = prices) -> float:
        tokens = 4 * (1 + drafted)
        return of.seconds("verify", full, 4, tokens, 100) / prices.model_s(full, 4, tokens, 100)

    prices.saw("full", full, 4, 4, 100, 0.5 * prices.model_s(full, 4, 4, 100))  # another kind says nothing
    saw(2, 9.0)
    assert ratio(2) == pytest.approx(9.0)
    for _ in range(4):
        saw(1, 1.5)
    assert ratio(2) == pytest.approx(1.5, abs=0.01)
    assert ratio(2, in_turns) == pytest.approx(9.0)
    for _ in range(3):
        saw(2, 2.0)
    assert ratio(2) == pytest.approx(2.0)
    assert ratio(1) == pytest.approx(1.5)
    saw(1, 0.9)
    assert ratio(1) == pytest.approx(1.5), "one fast pass does not speak for it either"
    assert ratio(1, in_turns) == pytest.approx(0.9)
