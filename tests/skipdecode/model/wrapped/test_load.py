"""Loading a model of transformers: tensors that do not fit, the proof, and what such a model refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import skipdecode.api
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.logprobs import score_prompts
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.model.wrapped.load import prove
from skipdecode.schedules.from_config import make_schedule
from tests.support.families import family_config
from tests.support.naive import random_prompts, requests_for, tokens_of
from tests.support.schedules import decodes
from tests.support.wrapped_models import L, save


@pytest.fixture(scope="module")
def olmo2(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("olmo2")
    save("olmo2", folder, vocab_size=320)
    (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_both_implementations_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    raw = family_config(name)
    config: PreTrainedConfig = CONFIG_MAPPING[name](**{key: value for key, value in raw.items() if key != "model_type"})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    own, theirs = (load_model(tmp_path, implementation=kind) for kind in ("own", "transformers"))
    assert not isinstance(own, WrappedDecoder)
    assert isinstance(theirs, WrappedDecoder)
    requests = requests_for(random_prompts([9, 4, 6]), Sampling(max_new_tokens=9, temperature=0.8, ignore_eos=True))
    skips: list[dict[str, Any]] = [
        {"mode": "fixed", "layers": [1, 3], "warmup_tokens": 1},
        {"mode": "row", "threshold": 0.9, "cold_start": 1, "cold_end": 1, "warmup_tokens": 1},
    ]
    for decode in (*decodes(L).values(), *({"method": "full", "ffn_skip": skip} for skip in skips)):
        schedule = make_schedule(decode, num_layers=L, max_new_tokens=9)
        one, other = (generate(model, requests, schedule) for model in (own, theirs))
        assert tokens_of(one) == tokens_of(other), decode
        assert one.stats.ffns_run == other.stats.ffns_run
        assert (other.stats.ffns_run < other.stats.layers_run) == ("ffn_skip" in decode), decode


def test_missing_and_unexpected_tensors_are_named(olmo2: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((olmo2 / name).read_bytes())
    tensors = load_file(olmo2 / "model.safetensors")
    gone = tensors.pop("model.layers.2.mlp.down_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors are missing, the first is 'model.layers.2.mlp.down_proj.weight'"):
        load_model(tmp_path)
    more = tensors | {"model.layers.2.mlp.down_proj.weight": gone, "model.layers.9.extra": gone.clone()}
    save_file(more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 tensors are unexpected, the first is 'model.layers.9.extra'"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be read"):
        check_folder(tmp_path)


LIES: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": 8}, r"experts\.down_proj' is \[4, 64, 96\], config.json asks for \[8, 64, 96\]"),
    (
        "qwen3_moe",
        {"moe_intermediate_size": 64},
        r"experts\.down_proj' is \[4, 64, 32\], config.json asks for \[4, 64, 64\]",
    ),
    (
        "deepseek_v3",
        {"first_k_dense_replace": 2},
        "3 tensors are missing, the first is 'model.layers.1.mlp.down_proj.weight'",
    ),
    (
        "deepseek_v3",
        {"num_key_value_heads": 2},
        "4 heads of queries and 4 of keys, which num_key_value_heads does not say",
    ),
    (
        "gpt_oss",
        {"attention_bias": False},
        "24 tensors are unexpected, the first is 'model.layers.0.self_attn.k_proj.bias'",
    ),
    ("cohere", {"use_qk_norm": True}, "12 tensors are missing, the first is 'model.layers.0.self_attn.k_norm.weight'"),
]
"""By model type: keys of config.json that its weights do not have, and what the message says. transformers joins the
weights of experts as it loads them."""


@pytest.mark.parametrize(("kind", "lie", "message"), LIES)
def test_a_config_that_lies_about_its_weights_is_found_without_reading_them(
    tmp_path: Path, kind: str, lie: dict[str, Any], message: str
) -> None:
    save(kind, tmp_path)
    check_folder(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | lie))
    with pytest.raises(ValueError, match=message):
        check_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_the_proof_finds_a_model_that_decodes_otherwise(olmo2: Path) -> None:
    model = load_model(olmo2)
    assert isinstance(model, WrappedDecoder)
    prove(model)
    model.layers[1], model.layers[2] = model.layers[2], model.layers[1]
    with pytest.raises(ValueError, match=r"model_type 'olmo2' does not decode here as in transformers: .* apart"):
        prove(model)


def test_prompts_are_scored(olmo2: Path) -> None:
    model, reference = load_model(olmo2), AutoModelForCausalLM.from_pretrained(olmo2, dtype=torch.float32)
    prompts = random_prompts([9, 4])
    for prompt, scores in zip(prompts, score_prompts(model, prompts, 1), strict=True):
        with torch.no_grad():
            logprobs = reference(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = logprobs.gather(1, torch.tensor(prompt)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([one.logprob for one in scores]), wanted, rtol=1e-4, atol=1e-4)


def test_the_python_api_decodes(olmo2: Path) -> None:
    model = skipdecode.api.load(olmo2, dtype="float32", device="cpu")
    (made,) = skipdecode.api.generate(
        model, "The Golden Otter", max_new_tokens=5, ignore_eos=True, method="unified", layers=4
    )
    assert (len(made.tokens), made.layers_run) == (5, 16)
    (made,) = skipdecode.api.generate(
        model,
        "The",
        max_new_tokens=5,
        ignore_eos=True,
        ffn_skip={"mode": "fixed", "layers": [3], "warmup_tokens": 0},
    )
    assert (made.layers_run, made.ffns_run) == (24, 20)
    with pytest.raises(ValueError, match=r"quantization: int8 weights are for bfloat16 on CPUs, and this is float32"):
        skipdecode.api.load(olmo2, dtype="float32", device="cpu", quantization="int8")
    with pytest.raises(ValueError, match="implementation: must be auto, own, transformers, got 'vllm'"):
        skipdecode.api.load(olmo2, implementation="vllm")  # type: ignore[arg-type]
