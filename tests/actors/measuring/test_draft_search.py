"""The search for drafts: on models whose answer is known, and one in which no layer can be spared."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch

from actors.measuring.draft_search import Candidate, DraftSample, Pair, Search, named_decodes
from actors.measuring.draft_times import ROUNDS, STEPS, VERIFIED, _more, time_drafts, time_full_depth
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.plan import ChosenLayers, FullDepth, SkipDecode, Unified
from skipdecode.speculative import latency_model as prices_module
from skipdecode.speculative.draft_length import MARGIN, MOST
from skipdecode.speculative.latency_model import Prices, size_of
from tests.support.cuda_models import random_model, some_requests

L, N = 8, 20
CEILINGS = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=3e-6)


@pytest.fixture(autouse=True)
def _no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the host's work layers as small as these cost nothing, and no draft would pay."""
    monkeypatch.setattr(prices_module, "HOST_DRAFT_S", 0.0)
    monkeypatch.setattr(prices_module, "HOST_ROUND_S", 0.0)


def model_with(idle: Sequence[int]) -> Decoder:
    """Layers that do nothing at all, among others of which every one matters."""
    model = random_model("llama", layers=L)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            for linear in (layer.out_proj, layer.fc2):
                linear.weight *= 0.0 if number in idle else 3.0
    return model


def pairs_of(model: Decoder, count: int = 12) -> list[Pair]:
    requests = some_requests(N, tuple(range(3, 3 + count)))
    made = generate(model, requests, FullDepth(L)).completions
    return [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)]


def search_of(model: Decoder, batch_sizes: Sequence[int] = (1, 8), pairs: list[Pair] | None = None) -> Search:
    sample = DraftSample(model, pairs_of(model) if pairs is None else pairs, 4)
    return Search(
        sample, Prices(model.config, 4, reference=prices_module.REFERENCE_AMX), batch_sizes, N, lambda _: None
    )


