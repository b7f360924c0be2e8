"""`OPTConfig` against `transformers.OPTConfig`: the same fields both ways, and refusals by name."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig as HFConfig
from transformers import OPTForCausalLM

from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import expected_tensors
from skipdecode.families import released
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import RELEASED, OPTConfig
from skipdecode.model.decoder import Decoder

# Parameters of the released models, tied head counted once.
PARAMETERS = {
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
}

CARRIED = {"skip_decode", "trained_schedules", "ffn_skip", "drafts", "swiftkv"}
RAW = {"model_type": "opt", "hidden_size": 64, "num_attention_heads": 4}


def hf_shape(name: str) -> HFConfig:
    """The released `config.json` of a model, as far as it shapes tensors (facebook/opt-* on the hub)."""
    layers, hidden, heads = RELEASED[name]
    is_350m = name == "opt-350m"
    return HFConfig(
        vocab_size=50272,
        hidden_size=hidden,
        num_hidden_layers=layers,
        ffn_dim=4 * hidden,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        word_embed_proj_dim=512 if is_350m else hidden,
        do_layer_norm_before=not is_350m,
    )


@pytest.mark.parametrize("name", RELEASED)
def test_released_shapes_have_hugging_faces_tensors(name: str) -> None:
    """Names, shapes and counts of every parameter, on the meta device: nothing is allocated."""
    with torch.device("meta"):
        ours, theirs = Decoder(released(name)), OPTForCausalLM(hf_shape(name))
    mapped = {key: part.shape for key, part in expected_tensors(ours).items()}
    wanted = {key: tuple(value.shape) for key, value in theirs.state_dict().items() if key != "lm_head.weight"}
    assert mapped == wanted
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in theirs.parameters())
    assert count == PARAMETERS.get(name, count)
    assert OPTConfig.from_dict(hf_shape(name).to_dict()) == replace(
        released(name), word_embed_proj_dim=hf_shape(name).word_embed_proj_dim
    )


def test_released_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"opt-175b.*opt-125m"):
        released("opt-175b")


@pytest.mark.parametrize(("pad", "filler"), [(None, 2), (3, 3), (-1, 2), (32_000, 2)])
def test_what_stands_where_no_token_is_is_a_token(pad: int | None, filler: int) -> None:
    assert LlamaConfig(vocab_size=32_000, pad_token_id=pad, eos_token_id=2).filler_token_id == filler


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"word_embed_proj_dim": 32, "do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"eos_token_id": 7, "bos_token_id": 5, "pad_token_id": 3, "max_position_embeddings": 100},
    ],
    ids=str,
)
def test_round_trip_through_hugging_face(tmp_path: Path, changes: dict[str, Any]) -> None:
    """HF writes config.json, we read it, we write it, HF reads the same values."""
    theirs = HFConfig(
        **{"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "ffn_dim": 96, "num_attention_heads": 4}
        | {"word_embed_proj_dim": 64, "dropout": 0.0}  # we train without dropout, and write that
        | changes
    )
    theirs.save_pretrained(tmp_path)
    ours = read_config(tmp_path)
    for field in (one.name for one in fields(ours)):
        if field not in (*CARRIED, "torch_dtype", "remove_final_layer_norm"):
            assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.remove_final_layer_norm == theirs._remove_final_layer_norm
    assert ours.head_dim == 16
    assert ours.embed_dim == theirs.word_embed_proj_dim
    assert ours.has_final_norm == (theirs.do_layer_norm_before and not theirs._remove_final_layer_norm)
    (tmp_path / "config.json").write_text(json.dumps(ours.to_dict()))
    again = HFConfig.from_pretrained(tmp_path)
    ignored = {"transformers_version", "architectures", "dtype", "init_std"}
    old, new = theirs.to_dict(), again.to_dict()
    assert {k: v for k, v in new.items() if k in old and k not in ignored} == {
        k: v for k, v in old.items() if k not in ignored
    }
    assert read_config(tmp_path) == ours


def test_stored_dtype_under_both_names() -> None:
    assert OPTConfig.from_dict(RAW | {"dtype": "bfloat16"}).torch_dtype == "bfloat16"
    assert OPTConfig.from_dict(RAW | {"torch_dtype": "float16"}).torch_dtype == "float16"
    assert OPTConfig.from_dict(RAW).torch_dtype == "float32"


def test_schedule_of_the_checkpoint_survives() -> None:
    schedule = {"method": "skipdecode", "speedup": 2, "horizon": 31}
    trained = [{"method": "full"}, schedule]
    ours = OPTConfig.from_dict(RAW | {"skip_decode": schedule, "trained_schedules": trained})
    for found in (ours, OPTConfig.from_dict(ours.to_dict())):
        assert (found.skip_decode, found.trained_schedules) == (schedule, trained)
    assert not OPTConfig.from_dict(RAW).to_dict().keys() & CARRIED
    hash(ours)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mixtral"}, r"model_type is 'mixtral'"),
    ({"model_type": None}, r"model_type is None"),
    ({"activation_function": "gelu"}, r"activation_function is 'gelu'"),
    ({"tie_word_embeddings": False}, r"tie_word_embeddings is False"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config"),
    ({"swiftkv": {"kv_layers": 99}}, r"swiftkv\.kv_layers is 99"),
    ({"hidden_size": 65}, r"hidden_size 65.*num_attention_heads 4"),
    ({"eos_token_id": [2, "3"]}, r"eos_token_id is \[2, '3'\]"),
    ({"hidden_size": "64"}, r"hidden_size"),
    ({"num_attention_heads": 0}, r"num_attention_heads"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers"),
    ({"vocab_size": 2.5}, r"vocab_size"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=lambda value: str(value)[:50])
def test_refusals_name_the_field_and_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | changes))
    with pytest.raises(ValueError, match=message) as caught:
        read_config(tmp_path, "own")
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"opt"', "\xff"], ids=repr)
def test_unreadable_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)
