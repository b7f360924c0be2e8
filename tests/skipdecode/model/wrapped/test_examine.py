"""What neither we nor transformers can run is refused by the part that is in the way; what runs has its shape found."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from skipdecode.checkpoint.model_config import read_config
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.wrapped.examine import SINCE
from tests.support.wrapped_models import INSTALLED_TYPES, L, small_config, small_model

REFUSED = {
    "mamba": "layer_types: its layers of type (linear_attention|mamba) keep a state",
    "qwen3_next": "layer_types: its layers of type (linear_attention|mamba) keep a state",
    "falcon_h1": "layer_types: its layers of type hybrid keep a state",
    "bloom": "model_type 'bloom' has no max_position_embeddings",
    "rwkv": "model_type 'rwkv' has no num_attention_heads",
    "falcon": "its attention does not go through transformers' attention interface",
    "xglm": "its attention does not go through transformers' attention interface",
    "doge": "layer 0 of model_type 'doge' .* cannot run: it works on the attention mask itself",
    "bert": "its layers are in BertEncoder, which takes no",
    "t5": "model_type 't5' has an encoder",
    "vit": "model_type 'vit' has no AutoModelForCausalLM",
    "gemma3n_text": "num_kv_shared_layers is 15: layers read keys of others",
}
"""By model type, what the message says."""


def folder_of(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_in_the_way_is_named(kind: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[kind]().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED[kind]) as caught:
        read_config(folder_of(tmp_path, json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": 2}))
    assert f"model_type is {kind!r}; supported are opt" in str(caught.value)


@pytest.mark.parametrize("kind", SINCE)
def test_a_type_that_needs_a_newer_transformers_says_which(kind: str, tmp_path: Path) -> None:
    """The other tests run these types where they can (`make test-floor` has a transformers where they cannot)."""
    folder = folder_of(tmp_path, small_config(kind).to_dict())
    if kind in INSTALLED_TYPES:
        assert read_config(folder).implementation == "transformers"
        return
    with pytest.raises(ValueError, match=rf"it needs transformers >= {SINCE[kind]}, and 5\.\d+\.\d+ is installed"):
        read_config(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mine"}, "model_type is 'mine', which transformers .* does not have"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, r"its own code, which auto_map names, is never run"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config is set \(fp8\)"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most 1024"),
        ({"swiftkv": {"kv_layers": 9}}, "swiftkv.kv_layers is 9, and the model has 6 layers"),
        ({"num_hidden_layers": "six"}, "transformers cannot read it: .*num_hidden_layers"),
    ],
)
def test_keys_that_neither_can_run(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    raw = small_config("olmo2").to_dict() | changes
    with pytest.raises(ValueError, match=message):
        read_config(folder_of(tmp_path, raw))


def test_own_refuses_what_transformers_would_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, small_config("olmo2").to_dict())
    with pytest.raises(ValueError, match="model_type is 'olmo2'; supported are opt"):
        read_config(folder, "own")


def test_a_family_of_ours_comes_first(tmp_path: Path) -> None:
    """And what it refuses is left to transformers, with its tokenizer's rules."""
    folder = folder_of(tmp_path, small_config("mistral").to_dict() | {"sliding_window": None})
    assert read_config(folder).implementation == "own"
    assert read_config(folder, "transformers").implementation == "transformers"
    other = read_config(folder_of(tmp_path, small_config("mistral").to_dict() | {"hidden_act": "gelu"}))
    assert other.implementation == "transformers"
    assert other.tokenizer_rules == read_config(folder, "transformers").tokenizer_rules


def test_the_shape_is_found_without_weights(tmp_path: Path) -> None:
    """Of latent attention, whose values are narrower than its keys; the price counts the weights that there are."""
    config = read_config(folder_of(tmp_path, small_config("deepseek_v2").to_dict()))
    assert isinstance(config, WrappedConfig)
    assert config.kv_shapes == ((4, 24, 16),) * L
    assert config.kv_dim == 4 * (24 + 16) // 2
    layers = small_model("deepseek_v2").model.layers
    assert config.layer_weights == sum(p.numel() for p in layers.parameters()) // L
    model = small_model("deepseek_v2")
    assert config.num_values == sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
