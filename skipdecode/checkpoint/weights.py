"""Loads weights, and saves models as folders that `AutoModelForCausalLM.from_pretrained` opens.

Reads safetensors and `pytorch_model.bin` (single or sharded), and GGUF files, which are dequantised; no other quantised
formats. A missing, unexpected or misshapen tensor is an error that names it; nothing is initialised silently.
"""

import json
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.lora_adapter import KEY as ADAPTER_KEY
from skipdecode.checkpoint.lora_adapter import Adapter, open_adapter
from skipdecode.checkpoint.model_config import read_config
from skipdecode.config.model import DecoderConfig
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import dtype_name
from skipdecode.model.pipeline_parallel import deal
from skipdecode.model.swiftkv import hf_parts as swiftkv_parts
from skipdecode.schedules.trained import read_schedules

SHARD_SUFFIXES = (".safetensors", ".bin")


def hf_parts(name: str, config: DecoderConfig) -> list[tuple[str, int]]:
    """The Hugging Face tensors that our parameter `name` consists of: (name, rows). Several if it is fused."""
    module, _, kind = name.rpartition(".")
    if module.startswith("swiftkv."):
        return [
            (f"{config.prefix}{part}.{kind}", rows)
            for part, rows in swiftkv_parts(module.removeprefix("swiftkv."), config)
        ]
    if module == "lm_head":
        return [(f"lm_head.{kind}", config.vocab_size)]
    if module.startswith("blocks."):
        _, number, part = module.split(".")
        rows = {"qkv": [config.q_dim, config.kv_dim, config.kv_dim], "fc1": [config.ffn_dim] * 2}.get(part, [0])
        theirs = config.layer_parts[part]
        rows = rows[: len(theirs)] if len(theirs) > 1 else [0]
        return [(f"{config.prefix}layers.{number}.{one}.{kind}", n) for one, n in zip(theirs, rows, strict=True)]
    (theirs_of,) = config.model_parts[module]
    return [(f"{config.prefix}{theirs_of}.{kind}", 0)]


