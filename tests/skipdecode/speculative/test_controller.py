"""How many tokens are drafted, and whether any: on machines and texts that are made up, by their clock."""

import random
from collections import Counter

import pytest

from skipdecode.backends.cpu_backend import CompiledBackend
from skipdecode.cost.roofline import Ceilings
from skipdecode.families import released
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from skipdecode.speculative.answer_index import ANSWERS
from skipdecode.speculative.controller import (
    FIRST_PAUSE,
    NGRAMS,
    PLAIN_ROUNDS,
    PRIOR,
    Acceptance,
    Decision,
    SpeculationController,
)
from skipdecode.speculative.draft import LAYERS, Source
from skipdecode.speculative.latency_model import HOST_S, REFERENCE, REFERENCE_AMX, LatencyModel
from tests.support.cuda_models import random_model

OPT = released("opt-1.3b")
L = OPT.num_hidden_layers
FULL, SKIP = FullDepth(L), SkipDecode(L, 5, 4, 1, 63)
CEILINGS = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=1e-6)


def controller(
    drafts: Schedule = SKIP, tokens: int | None = None, *, adaptive: bool = True, ceilings: Ceilings | None = None
) -> SpeculationController:
    latency = LatencyModel(OPT, 2, None, ceilings, reference=REFERENCE_AMX)
    return SpeculationController(Lossless(L, drafts, tokens, adaptive), latency)


def learn(acceptance: Acceptance, source: Source, rate: float, times: int = 400) -> None:
    for i in range(times):
        acceptance.observe([source], int(i % 100 < 100 * rate))


class Machine:
    """Decodes batch after batch: `accepted` of the drafts, each round by the roofline times `slowness` if it has any,
    and by a clock that other processes disturb now and then."""

    def __init__(self, own: SpeculationController, accepted: float, slowness: float, seed: int = 0) -> None:
        self.controller, self.accepted, self.slowness = own, accepted, slowness
        self.rng, self.outcomes = random.Random(seed), Counter[str]()
        self.took_s = self.plain_s = 0.0

    def decode(self, rows: int, new_tokens: int) -> None:
        """Rows end when they have their tokens, so that the batch shrinks."""
        left = [new_tokens] * rows
        while left:
            k = new_tokens - left[0]
            decision = self.controller.decide(len(left), k, 100 + k)
            left = self._drafted(decision, left, k) if decision.layer_tokens else self._plain(decision, left, k)

    def _drafted(self, decision: Decision, left: list[int], k: int) -> list[int]:
        """A round; what the rows that go on still want."""
        latency, n, number = self.controller.latency, len(left), decision.layer_tokens
        verify_s = latency.roofline_s(FULL.prefill(), n, n * (1 + number), 100 + k) * self.slowness
        draft_s = sum(latency.roofline_s(SKIP.step(k), n, n, 100 + k) for _ in range(number)) * self.slowness
        latency.observe("draft", n, draft_s, draft_s / self.slowness)
        latency.observe("verify", n, verify_s, verify_s / self.slowness)
        made = [self._draft(number) for _ in left]
        self.took_s += verify_s + draft_s
        self.plain_s += sum(made) / n * latency.roofline_s(FULL.prefill(), n, n, 100 + k)  # without drafts
        self.outcomes[decision.outcome] += 1
        self.controller.observe(decision, n, 100 + k, sum(made), (verify_s + draft_s) * self._noise())
        return [rest - one for rest, one in zip(left, made, strict=True) if rest > one]

    def _plain(self, decision: Decision, left: list[int], k: int) -> list[int]:
        """As many rounds as the decision holds for; what the rows that go on still want."""
        latency, n, number = self.controller.latency, len(left), min(decision.num_rounds, min(left))
        rounds_s = [latency.roofline_s(FULL.prefill(), n, n, 100 + k + i) for i in range(number)]
        latency.observe("plain", n, sum(rounds_s), sum(rounds_s))
        self.took_s += sum(rounds_s)
        self.plain_s += sum(rounds_s)
        self.outcomes[decision.outcome] += number
        noisy_s = sum(one_s * self._noise() for one_s in rounds_s)
        self.controller.observe(decision, n, 100 + k, n * number, noisy_s, number)
        return [rest - number for rest in left if rest > number]

    def _noise(self) -> float:
        return self.rng.uniform(0.95, 1.05) * (6.0 if self.rng.random() < 0.01 else 1.0)

    def _draft(self, number: int) -> int:
        accepted = 0
        while accepted < number and self.rng.random() < self.accepted:
            accepted += 1
        self.controller.acceptance.observe([LAYERS] * number, accepted)
        return 1 + accepted

    @property
    def speedup(self) -> float:
        return self.plain_s / self.took_s


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("accepted", "slowness"), [(0.0, 1.0), (0.5, 1.5), (0.8, 2.0), (0.8, 3.0), (0.3, 1.1)])
@pytest.mark.parametrize("seed", range(3))
def test_drafts_that_do_not_pay_cost_little(rows: int, accepted: float, slowness: float, seed: int) -> None:
    """Over batches of 128 tokens, the first one with all its tries included; and next to nothing later on."""
    first = Machine(controller(ceilings=CEILINGS), accepted, slowness, seed)
    first.decode(rows, 128)
    assert first.speedup >= 0.97
    later = Machine(first.controller, accepted, slowness, seed)
    for _ in range(10):
        later.decode(rows, 128)
    assert later.speedup >= 0.975


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize(("accepted", "slowness"), [(0.0, 1.0), (0.3, 1.1), (0.5, 1.5)])
@pytest.mark.parametrize("seed", range(6))
def test_a_short_first_batch_loses_at_most_three_percent(
    rows: int, accepted: float, slowness: float, seed: int
) -> None:
    """What trials may lose is bounded by the worst case of each round, as far as its time is predicted well."""
    machine = Machine(controller(ceilings=CEILINGS), accepted, slowness, seed)
    machine.decode(rows, 64)
    assert machine.outcomes["drafted"] > 0
    assert machine.speedup >= 0.97


