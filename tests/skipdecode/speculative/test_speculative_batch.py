"""Lossless decoding against full depth: same tokens, whatever is drafted and whoever is in the batch. Float32."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.model import Quantization
from skipdecode.config.sampling import Sampling
from skipdecode.cost.roofline import Ceilings
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request, Row
from skipdecode.engine.results import LosslessStats
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, Unified
from skipdecode.speculative import speculative_batch
from skipdecode.speculative.controller import Decision, Outcome, SpeculationController
from skipdecode.speculative.generate_lossless import generate_lossless
from skipdecode.speculative.latency_model import LatencyModel
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.cpu_backends import forced, kind, product_dtype
from tests.support.cuda_models import random_model
from tests.support.lossless_models import DRAFTS, FULL, Erratic, L, models
from tests.support.naive import greedy, random_prompts, requests_for
from tests.support.processed import processing
from tests.support.ties import is_tie

__all__ = ["kind", "models", "product_dtype"]  # fixtures

PROMPT_LENGTHS = [3, 30, 7, 1, 12, 5, 18, 9]


def run(batch: SpeculativeBatch, arrivals: dict[int, list[Request]], cancel_at: dict[str, int]) -> dict[str, Row]:
    """Step 0, 1, ...: who arrives joins, who is to go is cancelled, until nobody is left."""
    rows: dict[str, Row] = {}
    step = 0
    while step <= max(arrivals) or not batch.is_done:
        if new := arrivals.get(step):
            rows |= {row.request.id: row for row in batch.join(new)}
        for name, at in cancel_at.items():
            if at == step and name in rows:
                rows[name].cancel()
        batch.step()
        step += 1
    return rows


def assert_same(model: Decoder, request: Request, made: list[int], reason: str | None) -> None:
    """What it makes alone at full depth, but for what is no clear choice of the model's."""
    completion = generate(model, [request], FullDepth(model.config.num_hidden_layers)).completions[0]
    if reason == "cancelled":
        wanted = completion.tokens[: len(made)]
        assert made == wanted or is_tie(model, request, made, wanted)
    elif (made, reason) != (completion.tokens, completion.finish_reason):
        assert is_tie(model, request, made, completion.tokens), request


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    prompt = random_prompts([draw(st.integers(1, 40))], seed=draw(st.integers(0, 99)), vocab=200)[0]
    max_new_tokens = draw(st.integers(1, 30))
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        top_k=draw(st.sampled_from([0, 20])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        seed=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        **draw(processing(max_new_tokens, vocab=200)),
    )
    return Request(name, prompt, sampling)


@settings(max_examples=5)
@given(
    data=st.data(),
    name=st.sampled_from(["opt", "llama", "gemma3"]),
    drafts=st.sampled_from(DRAFTS),
    draft_tokens=st.sampled_from([None, 1, 2, 5]),
    adaptive=st.booleans(),
)
def test_rows_that_come_and_go_have_the_tokens_of_full_depth(
    models: dict[str, Decoder],
    data: st.DataObject,
    name: str,
    drafts: Schedule,
    draft_tokens: int | None,
    adaptive: bool,
) -> None:
    arrivals: dict[int, list[Request]] = {}
    names = [str(i) for i in range(data.draw(st.integers(1, 9)))]
    for row in names:
        arrivals.setdefault(data.draw(st.integers(0, 12)), []).append(data.draw(requests(row)))
    cancel_at = {row: data.draw(st.integers(0, 20)) for row in names if data.draw(st.integers(0, 3)) == 0}
    schedule, model = Lossless(L, drafts, draft_tokens, adaptive), models[name]
    seed = data.draw(st.integers(0, 99)) if adaptive else None
    controller = None if seed is None else Erratic(schedule, model.config, seed)
    batch = SpeculativeBatch(model, schedule, controller=controller)
    rows = run(batch, arrivals, cancel_at)
    assert sorted(rows) == sorted(names)
    for row in rows.values():
        assert_same(models[name], row.request, row.tokens, row.finish_reason)


