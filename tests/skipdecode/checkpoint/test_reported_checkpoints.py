"""Checkpoints that were decoded otherwise than by transformers, the reference, or refused without saying why.

Each is now decoded as there (float32, logits within 1e-4), or refused by the name of what is wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.engine.generate import generate
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth
from tests.support.families import family_config
from tests.support.naive import greedy, requests_for, tokens_of

TOLERANCE = 1e-4
FAMILIES = ["opt", "llama", "mistral", "qwen2", "qwen3", "stablelm"]
ROPE_FAMILIES = FAMILIES[1:]
NUM_LAYERS, VOCAB = 2, 320
Tensors = dict[str, Tensor]
Make = Callable[..., Path]


def config_of(family: str) -> dict[str, Any]:
    if family != "opt":
        return family_config(family) | {"num_hidden_layers": NUM_LAYERS}
    shape = {"hidden_size": 48, "ffn_dim": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
    return {"model_type": "opt", "vocab_size": VOCAB, "max_position_embeddings": 128, "word_embed_proj_dim": 48} | shape


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(family, tensors=..., generation=..., without=(...), init={...}, **keys)`: a folder whose config.json has
    these keys, and whose weights are those of a model with `init` after `tensors(weights)`."""

    def folder_of(
        family: str,
        tensors: Callable[[Tensors], object] = lambda found: None,
        generation: dict[str, Any] | None = None,
        without: tuple[str, ...] = (),
        init: dict[str, Any] | None = None,
        **keys: Any,
    ) -> Path:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**(config_of(family) | (init or {}))))
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.12)
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink()
        weights = load_file(folder / "model.safetensors")
        tensors(weights)
        save_file({k: v.clone() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        raw = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k not in without}))
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return folder_of