@pytest.mark.parametrize(("rows", "least"), [(1, 1.8), (4, 1.4)])
def test_drafts_that_pay_are_made(rows: int, least: float) -> None:
    machine = Machine(controller(ceilings=CEILINGS), 0.9, 1.1)
    machine.decode(rows, 256)
    assert machine.speedup > 1.2, "in the first batch already"
    later = Machine(machine.controller, 0.9, 1.1)
    for _ in range(10):
        later.decode(rows, 128)
    assert later.speedup >= least
    assert later.outcomes["drafted"] > 0.9 * later.outcomes.total()


def test_texts_that_become_easier_are_drafted_again() -> None:
    own = controller(ceilings=CEILINGS)
    hard = Machine(own, 0.0, 1.0)
    for _ in range(5):
        hard.decode(4, 128)
    assert hard.outcomes["drafted"] < 0.15 * hard.outcomes.total()
    easy = Machine(own, 0.95, 1.0)
    for _ in range(60):
        easy.decode(4, 128)
    assert easy.outcomes["drafted"] > 0.3 * easy.outcomes.total()
    assert easy.speedup > 1.3


def test_pauses_grow() -> None:
    machine = Machine(controller(ceilings=CEILINGS), 0.0, 1.0)
    for _ in range(60):
        machine.decode(4, 128)
    assert machine.outcomes["slower"] + machine.outcomes["no_gain"] > 0.9 * machine.outcomes.total()
    assert machine.controller._comparison(4).pause > 4 * FIRST_PAUSE


def test_plain_steps_come_first() -> None:
    own = controller(ceilings=CEILINGS)
    outcomes = []
    for _ in range(PLAIN_ROUNDS + 1):
        decision = own.decide(1, 0, 100)
        outcomes.append(decision.outcome)
        own.observe(decision, 1, 100, 1, 1.0)
    assert outcomes == ["timing_plain"] * PLAIN_ROUNDS + ["drafted"]


def test_a_fixed_number_is_kept_to() -> None:
    assert controller(tokens=3, adaptive=False).decide(512, 0, 9) == Decision("drafted", 3, {4: 3})
    alone = controller(FULL, 3, adaptive=False).decide(1, 0, 9)
    assert alone == Decision("drafted", 0, dict.fromkeys(NGRAMS, 3))
    assert controller(tokens=12, adaptive=False).decide(1, 0, 9).layer_tokens == 12


def test_ngrams_draft_where_they_pay_as_well_as_skipped_layers() -> None:
    """They run no layer, so their drafts may be refused more often."""
    own = controller()
    learn(own.acceptance, LAYERS, 0.9)
    learn(own.acceptance, ANSWERS, 0.85)
    for length in (2, 3, 4):
        learn(own.acceptance, length, 0.3)
    decision = own.decide(8, 0, 100)
    assert decision.layer_tokens > 0
    assert set(decision.ngram_tokens) == {ANSWERS}


def test_auto_drafts_that_number_or_none() -> None:
    assert controller(tokens=3).decide(1, 0, 100).layer_tokens == 3
    assert set(controller(tokens=3).decide(1, 0, 100).ngram_tokens.values()) <= {3}
    assert controller(tokens=3).decide(512, 0, 100) == Decision("no_gain")
    assert controller(tokens=256).decide(1, 0, 100).layer_tokens == 0


