"""`jobs.calibrate`: figures against the naive decoder, proposals on a model whose answer is known, and the verb."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import OPTForCausalLM

from actors.measuring.ffn_calibration import Sample, propose_layers, propose_rule, threshold_for
from jobs import calibrate
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.resolve_model import check_model
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import FFNSkip, SkipBand, SkipSaturated
from skipdecode.schedules.schedule import FullDepth, Schedule, Unified
from tests.support.naive import FFNRule, NaiveRow, greedy, random_prompts, requests_for
from tests.support.verbs import Call

L = 6
FULL = FullDepth(L)
Verb = Callable[..., tuple[int, dict[str, Any], str]]


def silent(done: int, total: int) -> None:
    assert 0 < done <= total


def sample_of(model: Decoder, base: Schedule) -> Sample:
    requests = requests_for(random_prompts([5, 1, 9, 3, 4], seed=2), greedy(12))
    made = generate(model, requests, base).completions
    return Sample(model, base, [(r.prompt_tokens, c.tokens) for r, c in zip(requests, made, strict=True)], 2)


@pytest.fixture(scope="module")
def idle_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which the feed-forward blocks of layers 2 and 3 do nothing at all."""
    folder = tmp_path_factory.mktemp("idle") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if ".fc2." in name and any(f"layers.{i}." in name for i in (2, 3)):
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("base", [FULL, pytest.param(Unified(L, 4), marks=pytest.mark.slow)], ids=["full", "unified"])
def test_share_loss_and_match_are_those_of_the_naive_decoder(
    tiny_checkpoint: Path, hf: Callable[[Path], OPTForCausalLM], loaded: Decoder, base: Schedule
) -> None:
    sample = sample_of(loaded, base)
    middle = float(np.nanquantile(sample.similarity, 0.6))
    cases: list[tuple[FFNSkip, FFNRule | None, frozenset[int]]] = [
        (SkipSaturated(base, 2, 1, 1, middle), FFNRule(middle, 1, 1, 2), frozenset()),
        (SkipSaturated(base, 0, 0, 0, -1.0), FFNRule(-1.0, 0, 0, 0), frozenset()),
        (SkipBand(base, 3, (0, 2, 5)), None, frozenset({0, 2, 5})),
    ]
    pairs = [
        (batch.tokens[row, pad : batch.prompt_columns].tolist(), [t for t in batch.targets[row].tolist() if t >= 0])
        for batch in sample.batches
        for row, pad in enumerate(batch.num_pad.tolist())
    ]
    plain, _, _ = forced(hf(tiny_checkpoint), pairs, base, None, frozenset(), 0)
    for schedule, rule, skipped in cases:
        logits, ran, wanted = forced(hf(tiny_checkpoint), pairs, base, rule, skipped, schedule.warmup_tokens)
        total = sum(base.step(k).num_layers_run for _, made in pairs for k in range(len(made) - 1))
        assert sample.num_tokens == len(wanted)
        assert sample.ffns().sum() == total
        matched = float((logits.argmax(-1) == wanted).float().mean())
        expected = (1 - ran / total, divergence(plain, logits), matched)
        assert sample.measure([schedule])[0] == pytest.approx(expected, abs=1e-4)
        assert 0 < expected[0] < 1
        assert expected[1] > 1e-3
    share, moved, match = sample.measure([base])[0]
    assert (share, match) == (0.0, 1.0), "greedy text is the likeliest text"
    assert moved == pytest.approx(0.0, abs=1e-6)


