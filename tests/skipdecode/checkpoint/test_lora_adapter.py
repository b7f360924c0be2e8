"""LoRA adapters: merged weights against a Hugging Face model with W + scale * B A computed here from the raw tensors,
in float32, logits within 1e-5 of the largest; and what is refused, by name of the key."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import skipdecode
from skipdecode.checkpoint.lora_adapter import LoraKeys
from skipdecode.checkpoint.weights import check_folder, load_model
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth
from skipdecode.schedules.trained import SCHEDULE_FILE, TRAINED_FILE
from tests.support.gguf_models import random_model, write_model
from tests.support.lora_adapters import merge_by_hand, write_adapter

TOLERANCE = 1e-5
OPT_LAYER, LLAMA_LAYER = "model.decoder.layers.{}.", "model.layers.{}."


def assert_equal_logits(model: Decoder, theirs: PreTrainedModel) -> None:
    ids = torch.randint(4, theirs.config.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    rows = ids.tolist()
    batch = teacher_batch([(row[:1], row[1:]) for row in rows], 1, torch.device("cpu"))
    with torch.inference_mode():
        reference = theirs(ids).logits[:, :-1]
        ours = teacher_forced_logits(model, batch, FullDepth(model.config.num_hidden_layers))
    torch.testing.assert_close(ours, reference, rtol=0, atol=TOLERANCE * float(reference.abs().max()))


@pytest.fixture
def base(tiny_checkpoint: Path) -> PreTrainedModel:
    """OPT, to be changed."""
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


def opt_modules(layers: range, *names: str) -> list[str]:
    return [OPT_LAYER.format(i) + name for i in layers for name in names]


def test_opt_with_plain_scale(base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path) -> None:
    modules = opt_modules(range(6), "self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")
    keys = {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "q_proj", "fc1", "fc2", "self_attn.out_proj"]}
    adapter = write_adapter(tmp_path / "a", base, dict.fromkeys(modules, 4), **keys)
    before = base(torch.arange(4, 14)[None]).logits
    theirs = merge_by_hand(base, adapter, dict.fromkeys(modules, 6 / 4))
    assert (theirs(torch.arange(4, 14)[None]).logits - before).abs().max() > 0.1  # else nothing was shown
    assert_equal_logits(load_model(tiny_checkpoint, adapter=adapter), theirs)


def test_llama_with_patterns_a_stabilised_scale_and_a_head(llama_folder: Path, tmp_path: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32).eval()
    parts = ("self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    modules = [LLAMA_LAYER.format(i) + part for i in range(3) for part in parts] + ["lm_head"]
    ranks = {name: 2 if name.endswith("gate_proj") else 5 if ".1.self_attn.k" in name else 4 for name in modules}
    alphas = {name: 3 if name.endswith("up_proj") else 8 for name in modules}
    adapter = write_adapter(
        tmp_path / "a",
        theirs,
        ranks,
        use_rslora=True,
        target_modules=r"lm_head|.*\.(k_proj|o_proj|gate_proj|up_proj|down_proj)",
        rank_pattern={"gate_proj": 2, r"layers\.1\.self_attn\.k_proj": 5, "_proj": 7},  # the last is no whole name
        alpha_pattern={"up_proj": 3},
    )
    merge_by_hand(theirs, adapter, {name: alphas[name] / math.sqrt(ranks[name]) for name in modules})
    assert_equal_logits(load_model(llama_folder, adapter=adapter), theirs)


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"layers_to_transform": [1, 4]}, (1, 4)),
        ({"layers_to_transform": 2, "layers_pattern": "layers"}, (2,)),
        ({"exclude_modules": [f"layers.{i}.self_attn.q_proj" for i in (0, 5)]}, (1, 2, 3, 4)),
        ({"exclude_modules": r".*\.[1-5]\..*"}, (0,)),
    ],
)
def test_some_layers(
    base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path, keys: dict[str, Any], layers: tuple[int, ...]
) -> None:
    modules = [OPT_LAYER.format(i) + "self_attn.q_proj" for i in layers]
    adapter = write_adapter(tmp_path / "a", base, dict.fromkeys(modules, 4), **keys)
    assert_equal_logits(
        load_model(tiny_checkpoint, adapter=adapter), merge_by_hand(base, adapter, dict.fromkeys(modules, 2.0))
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    """Its rows of queries lie otherwise in the file than in the model that the adapter was trained on."""
    theirs = random_model("llama")
    source = write_model(tmp_path / "model.gguf", theirs)
    modules = [LLAMA_LAYER.format(i) + part for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]
    keys = {"target_modules": ["q_proj", "up_proj"]}
    adapter = write_adapter(tmp_path / "a", theirs, dict.fromkeys(modules, 4), **keys)
    model = load_model(source, adapter=adapter)
    assert_equal_logits(model, merge_by_hand(theirs, adapter, dict.fromkeys(modules, 2.0)))


def test_merged_in_float32_then_rounded_once(base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", base, dict.fromkeys(opt_modules(range(6), "self_attn.q_proj"), 4))
    exact = load_model(tiny_checkpoint, adapter=adapter).state_dict()
    rounded = load_model(tiny_checkpoint, adapter=adapter, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], value.bfloat16()) for name, value in exact.items())


def test_the_schedule_of_the_adapter_is_the_default(
    base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", base, dict.fromkeys(opt_modules(range(6), "self_attn.q_proj"), 4))
    assert load_model(tiny_checkpoint, adapter=adapter).config.skip_decode is None
    (adapter / SCHEDULE_FILE).write_text('{"method": "unified", "layers": 3}')
    model = skipdecode.load(tiny_checkpoint, adapter=adapter, dtype="float32")
    assert model.schedule(8, "full", {}).step(0).num_layers_run == 3
    (adapter / SCHEDULE_FILE).write_text("[1]")
    with pytest.raises(ValueError, match=r"model.adapter: .*skip_decode.json is \[1\], expected a mapping"):
        load_model(tiny_checkpoint, adapter=adapter)
    (adapter / SCHEDULE_FILE).write_text('{"method": "unified", "layers": 3}')
    (adapter / TRAINED_FILE).write_text("{")
    with pytest.raises(ValueError, match=r"model.adapter: .*trained_schedules.json cannot be read"):
        load_model(tiny_checkpoint, adapter=adapter)


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is True; only False"),
    ({"bias": "lora_only"}, "bias is 'lora_only'; only 'none'"),
    ({"lora_bias": True}, "lora_bias is True"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out is True"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; only 'LORA'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices is"),
    ({"target_parameters": ["w"]}, "target_parameters is"),
    ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens is"),
    ({"a_key_of_next_year": 0.5}, "a_key_of_next_year is 0.5"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules names the embedding 'model.decoder.embed_tokens'"),
    ({"target_modules": ["gate_proj"]}, "it is an adapter of another model"),
    ({"target_modules": "(q"}, "target_modules: .* is no regular expression"),
    ({"target_modules": 3}, "target_modules is 3"),
    ({"use_rslora": "no"}, "use_rslora is 'no'"),
    ({"r": 0}, "r is 0, expected a positive integer"),
    ({"r": 5}, "tensor .*lora_A.weight' is \\[4, 48\\], this model and rank 5 ask for \\[5, 48\\]"),
    ({"lora_alpha": "big"}, "lora_alpha is 'big'"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern is"),
    ({"layers_to_transform": ["all"]}, "layers_to_transform is"),
    ({"layers_to_transform": [0], "target_modules": ".*fc1"}, "does not take beside an expression"),
    ({"target_modules": ["q_proj", "k_proj"]}, "lacks tensor .*k_proj.lora_A.weight' of a module that target_modules"),
    ({"layers_to_transform": [0, 1]}, "has 8 tensors that this model has no use for"),
]


@pytest.mark.parametrize(("keys", "message"), UNSUPPORTED, ids=[str(keys) for keys, _ in UNSUPPORTED])
def test_what_is_not_plain_lora_of_this_model_is_refused(
    hf: Callable[[Path], PreTrainedModel], tiny_checkpoint: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    modules = dict.fromkeys(opt_modules(range(6), "self_attn.q_proj"), 4)
    adapter = write_adapter(tmp_path / "a", hf(tiny_checkpoint), modules, **keys)
    for call in (check_folder, load_model):
        with pytest.raises(ValueError, match=f"^model.adapter: .*{message}"):
            call(tiny_checkpoint, adapter=adapter)


def test_tensors_of_another_model_are_refused(
    hf: Callable[[Path], PreTrainedModel], tiny_checkpoint: Path, llama_folder: Path, tmp_path: Path
) -> None:
    modules = dict.fromkeys(opt_modules(range(6), "self_attn.q_proj"), 4)
    adapter = write_adapter(tmp_path / "a", hf(tiny_checkpoint), modules)
    with pytest.raises(ValueError, match=r"lacks tensor 'base_model.model.model.layers.0.self_attn.q_proj.lora_A"):
        check_folder(llama_folder, adapter)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 48)}, path)
    with pytest.raises(ValueError, match=r"1 tensors .*no linear layer 'lm_head' to be changed"):
        check_folder(tiny_checkpoint, adapter)
    save_file(tensors | {"base_model.model.model.decoder.embed_tokens.lora_embedding_A": torch.zeros(4, 320)}, path)
    with pytest.raises(ValueError, match="a part of it that is not supported"):
        check_folder(tiny_checkpoint, adapter)


def test_numbers_that_are_none_are_refused(
    hf: Callable[[Path], PreTrainedModel], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    modules = dict.fromkeys(opt_modules(range(6), "fc1"), 4)
    adapter = write_adapter(tmp_path / "a", hf(tiny_checkpoint), modules, target_modules=["fc1"])
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[min(tensors)][0, 0] = torch.nan
    save_file(tensors, path)
    message = r"^model.adapter: .*layers.0.fc1.lora_A.weight' holds NaN or infinity"
    for call in (check_folder, load_model):
        with pytest.raises(ValueError, match=message):
            call(tiny_checkpoint, adapter=adapter)


def test_a_folder_that_is_no_adapter(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.adapter: 'some/where' is not a folder"):
        load_model(tiny_checkpoint, adapter="some/where")
    with pytest.raises(ValueError, match=r"model.adapter: .* has no adapter_config.json"):
        load_model(tiny_checkpoint, adapter=tiny_checkpoint)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"')
    with pytest.raises(ValueError, match=r"model.adapter: .* has no adapter_model.safetensors"):
        load_model(tiny_checkpoint, adapter=tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"model.adapter: .*adapter_config.json cannot be read"):
        load_model(tiny_checkpoint, adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"]}')
    with pytest.raises(ValueError, match=r"model.adapter: .*adapter_model.safetensors cannot be read"):
        load_model(tiny_checkpoint, adapter=tmp_path)


PEFT_KEYS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": "all-linear", "use_rslora": True},
    {"target_modules": r".*\.(fc1|out_proj)", "rank_pattern": {r"layers\.2\.fc1": 2, "out_proj": 3}, "lora_alpha": 5},
    {"target_modules": ["fc2"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
    {"target_modules": ["k_proj"], "exclude_modules": ["layers.1.self_attn.k_proj"], "alpha_pattern": {"k_proj": 1}},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("keys", PEFT_KEYS, ids=str)
def test_adapters_that_peft_saves(
    base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8} | keys))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    theirs.eval().save_pretrained(tmp_path / "a")
    assert_equal_logits(load_model(tiny_checkpoint, adapter=tmp_path / "a"), theirs)


def test_names_as_peft_matches_them() -> None:
    keys = LoraKeys.from_dict({"peft_type": "LORA", "target_modules": ["q_proj", "head"], "rank_pattern": {"b.c": 3}})
    found = [keys.changes(name) for name in ("a.q_proj", "a.xq_proj", "head", "head.q", "a.head")]
    assert found == [True, False, True, False, True]
    assert [keys.rank(name) for name in ("a.b.c", "a.bxc", "ab.c", "b.c.d")] == [3, 3, 8, 8]  # it is an expression


def test_weights_in_another_type(base: PreTrainedModel, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """An adapter in bfloat16 on weights in float16: both are taken to float32 first."""
    modules = dict.fromkeys(opt_modules(range(6), "self_attn.q_proj"), 4)
    adapter = write_adapter(tmp_path / "a", base, modules)
    path = adapter / "adapter_model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    shutil.copytree(tiny_checkpoint, tmp_path / "half")
    base.half().save_pretrained(tmp_path / "half")
    exact = load_file(path)
    wide = {name: value.float() for name, value in exact.items()}
    save_file(wide, path)
    theirs = merge_by_hand(base.float(), adapter, dict.fromkeys(modules, 2.0))
    save_file(exact, path)
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"
    assert_equal_logits(load_model(tmp_path / "half", adapter=adapter), theirs)
