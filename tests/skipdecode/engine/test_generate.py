"""Decoding against Hugging Face: `generate` at full depth, and the naive decoder of `support.naive` under a schedule.

Everything in float32; tokens must be equal, one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.engine.generate import generate
from skipdecode.engine.logprobs import top_logprobs
from skipdecode.engine.request import Request, completions_of
from skipdecode.engine.results import BatchResult
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import ChosenLayers, EarlyExit, Schedule, SkipDecode, Unified
from tests.support.examples import examples
from tests.support.hf_tokens import FULL, L, Load, LoadHF, hf_generate
from tests.support.naive import greedy, naive_decode, random_prompts, requests_for, tokens_of
from tests.support.schedules import SCHEDULES

STYLES = ["125m", "350m", "1.3b"]
SKIPPING = [schedule for name, schedule in SCHEDULES.items() if name != "full"]
Factory = Callable[..., Path]


def logged(
    model: Decoder, requests: Sequence[Request], schedule: Schedule, **keys: object
) -> tuple[BatchResult, Tensor]:
    """The result, and the logits [B, N, V] of all calls of the model."""
    calls: list[Tensor] = []
    asking = [replace(request, top_logprobs=0) for request in requests]  # else there are only tokens to see
    hook = model.register_forward_hook(lambda _module, _args, out: calls.append(out.clone()))
    try:
        result = generate(model, asking, schedule, compact=False, **keys)  # type: ignore[arg-type]
    finally:
        hook.remove()
    return result, torch.stack(calls, dim=1)


def mean_distinct(rows: Sequence[Sequence[int]]) -> float:
    return sum(len(set(row)) for row in rows) / len(rows)


@st.composite
def schedules(draw: st.DrawFn, num_layers: int = L) -> Schedule:
    method = draw(st.sampled_from([SkipDecode, SkipDecode, EarlyExit, Unified, ChosenLayers]))
    if method is ChosenLayers:
        return ChosenLayers(num_layers, tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))))
    if method is Unified:
        return Unified(num_layers, draw(st.integers(2, num_layers)))
    w, m, big_m = sorted(draw(st.tuples(*[st.integers(1, num_layers)] * 3)))
    return method(num_layers, big_m, m, w, draw(st.integers(1, 20)))


# Full depth: Hugging Face


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("lengths", [[1, 9, 4, 16, 2, 9], [7, 7, 7, 7], [1], [1, 1]], ids=str)
@pytest.mark.grid
def test_full_depth_is_hugging_face_generate(
    checkpoint_factory: Factory, ours: Load, hf: LoadHF, style: str, lengths: list[int]
) -> None:
    folder = checkpoint_factory(style)
    prompts = random_prompts(lengths, seed=len(lengths))
    wanted = hf_generate(hf(folder), prompts, 30)
    result = generate(ours(folder), requests_for(prompts, greedy(30)), FULL)
    assert tokens_of(result) == wanted
    assert mean_distinct(wanted) >= 5  # a model that repeats one token would prove nothing
    for c in result.completions:
        assert c.finish_reason == ("stop" if c.tokens[-1] == 2 else "length")
        assert c.layers_run == L * (len(c.tokens) - 1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", [FULL, SkipDecode(L, 5, 2, 1, 9)], ids=["full", "skipdecode"])
@pytest.mark.grid
def test_rows_that_end_at_different_steps(
    ending_checkpoint: Callable[[str], Path], ours: Load, hf: LoadHF, style: str, schedule: Schedule
) -> None:
    """EOS falls at many different steps, and the batch shrinks on the way."""
    folder = ending_checkpoint(style)
    model, eos = ours(folder), ours(folder).config.eos_token_id
    prompts = random_prompts([3, 9, 1, 5, 12, 7, 2, 8, 10, 4, 6, 11, 3, 9, 14, 5] * 2, seed=5)
    limits = [60 if i % 4 == 0 else 25 for i in range(32)]
    if schedule == FULL:
        wanted = [t[:n] for t, n in zip(hf_generate(hf(folder), prompts, 60, eos), limits, strict=True)]
    else:
        wanted = [naive_decode(hf(folder), p, schedule, n, eos) for p, n in zip(prompts, limits, strict=True)]
    requests = [Request(str(i), p, greedy(n)) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    result = generate(model, requests, schedule)
    assert tokens_of(result) == wanted
    assert [c.finish_reason for c in result.completions] == ["stop" if t[-1] == eos else "length" for t in wanted]
    assert len({len(t) for t in wanted if t[-1] == eos}) >= 3, "the case has lost its point: rows end together"
    assert len(set(result.stats.batch_rows)) >= 2, "the case has lost its point: no compaction"
    assert tokens_of(generate(model, requests, schedule, compact=False)) == wanted


def test_ignore_eos_runs_to_the_end(ending_checkpoint: Callable[[str], Path], ours: Load, hf: LoadHF) -> None:
    folder = ending_checkpoint("125m")
    prompts = random_prompts([3, 9, 1, 5, 12, 7, 2, 8], seed=5)
    result = generate(ours(folder), requests_for(prompts, greedy(40, ignore_eos=True)), FULL)
    wanted = hf_generate(hf(folder), prompts, 40, eos=-7)
    assert tokens_of(result) == wanted
    assert any(ours(folder).config.eos_token_id in row[:-1] for row in wanted)
    assert {c.finish_reason for c in result.completions} == {"length"}


# Schedules: the naive decoder, one teacher-forced pass, and each row alone


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", [*SKIPPING, SkipDecode(L, 4, 4, 2, 1)], ids=str)
@pytest.mark.grid
def test_schedules_are_the_naive_decoder(
    checkpoint_factory: Factory, ours: Load, hf: LoadHF, style: str, schedule: Schedule
) -> None:
    folder = checkpoint_factory(style)
    prompts = random_prompts([1, 9, 4, 13], seed=4)
    wanted = [naive_decode(hf(folder), p, schedule, 20) for p in prompts]
    assert tokens_of(generate(ours(folder), requests_for(prompts, greedy(20)), schedule)) == wanted
    full = [naive_decode(hf(folder), p, FULL, 20) for p in prompts]
    assert wanted != full, "the schedule changes nothing here: the case has lost its point"
    assert mean_distinct(wanted) >= 4


def test_naive_decoder_is_hugging_face(checkpoint_factory: Factory, hf: LoadHF) -> None:
    """The oracle itself, where Hugging Face has an answer."""
    for style in STYLES:
        reference = hf(checkpoint_factory(style))
        prompts = random_prompts([1, 9, 4], seed=6)
        assert [naive_decode(reference, p, FULL, 20) for p in prompts] == hf_generate(reference, prompts, 20)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=examples(15))
@given(
    schedule=schedules(),
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=5),
    num_new=st.integers(1, 16),
)
def test_decoding_is_one_teacher_forced_pass(
    checkpoint_factory: Factory, ours: Load, style: str, schedule: Schedule, lengths: list[int], num_new: int
) -> None:
    """The prefix trick: cached steps under any schedule have the logits of one pass over prompt and answer."""
    model = ours(checkpoint_factory(style))
    prompts = random_prompts(lengths, seed=sum(lengths))
    result, decoded = logged(model, requests_for(prompts, greedy(num_new, ignore_eos=True)), schedule)
    batch = teacher_batch([(p, c.tokens) for p, c in zip(prompts, result.completions, strict=True)], 1)
    with torch.inference_mode():
        forced = teacher_forced_logits(model, batch, schedule)
    torch.testing.assert_close(forced, decoded, atol=1e-4, rtol=0)
    assert forced.argmax(-1).tolist() == tokens_of(result)


@settings(max_examples=examples(25))
@given(data=st.data(), schedule=schedules())
def test_a_row_does_not_depend_on_its_batch(
    ending_checkpoint: Callable[[str], Path], ours: Load, data: st.DataObject, schedule: Schedule
) -> None:
    """Any subset in any order, compaction, fixed shapes: the tokens, reasons and layers of the row alone."""
    model = ours(ending_checkpoint("125m"))
    limits = [1, 3, 18, 18, 7, 18, 18, 12]
    prompts = random_prompts([3, 9, 1, 5, 12, 7, 2, 8], seed=7)
    pool = [Request(f"row-{i}", p, greedy(limits[i])) for i, p in enumerate(prompts)]
    order = data.draw(st.lists(st.sampled_from(range(8)), min_size=1, max_size=8, unique=True))
    chosen = [pool[i] for i in order]
    alone = [generate(model, [r], schedule).completions[0] for r in chosen]
    assert generate(model, chosen, schedule).completions == alone
    fixed = generate(model, chosen, schedule, prompt_columns=16, batch_rows=8, compact=False)
    assert fixed.completions == alone
    assert set(fixed.stats.batch_rows) <= {8}
    assert fixed.stats.prompt_columns == 16
    both = generate(model, chosen, schedule, prompt_columns=13, batch_rows=10)  # fixed start, free to shrink
    assert both.completions == alone


@settings(max_examples=examples(30))
@given(
    schedule=schedules(),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    num_new=st.integers(1, 16),
)
def test_cache_bytes_are_the_prefixes(loaded: Decoder, schedule: Schedule, lengths: list[int], num_new: int) -> None:
    result = generate(loaded, requests_for(random_prompts(lengths), greedy(num_new)), schedule)
    steps = [sum(layer in schedule.step(k).layers for k in range(num_new - 1)) for layer in range(L)]
    heads, dim = loaded.config.num_attention_heads, loaded.config.head_dim
    assert result.stats.cache_bytes == 2 * len(lengths) * heads * dim * 4 * sum(max(lengths) + n for n in steps)


@settings(max_examples=examples(20))
@given(schedule=schedules(), num_new=st.integers(1, 20))
def test_layers_run_are_the_budgets(
    ending_checkpoint: Callable[[str], Path], ours: Load, schedule: Schedule, num_new: int
) -> None:
    model = ours(ending_checkpoint("125m"))
    result = generate(model, requests_for(random_prompts([3, 9, 1, 5], seed=5), greedy(num_new)), schedule)
    for c in result.completions:
        assert c.layers_run == sum(schedule.step(k).num_layers_run for k in range(len(c.tokens) - 1))
    stats = result.stats
    assert stats.layers_run == sum(c.layers_run for c in result.completions)
    assert stats.output_tokens == sum(len(c.tokens) for c in result.completions)
    assert stats.input_tokens == 3 + 9 + 1 + 5
    assert stats.rows == 4
    assert stats.decode_steps == max(len(c.tokens) for c in result.completions) - 1 == len(stats.batch_rows)
    assert stats.row_steps == sum(stats.batch_rows)
    assert stats.row_steps >= stats.output_tokens - 4
    depth = [schedule.step(k).num_layers_run for k in range(stats.decode_steps)]
    assert stats.layer_row_steps == sum(n * d for n, d in zip(stats.batch_rows, depth, strict=True))


def test_fixed_shapes_always_have_a_mask(loaded: Decoder) -> None:
    """Else a full batch of full-length rows would take another kernel than a row among padding rows."""
    requests = requests_for(random_prompts([6, 6, 6]), greedy(5, ignore_eos=True))
    for keys, is_masked in (({}, False), ({"batch_rows": 3, "prompt_columns": 6, "compact": False}, True)):
        masks: list[bool] = []
        hook = loaded.register_forward_hook(lambda _m, args, _out, masks=masks: masks.append(args[2].valid is not None))
        generate(loaded, requests, FULL, **keys)  # type: ignore[arg-type]
        hook.remove()
        assert masks == [is_masked] * 5


@pytest.mark.parametrize("async_output", [(1, 1), (4, 1), (3, 2)], ids=str)
def test_log_probabilities_come_with_late_output(loaded: Decoder, async_output: tuple[int, int]) -> None:
    """Rows leave between, so that what is seen of a choice and given later is of other rows than those left."""
    schedule, prompts = SkipDecode(L, 5, 2, 1, 12), random_prompts([3, 9, 5, 1, 7], seed=1)
    pool = [
        Request(str(i), p, greedy(4 + 3 * i, ignore_eos=True), top_logprobs=(2, None, 0, 3, 1)[i])
        for i, p in enumerate(prompts)
    ]
    wanted = generate(loaded, pool, schedule).completions
    static = StaticBatch(
        loaded, pool, schedule, compact_at=1.0, check_every=async_output[0], max_pending=async_output[1]
    )
    static.prefill()
    while not static.is_done:
        static.step()
    assert len(set(static.stats.batch_rows)) > 2, "no row has left"
    for made, whole in zip(completions_of(static.rows, schedule), wanted, strict=True):
        assert made.tokens == whole.tokens
        assert len(made.logprobs) == len(whole.logprobs)
        for own, other in zip(made.logprobs, whole.logprobs, strict=True):
            assert own.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in own.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("num_top", [1, 2, 5])
def test_equally_likely_tokens_are_listed_by_id(num_top: int) -> None:
    """The first is the one that greedy choice takes; a row gets the same whatever its neighbours ask for."""
    logits, equal = torch.zeros(2, 200), ([150, 3, 90, 7, 1, 198], [199, 0, 77, 76, 75, 12])
    for row, ids in enumerate(equal):
        logits[row, ids] = 3.0
    _, values, ids = top_logprobs(logits, logits.argmax(dim=-1), num_top)
    assert ids.tolist() == [sorted(row)[:num_top] for row in equal]
    assert ids[:, 0].tolist() == logits.argmax(dim=-1).tolist()
    assert torch.equal(values, logits.log_softmax(dim=-1).gather(1, ids))


# Sampling inside the loop: streams belong to rows


def test_draws_of_a_row_do_not_depend_on_its_batch(loaded: Decoder, check_every: Callable[[int], None]) -> None:
    """Same (seed, id, k), same token: reordered, alone, with greedy neighbours, compacted, fixed shape, any check."""
    prompts = random_prompts([3, 9, 1, 5, 12, 7], seed=5)
    settings_of = [
        greedy(24, temperature=1.0, seed=1),
        greedy(5, temperature=0.7, top_k=20, seed=1),
        greedy(24),
        greedy(24, temperature=1.5, top_p=0.9, seed=2),
        greedy(3, temperature=1.0, seed=1),
        greedy(2),
    ]
    pool = [Request(f"id-{i}", p, s) for i, (p, s) in enumerate(zip(prompts, settings_of, strict=True))]
    schedule = SkipDecode(L, 6, 3, 1, 12)
    alone = [generate(loaded, [r], schedule).completions[0] for r in pool]
    for interval in (1, 8):
        check_every(interval)
        for order in (range(6), range(5, -1, -1), (3, 0), (2, 3, 5, 4), (1, 4, 5, 0)):
            wanted = [alone[i] for i in order]
            assert generate(loaded, [pool[i] for i in order], schedule).completions == wanted
            fixed = generate(loaded, [pool[i] for i in order], schedule, prompt_columns=16, batch_rows=7, compact=False)
            assert fixed.completions == wanted
    shrunk = generate(loaded, pool, schedule).stats.batch_rows
    assert len(set(shrunk)) > 1, "no compaction happened"
    greedily = generate(loaded, [Request("id-0", prompts[0], greedy(24))], schedule).completions[0]
    assert alone[0] != greedily
    other_id = generate(loaded, [Request("id-9", prompts[0], settings_of[0])], schedule).completions[0]
    other_seed = generate(
        loaded, [Request("id-0", prompts[0], greedy(24, temperature=1.0, seed=3))], schedule
    ).completions[0]
    assert len({tuple(c.tokens) for c in (alone[0], other_id, other_seed)}) == 3


def test_top_k_one_is_greedy(loaded: Decoder) -> None:
    prompts = random_prompts([3, 9, 1], seed=5)
    wanted = tokens_of(generate(loaded, requests_for(prompts, greedy(20)), FULL))
    for keys in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}, {"temperature": 1e-38}):
        sampled = generate(loaded, requests_for(prompts, greedy(20, **({"temperature": 2.0} | keys))), FULL)
        assert tokens_of(sampled) == wanted, keys


# A constant budget: the same layers at every step


@settings(max_examples=examples(10))
@given(budget=st.integers(1, L), num_new=st.integers(2, 10))
def test_constant_budget_is_the_naive_decoder_with_fixed_layers(
    loaded: Decoder, tiny_checkpoint: Path, hf: LoadHF, budget: int, num_new: int
) -> None:
    assume(budget < L)
    for schedule in (SkipDecode(L, budget, budget, 1, 5), EarlyExit(L, budget, budget, 1, 5)):
        layers = schedule.step(0).layers
        assert layers == schedule.step(99).layers
        prompts = random_prompts([5, 2], seed=budget)
        wanted = [naive_decode(hf(tiny_checkpoint), p, schedule, num_new) for p in prompts]
        assert tokens_of(generate(loaded, requests_for(prompts, greedy(num_new)), schedule)) == wanted
