"""FFN-SkipLLM against the naive decoder of `support.naive`: every mode and base schedule, float32, token for token."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTForCausalLM

from skipdecode.checkpoint.weights import load_model
from skipdecode.cost.roofline import BatchShape, Ceilings, predict_s
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import CHECK_EVERY
from skipdecode.families import released
from skipdecode.model.decoder import Decoder
from skipdecode.model.ffn_executor import ALL_ROWS, SimilarityRecorder, similarity
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.ffn_skip import FFNSkip, SkipBand, SkipSaturated
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule, has_no_kv_holes
from tests.support.examples import examples
from tests.support.naive import FFNRule, greedy, naive_row, random_prompts, requests_for, tokens_of
from tests.support.schedules import SCHEDULES

L = 6
FULL = FullDepth(L)
LENGTHS = [5, 1, 12, 3]
Factory = Callable[..., Path]
Load = Callable[[Path], Decoder]
LoadHF = Callable[[Path], OPTForCausalLM]


def thresholds(reference: OPTForCausalLM) -> list[float]:
    """Cosines that occur, so that some tokens flip at each layer and some never do."""
    seen = sorted(naive_row(reference, random_prompts([7])[0], FULL, 12, -7, FFNRule(1.0, 0, 0, 0))[2])
    return [-1.0, *(round(seen[len(seen) * i // 6], 3) for i in (1, 3, 5)), 1.0]


@pytest.mark.parametrize(
    ("style", "interval"),
    [
        ("125m", 3),
        pytest.param("350m", 1, marks=pytest.mark.slow),
        pytest.param("125m", 1, marks=pytest.mark.slow),
        pytest.param("350m", 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "base",
    [
        pytest.param(base, id=name, marks=[] if name == "skipdecode" else pytest.mark.slow)  # any rule below has all
        for name, base in SCHEDULES.items()
    ],
)
def test_row_is_the_naive_decoder(
    ending_checkpoint: Callable[[str], Path], hf: LoadHF, ours: Load, monkeypatch: pytest.MonkeyPatch,
    style: str, interval: int, base: Schedule,
) -> None:  # fmt: skip
    """Never to always, no warm-up and more, any borders, rows of mixed lengths that end early and leave the batch."""
    monkeypatch.setitem(CHECK_EVERY, "cpu", interval)  # as on CUDA, where a look waits for the device
    folder = ending_checkpoint(style)
    reference, model = hf(folder), ours(folder)
    eos, prompts, limits = model.config.eos_token_id, random_prompts(LENGTHS, seed=3), (24, 5, 24, 8)
    ran, sizes = set(), set()
    for threshold in thresholds(reference):
        for cold_start, cold_end, warmup in ((0, 0, 0), (1, 2, 0), (0, 1, 3), (2, 0, 30)):
            rule = FFNRule(threshold, cold_start, cold_end, warmup)
            schedule = SkipSaturated(base, warmup, cold_start, cold_end, threshold)
            wanted = [naive_row(reference, p, base, n, eos, rule)[:2] for p, n in zip(prompts, limits, strict=True)]
            requests = [Request(str(i), p, greedy(n)) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
            result = generate(model, requests, schedule)
            assert [(c.tokens, c.ffns_run) for c in result.completions] == wanted, rule
            for c in result.completions:
                assert c.layers_run == sum(base.step(k).num_layers_run for k in range(len(c.tokens) - 1))
            ran |= {c.ffns_run / max(c.layers_run, 1) for c in result.completions}
            sizes |= set(result.stats.batch_rows)
    assert min(ran) < 0.5, "hardly anything was skipped"
    assert len(ran) > 10, "the thresholds do not tell rows apart"
    assert len(sizes) > 1, "no row left a batch"


@settings(max_examples=examples(40))
@given(
    borders=st.tuples(st.integers(0, L), st.integers(0, L)).filter(lambda b: sum(b) <= L),
    threshold=st.floats(-1, 1) | st.floats(0.6, 1.0),
    warmup=st.integers(0, 12),
    base=st.sampled_from(list(SCHEDULES.values())),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_row_is_the_naive_decoder_for_any_rule(
    tiny_checkpoint: Path, hf: LoadHF, loaded: Decoder, borders: tuple[int, int], threshold: float, warmup: int,
    base: Schedule, lengths: list[int],
) -> None:  # fmt: skip
    prompts, rule = random_prompts(lengths, seed=sum(lengths)), FFNRule(threshold, *borders, warmup)
    wanted = [naive_row(hf(tiny_checkpoint), p, base, 10, skip=rule)[:2] for p in prompts]
    schedule = SkipSaturated(base, warmup, *borders, threshold)
    result = generate(loaded, requests_for(prompts, greedy(10)), schedule)
    assert [(c.tokens, c.ffns_run) for c in result.completions] == wanted


@pytest.mark.parametrize("style", ["125m", "350m"])
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("band", [((), 0), ((1, 2, 3), 0), ((0, 4, 5), 2), (tuple(range(L)), 1)])
@pytest.mark.grid
def test_band_is_the_naive_decoder_without_those_blocks(
    checkpoint_factory: Factory, hf: LoadHF, ours: Load, style: str, base: Schedule, band: tuple[tuple[int, ...], int]
) -> None:
    folder, prompts = checkpoint_factory(style), random_prompts(LENGTHS, seed=4)
    layers, warmup = band

    def skipped(k: int) -> frozenset[int]:
        return frozenset(layers) if k >= warmup else frozenset()

    wanted = [naive_row(hf(folder), p, base, 12, skipped=skipped)[:2] for p in prompts]
    result = generate(ours(folder), requests_for(prompts, greedy(12)), SkipBand(base, warmup, layers))
    assert [(c.tokens, c.ffns_run) for c in result.completions] == wanted
    assert result.stats.ffns_run == sum(ran for _, ran in wanted)


@pytest.mark.parametrize("style", ["125m", "350m"])
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
def test_a_teacher_forced_pass_is_decoding(checkpoint_factory: Factory, ours: Load, style: str, base: Schedule) -> None:
    model, prompts = ours(checkpoint_factory(style)), random_prompts(LENGTHS, seed=6)
    middle = thresholds_of(model, prompts)[1]
    for schedule in (
        SkipSaturated(base, 3, 1, 1, middle),
        SkipSaturated(base, 0, 0, 0, middle),
        SkipSaturated(base, 40, 0, 0, -1.0),
        SkipBand(base, 2, (1, 3, 4)),
    ):
        made = tokens_of(generate(model, requests_for(prompts, greedy(10, ignore_eos=True)), schedule))
        with torch.inference_mode():
            logits = teacher_forced_logits(model, teacher_batch(list(zip(prompts, made, strict=True)), 1), schedule)
        assert logits.argmax(-1).tolist() == made, schedule


def thresholds_of(model: Decoder, prompts: list[list[int]]) -> list[float]:
    """Quartiles of the cosines of all tokens at full depth."""
    seen = recorded(model, [(p, p) for p in prompts], FULL)
    values = torch.cat([t.flatten() for t in seen.values()])
    return torch.quantile(values, torch.tensor([0.25, 0.5, 0.75])).tolist()


def recorded(model: Decoder, pairs: list[tuple[list[int], list[int]]], base: Schedule) -> dict[int, Tensor]:
    recorder = SimilarityRecorder()
    with torch.inference_mode():
        teacher_forced_logits(model, teacher_batch(pairs, 1), base, ffns=recorder)
    return recorder.similarity


def test_what_calibration_records_are_the_naive_cosines(tiny_checkpoint: Path, hf: LoadHF, loaded: Decoder) -> None:
    prompt = random_prompts([7])[0]
    tokens, _, cosines = naive_row(hf(tiny_checkpoint), prompt, FULL, 9, -7, FFNRule(1.0, 0, 0, 0))
    seen = recorded(loaded, [(prompt, tokens)], FULL)
    ours = [float(seen[layer][0, len(prompt) + k]) for k in range(8) for layer in range(L)]
    assert ours == pytest.approx(cosines, abs=1e-5)


def test_fixed_shapes_and_gathered_rows_give_the_same(loaded: Decoder) -> None:
    prompts = random_prompts([3, 9, 1, 5, 12, 7], seed=5)
    schedule = SkipSaturated(FULL, 1, 1, 1, thresholds_of(loaded, prompts)[1])
    requests = requests_for(prompts, greedy(20))
    free = generate(loaded, requests, schedule)
    fixed = generate(loaded, requests, schedule, prompt_columns=16, batch_rows=8, compact=False)
    assert fixed.completions == free.completions
    alone = [generate(loaded, [r], schedule).completions[0] for r in requests]
    assert alone == free.completions
    assert 0 < free.stats.ffns_run < free.stats.layers_run
    assert {n for step in fixed.stats.deferred_ffn_rows for n in step} == {8}


def test_a_block_runs_on_the_rows_that_need_it_and_on_no_other(loaded: Decoder) -> None:
    prompts = random_prompts([4] * 6, seed=8)
    schedule = SkipSaturated(FULL, 2, 1, 1, thresholds_of(loaded, prompts)[1])
    rows: list[int] = []
    hooks = [block.fc1.register_forward_hook(lambda _m, args, _o: rows.append(len(args[0]))) for block in loaded.layers]
    try:
        result = generate(loaded, requests_for(prompts, greedy(16, ignore_eos=True)), schedule)
    finally:
        for hook in hooks:
            hook.remove()
    assert sum(rows[L:]) == result.stats.ffns_run  # the first L calls are the prompt's
    assert sum(map(sum, result.stats.deferred_ffn_rows)) == sum(rows[L:]) - 6 * (
        2 * L + 13 * 2
    )  # warm-up steps, cold borders
    assert len(set(rows[L:])) > 3


def test_similarity_is_of_the_state_before_and_after_not_of_the_block(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """cos(h, h + FFN(h)) saturates where blocks add little; cos(h, FFN(h)) of the same blocks is nowhere near."""
    shutil.copytree(tiny_checkpoint, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    small = {name: tensor * 1e-3 for name, tensor in weights.items() if ".fc2." in name}
    save_file(weights | small, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path)
    h = torch.randn(50, 1, 48, generator=torch.Generator().manual_seed(1))
    for block in model.layers:
        added = block.add_feed(h)
        assert similarity(h, added).min() > 0.999
        assert similarity(h, added - h).abs().max() < 0.98
    result = generate(
        model, requests_for(random_prompts([5, 3]), greedy(9, ignore_eos=True)), SkipSaturated(FULL, 0, 1, 1, 0.98)
    )
    # every token flips at the first block of the middle region: two cold borders and that one
    assert [c.ffns_run for c in result.completions] == [3 * 8, 3 * 8]


@settings(max_examples=examples(200))
@given(
    base=st.sampled_from(list(SCHEDULES.values())),
    warmup=st.integers(0, 20),
    layers=st.sets(st.integers(0, L - 1)),
    borders=st.tuples(st.integers(0, L), st.integers(0, L)).filter(lambda b: sum(b) <= L),
)
def test_attention_is_that_of_the_schedule_beneath(
    base: Schedule, warmup: int, layers: set[int], borders: tuple[int, int]
) -> None:
    for schedule in (SkipBand(base, warmup, tuple(layers)), SkipSaturated(base, warmup, *borders, 0.9)):
        plans = [schedule.step(k) for k in range(30)]
        assert schedule.prefill() == base.prefill()
        assert [plan.attn for plan in plans] == [base.step(k).attn for k in range(30)]
        assert has_no_kv_holes(plans)
        for k, plan in enumerate(plans):
            assert plan.num_layers_run == base.step(k).num_layers_run
            for i in range(L):
                runs = base.step(k).ffn[i]
                if isinstance(schedule, SkipBand):
                    assert plan.ffn[i] == (runs and not (k >= warmup and i in layers))
                    assert not plan.dynamic_ffn
                else:
                    assert plan.ffn[i] == runs
                    in_question = runs and k >= warmup and borders[0] <= i < L - borders[1]
                    assert bool(plan.dynamic_ffn and plan.dynamic_ffn[i]) == in_question


def test_blocks_that_nobody_decides_on_are_not_run_for_all_rows() -> None:
    plan = SkipSaturated(FULL, 1, 1, 1, 0.9).step(1)
    with pytest.raises(AssertionError, match="dynamic blocks"):
        ALL_ROWS.deferred(plan)
    assert plan.static_ffns == (True, False, False, False, False, True)
    assert ALL_ROWS.deferred(FULL.step(1)) == ()


GOOD: list[tuple[dict[str, Any], FFNSkip]] = [
    ({}, SkipSaturated(FullDepth(24), 25, 4, 4, 0.98)),
    (
        {"mode": "row", "threshold": -1, "cold_start": 0, "cold_end": 24, "warmup_tokens": 0},
        SkipSaturated(FullDepth(24), 0, 0, 24, -1),
    ),
    ({"mode": "fixed", "layers": [5, 3, 3]}, SkipBand(FullDepth(24), 25, (3, 5))),
    ({"mode": "calibrated", "layers": (3,), "warmup_tokens": 1}, SkipBand(FullDepth(24), 1, (3,))),
]


@pytest.mark.parametrize(("keys", "schedule"), GOOD)
def test_schedule_from_the_configuration(keys: dict[str, Any], schedule: FFNSkip) -> None:
    assert make_schedule({"method": "full", "ffn_skip": keys}, num_layers=24, max_new_tokens=64) == schedule
    below = make_schedule({"speedup": 3, "ffn_skip": keys}, num_layers=24, max_new_tokens=64)
    assert isinstance(below, FFNSkip)
    assert below.base == make_schedule({"speedup": 3}, num_layers=24, max_new_tokens=64)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"threshold": 1.01}, "threshold"),
        ({"threshold": -1.5}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": "high"}, "threshold"),
        ({"cold_start": 13, "cold_end": 12}, "cold_start"),
        ({"cold_start": -1}, "cold_start"),
        ({"cold_end": -1}, "cold_end"),
        ({"cold_end": 2.5}, "cold_end"),
        ({"warmup_tokens": -1}, "warmup_tokens"),
        ({"warmup_tokens": True}, "warmup_tokens"),
        ({"mode": "layer"}, "mode"),
        ({"mode": "row", "layers": [3]}, "layers"),
        ({"mode": "row", "share": 0.3}, "share"),
        ({"mode": "fixed"}, "layers"),
        ({"mode": "fixed", "layers": 3}, "layers"),
        ({"mode": "fixed", "layers": [24]}, "layers"),
        ({"mode": "fixed", "layers": [-1]}, "layers"),
        ({"mode": "fixed", "layers": [1.5]}, "layers"),
        ({"mode": "fixed", "layers": [3], "threshold": 0.9}, "threshold"),
        ({"mode": "calibrated"}, "layers"),
        ({"mode": "random"}, "mode"),
    ],
)
def test_bad_values_are_named(keys: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=rf"^decode\.ffn_skip\.{names}: "):
        make_schedule({"method": "full", "ffn_skip": keys}, num_layers=24, max_new_tokens=64)


def test_cost_follows_the_blocks_that_run() -> None:
    """A band saves its blocks; a row rule costs its overhead, and less the fewer rows a block runs on."""
    config = released("opt-1.3b")
    ceilings = Ceilings(1e12, 1e10, 1e-6)
    base = FullDepth(24)

    def decode_s(schedule: Schedule, apart: list[list[int]] | None = None) -> float:
        batch = BatchShape(8, [16] * 4, deferred_ffn_rows=apart)
        return predict_s(config, schedule, ceilings, batch, itemsize=2)[1]

    full, band = decode_s(base), decode_s(SkipBand(base, 0, tuple(range(12))))
    ffn_bytes = 2 * (8 * 2048**2 + 16 * 12 * 2048)
    assert full - band == pytest.approx(4 * 12 * (ffn_bytes / 1e10 + 3e-6))
    rule = SkipSaturated(base, 0, 0, 0, 0.9)
    every, none = decode_s(rule, [[16] * 24] * 4), decode_s(rule, [[0] * 24] * 4)
    assert decode_s(rule) == every == pytest.approx(full + 4 * 24 * 15e-6)
    assert every - none == pytest.approx(4 * 24 * (ffn_bytes / 1e10 + 11e-6))
    assert none < decode_s(rule, [[16] * 12 + [3] * 12] * 4) < every
