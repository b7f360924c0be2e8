"""Loads weights, and saves models as folders that `AutoModelForCausalLM.from_pretrained` opens.

Reads safetensors and `pytorch_model.bin` (single or sharded), and GGUF files, which are dequantised; no other quantised
formats. A missing, unexpected or misshapen tensor is an error that names it; nothing is initialised silently.
"""

import json
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from skipdecode.backends.block_quantization import StoredBlocks
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.checkpoint.lora_adapter import KEY as ADAPTER_KEY
from skipdecode.checkpoint.lora_adapter import Adapter, open_adapter, resolve_adapter
from skipdecode.checkpoint.model_config import config_remarks, read_config
from skipdecode.checkpoint.weight_files import StoredTensor, WeightFile, open_weights
from skipdecode.config.model import DecoderConfig, Quantization, WantedImplementation
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.decoder import Decoder
from skipdecode.model.devices import dtype_name
from skipdecode.model.linear import Linear
from skipdecode.model.pipeline_parallel import deal
from skipdecode.model.swiftkv import hf_parts as swiftkv_parts
from skipdecode.schedules.trained import read_schedules

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ADAPTER_NEEDS_VALUES = (
    "the file has its weights in blocks, which model.quantization=int4 keeps and no adapter can be merged "
    "into; take the original checkpoint, or model.quantization=null or int8, which read the file's values"
)
LAYER = re.compile(r"layers\.(\d{1,9})\.")
QUANTISED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_scale\w*|SCB|weight\.(absmax|quant_map|quant_state).*)$")
"""Names of GPTQ, AWQ, compressed-tensors and bitsandbytes."""
OTHER_HEAD = re.compile(r"(score|classifier|qa_outputs|v_head|value_head)\.")
"""Heads of classifiers, of question answering, and of reward and value models."""
MIN_BITS = 2
"""The smallest weights that a file may hold take more (GGUF's Q2_K has 2.6)."""
ROTARY_TABLE_BYTES = 1 << 30
"""A table of rotary positions may have so many bytes, or as many as the weights."""
MADE_VALUES = ROTARY_TABLE_BYTES // 4
"""Of a model of transformers, those that no file holds: tables of positions, masks."""


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
    implementation: WantedImplementation = "auto",
    quantization: Quantization | None = None,
) -> Decoder:
    """Loads the model of a Hugging Face folder or hub id, in eval mode; ValueError names what does not fit.

    `adapter`: the folder of a LoRA adapter, which is merged in float32 before the weights become `dtype`. `devices`:
    two or more that the layers are spread over (`skipdecode.model.pipeline_parallel`), instead of `device`.
    `implementation`: as in `read_config`. `quantization`: int4 keeps the blocks of a GGUF file where there are kernels
    for them, and the model is then only for `Decoder.pack` with the same.
    """
    folder = resolve_source(str(source))
    config = read_config(folder, implementation)
    if isinstance(config, WrappedConfig):
        from skipdecode.model.wrapped.load import load_wrapped  # loads transformers

        assert len(devices) < 2, "layers of transformers on several devices"
        _check_size(folder, config, open_weights(folder))
        own = None if adapter is None else resolve_adapter(str(adapter))
        return load_wrapped(
            folder, config if own is None else adapted(config, own), device=device, dtype=dtype, adapter=own
        )
    if adapter is not None:
        config = adapted(config, Path(adapter).expanduser())
    match = match_files(folder, config)
    model = match.model
    lora = None if adapter is None else adapter_of(adapter, model)
    model.placement = placement = deal(config.num_hidden_layers, devices) if len(devices) > 1 else None
    kept = keep_blocks(match) if quantization == "int4" else {}
    if kept and adapter is not None:
        raise ValueError(f"adapter: {ADAPTER_NEEDS_VALUES}")
    unread = {name for name in kept if name != EMBEDDING}  # which is looked up by token
    state = {
        name: torch.empty(
            p.shape,
            dtype=dtype,
            device="meta" if name in unread else placement.of_weight(name) if placement else device,
        )
        for name, p in model.named_parameters()
    }
    without = {theirs for theirs, part in match.parts.items() if part.name in unread}
    for file in match.files:
        for theirs, tensor in file.tensors(without):
            if (part := match.parts.get(theirs)) is not None:
                target = state[part.name][part.rows]
                target.copy_(_folded(tensor if lora is None else lora.merged(part.module, tensor), *part.fold))
                _refuse_not_finite(file.path, theirs, tensor, target)
    model.load_state_dict(state, assign=True)
    for name, blocks in kept.items():
        if name in (EMBEDDING, HEAD):
            model.head_blocks = blocks
        else:
            linear = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, Linear), name
            linear.blocks = blocks
    return model.eval().requires_grad_(False)