def load_model(
    source: str | Path,
    *,
    adapter: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    devices: Sequence[torch.device] = (),
) -> Decoder:
    """Loads the model of a Hugging Face folder or hub id, in eval mode; ValueError names what does not fit.

    `adapter`: the folder of a LoRA adapter, which is merged in float32 before the weights become `dtype`. `devices`:
    two or more that the layers are spread over (`skipdecode.model.pipeline_parallel`), instead of `device`.
    """
    folder = resolve_source(str(source))
    config = read_config(folder) if adapter is None else adapted(read_config(folder), Path(adapter).expanduser())
    with torch.device("meta"):
        model = Decoder(config)
    lora = None if adapter is None else adapter_of(adapter, model)
    model.placement = placement = deal(config.num_hidden_layers, devices) if len(devices) > 1 else None
    state = {
        name: torch.empty(p.shape, dtype=dtype, device=device if placement is None else placement.of_weight(name))
        for name, p in model.named_parameters()
    }
    missing = expected_tensors(model)
    for theirs, tensor in _tensors(folder):
        found = _match(folder, theirs, tuple(tensor.shape), missing, config)
        if found:
            merged = tensor if lora is None else lora.merged(found.module, tensor)
            state[found.name][found.rows].copy_(merged)
    _refuse_missing(folder, missing)
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Part:
    """Where a tensor of the files belongs: some rows of our parameter `name`."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    module: str
    """The Hugging Face name of its module."""


Expected = dict[str, Part]
"""By Hugging Face name."""


def expected_tensors(model: Decoder) -> Expected:
    """The tensors in the files of a model of that shape."""
    expected: Expected = {}
    for name, parameter in model.named_parameters():
        start = 0
        for theirs, count in hf_parts(name, model.config):
            count = count or parameter.shape[0]
            rows, shape = slice(start, start + count), (count, *parameter.shape[1:])
            expected[theirs] = Part(name, rows, shape, theirs.rpartition(".")[0])
            start += count
        assert start == parameter.shape[0], (name, start, parameter.shape)
    return expected


def adapter_of(path: str | Path, model: Decoder) -> Adapter:
    """An adapter that fits a model of that shape; ValueError blames `model.adapter`. Reads no weights."""
    parts = [part for name, part in expected_tensors(model).items() if name.endswith(".weight")]
    own = [part for part in parts if len(part.shape) == 2 and not part.name.startswith("swiftkv.")]
    linears = {part.module: part.shape for part in own if not part.name.startswith("embed_")}
    return open_adapter(path, linears, [part.module for part in own if part.name.startswith("embed_")])


def adapted(config: DecoderConfig, adapter: Path) -> DecoderConfig:
    """The configuration of a model with that adapter.

    It has the schedules of the adapter's training, if these are known, and neither the layers nor the drafts that were
    calibrated for other weights.
    """
    schedule, trained = read_schedules(adapter, ADAPTER_KEY)
    if schedule is not None or trained is not None:
        config = replace(config, skip_decode=schedule, trained_schedules=trained)
    return replace(config, ffn_skip=None, drafts=None)


def _match(folder: Path, theirs: str, shape: tuple[int, ...], missing: Expected, config: DecoderConfig) -> Part | None:
    """Removes a tensor of the files from `missing`; None if it is ignored, ValueError if it does not belong here."""
    if not theirs.startswith(("model.", "lm_head.")):
        theirs = "model." + theirs  # some checkpoints leave it out
    is_copy = config.has_tied_head and theirs == "lm_head.weight"
    if theirs not in missing:
        if is_copy or theirs.endswith(config.ignored_tensors):
            return None
        raise ValueError(f"{folder}: unexpected tensor {theirs!r}; config.json and weights are of different models")
    part = missing.pop(theirs)
    if shape != part.shape:
        raise ValueError(f"{folder}: tensor {theirs!r} is {list(shape)}, config.json asks for {list(part.shape)}")
    return part


def _refuse_missing(folder: Path, missing: Expected) -> None:
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)!r}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # a kind of safetensors' own
        raise ValueError(f"{path}: cannot be read: {error}") from error


def check_folder(folder: str | Path, adapter: str | Path | None = None) -> None:
    """Checks the names and shapes in the weight files, and in an adapter, against config.json; raises ValueError.

    Reads the headers of safetensors and maps `pytorch_model.bin` into memory, so no weights are loaded.
    """
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    missing = expected_tensors(model)
    for path in weight_files(folder):
        for theirs, shape in _shapes(path):
            _match(folder, theirs, shape, missing, config)
    _refuse_missing(folder, missing)
    if adapter is not None:
        adapter_of(adapter, model)


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    if path.suffix == ".safetensors":
        with _open(path) as file:
            for theirs in file.keys():  # noqa: SIM118 - safe_open is no mapping
                yield theirs, tuple(file.get_slice(theirs).get_shape())
    elif path.suffix == ".gguf":
        from skipdecode.checkpoint import gguf_file  # the worker of a checkpoint needs no gguf

        yield from gguf_file.shapes(path)
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
    """All tensors of a folder, with one file in memory at a time."""
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with _open(path) as file:
                for theirs in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield theirs, file.get_tensor(theirs)
        elif path.suffix == ".gguf":
            from skipdecode.checkpoint import gguf_file

            yield from gguf_file.tensors(path)
        else:
            yield from _load_bin(path).items()


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder, safetensors preferred, or the GGUF file itself.

    Raises ValueError if one is missing.
    """
    if folder.is_file():
        return [folder]
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
            if paths:  # a change elsewhere would not be noticed
                raise ValueError(f"{index}: names {paths[0]!r}; shards lie beside their index, with bare names")
            odd = [name for name in names if Path(name).suffix not in SHARD_SUFFIXES]
            if odd:  # the name decides how it is read, and whether it is in the fingerprint
                raise ValueError(f"{index}: names {odd[0]!r}; shards end in {' or '.join(SHARD_SUFFIXES)}: rename it")
            gone = [name for name in names if not (folder / name).is_file()]
            if gone:
                raise ValueError(f"{index}: names {gone[0]!r}, which is not in the folder")
            return [folder / name for name in names]
    raise ValueError(f"{folder}: no model.safetensors, pytorch_model.bin or index of shards")


def save_model(model: Decoder, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in Hugging Face layout, but no tokenizer."""
    assert not model.is_packed, "a packed model cannot be saved"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        parts = hf_parts(name, model.config)
        rows = [count or len(parameter) for _, count in parts]
        for (theirs, _), part in zip(parts, parameter.split(rows), strict=True):
            tensors[theirs] = part.to(dtype=dtype, device="cpu").contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model.config.to_dict() | {"torch_dtype": dtype_name(dtype)}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    # safetensors makes its file readable by the owner only
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
