"""The main job on a real Ray: its tokens are those of Hugging Face and of the plain decoder, whatever the workers."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTForCausalLM

from pipeline.evaluation.score import EvaluateConfig, RunPolicy, _load_policy
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, SwiftKVPrefill
from tests.support.pipeline_runs import prompts, read, write_jsonl
from tests.support.schedules import decodes
from tests.support.verbs import Job

pytestmark = pytest.mark.ray


def hf_tokens(model: OPTForCausalLM, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), max_new_tokens=count,
        do_sample=False,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("style", "num_actors"),
    [
        pytest.param("125m", "1", marks=pytest.mark.slow),
        pytest.param("125m", "2", marks=pytest.mark.slow),
        pytest.param("350m", "[1,2]", marks=pytest.mark.slow),
        pytest.param("1.3b", "2", marks=pytest.mark.slow),
    ],
)
def test_full_depth_through_the_pipeline_equals_hugging_face(
    job: Job, tmp_path: Path, ending_checkpoint: Any, hf: Any, style: str, num_actors: str
) -> None:
    model = ending_checkpoint(style)
    config = read_config(model)
    rows = [{"id": f"r{i}", "prompt": p, "n": i, "tags": ["a"] * (i % 3)} for i, p in enumerate(prompts(40))]
    code, report, _ = job(
        "-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), "decode.method=full", f"actors.num_actors={num_actors}",
        "actors.batch_size=8", "actors.length_buckets=[8,16,32]", model=model,
    )  # fmt: skip
    assert code == 0
    got = read(tmp_path / "run")
    assert got.keys() == {row["id"] for row in rows}
    tokenizer = Tokenizer(model, config)
    lengths = set()
    for row in rows:
        mine = got[row["id"]]
        tokens = tokenizer.encode([row["prompt"]])[0]
        assert mine["generated_tokens"] == hf_tokens(hf(model), tokens, 12)
        assert mine["generated_text"] == tokenizer.decode(mine["generated_tokens"])
        assert (mine["prompt"], mine["n"], mine["tags"]) == (row["prompt"], row["n"], row["tags"])
        assert mine["num_input_tokens"] == len(tokens)
        assert mine["num_generated_tokens"] == len(mine["generated_tokens"])
        assert mine["finish_reason"] == ("stop" if mine["generated_tokens"][-1] == config.eos_token_id else "length")
        assert mine["layers_run"] == mine["ffns_run"] == 6 * (mine["num_generated_tokens"] - 1)
        lengths.add(mine["num_generated_tokens"])
    assert len(lengths) > 2, "rows must end at different steps for this test to mean anything"
    assert report["books"] == {"input": 40, "ok": 40, "failed": 0, "closed": True}
    # An actor reports with its first batch, and 40 rows can be over before the second one has loaded.
    assert 1 <= len(report["actors"]) <= (1 if num_actors == "1" else 2)


@pytest.mark.parametrize(
    "decode",
    [
        decodes()["skipdecode"],
        pytest.param(
            {
                "method": "unified",
                "layers": 5,
                "ffn_skip": {"threshold": 0.85, "cold_start": 1, "cold_end": 1, "warmup_tokens": 2},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["skipdecode", "unified-ffn"],
)
def test_skipping_through_the_pipeline_equals_the_decoder_row_by_row(
    job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder, decode: dict[str, Any]
) -> None:
    rows = [{"prompt": prompt} for prompt in prompts(30, seed=1)]
    settings = [f"decode.{key}={value}" for key, value in decode.items()]
    code, report, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings, "baseline.fraction=1.0")
    assert code == 0
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    schedule = make_schedule(decode, num_layers=6, max_new_tokens=12)
    got = read(tmp_path / "run")
    assert sorted(got) == sorted(f"in.jsonl:{i}" for i in range(30))
    for i, row in enumerate(rows):
        request = Request("", tokenizer.encode([row["prompt"]])[0], Sampling(max_new_tokens=12))
        alone = generate(loaded, [request], schedule).completions[0]
        mine = got[f"in.jsonl:{i}"]
        assert (mine["generated_tokens"], mine["layers_run"]) == (alone.tokens, alone.layers_run)
        assert mine["ffns_run"] == alone.ffns_run
    steps = sum(len(row["generated_tokens"]) - 1 for row in got.values())
    assert report["ffns_per_token"] == pytest.approx(sum(row["ffns_run"] for row in got.values()) / steps)
    assert (report["ffns_per_token"] < report["layers_per_token"]) is ("ffn_skip" in decode)
    s = report["speedup"]
    assert s["batches"] >= 3, "an interval takes three"
    assert s["ci95"][0] < s["measured"] < s["ci95"][1]
    assert s["layers"] > 1
    if "ffn_skip" not in decode:  # deciding by row costs more than it saves at this width, and the prediction says so
        assert s["predicted"] > 1
    assert 0 <= report["agreement"]["exact_rows"] <= report["agreement"]["token_match"] <= 1


@pytest.mark.slow
def test_swiftkv_through_the_pipeline_equals_the_decoder_row_by_row(
    job: Job, tmp_path: Path, tiny_checkpoint: Path, loaded: Decoder
) -> None:
    """The prompt stops half-way for every row of a job, and what scores the run knows."""
    model = loaded.with_swiftkv(3, 1)
    assert model.swiftkv is not None
    with torch.no_grad():
        model.swiftkv.kv.weight += 0.4 * torch.randn(
            model.swiftkv.kv.weight.shape, generator=torch.Generator().manual_seed(1)
        )
    save_model(model, tmp_path / "model")
    shutil.copy(tiny_checkpoint / "tokenizer.json", tmp_path / "model")
    rows = [{"prompt": prompt} for prompt in prompts(30, seed=2)]
    settings = ["decode.method=full", "prefill.method=swiftkv", "baseline.fraction=1.0"]
    code, report, _ = job(
        "-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings, model=tmp_path / "model"
    )  # fmt: skip
    assert code == 0
    assert report["prefill"] == "swiftkv"
    assert report["speedup"]["batches"] >= 2, "full depth without SwiftKV is what it is measured against"
    assert report["agreement"]["token_match"] < 1
    tokenizer, schedule = Tokenizer(tiny_checkpoint, model.config), SwiftKVPrefill(FullDepth(6), 3)
    got = read(tmp_path / "run")
    for i, row in enumerate(rows):
        request = Request("", tokenizer.encode([row["prompt"]])[0], Sampling(max_new_tokens=12))
        assert got[f"in.jsonl:{i}"]["generated_tokens"] == generate(model, [request], schedule).completions[0].tokens
    state = json.loads((tmp_path / "run/run.json").read_text())
    policy = _load_policy(EvaluateConfig(generated=str(tmp_path / "run")), RunPolicy.of(state), torch.device("cpu"))
    assert policy.schedule == SwiftKVPrefill(FullDepth(6), 3)


@pytest.mark.slow
def test_the_same_schedule_as_full_depth_agrees_with_it(job: Job, tmp_path: Path) -> None:
    rows = [{"prompt": prompt} for prompt in prompts(20)]
    settings = ["decode.max_layers=6", "decode.min_layers=6", "decode.method=skipdecode", "baseline.fraction=1.0"]
    _, report, _ = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)), *settings)
    assert report["agreement"] == {"exact_rows": 1.0, "token_match": 1.0, "rows": 20}
    assert report["speedup"]["layers"] == 1.0


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_workers_or_batches(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(30))]
    sampled = ["sampling.temperature=1.0", "sampling.seed=5", "sampling.top_p=0.95"]
    job("-i", str(write_jsonl(tmp_path / "a.jsonl", rows)), *sampled, "actors.batch_size=4")
    first = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    random.Random(0).shuffle(rows)
    job("-i", str(write_jsonl(tmp_path / "b.jsonl", rows)), *sampled, "actors.num_actors=2", "--overwrite")
    assert {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()} == first
    assert len({tuple(tokens) for tokens in first.values()}) > 20


@pytest.mark.slow
def test_deterministic_bfloat16_tokens_do_not_depend_on_neighbours(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(24))]
    fixed = ["model.dtype=bfloat16", "sampling.deterministic=true", "actors.batch_size=8"]
    job("-i", str(write_jsonl(tmp_path / "a.jsonl", rows)), *fixed)
    first = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    random.Random(0).shuffle(rows)
    job("-i", str(write_jsonl(tmp_path / "b.jsonl", rows[:13])), *fixed, "--overwrite")
    second = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    assert second == {row["id"]: first[row["id"]] for row in rows[:13]}
