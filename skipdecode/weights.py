"""Weights: Hugging Face OPT folders (and hub ids) in, and folders that `OPTForCausalLM.from_pretrained` opens out.

Reads safetensors (single or sharded) and `pytorch_model.bin` (single or sharded). A missing, unexpected or misshapen
tensor is an error that names it; nothing is initialised silently. No quantised formats.
"""

import json
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skipdecode.config import OPTConfig
from skipdecode.hub import resolve_source
from skipdecode.model import OPT

# Ours -> Hugging Face, inside one decoder layer; `qkv` is handled apart.
LAYER_NAMES = {
    "attn_norm": "self_attn_layer_norm",
    "out_proj": "self_attn.out_proj",
    "ffn_norm": "final_layer_norm",
    "fc1": "fc1",
    "fc2": "fc2",
}
MODEL_NAMES = {
    "embed_tokens": "embed_tokens",
    "embed_positions": "embed_positions",
    "project_in": "project_in",
    "project_out": "project_out",
    "final_norm": "final_layer_norm",
}
PREFIX = "model.decoder."
# Read by nobody: the tied head, and buffers of old checkpoints.
IGNORED = {"lm_head.weight", PREFIX + "version"}


def hf_names(name: str, config: OPTConfig) -> list[str]:
    """The Hugging Face names of the equal parts, along its rows, of our parameter `name`: one but for fused ones."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blocks."):
        _, index, part = module.split(".")
        theirs = [f"self_attn.{x}_proj" for x in "qkv"] if part == "qkv" else [LAYER_NAMES[part]]
        return [f"{PREFIX}layers.{index}.{one}.{kind}" for one in theirs]
    if module.startswith("swift."):
        return [f"{PREFIX}{one}.{kind}" for one in _swift_names(module.removeprefix("swift."), config)]
    return [f"{PREFIX}{MODEL_NAMES[module]}.{kind}"]


def _swift_names(module: str, config: OPTConfig) -> list[str]:
    """As the released SwiftKV checkpoints have them: a `_swiftkv` behind the name of what it stands in for."""
    assert config.swiftkv is not None
    first, size = config.swiftkv.kv_layers, config.swiftkv.group_size
    if module == "norm":
        return ["norm_swiftkv"]
    if module == "kv":
        leaders = range(first, config.num_hidden_layers, size)
        return [f"layers.{leader}.self_attn.{x}_proj_swiftkv" for leader in leaders for x in "kv"]
    return [f"layers.{first + int(module.removeprefix('q.'))}.self_attn.q_proj_swiftkv"]


def load_opt(source: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> OPT:
    """The model of a Hugging Face OPT folder or hub id, in eval mode; ValueError names what does not fit."""
    folder = resolve_source(str(source))
    config = OPTConfig.from_folder(folder)
    with torch.device("meta"):
        model = OPT(config)
    state = {name: torch.empty(p.shape, dtype=dtype, device=device) for name, p in model.named_parameters()}
    missing = _expected(model)
    for theirs, tensor in _tensors(folder):
        found = _match(folder, _canonical(theirs), tuple(tensor.shape), missing)
        if found:
            name, row = found
            state[name].chunk(len(hf_names(name, config)))[row].copy_(tensor)
    _refuse_missing(folder, missing)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


Expected = dict[str, tuple[str, int, tuple[int, ...]]]
"""Their name -> (our name, part of a fused tensor, shape)."""


def _expected(model: OPT) -> Expected:
    expected: Expected = {}
    for name, parameter in model.named_parameters():
        rows, *rest = parameter.shape
        theirs = hf_names(name, model.config)
        expected |= {one: (name, part, (rows // len(theirs), *rest)) for part, one in enumerate(theirs)}
    return expected


def _canonical(theirs: str) -> str:
    """Some old checkpoints leave the `model.` away."""
    return theirs if theirs.startswith(("model.", "lm_head.")) else "model." + theirs


def _match(folder: Path, theirs: str, shape: tuple[int, ...], missing: Expected) -> tuple[str, int] | None:
    """Ticks off one tensor of the files: (our name, part), or None when nobody reads it; ValueError when wrong."""
    if theirs in IGNORED:
        return None
    if theirs not in missing:
        raise ValueError(f"{folder}: unexpected tensor {theirs!r}; config.json and weights are of different models")
    name, part, wanted = missing.pop(theirs)
    if shape != wanted:
        raise ValueError(f"{folder}: tensor {theirs!r} is {list(shape)}, config.json asks for {list(wanted)}")
    return name, part


def _refuse_missing(folder: Path, missing: Expected) -> None:
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)!r}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # a kind of safetensors' own
        raise ValueError(f"{path}: cannot be read: {error}") from error


def check_folder(folder: str | Path) -> None:
    """Compares the names and shapes in the weight files with config.json; ValueError otherwise.

    Reads headers of safetensors, and maps `pytorch_model.bin` into memory: no weights are loaded.
    """
    folder = Path(folder)
    with torch.device("meta"):
        model = OPT(OPTConfig.from_folder(folder))
    missing = _expected(model)
    for path in weight_files(folder):
        for theirs, shape in _shapes(path):
            _match(folder, _canonical(theirs), shape, missing)
    _refuse_missing(folder, missing)


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    if path.suffix == ".safetensors":
        with _open(path) as file:
            for theirs in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield theirs, tuple(file.get_slice(theirs).get_shape())
    else:
        for theirs, tensor in _load_bin(path).items():
            yield theirs, tuple(tensor.shape)


def _load_bin(path: Path) -> dict[str, Tensor]:
    mmap = zipfile.is_zipfile(path)  # files from before torch 1.6 are no zip archives and cannot be mapped
    try:
        state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # pickle and zip raise many kinds
        raise ValueError(f"{path}: cannot be read: {error}") from error
    return state


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a folder, file by file, so that never more than one file is in memory."""
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with _open(path) as file:
                for theirs in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield theirs, file.get_tensor(theirs)
        else:
            yield from _load_bin(path).items()


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, safetensors preferred; ValueError when one is gone."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(f"{index}: no index of shards: {error!r}") from error
            paths = [name for name in names if not isinstance(name, str) or Path(name).name != name]
            if paths:  # elsewhere nobody looks whether they change
                raise ValueError(f"{index}: names {paths[0]!r}; shards lie beside their index, with bare names")
            gone = [name for name in names if not (folder / name).is_file()]
            if gone:
                raise ValueError(f"{index}: names {gone[0]!r}, which is not in the folder")
            return [folder / name for name in names]
    raise ValueError(f"{folder}: no model.safetensors, pytorch_model.bin or index of shards")


def save_opt(model: OPT, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in Hugging Face layout; the tokenizer's files are the caller's."""
    assert not model.is_packed, "a packed model cannot be saved"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        theirs = hf_names(name, model.config)
        for one, part in zip(theirs, parameter.chunk(len(theirs)), strict=True):
            tensors[one] = part.to(dtype=dtype, device="cpu").contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model.config.to_dict() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors lets nobody else read it
