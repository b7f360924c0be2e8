"""LoRA adapters of models of transformers: the weights are those of PEFT's merged model; what does not fit is named."""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from actors.training.trainer import Hooks, train
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import adapter_of, check_folder, load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.schedules.schedule import FullDepth
from skipdecode.training.lora import LoraShape, add_lora, check_start, linear_names, save_adapter
from tests.support.naive import random_prompts, requests_for, tokens_of
from tests.support.train_configs import make_config
from tests.support.wrapped_models import VOCAB, L, save, small_model

NUM_NEW = 9
PROMPTS = random_prompts([9, 4, 6], vocab=VOCAB)
KEYS: dict[str, dict[str, Any]] = {
    "olmo2": {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
    "gpt_neox": {"target_modules": ["query_key_value"], "use_rslora": True, "bias": "lora_only"},
    "gemma2": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "glm": {"target_modules": ["gate_up_proj"], "modules_to_save": ["lm_head"]},
    "qwen3_moe": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.down_proj"]},
}
"""By model type, what PEFT is asked for: plain LoRA, biases, DoRA, whole modules, experts."""


def adapter_for(kind: str, folder: Path, **keys: Any) -> Path:
    """An adapter with random weights, as PEFT saves it."""
    torch.manual_seed(0)
    model = peft.get_peft_model(small_model(kind), peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **keys))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.normal_(0.0, 0.2)
    model.eval().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind", [kind if kind == "olmo2" else pytest.param(kind, marks=pytest.mark.slow) for kind in KEYS]
)
def test_tokens_are_those_of_the_model_that_peft_merges(kind: str, tmp_path: Path) -> None:
    plain = save(kind, tmp_path / "model")
    adapter = adapter_for(kind, tmp_path / "adapter", **KEYS[kind])
    check_folder(tmp_path / "model", adapter)
    ours = load_model(tmp_path / "model", adapter=adapter)
    assert isinstance(ours, WrappedDecoder)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(plain, str(adapter)).merge_and_unload()
    found, wanted = ours.model.state_dict(), merged.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(before[name], tensor) for name, tensor in wanted.items() if name in before)
    check_tokens(ours, merged)


def check_tokens(ours: Decoder, merged: PreTrainedModel) -> None:
    """Those of transformers' `generate`."""
    requests = requests_for(PROMPTS, Sampling(max_new_tokens=NUM_NEW, ignore_eos=True))
    for prompt, tokens in zip(PROMPTS, tokens_of(generate(ours, requests, FullDepth(L))), strict=True):
        ids = torch.tensor([prompt])
        made = merged.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-7
        )
        assert tokens == made[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["olmo2", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_trained_adapter_is_peft_s_own(kind: str, tmp_path: Path) -> None:
    """The base stays as it is; PEFT merges what is saved, and so does `load_model`, from which training goes on."""
    source, adapter = tmp_path / "model", tmp_path / "adapter"
    save(kind, source)
    adapter.mkdir()
    model = load_model(source, implementation="transformers")
    shape = LoraShape(4, 8.0, ("q_proj", "down_proj") if kind == "olmo2" else ("c_attn", "c_fc"))
    assert set(shape.targets) < set(linear_names(model.config))
    batch, full = teacher_batch([(prompt, [9, 7, 8]) for prompt in PROMPTS], 0), FullDepth(L)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = teacher_forced_logits(model, batch, full)
    add_lora(model, shape, seed=3)
    assert all(
        torch.equal(one, other) for one, other in zip(plain, teacher_forced_logits(model, batch, full), strict=True)
    )
    again = load_model(source, implementation="transformers")
    add_lora(again, shape, seed=3)
    for (name, one), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name

    def keep(weights: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        own = {name.removeprefix("model."): value for name, value in weights.items()}
        save_adapter(own, adapter, model.config, shape, str(source))

    config = make_config(epochs=4.0, batch_size=3, validate_every=4, learning_rate=0.02, warmup_steps=1)
    pairs = [(prompt, [9, 7, 8]) for prompt in PROMPTS]
    train(model, pairs, pairs, config, Hooks(lambda _: None, keep, lambda *_: None))
    trained = teacher_forced_logits(model, batch, full)
    assert not any(torch.allclose(one, other, atol=0.1) for one, other in zip(plain, trained, strict=True))
    now = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert now.keys() == before.keys()
    assert all(torch.equal(now[name], before[name]) for name in before)

    ours = load_model(source, adapter=adapter, implementation="transformers")
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(reference, str(adapter)).merge_and_unload().eval()
    check_tokens(ours, merged)
    for one, other in zip(teacher_forced_logits(ours, batch, full), trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)

    check_start(adapter, shape, read_config(source, "transformers"), source)
    begun = load_model(source, implementation="transformers")
    add_lora(begun, shape, 5, adapter_of(adapter, begun))
    for one, other in zip(teacher_forced_logits(begun, batch, full), trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"model.adapter: has rank 4 and alpha 8 at .* asks for 8 and 8"):
        check_start(adapter, LoraShape(8, 8.0, shape.targets), read_config(source, "transformers"), source)


def test_what_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    folder = tmp_path / "model"
    save("olmo2", folder)
    adapter = adapter_for("olmo2", tmp_path / "adapter", target_modules=["q_proj"])
    file, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole, keys = load_file(file), json.loads(settings.read_text())
    first = min(whole)

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            check_folder(folder, adapter)

    save_file({name: tensor for name, tensor in whole.items() if name != first}, file, metadata={"format": "pt"})
    refused("model.adapter: .*adapter cannot be merged into Olmo2ForCausalLM: 1 tensors are missing, the first is")
    save_file(whole | {"base_model.model.model.layers.9.x.lora_A.weight": whole[first].clone()}, file)
    refused("1 tensors are unexpected, the first is 'base_model.model.model.layers.9.x.lora_A")
    save_file(whole | {first: torch.zeros(4, 65)}, file)
    refused("model.adapter: .*size mismatch for base_model.model.model.layers.0.self_attn.q_proj.lora_A")
    save_file(whole, file)
    settings.write_text(json.dumps(keys | {"target_modules": ["qkv"]}))
    refused("model.adapter: .*Target modules .*qkv.* not found in the base model")
    settings.write_text(json.dumps(keys | {"peft_type": "IA3"}))
    refused("model.adapter: .*adapter_config.json: peft_type is 'IA3'; only 'LORA' is supported")
    settings.write_text(json.dumps(keys))
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("model.adapter: needs the library peft")
    monkeypatch.undo()
    check_folder(folder, adapter)
    save_file(whole | {first: torch.full_like(whole[first], float("nan"))}, file)
    with pytest.raises(ValueError, match=r"model.adapter: .*NaNs detected in the merged weights"):
        load_model(folder, adapter=adapter)
