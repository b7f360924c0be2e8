"""Loading and saving against transformers: every file layout it has written, and errors that name what is wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTForCausalLM

from skipdecode.checkpoint.hub import HUB_FILES, resolve_source
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.weight_files import weight_files
from skipdecode.checkpoint.weights import check_folder, load_model, save_model
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth

STYLES = ["125m", "350m", "1.3b"]
TOKENS = torch.tensor([[2, 9, 250, 17, 31, 4, 300], [2, 5, 5, 77, 140, 319, 8]])
Factory = Callable[..., Path]
Load = Callable[[Path], Decoder]
LoadHF = Callable[[Path], OPTForCausalLM]


def logits_of(model: Decoder) -> Tensor:
    layers = model.config.num_hidden_layers
    cache = KVCache.allocate(
        model.config, num_pad=torch.zeros(2, dtype=torch.int64), capacities=[7] * layers, dtype=model.dtype
    )
    with torch.inference_mode():
        return model(TOKENS, torch.arange(7).expand(2, -1), cache, FullDepth(layers).prefill())


def assert_same_weights(ours: Decoder, other: Decoder) -> None:
    a, b = ours.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def copy_of(folder: Path, target: Path, tensors: dict[str, Tensor] | None = None) -> Path:
    """The checkpoint without its weights, or with `tensors` instead."""
    target.mkdir(exist_ok=True)
    shutil.copy(folder / "config.json", target)
    if tensors is not None:
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
def small(checkpoint_factory: Factory) -> Path:
    return checkpoint_factory("350m", layers=2)


@pytest.fixture
def tensors(small: Path) -> dict[str, Tensor]:
    return load_file(small / "model.safetensors")


# Layouts


@pytest.mark.parametrize("style", STYLES)
def test_sharded_safetensors(checkpoint_factory: Factory, ours: Load, tmp_path: Path, style: str) -> None:
    folder = checkpoint_factory(style)
    OPTForCausalLM.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_weights(load_model(tmp_path), ours(folder))
    check_folder(tmp_path)


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "before torch 1.6"])
def test_bin_single(small: Path, tensors: dict[str, Tensor], ours: Load, tmp_path: Path, is_zip: bool) -> None:
    copy_of(small, tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_same_weights(load_model(tmp_path), ours(small))


def test_bin_sharded(small: Path, tensors: dict[str, Tensor], ours: Load, tmp_path: Path) -> None:
    copy_of(small, tmp_path)
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        file = f"pytorch_model-{i + 1:05d}-of-00003.bin"
        torch.save({name: tensors[name] for name in names[i::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same_weights(load_model(tmp_path), ours(small))
    (tmp_path / "pytorch_model-00002-of-00003.bin").unlink()
    with pytest.raises(ValueError, match=r"index\.json.*pytorch_model-00002-of-00003\.bin"):
        load_model(tmp_path)


def test_safetensors_win_over_bin(small: Path, tensors: dict[str, Tensor], ours: Load, tmp_path: Path) -> None:
    copy_of(small, tmp_path, tensors)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert_same_weights(load_model(tmp_path), ours(small))


@pytest.mark.parametrize("kind", ["old names", "with head", "without head", "old version buffer", "float16"])
def test_old_and_new_contents(small: Path, tensors: dict[str, Tensor], ours: Load, tmp_path: Path, kind: str) -> None:
    """`decoder.…` instead of `model.decoder.…` (facebook/opt-125m's .bin), and the tied head stored or not."""
    tensors.pop("lm_head.weight", None)
    wanted = ours(small)
    if kind == "old names":
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
        assert all(name.startswith("decoder.") for name in tensors)
    if kind == "with head":
        tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    if kind == "old version buffer":
        tensors["decoder.version"] = torch.tensor([3.0])
    if kind == "float16":
        tensors = {name: value.half() for name, value in tensors.items()}
        wanted = load_model(small, dtype=torch.float16).to(torch.float32)
    assert_same_weights(load_model(copy_of(small, tmp_path, tensors)), wanted)


@pytest.mark.parametrize("style", STYLES)
def test_loaded_model(checkpoint_factory: Factory, hf: LoadHF, style: str) -> None:
    """Names map onto the right tensors: equal logits; and the model comes ready for inference in the type asked for."""
    folder = checkpoint_factory(style)
    model = load_model(folder)
    theirs = hf(folder)(TOKENS).logits[:, -1]
    torch.testing.assert_close(logits_of(model), theirs, atol=1e-4, rtol=0)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    half = load_model(str(folder), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert_same_weights(half, load_model(folder).to(torch.bfloat16))


# Saving


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_saved_folder_opens_in_transformers(
    checkpoint_factory: Factory, ours: Load, tmp_path: Path, style: str, dtype: torch.dtype | None
) -> None:
    model = ours(checkpoint_factory(style))
    save_model(model, tmp_path / "new" / "folder", dtype=dtype)
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "new" / "folder").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"], "who may read one may read the other"
    theirs, info = OPTForCausalLM.from_pretrained(tmp_path / "new" / "folder", output_loading_info=True, dtype="auto")
    assert not any(info.values()), info  # nothing missing, unexpected or misshapen
    assert theirs.dtype == (dtype or torch.float32)
    again = load_model(tmp_path / "new" / "folder")
    wanted = load_model(checkpoint_factory(style), dtype=dtype or torch.float32).to(torch.float32)
    assert_same_weights(again, wanted)
    theirs = theirs.float().eval()
    torch.testing.assert_close(logits_of(again), theirs(TOKENS).logits[:, -1].detach(), atol=1e-4, rtol=0)
    check_folder(tmp_path / "new" / "folder")
    stored = read_config(tmp_path / "new" / "folder")
    assert stored.torch_dtype == str(dtype or torch.float32).removeprefix("torch.")
    assert replace(stored, torch_dtype="float32") == model.config


# Errors


def test_missing_tensor_is_named(small: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    del tensors["model.decoder.layers.1.self_attn.k_proj.bias"]
    folder = copy_of(small, tmp_path, tensors)
    for read in (load_model, check_folder):
        with pytest.raises(ValueError, match=r"1 tensors are missing.*layers\.1\.self_attn\.k_proj\.bias"):
            read(folder)


@pytest.mark.parametrize(
    "name", ["model.decoder.layers.1.fc3.weight", "model.decoder.final_layer_norm.weight", "extra"]
)
def test_unexpected_tensor_is_named(small: Path, tensors: dict[str, Tensor], tmp_path: Path, name: str) -> None:
    """A part that no layer has, a final norm that 350m has not, something else."""
    tensors[name] = torch.zeros(3)
    folder = copy_of(small, tmp_path, tensors)
    for read in (load_model, check_folder):
        with pytest.raises(ValueError, match=rf"unexpected tensor .*{name.replace('.', '[.]')}"):
            read(folder)


def test_wrong_shape_is_named(small: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    for name, value in (
        ("model.decoder.layers.0.fc1.weight", torch.zeros(64, 128)),
        ("model.decoder.layers.1.self_attn.v_proj.weight", torch.zeros(64, 1)),  # must not be broadcast
        ("model.decoder.layers.1.self_attn.q_proj.bias", torch.zeros(1)),
    ):
        folder = copy_of(small, tmp_path, tensors | {name: value})
        for read in (load_model, check_folder):
            with pytest.raises(ValueError, match=rf"tensor '{name}' is \[{value.shape[0]}"):
                read(folder)


def test_config_of_another_size_is_refused(small: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    folder = copy_of(small, tmp_path, tensors)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"layers\.2\.self_attn.* is missing; num_hidden_layers in config\.json is 3"):
        load_model(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"vocab_size": 321}))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight' is \[320, 32\], config\.json asks for \[321, 32\]"):
        load_model(folder)


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mixtral", "heads of queries and 8 of keys, which num_key_value_heads does not say"),
        ("gpt2", "tensors are missing, the first is"),
    ],
)
def test_another_model_is_refused(
    small: Path, tensors: dict[str, Tensor], tmp_path: Path, model_type: str, message: str
) -> None:
    folder = copy_of(small, tmp_path, tensors)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": model_type}))
    with pytest.raises(ValueError, match=rf"config\.json: model_type is '{model_type}'"):
        load_model(folder, implementation="own")
    with pytest.raises(ValueError, match=message):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 5, 400, 0.5, 0.999])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_truncated_file_is_named(
    small: Path, tensors: dict[str, Tensor], tmp_path: Path, name: str, keep: float
) -> None:
    copy_of(small, tmp_path, tensors if name == "model.safetensors" else None)
    if name == "pytorch_model.bin":
        torch.save(tensors, tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match=rf"{name}: cannot be read"):
        load_model(tmp_path)