def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_equal_logits(model: Decoder, theirs: PreTrainedModel) -> None:
    rows = torch.randint(4, VOCAB, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        batch = teacher_batch([(row[:1], row[1:]) for row in rows.tolist()], 1)
        ours = teacher_forced_logits(model, batch, FullDepth(model.config.num_hidden_layers))
        torch.testing.assert_close(ours, theirs(rows).logits[:, :-1], rtol=0, atol=TOLERANCE)


def refuse(folder: Path, match: str) -> None:
    for read in (check_folder, load_model):
        with pytest.raises(ValueError, match=match):
            read(folder)


# --- decoded as by transformers


@pytest.mark.parametrize("family", ROPE_FAMILIES)
@pytest.mark.parametrize("place", ["top", "mapping", "both", "neither"])
def test_the_original_context_of_llama3_scaling(make: Make, family: str, place: str) -> None:
    mapping = {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    mapping |= {"original_max_position_embeddings": 16} if place in ("mapping", "both") else {}
    top = {"original_max_position_embeddings": 64} if place in ("top", "both") else {}
    folder = make(family, rope_parameters=mapping, without=("rope_theta", "rope_scaling"), **top)
    rope = read_config(folder).rope
    assert rope is not None
    expected = {"top": 64, "mapping": 16, "both": 64, "neither": 128}[place]
    assert rope.get("original_max_position_embeddings") == expected
    assert_equal_logits(load_model(folder), reference(folder))


@pytest.mark.parametrize(
    ("family", "init", "keys"),
    [
        ("qwen2", {"num_key_value_heads": 6}, {"num_key_value_heads": None}),
        ("qwen3", {"num_key_value_heads": 6}, {"num_key_value_heads": None}),
        ("llama", {"num_key_value_heads": 6}, {"num_key_value_heads": None}),
        ("mistral", {}, {"mlp_bias": True, "attention_bias": True}),
        ("qwen2", {}, {"mlp_bias": True, "attention_bias": False}),
        ("qwen3", {}, {"mlp_bias": True}),
        ("stablelm", {}, {"mlp_bias": True, "attention_bias": True}),
        ("llama", {}, {"partial_rotary_factor": None}),
        ("stablelm", {}, {"partial_rotary_factor": 0.5}),
    ],
)
def test_keys_that_are_null_or_of_another_family(
    make: Make, family: str, init: dict[str, Any], keys: dict[str, Any]
) -> None:
    folder = make(family, init=init, **keys)
    assert_equal_logits(load_model(folder), reference(folder))


def _head_alone(family: str) -> Callable[[Tensors], object]:
    prefix = "model.decoder." if family == "opt" else "model."
    return lambda found: found.update({"lm_head.weight": found.pop(f"{prefix}embed_tokens.weight")})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_weight_stored_as_the_head_alone(make: Make, family: str) -> None:
    folder = make(family, tensors=_head_alone(family), init={"tie_word_embeddings": True})
    check_folder(folder)
    assert_equal_logits(load_model(folder), reference(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_that_is_stored_too(make: Make, family: str) -> None:
    prefix = "model.decoder." if family == "opt" else "model."

    def store(found: Tensors) -> None:
        found["lm_head.weight"] = found[f"{prefix}embed_tokens.weight"].clone()

    folder = make(family, tensors=store, init={"tie_word_embeddings": True})
    check_folder(folder)
    assert_equal_logits(load_model(folder), reference(folder))


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_with_other_weights_is_refused(make: Make, family: str, suffix: str) -> None:
    """transformers 5 unties it, so every token would be another one."""
    prefix = "model.decoder." if family == "opt" else "model."

    def store(found: Tensors) -> None:
        found["lm_head.weight"] = found[f"{prefix}embed_tokens.weight"].clone()
        found["lm_head.weight"][-1, -1] += 0.5

    folder = make(family, tensors=store, init={"tie_word_embeddings": True})
    theirs = reference(folder)
    assert not torch.equal(theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight)
    if suffix == ".bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    refuse(folder, r"lm_head\.weight.* is not .*embed_tokens.*tie_word_embeddings")
    if family != "opt":
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
        assert_equal_logits(load_model(folder), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_beyond_the_number_are_left_out(make: Make, family: str) -> None:
    folder = make(family, num_hidden_layers=1, without=("layer_types",))
    (remark,) = [line for line in check_folder(folder) if "layers" in line]
    assert "the weights of 1 layers from 1 on are not used" in remark
    assert_equal_logits(load_model(folder), reference(folder))


# --- what ends a text


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_key_the_class_says_what_ends_a_text(make: Make, family: str) -> None:
    folder = make(family, without=("eos_token_id",))
    theirs = AutoConfig.from_pretrained(folder).eos_token_id
    assert read_config(folder).eos_token_ids == (() if theirs is None else (theirs,))
    (remark,) = check_folder(folder)
    assert "no eos_token_id" in remark


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eos", [None, [], -1, VOCAB + 5, [2, VOCAB]])
def test_ends_that_no_token_is(make: Make, family: str, eos: Any) -> None:
    folder = make(family, eos_token_id=eos, pad_token_id=None)
    config = read_config(folder)
    assert 0 <= config.filler_token_id < VOCAB
    prompts = [[5, 9, 77], [40], [8, 8, 100, 101, 102, 300]]  # of several lengths, so that some are padded
    made = tokens_of(generate(load_model(folder), requests_for(prompts, greedy(20)), FullDepth(NUM_LAYERS)))
    model = reference(folder)
    model.generation_config.pad_token_id = 0
    for prompt, row in zip(prompts, made, strict=True):
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        assert row == wanted.tolist()


@pytest.mark.parametrize(
    ("eos", "generation", "ends", "is_remarked"),
    [
        (2, None, (2,), False),
        (2, {"eos_token_id": [5, 6]}, (5, 6), False),
        (2, {}, (2,), True),
        (2, {"eos_token_id": None}, (2,), True),
        (None, {"eos_token_id": 7}, (7,), False),
        (None, None, (), True),
    ],
)
def test_both_files_may_say_what_ends_a_text(
    make: Make, eos: int | None, generation: dict[str, Any] | None, ends: tuple[int, ...], is_remarked: bool
) -> None:
    folder = make("llama", eos_token_id=eos, generation=generation)
    assert read_config(folder).eos_token_ids == ends
    assert len(check_folder(folder)) == is_remarked


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>", "special": True}], ids=["text", "mapping"])
@pytest.mark.parametrize(
    ("ends", "number", "is_remarked"), [(2, 5, True), ([2, 5], 5, False), (5, 5, False), ([2, 6], 5, True)]
)
def test_a_token_that_ends_answers_for_the_tokenizer_alone(
    make: Make, token: Any, ends: Any, number: int, is_remarked: bool
) -> None:
    """A fine-tuned chat model of which generation_config.json was forgotten: it does not stop."""
    folder = make("qwen2", generation={"eos_token_id": ends})
    added = {"0": {"content": "<|endoftext|>"}, str(number): {"content": "<|im_end|>"}}
    settings = {"eos_token": token, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    remarks = check_folder(folder)
    assert len(remarks) == is_remarked
    said = f"its eos_token '<|im_end|>' ({number}) ends no text here"
    assert not is_remarked or (said in remarks[0] and f"sampling.stop_token_ids=[{number}] ends" in remarks[0])


@pytest.mark.parametrize(
    ("generation", "named"),
    [
        ({"repetition_penalty": 1.05}, "repetition_penalty=1.05"),
        ({"no_repeat_ngram_size": 3, "min_new_tokens": 2}, "no_repeat_ngram_size=3, min_new_tokens=2"),
        ({"suppress_tokens": [1, 2]}, r"suppress_tokens=\[1, 2\]"),
        ({"forced_bos_token_id": 0}, "forced_bos_token_id=0"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": []}, None),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20, "do_sample": True, "max_length": 20}, None),
    ],
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_what_changes_greedy_text_is_named(
    make: Make, generation: dict[str, Any], named: str | None, name: str
) -> None:
    if name == "config.json":
        folder = make("qwen2", **generation)
    else:
        folder = make("qwen2", generation=generation | {"eos_token_id": 2})
    remarks = check_folder(folder)
    assert len(remarks) == (named is not None)
    if named is not None:
        assert f"{name}: {named} has no effect here".replace("\\", "") in remarks[0]


def test_a_penalty_would_change_the_text(make: Make) -> None:
    """Why it is said: transformers' greedy `generate` applies it."""
    plain = reference(make("llama", generation={"eos_token_id": None}))
    prompt = torch.tensor([[5, 9, 77, 5, 9]])
    texts = [
        plain.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0, repetition_penalty=penalty).tolist()
        for penalty in (1.0, 1.3)
    ]
    assert texts[0] != texts[1]


# --- refused, and by name


def _with(name: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda found: found.update({name: value})


def _int8(found: Tensors) -> None:
    found["model.layers.0.mlp.up_proj.weight"] = found["model.layers.0.mlp.up_proj.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("tensors", "keys", "match"),
    [
        (_int8, {}, r"tensor 'model\.layers\.0\.mlp\.up_proj\.weight' is I8; quantised weights"),
        (_with("model.layers.0.mlp.up_proj.qweight", torch.zeros(2, 2)), {}, "qweight'; the weights are quantised"),
        (_with("score.weight", torch.zeros(2, 96)), {}, "'score.weight'; it is a classifier"),
        (_with("base_model.model.x.lora_A.weight", torch.zeros(2)), {}, "belongs to an adapter: model.adapter="),
        (_with("other.weight", torch.zeros(2)), {}, "'other.weight'; config.json and weights are of different models"),
        (lambda found: None, {"vocab_size": 400}, r"is \[320, 96\], config\.json asks for \[400, 96\] \(vocab_size\)"),
        (lambda found: None, {"num_hidden_layers": 3}, r"layers\.2\..* is missing; num_hidden_layers .* is 3"),
        (lambda found: None, {"quantization_config": {"quant_method": "awq"}}, r"quantization_config is set \(awq\)"),
    ],
)
def test_what_is_wrong_is_named(
    make: Make, tensors: Callable[[Tensors], object], keys: dict[str, Any], match: str
) -> None:
    refuse(make("llama", tensors=tensors, **keys), match)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.json", "model.gguf"])
def test_what_git_leaves_without_lfs_is_named(make: Make, name: str) -> None:
    """A few lines in the place of each large file of a clone."""
    folder = make("llama")
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 268109912\n")
    config, source = read_config(folder), folder / name if name == "model.gguf" else folder
    with pytest.raises(ValueError, match=r"it is a pointer of git LFS, and not the file; git lfs install"):
        Tokenizer(folder, config) if name == "tokenizer.json" else check_folder(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(make: Make, value: float) -> None:
    def spoil(found: Tensors) -> None:
        found["model.layers.1.mlp.down_proj.weight"][3, 5] = value

    folder = make("llama", tensors=spoil)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight' holds NaN or infinity"):
        load_model(folder)


def test_weights_that_do_not_fit_the_type(make: Make) -> None:
    def grow(found: Tensors) -> None:
        found["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6

    folder = make("llama", tensors=grow)
    load_model(folder, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"down_proj\.weight' does not fit float16; model\.dtype=bfloat16"):
        load_model(folder, dtype=torch.float16)


def test_code_in_the_folder_is_said_not_to_run(make: Make) -> None:
    folder = make("llama", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (remark,) = check_folder(folder)
    assert "auto_map names code of its own, which is not run: the model is decoded as LlamaForCausalLM" in remark


# --- adapters


def test_an_adapter_on_an_untied_head(make: Make, tmp_path: Path) -> None:
    """PEFT stores the weight of the head beside A and B."""
    folder = make("llama")
    shape = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(reference(folder), shape).eval()
    theirs.base_model.model.lm_head.base_layer.weight.data += 0.1  # as if a tokenizer had been extended
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "adapter/adapter_model.safetensors")
    check_folder(folder, tmp_path / "adapter")
    assert_equal_logits(load_model(folder, adapter=tmp_path / "adapter"), theirs)


def test_an_adapter_as_the_model_says_where_it_belongs(make: Make, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "facebook/opt-125m"}')
    refuse(tmp_path / "adapter", r"is an adapter: model\.adapter=.*adapter model\.source=facebook/opt-125m")
