"""Released checkpoints that skip, as random ones of exactly their layout: names, types, shards and config.json.

Snowflake's SwiftKV (`llama_swiftkv`) against Hugging Face's Llama and the naive decoder; Meta's LayerSkip (plain
Llamas) against the naive decoder and full depth.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import skipdecode.api
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.engine.generate import generate
from skipdecode.families.llama_swiftkv import LlamaSwiftKVConfig, as_llama_swiftkv
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from skipdecode.speculative.generate_lossless import generate_lossless
from tests.support.naive import greedy, requests_for, tokens_of
from tests.support.naive_llama import naive_llama

L, OWN, NEW = 6, 3, 16
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": L, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": [2, 7, 9],
}  # fmt: skip


def random_llama(folder: Path, dtype: torch.dtype, max_shard_size: str, **keys: Any) -> LlamaForCausalLM:
    """Saved by Hugging Face; the model is in float32, with the numbers that were stored."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | keys)))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.12)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return model.float().eval()


def snowflake(folder: Path, group_size: int) -> LlamaForCausalLM:
    """As Llama-3.1-SwiftKV-8B-Instruct: bfloat16 in shards, the teacher's projections beside the new ones."""
    model = random_llama(folder, torch.bfloat16, "150KB", rope_parameters={"rope_theta": 500_000.0} | LLAMA3)
    added = {"model.norm_swiftkv.weight": 1 + 0.1 * torch.randn(96)}
    for layer in range(OWN, L):
        own = model.model.layers[layer].self_attn
        for kind in "qkv" if (layer - OWN) % group_size == 0 else "q":
            plain = getattr(own, f"{kind}_proj").weight.detach()
            name = f"model.layers.{layer}.self_attn.{kind}_proj_swiftkv.weight"
            added[name] = plain + 0.05 * torch.randn_like(plain)
    save_file({n: t.to(torch.bfloat16) for n, t in added.items()}, folder / "more.safetensors", {"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(added, "more.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": raw.pop("dtype", "bfloat16")}
    raw |= {"architectures": ["LlamaSwiftKVForCausalLM"], "model_type": "llama_swiftkv", "swiftkv": True}
    raw |= {"num_key_value_layers": OWN, "key_value_group_size": group_size}
    (folder / "config.json").write_text(json.dumps(raw))
    return model


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(40, 320, (n,), generator=rng).tolist() for n in lengths]


PROMPTS = prompts_of(5, 17, 1, 9)


def decoded(folder: Path, schedule: Schedule, *, is_packed: bool) -> list[list[int]]:
    model = load_model(folder, implementation="own")
    return tokens_of(generate(model.pack() if is_packed else model, requests_for(PROMPTS, greedy(NEW)), schedule))


def hugging_faces(model: LlamaForCausalLM) -> list[list[int]]:
    with torch.inference_mode():
        rows = [model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False, pad_token_id=0) for p in PROMPTS]
    return [row[0].tolist()[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


@pytest.mark.parametrize("group_size", [1, 3])
def test_snowflakes_checkpoints_run_both_ways(tmp_path: Path, group_size: int) -> None:
    teacher = snowflake(tmp_path, group_size)
    config = read_config(tmp_path, "own")
    assert config.swiftkv is not None
    assert vars(config.swiftkv) == {"kv_layers": OWN, "group_size": group_size}
    assert config.default_prefill == "swiftkv"
    wanted = hugging_faces(teacher)
    for base in (FullDepth(L), SkipDecode(L, 6, 2, 1, NEW)):
        naive = [naive_llama(tmp_path, p, base, NEW, {2, 7, 9}, has_swiftkv=True)[0] for p in PROMPTS]
        for is_packed in (False, True):
            assert decoded(tmp_path, SwiftKVPrefill(base, OWN), is_packed=is_packed) == naive
            if base == FullDepth(L):
                assert decoded(tmp_path, base, is_packed=is_packed) == wanted
    assert naive != wanted, "the projections make no difference"


def test_snowflakes_prompts_skip_unless_full_is_asked_for(tmp_path: Path, tokenizer_folder: Path) -> None:
    snowflake(tmp_path, 1)
    model = skipdecode.api.load(tmp_path, tokenizer=tokenizer_folder, dtype="float32", device="cpu")
    texts = ["The Golden Otter serves", "near Willow Station"]
    wanted: dict[str | None, list[list[int]]] = {}
    for prefill, has_swiftkv in ((None, True), ("full", False)):
        made = skipdecode.api.generate(model, texts, max_new_tokens=NEW, prefill=prefill)
        wanted[prefill] = [
            naive_llama(tmp_path, prompt, FullDepth(L), NEW, {2, 7, 9}, has_swiftkv=has_swiftkv)[0]
            for prompt in model.tokenizer.encode(texts)
        ]
        assert [one.tokens for one in made] == wanted[prefill]
    assert wanted[None] != wanted["full"]


def test_what_we_write_is_snowflakes_layout(tmp_path: Path) -> None:
    snowflake(tmp_path / "theirs", 3)
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", dtype=torch.bfloat16)
    theirs = {n: t for path in (tmp_path / "theirs").glob("*.safetensors") for n, t in load_file(path).items()}
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    keys = ("architectures", "model_type", "swiftkv", "num_key_value_layers", "key_value_group_size")
    raw, wanted = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert {key: raw[key] for key in keys} == {key: wanted[key] for key in keys}
    assert read_config(tmp_path / "ours") == model.config
    save_model(model.without_swiftkv(), tmp_path / "plain")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "llama"
    LlamaForCausalLM.from_pretrained(tmp_path / "plain")


def test_a_llama_of_ours_is_written_in_that_layout(tmp_path: Path) -> None:
    random_llama(tmp_path, torch.float32, "5GB")
    model = load_model(tmp_path)
    with pytest.raises(ValueError, match=r"with SwiftKV; give model\.swiftkv"):
        as_llama_swiftkv(model.config)
    config = as_llama_swiftkv(model.with_swiftkv(4, 2).config)
    assert isinstance(config, LlamaSwiftKVConfig)
    assert config.to_dict()["num_key_value_layers"] == 4


@pytest.mark.parametrize("key", ["kv_sharing_map", "mlp_tuning_enabled", "layernorm_tuning_enabled"])
def test_later_variants_are_refused_by_key(tmp_path: Path, key: str) -> None:
    raw = SHAPE | {"model_type": "llama_swiftkv", "num_key_value_layers": OWN, key: {"4": 3}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"{key} is "):
        read_config(tmp_path, "own")


LAYERSKIP: dict[str, tuple[torch.dtype, str, dict[str, Any]]] = {
    "llama2-7B": (torch.float16, "200KB", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5, "eos_token_id": 2}),
    "codellama-7B": (torch.bfloat16, "200KB", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama3.2-1B": (
        torch.bfloat16, "5GB",
        {"tie_word_embeddings": True, "head_dim": 32, "rope_parameters": LLAMA3 | {"rope_theta": 5e5, "factor": 32.0}},
    ),
}  # fmt: skip
"""By the end of the name: type, shards, and keys of config.json."""


@pytest.mark.parametrize("name", LAYERSKIP)
def test_layerskip_exits_early_and_drafts_losslessly(tmp_path: Path, name: str) -> None:
    dtype, max_shard_size, keys = LAYERSKIP[name]
    model = random_llama(tmp_path, dtype, max_shard_size, **keys)
    exits = {"method": "early_exit", "max_layers": 2, "min_layers": 2}
    schedule = make_schedule(exits, num_layers=L, max_new_tokens=NEW)
    ends = set(read_config(tmp_path).eos_token_ids)
    naive = [naive_llama(tmp_path, prompt, schedule, NEW, ends)[0] for prompt in PROMPTS]
    for is_packed in (False, True):
        assert decoded(tmp_path, schedule, is_packed=is_packed) == naive
    lossless = make_schedule(exits | {"lossless": True}, num_layers=L, max_new_tokens=NEW)
    made = generate_lossless(load_model(tmp_path).pack(), requests_for(PROMPTS, greedy(NEW)), lossless)
    assert tokens_of(made) == hugging_faces(model) != naive