def forced(
    reference: OPTForCausalLM,
    pairs: list[tuple[list[int], list[int]]],
    base: Schedule,
    rule: FFNRule | None,
    skipped: frozenset[int],
    warmup: int,
) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Logits [N, V] of all tokens that decode steps make, fed the true ones; blocks that ran; the tokens [N]."""
    logits, ran = [], 0
    with torch.inference_mode():
        for prompt, made in pairs:
            row = NaiveRow(reference)
            for token in prompt:
                row.feed(token, range(L))
            row.ffns_run = 0
            for k, fed in enumerate(made[:-1]):
                thinned = (rule, skipped) if k >= warmup else (None, frozenset[int]())
                logits.append(row.feed(fed, base.step(k).layers, *thinned))
            ran += row.ffns_run
    return torch.stack(logits), ran, torch.tensor([token for _, made in pairs for token in made[1:]])


def divergence(plain: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL(plain || logits) over the 256 tokens that are likeliest without skipping, and all others as one."""
    total = 0.0
    for p, q in zip(plain.double().softmax(-1), logits.double().softmax(-1), strict=True):
        order = p.argsort(descending=True)
        pairs = [(p[order[:256]], q[order[:256]]), (p[order[256:]].sum()[None], q[order[256:]].sum()[None])]
        total += sum(float((a * (a / b).log()).sum()) for a, b in pairs)
    return total / len(plain)


def test_blocks_that_do_nothing_are_found(idle_checkpoint: Path) -> None:
    sample = sample_of(load_model(idle_checkpoint), FULL)
    layers = propose_layers(sample, 2 / L, 0, silent)
    assert layers.schedule == SkipBand(FULL, 0, (2, 3))
    assert (layers.skip_share, layers.token_match) == (pytest.approx(2 / L), 1.0)
    assert layers.divergence == pytest.approx(0.0, abs=1e-6)
    rule = propose_rule(sample, 1 / L, 0, silent)
    assert isinstance(rule.schedule, SkipSaturated)
    assert rule.skip_share == pytest.approx(1 / L, abs=0.02)
    assert rule.divergence == pytest.approx(0.0, abs=1e-6), "a token flips at layer 2 and skips layer 3"


@pytest.mark.parametrize("base", [FULL, pytest.param(Unified(L, 4), marks=pytest.mark.slow)], ids=["full", "unified"])
@pytest.mark.parametrize("share", [0.2, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.01, 0.5, 0.7))])
def test_a_share_that_no_whole_number_of_layers_has(loaded: Decoder, base: Schedule, share: float) -> None:
    """The nearest is taken, and only layers that the schedule beneath runs are in it."""
    sample = sample_of(loaded, base)
    layers, rule = propose_layers(sample, share, 0, silent), propose_rule(sample, share, 0, silent)
    assert isinstance(layers.schedule, SkipBand)
    assert set(layers.schedule.layers) <= set(base.step(0).layers)
    assert abs(layers.skip_share - share) <= 1 / len(base.step(0).layers)
    assert abs(rule.skip_share - share) <= 0.1
    assert layers.divergence >= 0


def test_threshold_for_a_share(loaded: Decoder) -> None:
    """What the recorded cosines say, against what the rule then does; -1 is the most that can be had."""
    sample = sample_of(loaded, FULL)
    rule = SkipSaturated(FULL, 1, 1, 1, -1.0)
    most, _, _ = sample.measure([rule])[0]
    late = float((sample.step >= 1).mean())
    assert most == pytest.approx(late * 3 / L), "the first block of the middle region always runs"
    assert threshold_for(sample, rule, most + 0.05)[0] == pytest.approx(most, abs=1e-6)
    for share in (0.1, 0.25):
        predicted, found = threshold_for(sample, rule, share)
        assert -1 < found.threshold < 1
        assert predicted == pytest.approx(share, abs=0.02)
        assert sample.measure([found])[0][0] == pytest.approx(share, abs=0.05)
    for propose in (propose_rule, propose_layers):
        with pytest.raises(ValueError, match=r"^skip_share: 0\.9 is out of reach: with warmup_tokens=9"):
            propose(sample, 0.9, 9, silent)


