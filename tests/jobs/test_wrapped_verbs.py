"""The verbs on a model that no family of ours takes: Gemma 3, whose layers have windows and norms of their own kind."""

import json
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import peft
import pyarrow.parquet as pq
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from jobs import calibrate, distill, doctor, finetune, generate, verify
from pipeline.config.job import ConfigError
from pipeline.resolve_model import check_quantization
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate as decode_batch
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from skipdecode.schedules.from_config import make_schedule
from tests.support.finetune_helpers import validations, write_pairs
from tests.support.service_helpers import local, make_endpoint
from tests.support.verbs import Call
from tests.support.wrapped_models import INSTALLED_TYPES, L, naive_logits, save

PROMPTS = [f"The Golden Otter serves {n} dishes near Willow Station" for n in range(12)]
DECODE = {"max_layers": 5, "min_layers": 2}
NUM_NEW = 8


KINDS = [kind if kind == "gemma2" else pytest.param(kind, marks=pytest.mark.slow) for kind in INSTALLED_TYPES]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Callable[[str], Path]:
    """`folder_of(kind)`: a checkpoint with a tokenizer."""

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        save(kind, folder, vocab_size=320)
        (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
        return folder

    return make


@pytest.fixture(scope="module")
def gemma(folder_of: Callable[[str], Path]) -> Path:
    return folder_of("gemma2")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    return path


def rows_of(run: Path) -> dict[str, list[int]]:
    files = sorted((run / "data/status=ok").glob("*.parquet"))
    return {row["id"]: row["generated_tokens"] for path in files for row in pq.ParquetFile(path).read().to_pylist()}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", INSTALLED_TYPES)
def test_a_run_is_exact_and_resumed(
    kind: str, folder_of: Callable[[str], Path], prompts: Path, tmp_path: Path, call: Call
) -> None:
    """Under SkipDecode, then without loss."""
    run, source = tmp_path / "run", folder_of(kind)
    arguments = ["-i", prompts, "-o", run, f"model.source={source}", "model.dtype=float32", "sampling.ignore_eos=true"]
    arguments += [f"sampling.max_new_tokens={NUM_NEW}", "actors.batch_size=4", "actors.window_batches=1"]
    arguments += [f"decode.{key}={value}" for key, value in DECODE.items()]
    code, document, err = call(generate, *arguments)
    assert code == 0, err
    assert document["model"]["implementation"] == "transformers"
    made = rows_of(run)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    schedule = make_schedule({"method": "skipdecode", **DECODE}, num_layers=L, max_new_tokens=NUM_NEW)
    encoded = Tokenizer(source, load_model(source).config).encode(PROMPTS)
    for number, prompt in enumerate(encoded):
        tokens = made[f"r{number}"]
        assert naive_logits(reference, prompt, tokens, schedule).argmax(-1).tolist() == tokens

    for path in sorted((run / "data/status=ok").glob("*.parquet"))[::2]:
        path.unlink()
    state = json.loads((run / "run.json").read_text())
    assert state["fingerprint"]["model.implementation"] == "transformers"
    (run / "run.json").write_text(json.dumps(state | {"state": "interrupted"}))  # as a killed driver leaves it
    assert 0 < len(rows_of(run)) < len(made)
    code, _, err = call(generate, *arguments, "--resume")
    assert code == 0, err
    assert rows_of(run) == made
    assert call(verify, run)[0] == 0

    arguments[3] = tmp_path / "lossless"
    code, document, err = call(generate, *arguments, "decode.lossless=true", "decode.draft_tokens=2")
    assert code == 0, err
    full = make_schedule({"method": "full"}, num_layers=L, max_new_tokens=NUM_NEW)
    made = rows_of(tmp_path / "lossless")
    for number, prompt in enumerate(encoded):
        tokens = made[f"r{number}"]
        assert naive_logits(reference, prompt, tokens, full).argmax(-1).tolist() == tokens


@pytest.mark.ray
@pytest.mark.slow
def test_doctor_says_which_implementation(gemma: Path, tmp_path: Path, call: Call) -> None:
    code, document, err = call(
        doctor, f"model.source={gemma}", "model.dtype=float32", f"output.path={tmp_path / 'run'}"
    )
    assert code == 0, err
    assert document["choice"]["implementation"] == "transformers"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.adapter", "{gemma}", "model.adapter: "),
        ("model.implementation", "own", "model_type is 'gemma2'; supported are opt"),
        ("decode.ffn_skip", "{mode: calibrated}", "decode.ffn_skip.mode: this checkpoint carries no calibrated layers"),
        ("prefill.method", "swiftkv", "prefill.method: 'swiftkv' needs a checkpoint"),
        ("actors.num_gpus", "2", "actors.num_gpus: is not supported"),
        ("sampling.deterministic", "true", "sampling.deterministic: is not supported"),
    ],
)
def test_generate_refuses_what_it_cannot_do(
    key: str, value: str, message: str, gemma: Path, prompts: Path, tmp_path: Path, call: Call
) -> None:
    asked = key + "=" + value.replace("{gemma}", str(gemma))
    code, _, err = call(generate, "-i", prompts, "-o", tmp_path / "run", f"model.source={gemma}", asked)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run").exists()


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder": ("bert", {}, "its layers are in BertEncoder, which takes no"),
    "encoder and decoder": ("t5", {}, "model_type 't5' has an encoder"),
    "linear attention": ("qwen3_next", {}, "layer_types: its layers of type linear_attention keep a state"),
    "state": ("mamba", {}, "layer_types: its layers of type linear_attention keep a state"),
    "remote code": (
        "olmo2",
        {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "m.M"}},
        "its own code, which",
    ),
    "fp8": ("olmo2", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set (fp8)"),
    "gptq": (
        "olmo2",
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "quantization_config is set (gptq)",
    ),
    "fewer layers": (
        "olmo2",
        {"num_hidden_layers": L - 1},
        f"11 tensors are unexpected, the first is 'model.layers.{L - 1}.",
    ),
    "more layers": ("olmo2", {"num_hidden_layers": L + 1}, f"11 tensors are missing, the first is 'model.layers.{L}."),
    "wider": ("olmo2", {"hidden_size": 128}, "is [320, 64], config.json asks for [320, 128]"),
    "vocabulary": ("olmo2", {"vocab_size": 400}, "'lm_head.weight' is [320, 64], config.json asks for [400, 64]"),
    "feed-forward": ("olmo2", {"intermediate_size": 128}, "mlp.down_proj.weight' is [64, 96], config.json asks for"),
}
"""By what is wrong: the model type, keys of config.json, and what the message says."""