def _folded(tensor: Tensor, scale: float, offset: float) -> Tensor:
    return tensor if (scale, offset) == (1.0, 0.0) else tensor.float() * scale + offset


def fold_of(name: str, config: DecoderConfig) -> tuple[float, float]:
    """`DecoderConfig.folded` of the Hugging Face tensor `name`."""
    module, kind = name.removeprefix(config.prefix).rsplit(".", 1)
    part = LAYER.sub("", module, count=1)
    part = "input_layernorm" if part == "norm_swiftkv" else part.removesuffix("_swiftkv")
    scale, offset = config.folded(part)
    return scale, offset if kind == "weight" else 0.0


def _refuse_not_finite(path: Path, name: str, tensor: Tensor, loaded: Tensor) -> None:
    if not _is_finite(loaded):
        fits_not = f"does not fit {dtype_name(loaded.dtype)}; model.dtype=bfloat16 takes it"
        raise ValueError(f"{path}: tensor {name!r} {fits_not if _is_finite(tensor) else 'holds NaN or infinity'}")


def _is_finite(tensor: Tensor) -> bool:
    return all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach())) if tensor.numel() else True


@dataclass(frozen=True)
class Part:
    """Where a tensor of the files belongs: some rows of our parameter `name`."""

    name: str
    rows: slice
    shape: tuple[int, ...]
    module: str
    """The Hugging Face name of its module."""
    fold: tuple[float, float] = (1.0, 0.0)
    """`DecoderConfig.folded`."""


ConfigT = TypeVar("ConfigT", bound=DecoderConfig)

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
            expected[theirs] = Part(name, rows, shape, theirs.rpartition(".")[0], fold_of(theirs, model.config))
            start += count
        assert start == parameter.shape[0], (name, start, parameter.shape)
    return expected


def adapter_of(path: str | Path, model: Decoder) -> Adapter:
    """An adapter that fits a model of that shape; ValueError blames `model.adapter`. Reads no weights."""
    if isinstance(model.config, WrappedConfig):
        from skipdecode.model.wrapped.adapter import linears_of  # loads transformers

        return open_adapter(path, linears_of(cast(nn.Module, model.model)), ())
    parts = [part for name, part in expected_tensors(model).items() if name.endswith(".weight")]
    own = [part for part in parts if len(part.shape) == 2 and not part.name.startswith("swiftkv.")]
    linears = {part.module: part.shape for part in own if not part.name.startswith("embed_")}
    return open_adapter(path, linears, [part.module for part in own if part.name.startswith("embed_")])


def adapted(config: ConfigT, adapter: Path) -> ConfigT:
    """The configuration of a model with that adapter.

    It has the schedules of the adapter's training, if these are known, and neither the layers nor the drafts that were
    calibrated for other weights.
    """
    schedule, trained = read_schedules(adapter, ADAPTER_KEY)
    if schedule is not None or trained is not None:
        config = replace(config, skip_decode=schedule, trained_schedules=trained)
    return replace(config, ffn_skip=None, drafts=None)


@dataclass(frozen=True)
class FileMatch:
    """The files of a checkpoint, and where their tensors belong."""

    model: Decoder
    """On the meta device."""
    files: list[WeightFile]
    parts: dict[str, Part]
    """By the names in the files, without what is ignored."""
    remarks: list[str]
    """What is ignored that a user may want to know."""


def match_files(folder: Path, config: DecoderConfig) -> FileMatch:
    """Finds the weights of a model of that shape by the headers of the files.

    ValueError names a tensor that is missing, unexpected, misshapen or of a type that no weights have. The files bound
    what is made: a shape that they cannot fill is refused before the model is built.
    """
    files = open_weights(folder)
    num_bytes = sum(file.path.stat().st_size for file in files)
    stored: dict[str, StoredTensor] = {}
    names: dict[str, str] = {}
    for file in files:
        for theirs, tensor in file.stored.items():
            if names.setdefault(full_name(theirs), theirs) != theirs or theirs in stored:
                raise ValueError(f"{file.path}: tensor {theirs!r} is there twice")
            stored[theirs] = tensor
    _check_shape(folder, config, names, num_bytes)
    with torch.device("meta"):
        model = Decoder(config)
    parts, beyond = _match(folder, model, names)
    for theirs, part in parts.items():
        _check_tensor(folder, theirs, stored[theirs], part)
    if (needed := sum(stored[theirs].num_bytes for theirs in parts)) > num_bytes:
        raise ValueError(f"{folder}: the tensors take {needed} bytes, and their files have {num_bytes}")
    if config.has_tied_head and (head := names.get(HEAD)) and head not in parts:
        _check_tied(folder, files, names[f"{config.prefix}embed_tokens.weight"], head)
    remarks = []
    if beyond:
        remarks.append(
            f"{folder}: the weights of {len(beyond)} layers from {min(beyond)} on are not used: num_hidden_layers in "
            f"config.json is {config.num_hidden_layers}"
        )
    return FileMatch(model, files, parts, remarks)


