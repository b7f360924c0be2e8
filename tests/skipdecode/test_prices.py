"""What passes cost where no clock may say it: by the kind of CPU, and with what the host does."""

import random
from collections import Counter

import pytest

from skipdecode import prices
from skipdecode.backends.compiled import CompiledBackend
from skipdecode.cost import Ceilings
from skipdecode.draft_length import SKIPPED, DraftLength
from skipdecode.families import released
from skipdecode.lossless import Lossless
from skipdecode.plan import FullDepth, SkipDecode
from skipdecode.prices import Prices
from tests.support.cuda_models import random_model

CONFIG = released("opt-1.3b")
FULL = FullDepth(CONFIG.num_hidden_layers).prefill()


def growth(of: Prices) -> float:
    """How many times as long as a step of 16 rows the verification of four drafts of each takes."""
    return of.seconds("verify", FULL, 16, 80, 128) / of.seconds("full", FULL, 16, 16, 128)


def test_many_columns_are_dear_without_matrix_units() -> None:
    assert growth(Prices(CONFIG, 2, reference=prices.REFERENCE_AMX)) < 2
    assert growth(Prices(CONFIG, 2, reference=prices.REFERENCE)) > 3.5


@pytest.mark.parametrize("has_them", [True, False])
def test_a_model_is_priced_by_the_cpu_it_runs_on(monkeypatch: pytest.MonkeyPatch, has_them: bool) -> None:
    monkeypatch.setattr(CompiledBackend, "has_matrix_units", has_them)
    model = random_model("opt", layers=2)
    reference = prices.REFERENCE_AMX if has_them else prices.REFERENCE
    wanted = Prices(model.config, model.dtype.itemsize, model.weight_itemsize, reference=reference)
    plan = FullDepth(2).prefill()
    assert Prices.of(model).seconds("full", plan, 512, 512, 128) == wanted.seconds("full", plan, 512, 512, 128)


def test_the_host_is_priced_where_no_clock_is() -> None:
    """Of a model as small as the demo's most of a skipped pass is not arithmetic."""
    untimed = Prices(CONFIG, 2)
    assert (
        untimed.seconds("draft", FULL, 1, 1, 128)
        == untimed.model_s(FULL, 1, 1, 128, kind="draft") + prices.HOST_DRAFT_S
    )
    assert untimed.round_s(1) == prices.HOST_ROUND_S
    timed = Prices(CONFIG, 2, ceilings=prices.REFERENCE)
    assert timed.seconds("draft", FULL, 1, 1, 128) == timed.model_s(FULL, 1, 1, 128, kind="draft")
    assert timed.round_s(1) == 0.0


def test_the_host_is_priced_by_the_nearest_number_of_rows() -> None:
    timed, other = (Prices(CONFIG, 2, ceilings=prices.REFERENCE) for _ in range(2))
    for rows, took_s in ((1, 1.0), (64, 3.0), (4096, -1.0)):
        for _ in range(prices.ENOUGH):
            timed.saw_round(rows, took_s)
    assert [timed.round_s(rows) for rows in (1, 2, 48, 4096)] == [1.0, 1.0, 3.0, 0.0]
    assert other.round_s(1) == 0.0
    other.learn(timed)
    assert other.round_s(1) == 1.0


@pytest.mark.parametrize(("column_s", "best"), [({1: 70, 2: 82, 3: 115}, 2), ({1: 90, 2: 95, 3: 115}, 3)])
def test_fewer_and_more_drafts_are_tried_again(column_s: dict[int, int], best: int) -> None:
    """As memory becomes faster or slower: what was best before is found not to be, and trying costs few rounds."""
    schedule = Lossless(24, SkipDecode(24, 4, 4, 1, 32))
    length = DraftLength(schedule, Prices(CONFIG, 2, ceilings=Ceilings(4.3e11, 3.2e10, 2e-6)))
    draft, full = schedule.drafts.step(0), schedule.prefill()
    slow = {1: 90, 2: 95, 3: 115} if best == 2 else {1: 70, 2: 82, 3: 115}
    length.prices.saw("full", full, 4, 4, 100, 0.08)
    made, rng = Counter[int](), random.Random(0)
    for number in range(600):
        took = slow if number < 200 else column_s
        skipped = length._wanted(4, 0, 100).skipped
        for _ in range(4):
            accepted = next((place for place in range(skipped) if rng.random() > 0.93), skipped)
            length.acceptance.see([(SKIPPED, place) for place in range(skipped)], accepted)
        length.prices.saw("draft", draft, 4, 4, 100, 6.5e-3)
        took_s = 1e-3 * (took.get(skipped) or 115 + 28 * (skipped - 3))
        length.prices.saw("verify", full, 4, 4 * (1 + skipped), 100, took_s)
        made[skipped] += number >= 300
    assert made[best] > 260, made
    assert sum(count for n, count in made.items() if abs(n - best) > 1) == 0, made


def test_prices_by_which_nothing_is_decided_are_what_was_seen() -> None:
    """`keep` None: of passes that are timed one by one."""
    for keep, share in ((None, 1.0), (prices.KEPT_TIMES, prices.AGAIN)):
        timed = Prices(CONFIG, 2, ceilings=prices.REFERENCE, keep=keep)
        for drafts in (3, 3, 2, 2, 2, 2, 1):
            timed.saw("verify", FULL, 4, 4 * (1 + drafts), 100, 1.0)
        for _ in range(prices.AGAIN_EVERY - 7):
            timed.saw("verify", FULL, 4, 16, 100, 1.0)
        assert timed.seconds("verify", FULL, 4, 12, 100) == pytest.approx(share)
        assert timed.seconds("verify", FULL, 4, 16, 100) == pytest.approx(1.0)