def test_what_was_found_under_swiftkv_is_for_swiftkv(
    verb: Verb, prompts: Path, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save_model(load_model(tiny_checkpoint).with_swiftkv(3, 1), tmp_path / "swiftkv")
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path / "swiftkv")
    settings = ["skip_share=0.3", "warmup_tokens=1", "max_new_tokens=8", "prefill.method=swiftkv"]
    out = tmp_path / "calibrated"
    code, document, err = verb("-i", prompts, "-o", out, f"model.source={tmp_path / 'swiftkv'}", *settings)
    assert code == 0, err
    assert document["prefill"] == "swiftkv"
    for method, is_told in (("full", True), ("swiftkv", False)):
        notes: list[str] = []
        wanted = {"decode": {"method": "full", "ffn_skip": {"mode": "calibrated"}}, "prefill": {"method": method}}
        check_model(build_config(JobConfig, {"model": {"source": str(out)}} | wanted), notes.append)
        assert any("with prefill swiftkv; on top of" in log for log in notes) == is_told
    code, _, err = verb("-i", prompts, "-o", tmp_path / "x", f"model.source={tiny_checkpoint}", *settings)
    assert code == 2
    assert "prefill.method: 'swiftkv' needs a checkpoint" in err


@pytest.fixture
def verb(call: Call) -> Verb:
    """`verb(*arguments)` runs `jobs.calibrate`: exit code, the JSON document, stderr."""
    return lambda *arguments: call(calibrate, *arguments, "threads=1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"name[The Otter], near[Willow {i // 2}]"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": None}, {"prompt": "x" * 900}]))
    return path


def test_the_verb_writes_a_checkpoint_that_carries_its_layers(
    verb: Verb, prompts: Path, tmp_path: Path, idle_checkpoint: Path
) -> None:
    out = tmp_path / "calibrated"
    settings = ["skip_share=0.3", "warmup_tokens=1", "max_new_tokens=12", "model.dtype=float32"]
    code, document, err = verb("-i", prompts, "-o", out, f"model.source={idle_checkpoint}", *settings)
    assert code == 0, err
    assert document["prompts"] == 12, "distinct ones that are fit to run"
    assert "sample: 12 prompts" in err
    assert "1 prompts with more than 116 tokens were left out" in err
    assert document["calibrated"]["ffn_skip"] == {"warmup_tokens": 1, "mode": "fixed", "layers": [2, 3]}
    assert document == json.loads((out / "calibration/calibration.json").read_text())
    assert {path.name for path in (out / "calibration").iterdir()} == {
        "calibration.json", "similarity.parquet", "similarity.svg", "similarity.png"
    }  # fmt: skip

    notes: list[str] = []
    skipping = job(out, {"mode": "calibrated"})
    skipping["decode"] |= {"method": "skipdecode", "speedup": 2}
    model = check_model(build_config(JobConfig, skipping), notes.append)
    assert model.decode["ffn_skip"] == {"mode": "calibrated", "layers": [2, 3], "warmup_tokens": 1}
    assert model.decode["method"] == "skipdecode", "the base schedule is the job's own"
    assert any("were calibrated on top of {'method': 'full'}" in log for log in notes)
    opened = OPTForCausalLM.from_pretrained(out)
    assert opened.config.ffn_skip["layers"] == [2, 3]
    assert os.path.samefile(out / "model.safetensors", idle_checkpoint / "model.safetensors")
    assert not os.path.samefile(out / "tokenizer.json", idle_checkpoint / "tokenizer.json"), "small files may be edited"

    table = pq.read_table(out / "calibration/similarity.parquet").to_pylist()
    assert {(line["layer"], line["step"]) for line in table} >= {(layer, 0) for layer in range(L)}
    assert all(line["p05"] - 1e-6 <= line["p50"] <= line["p95"] + 1e-6 for line in table)
    assert all(line["mean"] == pytest.approx(1.0, abs=1e-5) for line in table if line["layer"] in (2, 3))
    assert min(line["mean"] for line in table) < 0.99

    again = verb("-i", prompts, "-o", out, f"model.source={idle_checkpoint}", *settings)
    assert again[0] == 2
    assert f"output: {out} exists already" in again[2]


def job(source: Path, skip: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"source": str(source)}, "decode": {"ffn_skip": skip}, "sampling": {"max_new_tokens": 12}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["decode.ffn_skip={mode: row}"], "decode.ffn_skip: "),
        (["decode.prefix=off"], "decode.prefix: calibration shares no prefixes"),
        (["skip_share=0"], "skip_share: "),
        (["skip_share=0.9", "warmup_tokens=11"], "skip_share: 0.9 is out of reach"),
        (["warmup_tokens=-1"], "warmup_tokens: "),
        (["max_new_tokens=128"], "error: max_new_tokens: 128 leaves no room"),
        (["-o", "/proc/nowhere/x"], "output: /proc/nowhere/x cannot be created"),
        (["-o", "{model}/config.json/x"], "cannot be created"),
        (["-o", "{model}"], "exists already"),
        (["-i", "/nowhere.jsonl"], "input.path: "),
        (["input.prompt_column=text"], "or make it input.prompt_column"),
        (["model.source=/nowhere"], "model.source: "),
        (["skipshare=0.3"], "skipshare: unknown key; did you mean 'skip_share'?"),
    ],
)
def test_bad_input_is_named_and_writes_nothing(
    verb: Verb, prompts: Path, tmp_path: Path, tiny_checkpoint: Path, overrides: list[str], message: str
) -> None:
    out = tmp_path / "calibrated"
    given = [] if "-i" in overrides else ["-i", prompts]
    overrides = [text.replace("{model}", str(tiny_checkpoint)) for text in overrides]
    code, document, err = verb(*given, "-o", out, f"model.source={tiny_checkpoint}", "max_new_tokens=12", *overrides)
    assert (code, document["exit_code"]) == (2, 2), err
    assert message in err
    assert not out.exists()