def keep_blocks(match: FileMatch) -> dict[str, StoredBlocks]:
    """Of our parameters, the products of layers and the LM head whose tensors all are blocks of one kind."""
    found = {name: blocks for file in match.files for name, blocks in file.blocks().items()}
    config, parts = match.model.config, dict[str, list[StoredBlocks | None]]()
    for theirs, part in sorted(match.parts.items(), key=lambda item: item[1].rows.start or 0):
        parts.setdefault(part.name, []).append(found.get(theirs) if part.fold == (1.0, 0.0) else None)
    head = EMBEDDING if config.has_tied_head else HEAD
    linears = {f"{name}.weight" for name, module in match.model.named_modules() if isinstance(module, Linear)}
    kept = {}
    for name in [name for name in parts if name == head or name in linears]:
        kinds = {None if one is None else one.kind for one in parts[name]}
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            kept[name] = StoredBlocks(kind, [rows for one in parts[name] if one is not None for rows in one.parts])
    return kept


def check_blocks(folder: Path, config: DecoderConfig) -> bool:
    """Whether some of the products have blocks that `keep_blocks` finds. Reads these; ValueError names a tensor that
    holds NaN or infinity."""
    if isinstance(config, WrappedConfig):
        return False
    kept = keep_blocks(match_files(folder, config))
    for blocks in kept.values():
        blocks.check()
    return bool(kept)


def _match(folder: Path, model: Decoder, names: Mapping[str, str]) -> tuple[dict[str, Part], set[int]]:
    """Where each tensor belongs, by its name in the files, and which layers of the files the model does not have.

    `names`: the names in the files by the full ones. ValueError names a tensor that is missing or unexpected.
    """
    config, missing = model.config, expected_tensors(model)
    embedding = f"{config.prefix}embed_tokens.weight"
    parts, beyond = dict[str, Part](), set[int]()
    for name, theirs in names.items():
        if config.has_tied_head and name == HEAD:
            if embedding in names:
                continue  # a copy
            name = embedding
        if (part := missing.pop(name, None)) is not None:
            parts[theirs] = part
        elif (layer := LAYER.search(name)) and int(layer[1]) >= config.num_hidden_layers:
            beyond.add(int(layer[1]))
        elif not name.endswith(config.ignored_tensors):
            raise ValueError(f"{folder}: unexpected tensor {theirs!r}; {_explained(name)}")
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors are missing, the first is {min(missing)!r}")
    return parts, beyond