@pytest.mark.parametrize(
    "case", [case if case == "vocabulary" else pytest.param(case, marks=pytest.mark.slow) for case in BAD]
)
def test_generate_refuses_models_that_cannot_run(
    case: str, folder_of: Callable[[str], Path], prompts: Path, tmp_path: Path, call: Call
) -> None:
    """By the part that is in the way, within seconds, before Ray or a run folder is there."""
    kind, changes, message = BAD[case]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folder_of("olmo2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if kind != "olmo2":
        CONFIG_MAPPING[kind]().save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2} | raw | changes))
    began, was_started = time.monotonic(), ray.is_initialized()
    code, _, err = call(generate, "-i", prompts, "-o", tmp_path / "run", f"model.source={folder}")
    assert (code, time.monotonic() - began < 60) == (2, True), err
    assert message in err
    assert ray.is_initialized() == was_started
    assert not (tmp_path / "run").exists()


def test_int8_needs_widths_that_its_kernels_take(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Those of transformers' linear layers."""
    check_quantization("int8", read_config(folder_of("gemma2")), "bfloat16", "cpu", lacking=None)
    save("gemma2", tmp_path, intermediate_size=80)
    with pytest.raises(ConfigError, match=r"model.quantization: down_proj 80 of this model is .*; null takes it"):
        check_quantization("int8", read_config(tmp_path), "bfloat16", "cpu", lacking=None)


def test_other_verbs_refuse_it(
    gemma: Path, folder_of: Callable[[str], Path], prompts: Path, tmp_path: Path, call: Call
) -> None:
    """By the key, or the part of a layer that is in the way."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "response": "b"}\n')
    data = [f"data.path={pairs}", f"data.validation={pairs}", f"output.path={tmp_path / 'out'}"]
    swiftkv = "model.swiftkv={kv_layers: 3}"
    fused = "model.swiftkv needs projections of queries, keys and values that are modules, and layer 0 GPT2Block has no"
    given: list[tuple[Any, Path, list[str], str]] = [
        (
            finetune,
            gemma,
            [*data, "train.lora={targets: [qkv]}"],
            "train.lora.targets: this model has no 'qkv'; it has",
        ),
        (finetune, gemma, [*data, "train.parallel=fsdp"], "train.parallel: fsdp needs a model of a family of ours"),
        (distill, folder_of("gpt2"), [*data, swiftkv], fused),
        (distill, folder_of("gpt2"), [*data, swiftkv, "--init-only"], fused),
        (
            calibrate,
            folder_of("cohere"),
            [f"output={tmp_path / 'out'}", f"input.path={prompts}"],
            "target: feed-forward blocks cannot be skipped: layer 0 of model_type 'cohere'",
        ),
    ]
    for verb, source, arguments, message in given:
        code, _, err = call(verb, f"model.source={source}", *arguments)
        assert code == 2, err
        assert message in err


@pytest.mark.slow
@pytest.mark.parametrize(("target", "kind"), [("ffn_skip", "gemma2"), ("drafts", "cohere")])
def test_calibrate_writes_what_generate_uses(
    target: str, kind: str, folder_of: Callable[[str], Path], prompts: Path, tmp_path: Path, call: Call
) -> None:
    """The same model, whose config.json carries what was found."""
    output, keys = tmp_path / "out", {"max_new_tokens": 6, "num_prompts": 8, "batch_size": 4, "threads": 1}
    keys |= {"model.dtype": "float32", "target": target, "input.path": prompts, "model.source": folder_of(kind)}
    keys |= {"batch_sizes": "[2]"} if target == "drafts" else {"warmup_tokens": 1}
    code, _, err = call(calibrate, f"output={output}", *(f"{key}={value}" for key, value in keys.items()))
    assert code == 0, err
    before, after = (load_model(folder).state_dict() for folder in (folder_of(kind), output))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = read_config(output)
    assert config.implementation == "transformers"
    assert getattr(config, target) is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheduler", ["cohort", "continuous"])
def test_the_endpoint_serves_it(kind: str, scheduler: str, folder_of: Callable[[str], Path]) -> None:
    """With the tokens of the offline generator."""
    source = folder_of(kind)
    decode = {"method": "skipdecode", **DECODE, "horizon": 7}
    generator = Generator(GeneratorConfig(str(source), decode, dtype="float32", num_threads=1))
    encoded = generator.tokenizer.encode(PROMPTS)
    answers = generator([Request(str(n), tokens, Sampling(NUM_NEW)) for n, tokens in enumerate(encoded)]).answers
    engine = {"scheduler": scheduler}
    endpoint = make_endpoint(generator, engine=engine)
    asked = {"prompt": PROMPTS, "max_tokens": NUM_NEW, "temperature": 0, "return_token_ids": True}
    try:
        with local(endpoint) as url:
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
    finally:
        endpoint.close()
    assert answer.status_code == 200, answer.text
    offline = [one.tokens for one in answers if isinstance(one, Completion)]
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == offline


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe"])
def test_finetune_trains_it(kind: str, folder_of: Callable[[str], Path], tmp_path: Path, call: Call) -> None:
    """And writes a folder that transformers opens, with the schedule that `generate` uses by default."""
    pairs, output = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "tuned"
    keys = {"epochs": 12, "batch_size": 64, "learning_rate": 0.005, "warmup_steps": 5, "horizon": 7, "log_every": 1}
    keys |= {"validate_every": 12, "precision": "float32", "schedules": [{"method": "full"}, DECODE]}
    arguments: list[object] = [f"train.{key}={json.dumps(value)}" for key, value in keys.items()]
    arguments += [f"data={{path: {pairs}, validation: {pairs}}}", f"model.source={folder_of(kind)}", "-o", output]
    code, _, err = call(finetune, *arguments, "output.dtype=float32")
    assert code == 0, err
    losses = [max(record.values()) for record in validations(output).values()]
    assert losses[-1] < 0.3 * losses[0], losses
    config = read_config(output)
    assert config.implementation == "transformers"
    assert config.skip_decode == DECODE | {"method": "skipdecode", "horizon": 7}
    model, tokenizer = load_model(output), Tokenizer(output, config)
    reference = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32, attn_implementation="eager").eval()
    schedule = make_schedule(config.skip_decode, num_layers=L, max_new_tokens=8)
    (prompt,) = tokenizer.encode(["say ef"])
    (made,) = decode_batch(model, [Request("", prompt, Sampling(8))], schedule).completions
    assert tokenizer.decode(made.tokens) == "efef"
    assert naive_logits(reference, prompt, made.tokens, schedule).argmax(-1).tolist() == made.tokens


@pytest.mark.ray
@pytest.mark.slow
def test_finetune_trains_an_adapter_of_it(gemma: Path, prompts: Path, tmp_path: Path, call: Call) -> None:
    """Which `generate` merges as PEFT does, under the schedule that it was trained for."""
    pairs, output, run = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "adapter", tmp_path / "run"
    keys = {"epochs": 2, "batch_size": 64, "learning_rate": 0.02, "warmup_steps": 1, "horizon": 7}
    keys |= {"validate_every": 12, "precision": "float32", "schedules": [DECODE], "lora": {"rank": 4}}
    arguments: list[object] = [f"train.{key}={json.dumps(value)}" for key, value in keys.items()]
    arguments += [f"data={{path: {pairs}, validation: {pairs}}}", f"model.source={gemma}", "-o", output]
    code, _, err = call(finetune, *arguments)
    assert code == 0, err
    keys = {"model.source": gemma, "model.adapter": output, "model.dtype": "float32", "sampling.ignore_eos": "true"}
    keys |= {"sampling.max_new_tokens": NUM_NEW}
    code, _, err = call(generate, "-i", prompts, "-o", run, *(f"{key}={value}" for key, value in keys.items()))
    assert code == 0, err
    reference = AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float32, attn_implementation="eager")
    merged = peft.PeftModel.from_pretrained(reference, str(output)).merge_and_unload().eval()
    schedule = make_schedule({"method": "skipdecode", **DECODE, "horizon": 7}, num_layers=L, max_new_tokens=NUM_NEW)
    made = rows_of(run)
    for number, prompt in enumerate(Tokenizer(gemma, read_config(gemma)).encode(PROMPTS)):
        tokens = made[f"r{number}"]
        assert naive_logits(merged, prompt, tokens, schedule).argmax(-1).tolist() == tokens


@pytest.mark.ray
@pytest.mark.slow
def test_distill_gives_it_swiftkv(gemma: Path, prompts: Path, tmp_path: Path, call: Call) -> None:
    """With which `generate` decodes where it is asked for; transformers opens the folder as it is."""
    pairs, output, run = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "swiftkv", tmp_path / "run"
    keys = {"epochs": 2, "batch_size": 64, "learning_rate": 0.005, "warmup_steps": 1, "fit_pairs": 64}
    keys |= {"validate_every": 12, "precision": "float32"}
    arguments: list[object] = [f"train.{key}={json.dumps(value)}" for key, value in keys.items()]
    arguments += [f"data={{path: {pairs}, validation: {pairs}}}", f"model.source={gemma}", "-o", output]
    code, _, err = call(distill, *arguments, "model.swiftkv={kv_layers: 3, group_size: 1}", "output.dtype=float32")
    assert code == 0, err
    config = read_config(output)
    assert config.swiftkv is not None
    keys = {"model.source": output, "model.dtype": "float32", "sampling.ignore_eos": "true"}
    keys |= {"sampling.max_new_tokens": NUM_NEW, "prefill.method": "swiftkv"}
    code, _, err = call(generate, "-i", prompts, "-o", run, *(f"{key}={value}" for key, value in keys.items()))
    assert code == 0, err
    made, model = rows_of(run), load_model(output)
    schedule = make_schedule({"method": "full"}, num_layers=L, max_new_tokens=NUM_NEW, swiftkv_from=3)
    encoded = Tokenizer(output, config).encode(PROMPTS)
    requests = [Request(f"r{n}", tokens, Sampling(NUM_NEW, ignore_eos=True)) for n, tokens in enumerate(encoded)]
    completions = decode_batch(model, requests, schedule).completions
    assert {r.id: one.tokens for r, one in zip(requests, completions, strict=True)} == made
    before = AutoModelForCausalLM.from_pretrained(gemma).state_dict()
    after = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
