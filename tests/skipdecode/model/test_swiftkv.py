"""SwiftKV against the naive decoder of `support.naive`: prefill, decode, groups, compositions; token for token."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OPTForCausalLM

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs.bench import main as bench
from jobs.distill import main
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.input.training_pairs import encode_pairs
from pipeline.resolve_model import check_model
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import check_folder, load_model, save_model
from skipdecode.config.model import SwiftKVConfig
from skipdecode.cost.roofline import cache_bytes_per_row, plan_parts
from skipdecode.engine.generate import generate
from skipdecode.engine.prefill import allocate_cache
from skipdecode.families import released
from skipdecode.families.opt import OPTConfig
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from skipdecode.training.swiftkv_init import SwiftKVLeastSquares
from tests.support.naive import FFNRule, SwiftKVWeights, greedy, naive_row, random_prompts, requests_for, tokens_of
from tests.support.schedules import SCHEDULES

L = 6
FULL = FullDepth(L)
SHAPES = [(3, 1), (2, 2), (2, 4), (5, 1), (1, 1)]
LENGTHS = [5, 1, 12, 3]
MakeSwiftKV = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def swiftkv_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeSwiftKV:
    """`swiftkv_checkpoint(l, g)`: a folder whose SwiftKV weights are the teacher's, disturbed: nothing is equal."""

    def make(kv_layers: int, group_size: int) -> Path:
        model = load_model(tiny_checkpoint).with_swiftkv(kv_layers, group_size)
        assert model.swiftkv is not None
        generator = torch.Generator().manual_seed(kv_layers)
        with torch.no_grad():
            for parameter in model.swiftkv.parameters():
                parameter += 0.4 * torch.randn(parameter.shape, generator=generator)
        folder = tmp_path_factory.mktemp("swiftkv")
        save_model(model, folder)
        return folder

    return make


@pytest.mark.parametrize(("kv_layers", "group_size"), SHAPES)
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.grid
def test_decoding_is_the_naive_decoder(
    swiftkv_checkpoint: MakeSwiftKV, hf: Callable[[Path], OPTForCausalLM], tiny_checkpoint: Path, base: Schedule,
    kv_layers: int, group_size: int,
) -> None:  # fmt: skip
    folder = swiftkv_checkpoint(kv_layers, group_size)
    model, weights, prompts = load_model(folder), SwiftKVWeights.load(folder), random_prompts(LENGTHS, seed=3)
    schedule = SwiftKVPrefill(base, kv_layers)
    wanted = [naive_row(hf(tiny_checkpoint), p, base, 14, swiftkv=weights)[0] for p in prompts]
    result = generate(model, requests_for(prompts, greedy(14)), schedule)
    assert tokens_of(result) == wanted
    plain = generate(model, requests_for(prompts, greedy(14)), base)
    assert tokens_of(plain) == [naive_row(hf(tiny_checkpoint), p, base, 14)[0] for p in prompts]
    assert tokens_of(plain) != wanted, "the disturbed weights make no difference"
    for prompt, tokens in zip(prompts, wanted, strict=True):  # alone and without padding: no mask
        assert tokens_of(generate(model, requests_for([prompt], greedy(14)), schedule)) == [tokens]
    fixed = generate(model, requests_for(prompts, greedy(14)), schedule, prompt_columns=16, batch_rows=6, compact=False)
    assert tokens_of(fixed) == wanted


