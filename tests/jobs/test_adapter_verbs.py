"""`model.adapter` through every verb that decodes: tokens and figures are those of a folder with the merged weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.generator import Generator
from actors.training.trainer import mean_loss
from jobs import bench, calibrate, evaluate, generate
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.input.training_pairs import encode_pairs
from pipeline.resolve_model import check_model
from pipeline.service.app import make_spec
from pipeline.service.config import ServeConfig
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.schedule import FullDepth
from tests.support.lora_adapters import merge_by_hand, write_adapter
from tests.support.verbs import Call

PROMPTS = [f"The Golden Otter serves {n} dishes" for n in range(6)]
REFERENCE = "It serves dishes."
PLAIN = ["model.dtype=float32", "decode.method=full", "sampling.max_new_tokens=8"]
MODULES = [f"model.decoder.layers.{i}.fc1" for i in range(6)]


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, model, dict.fromkeys(MODULES, 4), target_modules=["fc1"])


@pytest.fixture(scope="module")
def merged(tiny_checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    merge_by_hand(model, adapter, dict.fromkeys(MODULES, 2.0)).save_pretrained(folder)
    shutil.copy(tiny_checkpoint / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"r{n}", "prompt": text, "reference": REFERENCE} for n, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(run: Path) -> dict[str, list[int]]:
    files = sorted((run / "data/status=ok").glob("*.parquet"))
    return {row["id"]: row["generated_tokens"] for path in files for row in pq.ParquetFile(path).read().to_pylist()}


def served(source: Path, adapter: Path | None = None) -> dict[str, list[int]]:
    """By the generator of an endpoint."""
    model = {"source": str(source), "adapter": adapter and str(adapter), "dtype": "float32"}
    config = build_config(ServeConfig, {"model": model, "decode": {"method": "full"}})
    generator = Generator(make_spec(config, "a-made-key").generator)
    requests = [Request(f"r{n}", ids, Sampling(8)) for n, ids in enumerate(generator.tokenizer.encode(PROMPTS))]
    answers = zip(requests, generator(requests).answers, strict=True)
    return {request.id: one.tokens for request, one in answers if isinstance(one, Completion)}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_is_up")
def test_generate_evaluate_and_resume(
    tiny_checkpoint: Path, adapter: Path, merged: Path, prompts: Path, tmp_path: Path, call: Call
) -> None:
    own, run = shutil.copytree(adapter, tmp_path / "adapter"), tmp_path / "run"
    plain = ["-i", prompts, "-o", run, f"model.source={tiny_checkpoint}", *PLAIN]
    code, _, err = call(generate, *plain, f"model.adapter={own}")
    assert code == 0, err
    assert rows_of(run) == served(merged) == served(tiny_checkpoint, own) != served(tiny_checkpoint)
    scoring = [run, "--references", prompts, "--prompt-column", "prompt", "--reference-column", "reference"]
    code, document, err = call(evaluate, *scoring)
    assert code == 0, err
    model = load_model(merged)
    encoded = encode_pairs(Tokenizer(merged, model.config), [(text, REFERENCE) for text in PROMPTS])
    assert document["loss"] == pytest.approx(mean_loss(model, encoded, FullDepth(6), 6), rel=1e-5)

    tensors = load_file(own / "adapter_model.safetensors")
    name = min(tensors)
    save_file(tensors | {name: tensors[name] + 1e-6}, own / "adapter_model.safetensors")
    for given in ([f"model.adapter={own}"], []):
        code, document, _ = call(generate, *plain, "--resume", *given)
        assert (code, document["error"].partition(":")[0]) == (2, "model.adapter")
    code, document, _ = call(evaluate, *scoring)
    assert code == 2
    assert "the adapter there is no longer the one that the run used" in document["error"]


def test_an_adapter_of_another_model_ends_the_verb_before_it_begins(
    tiny_checkpoint: Path,
    adapter: Path,
    checkpoint_factory: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    call: Call,
) -> None:
    wide = checkpoint_factory("1.3b")
    code, document, _ = call(
        generate, "-i", prompts, "-o", tmp_path / "run", f"model.source={wide}", f"model.adapter={adapter}", *PLAIN
    )
    assert code == 2
    assert document["error"].startswith("model.adapter: ")
    assert "this model and rank 4 ask for [4, 64]" in document["error"]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError) as caught:
        check_model(JobConfig.model_validate({"model": {"source": str(tiny_checkpoint), "adapter": "no/where"}}), print)
    assert caught.value.key == "model.adapter"


def test_calibrate_writes_the_two_merged(
    tiny_checkpoint: Path, adapter: Path, merged: Path, prompts: Path, tmp_path: Path, call: Call
) -> None:
    settings = ["skip_share=0.3", "warmup_tokens=1", "max_new_tokens=8", "model.dtype=float32", "threads=1"]
    output, source = tmp_path / "model", f"model.source={tiny_checkpoint}"
    code, _, err = call(calibrate, "-i", prompts, "-o", output, source, f"model.adapter={adapter}", *settings)
    assert code == 0, err
    made, by_hand = load_model(output), load_model(merged)
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(made.state_dict()[name], value, rtol=0, atol=1e-6)
    assert made.config.ffn_skip is not None
    wanted: dict[str, Any] = {"model": {"source": str(output)}, "decode": {"ffn_skip": {"mode": "calibrated"}}}
    check_model(build_config(JobConfig, wanted), print)
    wanted["model"]["adapter"] = str(adapter)  # for which it was not measured
    with pytest.raises(ConfigError, match=r"hold without a model.adapter alone"):
        check_model(build_config(JobConfig, wanted), print)


@pytest.mark.slow
def test_sweep_and_bench(
    tiny_checkpoint: Path, adapter: Path, merged: Path, prompts: Path, tmp_path: Path, call: Call
) -> None:
    models = ((tiny_checkpoint, adapter), (merged, "null"), (tiny_checkpoint, "null"))
    runs = ", ".join(
        f"{{label: x, model: {source}, adapter: {own}, decode: [{{method: full, name: n{number}}}]}}"
        for number, (source, own) in enumerate(models)
    )
    data = f"data={{path: {prompts}, prompt_column: prompt, reference_column: reference, limit: 6}}"
    fixed = ["max_new_tokens=8", f"output={tmp_path / 'quality'}", "threads=1"]
    code, document, err = call(evaluate, "--sweep", data, f"runs=[{runs}]", *fixed)
    assert code == 0, err
    losses = [row["loss"] for row in document["rows"]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0] != pytest.approx(losses[2], rel=1e-4)
    assert document["rows"][0]["adapter"] == str(adapter)
    short = ["shape=null", f"source={tiny_checkpoint}", "batch_sizes=[2]", "prompt_tokens=[4]", "new_tokens=4"]
    code, document, err = call(bench, *short, "repeats=1", f"adapter={adapter}", "threads=1", "schedules=[]")
    assert code == 0, err
    code, document, _ = call(bench, "shape=opt-125m", f"adapter={adapter}")
    assert (code, document["error"].partition(":")[0]) == (2, "adapter")