class NeverDrafting(SpeculationController):
    def decide(self, rows: int, k: int, context: int) -> Decision:
        return Decision("no_gain")


@pytest.mark.grid
@pytest.mark.parametrize("limits", [(4, 40, 3), (30, 4, 30), pytest.param((70, 66, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("drawing", [(1,), (0, 2), (0, 1, 2)])
def test_rounds_without_drafts_of_rows_that_draw_and_others(
    models: dict[str, Decoder], limits: Sequence[int], drawing: Sequence[int]
) -> None:
    """Each looks its own random numbers up, whatever limits its neighbours have, and whoever joins or goes."""
    schedule = Lossless(L, Unified(L, 3), adaptive=True)
    prompts = random_prompts([5, 9, 3] * 2, seed=1, vocab=200)
    for model in models.values():
        pool = [
            Request(f"{i}", prompt, greedy(limit, temperature=0.9 * (i % 3 in drawing), ignore_eos=True))
            for i, (prompt, limit) in enumerate(zip(prompts, limits * 2, strict=True))
        ]
        batch = SpeculativeBatch(model, schedule, controller=NeverDrafting(schedule, LatencyModel(model.config, 4)))
        rows = run(batch, {0: pool[:3], 6: pool[3:]}, {})
        for row in rows.values():
            assert_same(model, row.request, row.tokens, row.finish_reason)


@pytest.mark.parametrize("where", ["_params", "LogprobRecorder", "SlotCache.take"])
def test_a_join_that_fails_changes_nobody(
    models: dict[str, Decoder], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that runs out on the way: rows in the batch go on with their own numbers, though one left just then."""
    model, schedule = models["opt"], Lossless(L, Unified(L, 3), adaptive=True)
    sampled = [greedy(limit, temperature=0.9, ignore_eos=True) for limit in (30, 5, 30, 9)]
    pool = [
        Request(str(i), prompt, sampling)
        for i, (prompt, sampling) in enumerate(zip(random_prompts([4] * 4, seed=1, vocab=200), sampled, strict=True))
    ]
    batch = SpeculativeBatch(model, schedule, controller=NeverDrafting(schedule, LatencyModel(model.config, 4)))
    rows = batch.join(pool[:3])
    for _ in range(6):  # the second row ends
        batch.step()

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(f"skipdecode.{'kv.slot_cache' if '.' in where else 'engine.continuous_batch'}.{where}", fails)
        with pytest.raises(MemoryError):
            batch.join(pool[3:])
    while not batch.is_done:
        batch.step()
    for row in rows:
        assert_same(model, row.request, row.tokens, row.finish_reason)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_drafts_are_accepted_and_refused(models: dict[str, Decoder], drafts: Schedule, temperature: float) -> None:
    """Neither way is idle in these tests; drafts of all layers are always right, and no pass is in vain."""
    pool = requests_for(random_prompts(PROMPT_LENGTHS, seed=2, vocab=200), greedy(40, temperature=temperature))
    accepted = drafted = by_layers = right = 0
    for model in models.values():
        stats = generate_lossless(model, pool, Lossless(L, drafts, 4)).stats
        accepted, drafted = accepted + sum(stats.accepted_at), drafted + sum(stats.drafted_at)
        assert isinstance(stats, LosslessStats)
        assert (sum(stats.drafted_by), sum(stats.accepted_by)) == (sum(stats.drafted_at), sum(stats.accepted_at))
        by_layers, right = by_layers + stats.drafted_by[0], right + stats.accepted_by[0]
        assert stats.output_tokens - stats.rows <= stats.row_steps + sum(stats.accepted_at)
    if drafts == SkipDecode(L, 6, 6, 1, 1):
        # short of what is no clear choice, and of draws that land elsewhere among fewer tokens
        assert right > (0.98 if temperature == 0 else 0.9) * by_layers > 0
    elif temperature == 0 or drafts != FULL:
        assert 0 < accepted < drafted


def test_layers_count_what_was_refused(models: dict[str, Decoder]) -> None:
    """4 drafts of 2 layers each and 5 columns of 6 layers in each of a row's rounds."""
    request = Request("row", random_prompts([9], seed=1, vocab=200)[0], greedy(31, temperature=1.0, ignore_eos=True))
    result = generate_lossless(models["opt"], [request], Lossless(L, Unified(L, 2), 4))
    drafted, stats = sum(result.stats.drafted_at), result.stats
    assert stats.decode_steps == stats.row_steps > 0
    completion = result.completions[0]
    by_repeats = (completion.layers_run - 6 * (drafted + stats.row_steps)) / 2
    assert 0 <= by_repeats <= drafted
    assert completion.layers_run == completion.ffns_run
    assert stats.layers_run == completion.layers_run
    assert stats.layer_row_steps >= completion.layers_run


@pytest.mark.parametrize("tokens", [2, 5, 30])
def test_every_round_is_observed_and_counted_by_its_outcome(models: dict[str, Decoder], tokens: int) -> None:
    """Batches that end within a few rounds teach the controller too."""

    heard = Counter[str]()

    class Listening(SpeculationController):
        def observe(
            self, decision: Decision, rows: int, context: int, num_tokens: int, took_s: float, num_rounds: int = 1
        ) -> None:
            super().observe(decision, rows, context, num_tokens, took_s, num_rounds)
            heard[decision.outcome] += num_rounds
            assert took_s > 0
            assert num_tokens >= rows * num_rounds
            assert num_rounds <= decision.num_rounds

    model, schedule = models["opt"], Lossless(L, Unified(L, 2), None, True)
    controller = Listening(schedule, LatencyModel(model.config, 4, None, Ceilings(1e12, 1e10, 1e-6)))
    counted, steps = Counter[str](), 0
    for batch in range(12):
        pool = requests_for(random_prompts([5, 9], seed=batch, vocab=200), greedy(tokens, ignore_eos=True))
        stats = generate_lossless(model, pool, schedule, controller=controller).stats
        assert isinstance(stats, LosslessStats)
        counted.update({name: getattr(stats, f"{name}_rounds") for name in get_args(Outcome)})
        steps += stats.decode_steps
        assert stats.draft_s + stats.verify_s <= stats.decode_s
    assert +counted == heard
    assert counted.total() == steps > 0


def test_one_token_is_that_of_the_prompt(models: dict[str, Decoder]) -> None:
    pool = requests_for(random_prompts([3, 9], vocab=200), greedy(1))
    result = generate_lossless(models["opt"], pool, Lossless(L, Unified(L, 2), 4))
    full = generate(models["opt"], pool, FULL)
    assert [c.tokens for c in result.completions] == [c.tokens for c in full.completions]
    assert [c.layers_run for c in result.completions] == [0, 0]


@pytest.mark.parametrize("at_a_time", [speculative_batch.FEW, 1])
def test_logprobs_are_those_of_full_depth(
    models: dict[str, Decoder], at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows that ask for them, with as many of the likeliest as they ask for; columns are chosen in parts."""
    monkeypatch.setattr(speculative_batch, "FEW", at_a_time)
    prompts, sampling = random_prompts([5, 17, 3], seed=4, vocab=200), greedy(20, temperature=0.5)
    pool = [
        Request(str(i), p, sampling, top_logprobs=top)
        for i, (p, top) in enumerate(zip(prompts, (0, None, 3), strict=True))
    ]
    made, wanted = SpeculativeBatch(models["opt"], Lossless(L, SkipDecode(L, 5, 3, 1, 9), 3)), list[Row]()
    rows = list(run(made, {0: pool}, {}).values())
    for request in pool:
        alone = SpeculativeBatch(models["opt"], Lossless(L, FULL, 1, True))
        wanted += run(alone, {0: [request]}, {}).values()
    for ours, theirs in zip(rows, wanted, strict=True):
        assert ours.tokens == theirs.tokens
        count = 0 if ours.request.top_logprobs is None else len(ours.tokens)
        assert len(ours.logprobs[:count]) == count
        assert ours.request.top_logprobs is not None or not ours.logprobs
        for a, b in zip(ours.logprobs[:count], theirs.logprobs[:count], strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            assert len(a.top) == ours.request.top_logprobs


@pytest.mark.parametrize("shape", ["opt", "llama"])
def test_the_kernels_give_the_same_bits_whatever_was_drafted(product_dtype: torch.dtype, shape: str) -> None:
    """A column of several in a pass is computed as one that is alone, in bfloat16 too: tokens and log-probabilities are
    those without drafts, bit by bit (behind the same pass over the prompts)."""
    model, sampling = random_model(shape, layers=L, dtype=product_dtype).pack(), greedy(16, ignore_eos=True)
    pool = [
        Request(str(i), p, replace(sampling, temperature=0.5 * (i % 2)), top_logprobs=1)
        for i, p in enumerate(random_prompts([1 + i % 9 for i in range(14)], vocab=200))
    ]
    made = []
    for schedule in (
        Lossless(L, FULL, 1, True),
        Lossless(L, SkipDecode(L, 6, 6, 1, 1), 5),
        Lossless(L, Unified(L, 4), 3),
    ):
        rows = run(SpeculativeBatch(model, schedule), {0: pool}, {}).values()
        made.append([(row.tokens, [one.logprob for one in row.logprobs[: len(row.tokens)]]) for row in rows])
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("shape", ["opt", "llama", "qwen3"])
def test_the_kernels_give_the_bits_of_fixed_shapes(kind: tuple[torch.dtype, Quantization | None], shape: str) -> None:
    """Of a batch with padded rows and prompts, which `sampling.deterministic` asks for, whoever is beside a row."""
    dtype, quantization = kind
    model = random_model(shape, layers=L, dtype=dtype).pack(quantization)
    assert model.is_batch_invariant
    pool = [
        Request(str(i), p, greedy(16, ignore_eos=True, temperature=0.5 * (i % 2)), top_logprobs=i % 4)
        for i, p in enumerate(random_prompts([1 + 5 * i % 29 for i in range(14)], vocab=200))
    ]
    wanted = [
        generate(model, [request], FULL, prompt_columns=32, batch_rows=8, compact=False).completions[0]
        for request in pool
    ]
    for size, schedule in ((1, Lossless(L, Unified(L, 4), 3)), (14, Lossless(L, SkipDecode(L, 6, 6, 1, 1), 5))):
        made = [
            completion
            for start in range(0, len(pool), size)
            for completion in generate_lossless(model, pool[start : start + size], schedule).completions
        ]
        assert [(c.tokens, c.logprobs) for c in made] == [(c.tokens, c.logprobs) for c in wanted]


def test_no_others_promise_these_bits() -> None:
    with forced("torch"):
        assert not random_model("llama", layers=L).pack().is_batch_invariant
    assert not random_model("llama", layers=L).is_batch_invariant  # not packed
    narrower = random_model("opt, norms behind", layers=L).pack()  # torch's products before and behind the layers
    assert not narrower.is_batch_invariant


def test_stop_strings_end_rows_within_a_draft(tiny_checkpoint: Path) -> None:
    model = load_model(tiny_checkpoint)
    decode = Tokenizer(tiny_checkpoint, model.config).decode
    prompts = random_prompts(PROMPT_LENGTHS, seed=6)
    free = generate(model, requests_for(prompts, greedy(24, ignore_eos=True)), FULL)
    stops = [decode(c.tokens)[8:10] or "x" for c in free.completions]
    pool = [
        Request(str(i), p, greedy(24, ignore_eos=True, stop=(stop,)))
        for i, (p, stop) in enumerate(zip(prompts, stops, strict=True))
    ]
    full = generate(model, pool, FULL, decode_text=decode)
    ours = generate_lossless(model, pool, Lossless(L, SkipDecode(L, 6, 6, 1, 1), 5), decode_text=decode)
    assert [(c.tokens, c.finish_reason) for c in ours.completions] == [
        (c.tokens, c.finish_reason) for c in full.completions
    ]
    assert {c.finish_reason for c in ours.completions} >= {"stop"}