def full_name(name: str) -> str:
    """The name of a tensor with the prefix that some checkpoints leave out."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


def _check_shape(folder: Path, config: DecoderConfig, names: Collection[str], num_bytes: int) -> None:
    """ValueError for a shape that files of so many bytes cannot fill, and for layers that they lack."""
    most = num_bytes * 8 // MIN_BITS
    ffn = "intermediate_size" if "intermediate_size" in config.sizes else "ffn_dim"
    for keys, count in {
        "vocab_size": config.vocab_size * config.embed_dim,
        ffn: config.ffn_dim * config.hidden_size,
        "num_attention_heads": config.q_dim * config.hidden_size,
        "num_key_value_heads": config.kv_dim * config.hidden_size,
        "max_position_embeddings": 0 if config.rope else config.max_position_embeddings * config.hidden_size,
    }.items():
        if count > most:
            raise ValueError(
                f"{folder}: {keys} of config.json asks for a tensor of {count} values, and the weight files have "
                f"{num_bytes} bytes"
            )
    table = config.max_position_embeddings * config.head_dim * 4
    if config.rope and table > max(num_bytes, ROTARY_TABLE_BYTES):
        raise ValueError(
            f"{folder}: max_position_embeddings {config.max_position_embeddings} of config.json needs {table} bytes of "
            f"rotary positions, more than the {num_bytes} of the weights; set it to the context that you need"
        )
    linears = [one for part in ("qkv", "out_proj", "fc1", "fc2") for one in config.layer_parts[part]]
    for layer in range(config.num_hidden_layers):
        for linear in linears:
            if (name := f"{config.prefix}layers.{layer}.{linear}.weight") not in names:
                raise ValueError(
                    f"{folder}: tensor {name!r} is missing; num_hidden_layers in config.json is "
                    f"{config.num_hidden_layers}"
                )


def _check_size(folder: Path, config: WrappedConfig, files: Sequence[WeightFile]) -> None:
    """ValueError for a model of more values than its files can hold: transformers would make those that are missing."""
    num_bytes = sum(file.path.stat().st_size for file in files)
    if config.num_values > num_bytes * 8 // MIN_BITS + MADE_VALUES:
        raise ValueError(
            f"{folder}: config.json asks for a model of {config.num_values} values, and the weight files have "
            f"{num_bytes} bytes"
        )


def _check_tensor(folder: Path, name: str, stored: StoredTensor, part: Part) -> None:
    """ValueError for a tensor that cannot be `part`."""
    if not stored.is_float:
        raise ValueError(f"{folder}: tensor {name!r} is {stored.dtype}; quantised weights are not supported")
    if stored.shape == part.shape:
        return
    is_vocabulary = part.name in ("embed_tokens.weight", HEAD) and stored.shape[1:] == part.shape[1:]
    key = " (vocab_size)" if is_vocabulary else ""
    raise ValueError(f"{folder}: tensor {name!r} is {list(stored.shape)}, config.json asks for {list(part.shape)}{key}")


def _check_tied(folder: Path, files: Sequence[WeightFile], embedding: str, head: str) -> None:
    """ValueError where a stored head is not the embedding that config.json ties it to: it would not be used."""
    both = ours, theirs = [next(f for f in files if name in f.stored).tensor(name) for name in (embedding, head)]
    is_same = ours.shape == theirs.shape and (
        ours.data_ptr() == theirs.data_ptr()  # as in files of torch
        or all(torch.equal(a.float(), b.float()) for a, b in zip(*(torch.split(t, 4096) for t in both), strict=True))
    )
    if not is_same:
        raise ValueError(
            f"{folder}: {head!r} is not {embedding!r}, and tie_word_embeddings in config.json says that it is; set it "
            "to false to use both, as transformers does, or take one of the two tensors out"
        )


def _explained(name: str) -> str:
    """What a tensor with that name may come from."""
    if QUANTISED.search(name):
        return "the weights are quantised, which is not supported"
    if OTHER_HEAD.match(name.removeprefix("model.")):
        return "it is a classifier or a reward model, not a language model"
    if name.startswith("model.base_model."):
        return "it belongs to an adapter: model.adapter=<folder> merges one"
    return "config.json and weights are of different models"


def check_folder(
    folder: str | Path, adapter: str | Path | None = None, config: DecoderConfig | None = None
) -> list[str]:
    """Checks the names and shapes in the weight files, and in an adapter, against config.json; raises ValueError.

    Reads headers alone, and of a tied head that is stored the values. Returns what is not used of the folder, one line
    each. `config`: that of the folder, if it has been read.
    """
    folder = Path(folder)
    config = config or read_config(folder)
    if isinstance(config, WrappedConfig):
        files = open_weights(folder)
        _check_size(folder, config, files)
        stored = {name: part.shape for file in files for name, part in file.stored.items()}
        if quantised := [name for name in stored if QUANTISED.search(name)]:
            raise ValueError(f"{folder}: unexpected tensor {min(quantised)!r}; {_explained(min(quantised))}")
        from skipdecode.model.wrapped.examine import check_files  # loads transformers

        check_files(folder, stored, None if adapter is None else resolve_adapter(str(adapter)), config.swiftkv)
        return config_remarks(folder, config)
    match = match_files(folder, config)
    if adapter is not None:
        adapter_of(adapter, match.model)
    return [*config_remarks(folder, config), *match.remarks]


def save_model(model: Decoder, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Writes config.json and model.safetensors in Hugging Face layout, but no tokenizer."""
    assert not model.is_packed, "a packed model cannot be saved"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = dtype or model.dtype
    if isinstance(model.config, WrappedConfig):
        from skipdecode.model.wrapped.save import save_wrapped  # loads transformers

        save_wrapped(model, folder, dtype)
        return
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        parts = hf_parts(name, model.config)
        rows = [count or len(parameter) for _, count in parts]
        for (theirs, _), part in zip(parts, parameter.split(rows), strict=True):
            scale, offset = fold_of(theirs, model.config)
            part = part if (scale, offset) == (1.0, 0.0) else (part.float() - offset) / scale
            tensors[theirs] = part.to(dtype=dtype, device="cpu").contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = model.config.to_dict() | {"torch_dtype": dtype_name(dtype)}
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    # safetensors makes its file readable by the owner only
    shutil.copymode(folder / "config.json", folder / "model.safetensors")