@pytest.mark.parametrize("idle", [(2, 3, 5), (1, 4, 6), (0, 7)])
def test_layers_that_do_nothing_are_found(idle: tuple[int, ...]) -> None:
    found = search_of(model_with(idle)).run()
    best = found[0]
    assert best.decode == {"method": "layers", "layers": [layer for layer in range(L) if layer not in idle]}
    assert best.acceptance == (1.0,) * MOST
    assert best.pays
    for gain in best.gains:  # nothing is ever refused; the last pass of a text has room for fewer
        assert gain.tokens_per_pass == (N - 1) / -(-(N - 1) // (1 + gain.draft_tokens)) > 3
    assert best.mean_speedup == max(one.mean_speedup for one in found)


def test_where_every_layer_matters_nothing_pays() -> None:
    found = search_of(model_with(())).run()
    assert found
    assert not any(one.pays for one in found)
    for gain in (gain for one in found for gain in one.gains):
        assert (gain.draft_tokens, gain.tokens_per_pass, gain.speedup) == (0, 1.0, 1.0)


def test_a_named_schedule_is_preferred_to_the_same_layers() -> None:
    """Idle layers in the middle: SkipDecode with a constant depth runs what is left, and has a name."""
    found = search_of(model_with((1, 2, 3, 4))).run()
    assert found[0].decode == {"method": "skipdecode", "max_layers": 4, "min_layers": 4, "horizon": 1}
    assert found[0].acceptance[0] == 1.0


def test_expected_speedups_are_those_that_decoding_decides_by() -> None:
    search = search_of(model_with(()), (1, 4, 64))
    decode = {"method": "layers", "layers": [0, 1]}
    good, poor = search.candidate(decode, (0.95, 0.9)), search.candidate(decode, (0.2,))
    assert good.pays
    assert not poor.pays
    assert good.gains[0].speedup >= MARGIN
    # two of eight layers, and the head: by hand
    prices, context = search.prices, search.sample.context
    plan, full = ChosenLayers(L, (0, 1)).step(0), FullDepth(L).prefill()
    tokens, chance, drafts_s, best = 1.0, 1.0, 0.0, 0.0
    for n in range(1, MOST + 1):
        chance *= 0.95 if n == 1 else 0.9
        tokens += chance
        drafts_s += prices.model_s(plan, 1, 1, context)
        rate = tokens / (drafts_s + prices.model_s(full, 1, 1 + n, context))
        best = max(best, rate * prices.model_s(full, 1, 1, context))
    assert good.gains[0].speedup == pytest.approx(best)
    assert good.nearest >= best * 0.999
    assert good.mean_speedup**3 == pytest.approx(prod(gain.speedup for gain in good.gains))


def test_one_text_is_both_halves_and_short_ones_are_none() -> None:
    model = model_with((2, 3))
    pairs = pairs_of(model, 1)
    sample = DraftSample(model, [*pairs, ([5, 6], [7])], 4)
    assert (sample.num_prompts, sample.num_tokens) == (1, N - 1)
    one = ChosenLayers(L, (0, 1, 4, 5, 6, 7))
    (chosen,), ((judged, per_pass),) = sample.measure([one], 2), sample.judge([one])
    assert chosen.rates == (1.0, 1.0)
    assert set(judged.rates) == {1.0}
    # the last pass of a text has room for fewer
    assert per_pass == [(N - 1) / -(-(N - 1) // (1 + number)) for number in range(MOST + 1)]


def test_halves_are_of_different_texts() -> None:
    model = model_with(())
    sample = DraftSample(model, pairs_of(model), 4)
    (chosen,), ((judged, _),) = sample.measure([Unified(L, 4)], 1), sample.judge([Unified(L, 4)])
    assert chosen.tried[0] + judged.tried[0] == sample.num_tokens
    assert chosen.accepted != judged.accepted


@pytest.mark.parametrize("num_layers", [1, 2, 3, 24, 30, 32])
def test_what_is_tried_by_name_is_a_schedule_of_the_model(num_layers: int) -> None:
    """And means the same layers in a job of another length."""
    carried: dict[str, Any] = {"max_layers": num_layers, "min_layers": 1, "horizon": 9}
    without: dict[str, Any] = {"method": "skipdecode", "max_layers": num_layers, "min_layers": 1, "horizon": None}
    for decode in (*named_decodes(carried, num_layers, 64), next(iter(named_decodes(without, num_layers, 64)))):
        one, other = (make_schedule(decode, num_layers=num_layers, max_new_tokens=new) for new in (64, 7))
        assert one == other
    first = next(iter(named_decodes(carried, num_layers, 64)))
    assert make_schedule(first, num_layers=num_layers, max_new_tokens=3) == SkipDecode(num_layers, num_layers, 1, 1, 9)
    assert all(decode["method"] != "full" for decode in named_decodes({"method": "full"}, num_layers, 64))


def test_a_model_of_one_layer_has_nothing_to_try() -> None:
    model = random_model("llama", layers=1)
    requests = some_requests(N)
    made = generate(model, requests, FullDepth(1)).completions
    pairs = [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)]
    found: list[Candidate] = search_of(model, pairs=pairs).run()
    assert found == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_times_are_those_of_passes_of_every_batch_size(temperature: float) -> None:
    """Of full depth with few and many drafts, and of a candidate's own; of no other size."""
    model = model_with(())
    prompts, prices = [prompt for prompt, _ in pairs_of(model, 3)], Prices(model.config, 4, None, CEILINGS)
    time_full_depth(model, prompts, (1, 5), N, prices, temperature)
    assert all(has_seen(prices, "verify", rows, rows * (1 + n)) for rows in (1, 5) for n in VERIFIED)
    assert not any(has_seen(prices, "draft", rows, rows) for rows in (1, 5))
    assert all(has_seen(prices, "full", rows, rows) for rows in (1, 5))
    assert not has_seen(prices, "verify", 32, 32)
    assert not prices._rounds_s, "the host does more where there are drafts"
    assert len(prices._ratios["full", size_of(5), 0]) == STEPS - STEPS // 2, "nor are the first steps"
    assert len(prices._ratios["verify", size_of(5), 1]) == ROUNDS, "rounds right behind prompts are in no price"
    begun = time_drafts(model, prompts, (1, 5), N, Unified(L, 3), prices, temperature=temperature, drafted=7)
    assert list(begun) == [1, 5]
    assert has_seen(prices, "verify", 5, 40)
    assert all(has_seen(prices, "draft", rows, rows) for rows in (1, 5))
    assert prices._rounds_s.keys() == {size_of(1), size_of(5)}
    assert prices.is_timed


def test_what_the_first_passes_took_more() -> None:
    assert _more([5.0, 3.0, 1.0, 1.0, 1.0], 2) == 6.0
    assert _more([5.0, 1.0, 2.0, 3.0], 1) == 3.0
    assert _more([5.0], 0) == 0.0


def test_the_best_are_priced_by_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that take far longer here than the model says do not pay, however good they are."""

    def slow(*given: Any) -> None:
        _, _, batch_sizes, _, drafts, prices, _ = given
        for rows in batch_sizes:
            prices.saw("draft", drafts.step(0), rows, rows, 9, 1e9)

    def as_priced(*given: Any) -> None:
        _, _, batch_sizes, _, prices = given
        full = FullDepth(L).prefill()
        for rows in batch_sizes:
            prices.saw("verify", full, rows, rows, 9, prices.model_s(full, rows, rows, 9))

    model = model_with((2, 3, 5))
    search = Search(DraftSample(model, pairs_of(model), 4), Prices(model.config, 4, None, CEILINGS), (1, 8), N, print)
    monkeypatch.setattr("actors.measuring.draft_search.time_full_depth", as_priced)
    monkeypatch.setattr("actors.measuring.draft_search.time_drafts", lambda *_: None)
    assert search.run()[0].pays
    monkeypatch.setattr("actors.measuring.draft_search.time_drafts", slow)
    assert not any(one.pays for one in search.run())


def test_a_gain_is_over_full_depth_as_it_decodes() -> None:
    """Not over passes that verify nothing, which cost more than a plain step."""
    search = search_of(model_with(()), (1,))
    search.prices = prices = Prices(search.sample.model.config, 4, None, CEILINGS)
    decode, full = {"method": "layers", "layers": [0, 1]}, FullDepth(L).prefill()
    before = search.candidate(decode, (0.95,)).gains[0].speedup
    step_s = prices.model_s(full, 1, 1, 9)
    prices.saw("verify", full, 1, 1, 9, step_s)
    prices.saw("full", full, 1, 1, 9, step_s / 1.25)
    assert search.candidate(decode, (0.95,)).gains[0].speedup == pytest.approx(before / 1.25)


def has_seen(prices: Prices, kind: str, rows: int, tokens: int) -> bool:
    """Whether a pass of about that size was timed."""
    return (kind, size_of(rows), tokens // rows - 1) in prices._ratios


def test_times_that_differ_tell_of_a_busy_machine() -> None:
    prices, full = Prices(model_with(()).config, 4, None, CEILINGS), FullDepth(L).prefill()
    assert prices.spread("full") == 1.0
    for rows, took_s in ((1, 2.0), (1, 3.0), (1, 3.0), (8, 4.0), (8, 4.0), (8, 50.0)):
        prices.saw("full", full, rows, rows, 9, took_s)
        prices.saw("verify", full, rows, rows, 9, took_s**4)
    assert prices.spread("full") == pytest.approx(1.5)