def test_few_rows_draft_more_than_many() -> None:
    """Where weights bind, drafts are nearly free to verify; where arithmetic does, each costs what a token costs."""
    counts = [controller().decide(rows, 0, 100).layer_tokens for rows in (1, 4, 16, 64, 512)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 3
    assert counts[-1] == 0
    assert controller(adaptive=False).decide(512, 0, 100).layer_tokens == 1, "lossless: true drafts one at least"


def test_without_a_clock_times_decide_nothing() -> None:
    one, other = controller(), controller()
    for _ in range(20):
        other.latency.observe("draft", 4, 1e3, 1.0)
        other.latency.observe("verify", 4, 1e3, 1.0)
        decisions = [own.decide(4, 0, 100) for own in (one, other)]
        assert decisions[0] == decisions[1] != Decision("no_gain")
        one.observe(decisions[0], 4, 100, 8, 1e-3)
        other.observe(decisions[1], 4, 100, 8, 1e3)


def test_without_a_clock_refused_drafts_are_tried_again_after_a_pause() -> None:
    own, outcomes = controller(), list[str]()
    for _ in range(3 * FIRST_PAUSE):
        decision = own.decide(4, 0, 100)
        outcomes.append(decision.outcome)
        own.acceptance.observe([LAYERS] * decision.layer_tokens, 0)
        for source in decision.ngram_tokens:
            own.acceptance.observe([source], 0)
        own.observe(decision, 4, 100, 4, 1.0)
    pause = outcomes.index("no_gain")
    assert 0 < pause < FIRST_PAUSE
    assert outcomes[pause : pause + FIRST_PAUSE] == ["no_gain"] * FIRST_PAUSE
    assert "drafted" in outcomes[pause + FIRST_PAUSE :]


def test_acceptance_counts_up_to_the_first_refusal() -> None:
    acceptance = Acceptance(0.5)
    for _ in range(400):
        acceptance.observe([LAYERS, LAYERS, 3, 3], 2)
    assert acceptance.rates[LAYERS] == pytest.approx(1, abs=0.02)
    assert acceptance.rates[3] == pytest.approx(0, abs=0.02)
    assert acceptance.expected_tokens(LAYERS, 3) == pytest.approx(4, abs=0.1)
    assert Acceptance(0.5).expected_tokens(LAYERS, 2) == 1.75
    assert acceptance.rates[2] == PRIOR[2], "never tried"


def test_sources_that_were_left_alone_get_another_chance() -> None:
    acceptance = Acceptance()
    for source in (2, 3):
        learn(acceptance, source, 0.0)
    acceptance.retry()
    learn(acceptance, 2, 0.0)
    acceptance.retry()
    assert acceptance.rates[2] == pytest.approx(0, abs=0.02)
    assert acceptance.rates[3] == PRIOR[3]


def test_measured_passes_scale_the_roofline() -> None:
    """By the median of the newest, of batches of about that size."""
    latency, full = LatencyModel(OPT, 2, None, CEILINGS), FULL.prefill()
    predicted_s = latency.roofline_s(full, 4, 16, 100)
    assert latency.seconds("verify", full, 4, 16, 100) == predicted_s
    latency.observe("verify", 4, 30.0 * predicted_s, predicted_s)
    assert latency.seconds("verify", full, 4, 16, 100) == predicted_s, "one pass says little"
    for _ in range(2):
        latency.observe("verify", 4, 1.5 * predicted_s, predicted_s)
    assert latency.seconds("verify", full, 4, 16, 100) == 1.5 * predicted_s
    assert latency.seconds("verify", full, 64, 256, 100) == latency.roofline_s(full, 64, 256, 100)
    latency.forget_drafts(4)
    assert latency.seconds("verify", full, 4, 16, 100) == predicted_s
    latency.observe("plain", 4, 2.0, 1.0)
    assert latency.seconds("plain", full, 4, 16, 100) == 2.0 * predicted_s
    assert latency.seconds("verify", full, 4, 16, 100) == 2.0 * predicted_s + HOST_S
    untimed = LatencyModel(OPT, 2)
    untimed.observe("verify", 4, 1.0, 1e-9)
    assert untimed.seconds("verify", full, 4, 16, 100) == untimed.roofline_s(full, 4, 16, 100) + HOST_S


def test_the_roofline_knows_tokens_of_a_row_from_rows() -> None:
    """The cache of a row is read once for all of its tokens, weights once for all rows."""
    latency, full = LatencyModel(OPT, 2, reference=REFERENCE_AMX), FULL.prefill()
    assert latency.roofline_s(full, 4, 20, 1500) < latency.roofline_s(full, 20, 20, 1500)
    assert latency.roofline_s(full, 4, 20, 1500) < 2 * latency.roofline_s(full, 4, 4, 1500)
    assert latency.roofline_s(SKIP.step(0), 4, 4, 100) < latency.roofline_s(full, 4, 4, 100) / 2


@pytest.mark.parametrize("has_them", [True, False])
def test_without_a_clock_a_model_is_priced_by_the_kind_of_cpu(monkeypatch: pytest.MonkeyPatch, has_them: bool) -> None:
    monkeypatch.setattr(CompiledBackend, "has_matrix_units", has_them)
    model, plan = random_model("opt", layers=2), FullDepth(2).prefill()
    wanted = LatencyModel(
        model.config, 4, model.weight_itemsize, reference=REFERENCE_AMX if has_them else REFERENCE
    ).roofline_s(plan, 512, 512, 128)
    assert LatencyModel.of(model).roofline_s(plan, 512, 512, 128) == wanted