BENEATH: dict[str, Any] = {"decode": {"method": "full"}, "prefill": "full"}
"""What a calibration was made on top of."""


@pytest.mark.parametrize(
    ("band", "skip", "message"),
    [
        (None, {"mode": "calibrated"}, "decode.ffn_skip.mode: this checkpoint carries no calibrated layers"),
        ({"num_layers": 24, "layers": [3], "warmup_tokens": 2, **BENEATH}, {"mode": "calibrated"},
         "decode.ffn_skip.mode: the layers in ffn_skip of the checkpoint's config.json were calibrated for 24 layers, "
         "and this model has 6"),
        ({"layers": [3]}, {"mode": "calibrated"}, "decode.ffn_skip.mode: ffn_skip in the checkpoint's config.json is"),
        ([1], {"mode": "calibrated"}, "decode.ffn_skip.mode: ffn_skip in the checkpoint's config.json is not"),
        ({"num_layers": 6, "layers": [3], "warmup_tokens": 2}, {"mode": "calibrated"},
         "decode.ffn_skip.mode: ffn_skip in the checkpoint's config.json is not what jobs.calibrate writes, or was "
         "made by a version before 1.0; run jobs.calibrate again"),
        ({"num_layers": 6, "layers": [9], "warmup_tokens": 2, **BENEATH}, {"mode": "calibrated"},
         "decode.ffn_skip.layers: 9 is"),
        ({"num_layers": 6, "layers": [1], "warmup_tokens": 2}, {"mode": "calibrated", "layers": [2]},
         "decode.ffn_skip.layers: has no meaning with mode 'calibrated'"),
        (None, {"cold_start": 4, "cold_end": 3}, "decode.ffn_skip.cold_start: the cold borders overlap"),
        (None, {}, "decode.ffn_skip.cold_start: the cold borders overlap"),
        (None, {"threshold": 2.0, "cold_end": 1}, "decode.ffn_skip.threshold: "),
    ],
)  # fmt: skip
def test_a_checkpoint_and_a_job_that_do_not_fit(
    tiny_checkpoint: Path, tmp_path: Path, band: Any, skip: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | ({} if band is None else {"ffn_skip": band})))
    with pytest.raises(ConfigError) as caught:
        check_model(build_config(JobConfig, job(folder, skip)), print)
    assert str(caught.value).startswith(message)


def test_a_calibrated_job_may_start_its_own_warm_up(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw["ffn_skip"] = {"num_layers": L, "layers": [2, 3], "warmup_tokens": 5, **BENEATH}
    (folder / "config.json").write_text(json.dumps(raw))
    model = check_model(build_config(JobConfig, job(folder, {"mode": "calibrated", "warmup_tokens": 0})), print)
    assert model.decode["ffn_skip"] == {"mode": "calibrated", "layers": [2, 3], "warmup_tokens": 0}