def test_missing_shard_is_named(small: Path, tmp_path: Path) -> None:
    OPTForCausalLM.from_pretrained(small).save_pretrained(tmp_path, max_shard_size="60KB")
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": []}'])
def test_broken_index_is_named(small: Path, tmp_path: Path, text: str) -> None:
    copy_of(small, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_model(tmp_path)


def test_folder_without_weights(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model\.safetensors, pytorch_model\.bin"):
        load_model(copy_of(small, tmp_path))


# Sources


@pytest.fixture
def hub_cache(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache as `huggingface_hub` leaves it behind, holding `facebook/opt-tiny`."""
    repo = tmp_path / "hub" / "models--facebook--opt-tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    shutil.copytree(small, repo / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return repo / "snapshots" / commit


def test_hub_id_resolves_in_the_cache(hub_cache: Path, small: Path, ours: Load) -> None:
    assert resolve_source("facebook/opt-tiny") == hub_cache
    assert_same_weights(load_model("facebook/opt-tiny"), ours(small))


def test_hub_id_with_bin_weights_only(hub_cache: Path, tensors: dict[str, Tensor], small: Path, ours: Load) -> None:
    (hub_cache / "model.safetensors").unlink()
    torch.save(tensors, hub_cache / "pytorch_model.bin")
    assert_same_weights(load_model("facebook/opt-tiny"), ours(small))


@pytest.mark.parametrize(
    "source", ["facebook/opt-unknown", "no-such-folder", "./no/folder", "/no/folder", "a/b/c", "~/no-such", "bad id/x"]
)
def test_unreachable_source_names_the_key(hub_cache: Path, source: str) -> None:
    with pytest.raises(ValueError, match=r"model\.source") as caught:
        load_model(source)
    assert source in str(caught.value)


def test_local_folder_wins_over_a_hub_id(hub_cache: Path, small: Path) -> None:
    shutil.copytree(small, "facebook/opt-tiny")
    assert resolve_source("facebook/opt-tiny") == Path("facebook/opt-tiny")


def test_a_folder_that_hides_a_hub_id_is_named(hub_cache: Path) -> None:
    Path("facebook").mkdir()
    hidden = (
        r"model\.source: 'facebook/opt-125m' is not a folder.* the folder .*/facebook hides it: run in another folder"
    )
    with pytest.raises(ValueError, match=hidden):
        resolve_source("facebook/opt-125m")


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "shards/one.safetensors", "{absolute}", "./one.safetensors", 5]
)
def test_shards_lie_beside_their_index(small: Path, tmp_path: Path, name: str) -> None:
    """The fingerprint looks nowhere else."""
    folder = tmp_path / "model"
    (folder / "shards").mkdir(parents=True)
    for target in ("../other.safetensors", "shards/one.safetensors", "one.safetensors"):
        shutil.copy(small / "model.safetensors", folder / target)
    shutil.copy(small / "config.json", folder)
    given = str(folder / "one.safetensors") if name == "{absolute}" else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": given}}))
    with pytest.raises(ValueError, match=r"index\.json: names .*; shards lie beside their index, with bare names"):
        weight_files(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "one.safetensors"}}))
    assert weight_files(folder) == [folder / "one.safetensors"]


@pytest.mark.parametrize("name", ["shard-1.st", "shard.gguf", "shard", ".bin"])
def test_shards_have_a_name_that_says_what_they_are(small: Path, tmp_path: Path, name: str) -> None:
    """The fingerprint leaves others out."""
    shutil.copy(small / "model.safetensors", tmp_path / name)
    shutil.copy(small / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ValueError, match=rf"index\.json: names '{name}'; shards end in \.safetensors or \.bin"):
        weight_files(tmp_path)


def test_what_a_hub_id_brings() -> None:
    """All that a folder is read by, and no weights twice."""
    brings = ["config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
              "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
              "special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.jinja"]  # fmt: skip
    others = ["README.md", "pytorch_model.bin", "tf_model.h5", "model.gguf", "original/consolidated.00.pth"]
    assert sorted(filter_repo_objects(brings + others, allow_patterns=HUB_FILES)) == sorted(brings)
