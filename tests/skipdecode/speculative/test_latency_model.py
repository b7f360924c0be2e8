"""What passes cost where no clock may say it: by the kind of CPU, and with what the host does."""

import pytest

from skipdecode.backends.cpu_backend import CompiledBackend
from skipdecode.families import released
from skipdecode.schedules.plan import FullDepth
from skipdecode.speculative import latency_model as prices
from skipdecode.speculative.latency_model import Prices
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


def test_old_times_of_a_size_are_not_what_it_takes_now() -> None:
    """Of passes that are timed in turns, which is with `keep` None, none is old."""
    for keep, took_s in ((None, 1.0), (prices.KEPT_TIMES, 2.0)):
        timed = Prices(CONFIG, 2, ceilings=prices.REFERENCE, keep=keep)
        for drafts, seconds, times in ((2, 1.0, prices.KEPT_TIMES), (3, 3.0, prices.OLD + 1), (2, 2.0, prices.ENOUGH)):
            for _ in range(times):
                timed.saw("verify", FULL, 4, 4 * (1 + drafts), 100, seconds)
        assert timed.seconds("verify", FULL, 4, 12, 100) == pytest.approx(took_s)
        assert timed.num_seen_since(4, 12, timed.num_verified(4) - 1) == 1
