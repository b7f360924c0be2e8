"""`config.json` of Llama and its relatives: older and newer files, and what is refused by name."""

import json
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skipdecode.backends.rope import frequencies
from skipdecode.families import FAMILIES, config_of, released
from tests.support.families import BASE, FAMILY_MODELS, LLAMA3, L


@pytest.mark.parametrize("key", ["type", "rope_type", "rope_parameters"])
def test_rope_is_read_from_older_and_newer_files(key: str) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name not in ("rope_type", "rope_theta")}
    rope: dict[str, Any] = {"rope_theta": 1e4, "rope_scaling": {key: "llama3"} | scaling}
    rope = {"rope_parameters": LLAMA3} if key == "rope_parameters" else rope
    config = config_of(BASE | {"model_type": "llama"} | rope)
    assert config.rope is not None
    wanted = LlamaConfig(**(BASE | {"rope_parameters": LLAMA3}))
    theirs, factor = ROPE_INIT_FUNCTIONS["llama3"](wanted, "cpu")
    made, ours = frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    assert torch.equal(made, theirs)
    assert ours == factor


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, r"rope_scaling\.rope_type is 'ntk'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": "x"}}, r"rope_parameters\.factor is 'x'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, r"rope_parameters\.beta_fast is 0"),
    ({"rope_scaling": {"type": "longrope", "short_factor": 1.0}}, r"rope_scaling\.short_factor is 1\.0"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
        r"rope_scaling\.long_factor has 7 numbers, expected 8",
    ),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling is .*keep one",
    ),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "proportional", "factor": 4.0}},
        r"rope_scaling\.rope_type is 'proportional'",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, r"rope_parameters\.full_attention is"),
    ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is None"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, r"rope_scaling\.factor is -1"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, r"final_logit_softcapping is 30\.0"),
    ({"model_type": "gemma3_text", "layer_types": ["full_attention"]}, "layer_types is .* expected a list of num_hid"),
    ({"model_type": "smollm3", "no_rope_layers": [1]}, r"no_rope_layers is \[1\]"),
    ({"model_type": "granite", "logits_scaling": 0.0}, r"logits_scaling is 0\.0"),
    ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window is 'x'"),
    ({"model_type": "mistral", "max_position_embeddings": "x"}, "max_position_embeddings is 'x'"),
    ({"model_type": "qwen2", "use_sliding_window": "false"}, "use_sliding_window is 'false'"),
    ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x'"),
    ({"model_type": "stablelm", "layer_norm_eps": True}, "layer_norm_eps is True"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
    ({"mlp_bias": "false"}, "mlp_bias is 'false'"),
    ({"model_type": "qwen3", "attention_bias": "false"}, "attention_bias is 'false'"),
    ({"model_type": "opt", "enable_bias": 1}, "enable_bias is 1"),
    ({"model_type": "stablelm", "rope_parameters": "x"}, "rope_parameters is 'x'"),
    ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * L}, "layer_types has 'sliding.* is false"),
    ({"model_type": "qwen3", "layer_types": ["linear_attention"] * L}, "layer_types has 'linear_attention'"),
    ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
    ({"intermediate_size": "128"}, "intermediate_size is '128'"),
    ({"head_dim": 15}, "head_dim is 15"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual is True"),
    ({"hidden_size": 97}, "hidden_size 97 is not a multiple"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"),
    ({"model_type": "mistral", "num_hidden_layers": None}, "num_hidden_layers is null"),
    ({"model_type": "mistral", "num_key_value_heads": None}, "num_key_value_heads is null"),
    ({"model_type": "stablelm", "num_key_value_heads": None}, "num_key_value_heads is null"),
    ({"model_type": "stablelm", "partial_rotary_factor": 0.2}, r"partial_rotary_factor 0\.2 rotates 3 of"),
    ({"model_type": "stablelm", "head_dim": 32}, "head_dim is 32"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config is set \(gptq\)"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_we_lack_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(BASE | {"model_type": "llama"} | changes)


@pytest.mark.parametrize("window", [{}, {"sliding_window": 128}, {"sliding_window": None}])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_windows_that_cover_the_context_are_none(model_type: str, window: dict[str, Any]) -> None:
    raw = BASE | {"model_type": model_type, "use_sliding_window": True, "layer_types": ["sliding_attention"] * L}
    assert {config_of(raw | window).layer_window(layer) for layer in range(L)} == {None}
    assert {config_of(raw | {"sliding_window": 127}).layer_window(layer) for layer in range(L)} == {127}


def test_an_unknown_shape_names_each_known_one_once() -> None:
    with pytest.raises(ValueError, match="unknown shape 'gpt-2'") as caught:
        released("gpt-2")
    names = str(caught.value).partition("known: ")[2].split(", ")
    assert len(names) == len(set(names))
    assert {"opt-1.3b", "llama-3.1-8b"} <= set(names)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_config_survives_being_written(family: Any) -> None:
    config = family()
    assert config_of(json.loads(json.dumps(config.to_dict()))) in (config, config_of(config.to_dict()))
    hash(config)


def test_every_family_is_tested() -> None:
    elsewhere = {"opt", "llama_swiftkv"}  # test_decoder.py, test_checkpoints_that_skip.py
    assert {name.partition(",")[0] for name in FAMILY_MODELS} == FAMILIES.keys() - elsewhere
