"""The search for drafts: on models whose answer is known, and one in which no layer can be spared."""

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch

from actors.measuring.draft_search import Candidate, DraftSample, Pair, Search, named_decodes
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import ChosenLayers, FullDepth, SkipDecode, Unified
from skipdecode.speculative.controller import MAX_DRAFT_TOKENS, MIN_SPEEDUP
from skipdecode.speculative.latency_model import LatencyModel
from tests.support.cuda_models import random_model, some_requests

L, N = 8, 20
CEILINGS = Ceilings(flops_per_s=1e12, bytes_per_s=2.5e10, call_s=1e-7)


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
    return Search(sample, LatencyModel(model.config, 4, None, CEILINGS), batch_sizes, N, lambda _: None)


@pytest.mark.parametrize(
    "idle", [(1, 4, 6), *(pytest.param(one, marks=pytest.mark.slow) for one in ((2, 3, 5), (0, 7)))]
)
def test_layers_that_do_nothing_are_found(idle: tuple[int, ...]) -> None:
    found = search_of(model_with(idle)).run()
    best = found[0]
    assert best.decode == {"method": "layers", "layers": [layer for layer in range(L) if layer not in idle]}
    assert best.acceptance == 1.0
    assert best.pays
    for gain in best.gains:  # nothing is ever refused
        assert gain.tokens_per_pass == 1 + gain.draft_tokens > 3
    assert best.mean_speedup == max(one.mean_speedup for one in found)


@pytest.mark.slow
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
    assert found[0].acceptance == 1.0


def test_expected_speedups_are_by_the_roofline() -> None:
    search = search_of(model_with(()), (1, 4, 64))
    decode = {"method": "layers", "layers": [0, 1]}
    good, poor = search.candidate(decode, 0.9), search.candidate(decode, 0.2)
    assert good.pays
    assert not poor.pays
    assert good.gains[0].speedup >= MIN_SPEEDUP
    # two of eight layers, and the head: by hand
    seconds, context = search.latency.roofline_s, search.sample.context
    plan, full = ChosenLayers(L, (0, 1)).step(0), FullDepth(L).prefill()
    tokens, drafts_s, best = 1.0, 0.0, 0.0
    for n in range(1, MAX_DRAFT_TOKENS + 1):
        tokens += 0.9**n
        drafts_s += seconds(plan, 1, 1, context)
        rate = tokens / (drafts_s + seconds(full, 1, 1 + n, context))
        best = max(best, rate * seconds(full, 1, 1, context))
    assert good.gains[0].speedup == pytest.approx(best)
    assert good.nearest >= best * 0.999
    assert good.mean_speedup**3 == pytest.approx(prod(gain.speedup for gain in good.gains))


def test_one_text_is_both_halves_and_short_ones_are_none() -> None:
    model = model_with((2, 3))
    pairs = pairs_of(model, 1)
    sample = DraftSample(model, [*pairs, ([5, 6], [7])], 4)
    assert (sample.num_prompts, sample.num_tokens) == (1, N - 1)
    one = ChosenLayers(L, (0, 1, 4, 5, 6, 7))
    assert sample.acceptance([one]) == sample.acceptance([one], judging=True) == [1.0]


def test_halves_are_of_different_texts() -> None:
    model = model_with(())
    sample = DraftSample(model, pairs_of(model), 4)
    assert sample.acceptance([Unified(L, 4)]) != sample.acceptance([Unified(L, 4)], judging=True)


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