@pytest.mark.parametrize(("kv_layers", "group_size"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.grid
def test_all_three_methods_together(
    swiftkv_checkpoint: MakeSwiftKV, hf: Callable[[Path], OPTForCausalLM], tiny_checkpoint: Path, base: Schedule,
    kv_layers: int, group_size: int,
) -> None:  # fmt: skip
    folder = swiftkv_checkpoint(kv_layers, group_size)
    model, weights, prompts = load_model(folder), SwiftKVWeights.load(folder), random_prompts(LENGTHS, seed=4)
    beneath = SwiftKVPrefill(base, kv_layers)
    for threshold in (-1.0, 0.8, 0.9):
        rule = FFNRule(threshold, 1, 1, 2)
        wanted = [naive_row(hf(tiny_checkpoint), p, base, 12, skip=rule, swiftkv=weights)[:2] for p in prompts]
        result = generate(model, requests_for(prompts, greedy(12)), SkipSaturated(beneath, 2, 1, 1, threshold))
        assert [(c.tokens, c.ffns_run) for c in result.completions] == wanted


@pytest.mark.parametrize(("kv_layers", "group_size"), SHAPES)
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.grid
def test_a_teacher_forced_pass_is_decoding(
    swiftkv_checkpoint: MakeSwiftKV, base: Schedule, kv_layers: int, group_size: int
) -> None:
    model, prompts = load_model(swiftkv_checkpoint(kv_layers, group_size)), random_prompts(LENGTHS, seed=5)
    beneath = SwiftKVPrefill(base, kv_layers)
    for schedule in (beneath, SkipBand(beneath, 2, (1, 3, 4)), SkipSaturated(beneath, 1, 1, 1, 0.85)):
        made = tokens_of(generate(model, requests_for(prompts, greedy(9, ignore_eos=True)), schedule))
        for pairs in (list(zip(prompts, made, strict=True)), [(prompts[2], made[2])]):
            for recompute in (False, True):
                with torch.inference_mode(not recompute):
                    logits = teacher_forced_logits(model, teacher_batch(pairs, 1), schedule, recompute=recompute)
                assert logits.argmax(-1).tolist() == [tokens for _, tokens in pairs]


@pytest.mark.parametrize("style", ["125m", "1.3b"])
@pytest.mark.parametrize("kv_layers", [L - 1, L])
@pytest.mark.grid
def test_teacher_weights_and_every_layer_are_plain_opt(
    checkpoint_factory: Callable[..., Path], hf: Callable[[Path], OPTForCausalLM], style: str, kv_layers: int
) -> None:
    """l = L has no layer above; at l = L - 1 the one above takes K/V from what it has anyway."""
    folder, prompts = checkpoint_factory(style), random_prompts(LENGTHS, seed=6)
    model = load_model(folder).with_swiftkv(kv_layers, 1)
    assert (model.swiftkv is None) is (kv_layers == L)
    schedule = make_schedule({"method": "full"}, num_layers=L, max_new_tokens=12, swiftkv_from=kv_layers)
    wanted = [naive_row(hf(folder), p, FULL, 12)[0] for p in prompts]
    assert tokens_of(generate(model, requests_for(prompts, greedy(12)), schedule)) == wanted


def test_init_is_the_teacher(tiny_checkpoint: Path, hf: Callable[[Path], OPTForCausalLM], tmp_path: Path) -> None:
    """Queries copied, K and V the mean over the group, the norm that of layer l; plain Hugging Face opens the base."""
    save_model(load_model(tiny_checkpoint).with_swiftkv(2, 2), tmp_path)
    made, teacher = load_file(tmp_path / "model.safetensors"), hf(tiny_checkpoint).state_dict()
    extra = {name for name in made if "swiftkv" in name}
    layers = "model.decoder.layers."
    for kind in ("weight", "bias"):
        norm = made[f"model.decoder.norm_swiftkv.{kind}"]
        assert torch.equal(norm, teacher[f"{layers}2.self_attn_layer_norm.{kind}"])
        for j in range(2, L):
            query = made[f"{layers}{j}.self_attn.q_proj_swiftkv.{kind}"]
            assert torch.equal(query, teacher[f"{layers}{j}.self_attn.q_proj.{kind}"])
        for j in (2, 4):
            for x in "kv":
                pair = [teacher[f"{layers}{i}.self_attn.{x}_proj.{kind}"] for i in (j, j + 1)]
                shared = made[f"{layers}{j}.self_attn.{x}_proj_swiftkv.{kind}"]
                assert torch.equal(shared, torch.stack(pair).mean(0))
    assert len(extra) == 2 * (1 + 4 + 2 * 2)
    assert json.loads((tmp_path / "config.json").read_text())["swiftkv"] == {"kv_layers": 2, "group_size": 2}
    check_folder(tmp_path)
    opened = OPTForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(opened[name], teacher[name]) for name in teacher)


def test_keys_and_values_are_the_direct_projection(swiftkv_checkpoint: MakeSwiftKV, tiny_checkpoint: Path) -> None:
    """Of a prompt: the state that enters layer l, normed, times each group's own matrices."""
    folder = swiftkv_checkpoint(2, 2)
    model, weights = load_model(folder), SwiftKVWeights.load(folder)
    prompt = random_prompts([7])[0]
    tokens, num_pad = torch.tensor([prompt]), torch.tensor([0])
    schedule = SwiftKVPrefill(FULL, 2)
    cache = allocate_cache(model, num_pad, 7, schedule, 5)
    with torch.inference_mode():
        model(tokens, torch.arange(7)[None], cache, schedule.prefill())
        entering: list[torch.Tensor] = []
        hook = model.layers[2].attn_norm.register_forward_pre_hook(lambda _m, args: entering.append(args[0]))
        plain = allocate_cache(model, num_pad, 7, FULL, 5)
        model(tokens, torch.arange(7)[None], plain, FULL.prefill())
        hook.remove()
        for j in (2, 3, 4, 5):
            for kept, name in ((cache.k, "k"), (cache.v, "v")):
                for at in range(7):
                    x = weights.norm(entering[0][0, at])
                    wanted = weights.project(weights.leader(j), name, x).view(4, 12)
                    torch.testing.assert_close(kept[j][0, :, at], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kv_layers", "group_size"), SHAPES)
@pytest.mark.parametrize("base", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.grid
def test_cache_bytes_are_exact(
    swiftkv_checkpoint: MakeSwiftKV, base: Schedule, kv_layers: int, group_size: int
) -> None:
    """Grouped layers share memory that is allocated once; counted by the storages themselves."""
    model = load_model(swiftkv_checkpoint(kv_layers, group_size))
    schedule = SwiftKVPrefill(base, kv_layers)
    cache = allocate_cache(model, torch.tensor([0, 2, 1]), 9, schedule, 12)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*cache.k, *cache.v)}
    assert len(storages) == 2 * (kv_layers + (L - kv_layers) // group_size)
    priced = cache_bytes_per_row(model.config, schedule, prompt_columns=9, num_new=12, itemsize=4)
    assert cache.nbytes == sum(storages.values()) == 3 * priced
    kept = cache.keep([2, 0], [True] * L)
    assert kept.nbytes == 2 * priced
    assert len({t.data_ptr() for t in kept.k}) == len({t.data_ptr() for t in cache.k})
    if base == FULL:
        columns = 9 + 11
        assert priced == 2 * 4 * 48 * columns * (kv_layers + (L - kv_layers) // group_size)


def test_prefill_flops_that_a_cut_saves() -> None:
    """At l = L/2, g = 1, OPT saves 10/12 of half the layers on prompt tokens: 41.7 %, not 50 % (K/V are still made)."""
    for group_size, share in ((1, 10 / 12 / 2), (4, 11.5 / 12 / 2)):
        config = replace(released("opt-1.3b"), swiftkv=SwiftKVConfig(12, group_size))
        full = FullDepth(24)

        def flops(schedule: Schedule, config: OPTConfig = config) -> float:
            shape = {"rows": 1, "new_columns": 4096, "context": 0, "itemsize": 2}
            return sum(part.flops for part in plan_parts(config, schedule.prefill(), **shape)[:-1])

        paper = flops(full) * 24 / (24 - 10 / 12)  # its full depth runs 10/12 of the last layer for all tokens too
        saved = 1 - flops(SwiftKVPrefill(full, 12)) / paper
        assert saved == pytest.approx(share, abs=5e-4), "but for the last token, which runs every layer"


@pytest.mark.parametrize(
    ("swiftkv", "message"),
    [
        ({"kv_layers": 7, "group_size": 1}, "swiftkv.kv_layers is 7, and the model has 6 layers"),
        ({"kv_layers": 0}, "swiftkv.kv_layers is 0"),
        ({"kv_layers": 2, "group_size": 3}, "swiftkv.group_size is 3, which does not divide the 4 layers"),
        ({"kv_layers": 2, "group_size": True}, "swiftkv.group_size is True"),
        ({"group_size": 1}, "swiftkv is "),
        ({"kv_layers": 2, "heads": 1}, "swiftkv is "),
        ([2], "swiftkv is "),
    ],
)
def test_bad_shapes_are_named(tiny_checkpoint: Path, swiftkv: Any, message: str) -> None:
    raw = json.loads((tiny_checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        OPTConfig.from_dict(raw | {"swiftkv": swiftkv})


def test_post_norm_models_are_refused(checkpoint_factory: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="swiftkv needs norms before the blocks"):
        load_model(checkpoint_factory("350m")).with_swiftkv(3, 1)


def test_a_folder_without_the_weights_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    save_model(load_model(tiny_checkpoint), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"swiftkv": {"kv_layers": 3, "group_size": 1}}))
    with pytest.raises(ValueError, match=r"20 tensors are missing, the first is .*swiftkv"):
        check_folder(tmp_path)


def test_rows_of_any_length(
    swiftkv_checkpoint: MakeSwiftKV, hf: Callable[[Path], OPTForCausalLM], tiny_checkpoint: Path
) -> None:
    folder, rng = swiftkv_checkpoint(4, 2), random.Random(1)
    model, weights = load_model(folder), SwiftKVWeights.load(folder)
    schedule = SwiftKVPrefill(SkipDecode(L, 4, 2, 1, 6), 4)
    for seed in range(6):
        prompts = random_prompts([rng.randint(1, 30) for _ in range(rng.randint(1, 7))], seed=seed)
        limits = [rng.randint(1, 12) for _ in prompts]
        requests = [
            replace(r, sampling=greedy(n)) for r, n in zip(requests_for(prompts, greedy(1)), limits, strict=True)
        ]
        wanted = [
            naive_row(hf(tiny_checkpoint), p, schedule.base, n, swiftkv=weights)[0]
            for p, n in zip(prompts, limits, strict=True)
        ]
        assert tokens_of(generate(model, requests, schedule)) == wanted


def test_taking_it_off_leaves_the_model(swiftkv_checkpoint: MakeSwiftKV, tiny_checkpoint: Path) -> None:
    """What a fine-tuning without `model.swiftkv` starts from, and what another shape starts from."""
    model, plain = load_model(swiftkv_checkpoint(3, 1)), load_model(tiny_checkpoint)
    bare = model.without_swiftkv()
    assert (bare.config, bare.swiftkv) == (replace(model.config, swiftkv=None), None)
    assert bare.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in bare.state_dict().items())
    assert model.swiftkv is not None, "the model itself keeps it"
    other, wanted = model.with_swiftkv(2, 2).state_dict(), plain.with_swiftkv(2, 2).state_dict()
    assert all(torch.equal(other[name], value) for name, value in wanted.items())


def test_the_verb_writes_a_checkpoint_that_a_job_may_run(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "swiftkv"
    assert main(["--init-only", f"model.source={tiny_checkpoint}", "model.swiftkv.group_size=3", "-o", str(out)]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["swiftkv"] == {"kv_layers": 3, "group_size": 3}
    model = load_model(out)
    assert document["parameters"] == sum(p.numel() for p in model.parameters())
    prefill = {"model": {"source": str(out)}, "prefill": {"method": "swiftkv"}, "decode": {"method": "full"}}
    assert check_model(build_config(JobConfig, prefill), print).config.swiftkv == SwiftKVConfig(3, 3)
    generator = Generator(GeneratorConfig(str(out), {"method": "full"}, prefill="swiftkv", num_threads=1))
    assert generator.schedule(9) == SwiftKVPrefill(FULL, 3)
    with pytest.raises(ConfigError, match=r"^prefill\.method: 'swiftkv' needs a checkpoint"):
        check_model(build_config(JobConfig, prefill | {"model": {"source": str(tiny_checkpoint)}}), print)


def test_the_verb_fits_to_pairs(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All pairs, whatever their order and batches, and says how far it is."""
    texts = [(f"the {i} of {i * i}", " and more" * (1 + i % 3)) for i in range(9)]
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in texts]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    asked = ["--init-only", f"model.source={tiny_checkpoint}", "train={fit_pairs: 1000, precision: float32}"]
    asked += ["-o", str(tmp_path / "swiftkv")]
    bad = [*asked, f"data.path={tmp_path / 'none.jsonl'}"]
    assert main(bad) == 2
    assert main([*asked, f"data.path={tmp_path / 'pairs.jsonl'}", "output.dtype=float32"]) == 0
    assert "fitting SwiftKV's keys and values   9/9 pairs" in capsys.readouterr().err
    model = load_model(tiny_checkpoint)
    wanted, tokenizer = model.with_swiftkv(3, 1), Tokenizer(tiny_checkpoint, model.config)
    fit = SwiftKVLeastSquares(wanted)
    fit.add(teacher_batch(encode_pairs(tokenizer, texts), 1))
    fit.solve()
    found = load_model(tmp_path / "swiftkv")
    assert found.swiftkv is not None
    assert wanted.swiftkv is not None
    torch.testing.assert_close(found.swiftkv.kv.weight, wanted.swiftkv.kv.weight, atol=1e-4, rtol=0)
    assert not torch.allclose(found.swiftkv.kv.weight, model.with_swiftkv(3, 1).swiftkv.kv.weight, atol=1e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.swiftkv.kv_layers=7"], "model.swiftkv.kv_layers is 7, and the model has 6 layers"),
        (
            ["model.swiftkv.kv_layers=2", "model.swiftkv.group_size=3"],
            "model.swiftkv.group_size is 3, which does not divide",
        ),
        (["model.swiftkv.kv_layer=2"], "model.swiftkv.kv_layer: unknown key; did you mean 'kv_layers'?"),
        (["model.source=/nowhere"], "model.source: "),
    ],
)
def test_a_bad_init_is_named_and_writes_nothing(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    out = tmp_path / "swiftkv"
    assert main(["--init-only", f"model.source={tiny_checkpoint}", "-o", str(out), *overrides]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_the_bench_times_it(
    swiftkv_checkpoint: MakeSwiftKV, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["batch_sizes=[2]", "prompt_tokens=[40]", "new_tokens=4", "repeats=2", "dtype=float32", "threads=1"]
    small.append("schedules=[{prefill: swiftkv, method: full}]")
    assert bench([f"source={swiftkv_checkpoint(3, 1)}", *small]) == 0
    full, swiftkv = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert swiftkv["schedule"] == "swiftkv full"
    assert swiftkv["speedup_prefill_predicted"] > full["speedup_prefill_predicted"] == 1.0
    assert swiftkv["speedup_prefill_measured"] > 0
    assert swiftkv["cache_mb"] == full["cache_mb"]
    assert bench([f"source={tiny_checkpoint}", *small]) == 2
    assert "decode.prefill: swiftkv needs a model with SwiftKV's weights" in capsys.readouterr().err
