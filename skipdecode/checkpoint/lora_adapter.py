"""Reads LoRA adapters in PEFT's layout (arXiv 2106.09685), checks them against a model and merges them.

The merged weight is W + scale * B A, in float32. Anything but plain LoRA on linear layers (DoRA, embeddings, biases,
whole modules) is refused by its key in `adapter_config.json`, never ignored. `target_modules` are read as PEFT reads
them, and the tensors must be exactly those of these modules. Adapters are trained in `skipdecode.training.lora`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from skipdecode.config.json_files import read_json

KEY = "model.adapter"  # the key that errors blame
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

PLAIN = {"peft_type": "LORA", "bias": "none", "fan_in_fan_out": False, "use_dora": False, "lora_bias": False}
"""Keys that must have these values, or be absent except for the first."""
INERT = frozenset(
    "auto_mapping base_model_name_or_path eva_config inference_mode loftq_config lora_dropout megatron_core "
    "peft_version qalora_group_size revision runtime_config".split()
)
"""Keys that do not affect the merged weights."""
READ = frozenset(
    "alpha_pattern exclude_modules init_lora_weights layers_pattern layers_to_transform lora_alpha r rank_pattern "
    "target_modules task_type use_rslora".split()
)
KEEPING_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that do not change the base weights, as PiSSA, OLoRA and LoftQ do."""


@dataclass(frozen=True)
class LoraKeys:
    """The contents of `adapter_config.json`, by its own names."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: str | Sequence[str]
    exclude_modules: str | Sequence[str]
    layers_to_transform: Sequence[int]  # empty: all
    layers_pattern: Sequence[str]

    @classmethod
    def from_dict(cls, raw: Any) -> "LoraKeys":
        """Checks the contents; ValueError names a key that is wrong or unsupported."""
        if not isinstance(raw, dict):
            raise ValueError(f"expected a mapping, got {type(raw).__name__}")
        _refuse_unsupported(raw)
        pattern = raw.get("layers_pattern")
        patterns = [pattern] if isinstance(pattern, str) and pattern else _names(raw, "layers_pattern")
        for one in patterns:
            _compile("layers_pattern", one)
        return cls(
            r=_number(raw, "r", raw.get("r", 8), int),
            lora_alpha=_number(raw, "lora_alpha", raw.get("lora_alpha", 8), float),
            use_rslora=bool(raw.get("use_rslora", False)),
            rank_pattern=_pattern(raw, "rank_pattern", int),
            alpha_pattern=_pattern(raw, "alpha_pattern", float),
            target_modules=_names(raw, "target_modules"),
            exclude_modules=_names(raw, "exclude_modules"),
            layers_to_transform=_layers(raw.get("layers_to_transform"), raw.get("target_modules")),
            layers_pattern=patterns,
        )

    def changes(self, module: str) -> bool:
        """True if PEFT would add LoRA to the module with that full name."""
        if self.exclude_modules and _is_named(module, self.exclude_modules):
            return False
        if not _is_named(module, self.target_modules):
            return False
        if not self.layers_to_transform or module in self.target_modules:  # a full name has its layer
            return True
        patterns = [rf"(?:^|.*?\.){one}\.(\d+)\." for one in self.layers_pattern] or [r".*?\.[^.]*\.(\d+)\."]
        found = next(filter(None, (re.match(pattern, module) for pattern in patterns)), None)
        return found is not None and int(found[1]) in self.layers_to_transform

    def rank(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) for a rank-stabilised adapter (arXiv 2312.03732)."""
        rank = self.rank(module)
        alpha = float(_matching(self.alpha_pattern, module, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits a model."""

    folder: Path
    keys: LoraKeys
    modules: frozenset[str]
    """The modules that it changes, by Hugging Face name."""

    def merged(self, module: str, weight: Tensor) -> Tensor:
        """A weight [out, in] of that module with the adapter merged, in float32; unchanged if it has no adapter.

        The adapter's own copy of the weight (`base_name`) comes first, as in PEFT.
        """
        if module not in self.modules or weight.dim() != 2:  # biases stay as they are
            return weight
        if base_name(module) in self._file.keys():  # noqa: SIM118 - safe_open is no mapping
            weight = self._file.get_tensor(base_name(module))
        a, b = self.matrices(module)
        merged: Tensor = weight.float() + self.keys.scale(module) * (b @ a)
        return merged

    def matrices(self, module: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] of a module, in float32."""
        a, b = (self._file.get_tensor(tensor_name(module, which)).float() for which in "AB")
        return a, b

    @cached_property
    def _file(self) -> Any:
        return safe_open(self.folder / WEIGHTS_FILE, framework="pt")


def resolve_adapter(path: str, key: str = KEY) -> Path:
    """The folder of an adapter; ValueError blames `key` if it is none."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{key}: {path!r} is not a folder; download an adapter of the hub first")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{key}: {path} has no {name}, which a LoRA adapter saved by PEFT has")
    return folder


def open_adapter(
    path: str | Path, linears: Mapping[str, tuple[int, ...]], embeddings: Sequence[str], *, key: str = KEY
) -> Adapter:
    """Reads an adapter and checks it against a model; ValueError blames `key` if they do not fit.

    `linears`: names and shapes [out, in] of the model's linear layers; `embeddings`: names of its embeddings.
    """
    folder = resolve_adapter(str(path), key)
    try:
        keys = LoraKeys.from_dict(read_json(folder / CONFIG_FILE))
        modules = _changed(keys, linears, embeddings)
        _check_tensors(keys, modules, _shapes(folder / WEIGHTS_FILE), linears)
    except ValueError as error:
        raise ValueError(f"{key}: {folder / CONFIG_FILE}: {error}") from error
    return Adapter(folder, keys, frozenset(modules))


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if not isinstance(raw.get("use_rslora"), bool | None):
        raise ValueError(f"use_rslora is {raw['use_rslora']!r}, expected true or false")
    if "peft_type" not in raw:
        raise ValueError("peft_type is missing; only 'LORA' is supported")
    for name, only in PLAIN.items():
        if raw.get(name) not in (None, only):
            raise ValueError(f"{name} is {raw[name]!r}; only {only!r} is supported")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"task_type is {raw['task_type']!r}; only 'CAUSAL_LM' is supported")
    if raw.get("init_lora_weights") not in KEEPING_BASE:
        raise ValueError(
            f"init_lora_weights is {raw['init_lora_weights']!r}, which changes the base weights; convert it with "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    for name, value in raw.items():  # e.g. modules_to_save, trainable_token_indices, target_parameters
        if name not in INERT and name not in READ and name not in PLAIN and value not in (None, False, "", [], {}):
            raise ValueError(f"{name} is {value!r}, and only plain LoRA is supported")


def _changed(keys: LoraKeys, linears: Mapping[str, tuple[int, ...]], embeddings: Sequence[str]) -> list[str]:
    """The modules of the model that the adapter changes."""
    if isinstance(keys.target_modules, str) and keys.target_modules.lower() == ALL_LINEAR:
        return [name for name in linears if name != "lm_head"]
    if wrong := [name for name in embeddings if keys.changes(name)]:
        raise ValueError(f"target_modules names the embedding {wrong[0]!r}; only linear layers are supported")
    modules = [name for name in linears if keys.changes(name)]
    if not modules:
        raise ValueError(
            f"target_modules {keys.target_modules!r} names no linear layer of this model, which has "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in linears}))}; it is an adapter of another model"
        )
    return modules


def _check_tensors(
    keys: LoraKeys,
    modules: Sequence[str],
    found: Mapping[str, tuple[int, ...]],
    linears: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises ValueError unless the tensors are A and B of exactly these modules; their weights may be there, too."""
    left = dict(found)
    for module in modules:
        name, wanted = base_name(module), linears[module]
        if (shape := left.pop(name, wanted)) != wanted:
            raise ValueError(f"tensor {name!r} is {list(shape)}, the model's is {list(wanted)}")
    for module in modules:
        rank, (rows, columns) = keys.rank(module), linears[module]
        for which, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            name = tensor_name(module, which)
            if name not in left:
                raise ValueError(f"{WEIGHTS_FILE} lacks tensor {name!r} of a module that target_modules names")
            if left.pop(name) != shape:
                raise ValueError(
                    f"tensor {name!r} is {list(found[name])}, this model and rank {rank} ask for {list(shape)}; it is "
                    "an adapter of another model"
                )
    if left:
        name = min(left)
        known = TENSOR.fullmatch(name)
        why = "a part of it that is not supported" if known is None else f"no linear layer {known[1]!r} to be changed"
        raise ValueError(
            f"{WEIGHTS_FILE} has {len(left)} tensors that this model has no use for, the first is {name!r} ({why})"
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors; ValueError names one with NaN or infinity, from a training that diverged."""
    try:
        tensors = load_file(path)
    except Exception as error:  # a kind of safetensors' own
        raise ValueError(f"{path} cannot be read: {error}") from error
    if wrong := [name for name, tensor in tensors.items() if not tensor.float().isfinite().all()]:
        raise ValueError(f"{path.name}: tensor {wrong[0]!r} holds NaN or infinity; take an earlier checkpoint")
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def tensor_name(module: str, which: str) -> str:
    """The name of the tensor A or B (`which`) of a module."""
    return f"base_model.model.{module}.lora_{which}.weight"


def base_name(module: str) -> str:
    """The name of the weight that an adapter was trained on, which PEFT stores for LoRA on an LM head."""
    return f"base_model.model.{module}.base_layer.weight"


def _is_named(module: str, names: str | Sequence[str]) -> bool:
    """True if a regular expression matches the full name, or a list has the name or its last parts."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _matching(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first pattern that matches the last parts of the module's name."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _number(raw: Mapping[str, Any], key: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{key} is {raw.get(key)!r}, expected a positive {'number' if kind is float else 'integer'}")
    return value


def _pattern(raw: Mapping[str, Any], key: str, kind: type) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{key} is {found!r}, expected a mapping from names to numbers")
    for name, value in found.items():
        _number(raw, key, value, kind)
        _compile(key, name)
    return found


def _names(raw: Mapping[str, Any], key: str) -> str | list[str]:
    found = raw.get(key) or []
    if isinstance(found, str):
        _compile(key, found)
    elif not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{key} is {found!r}, expected a list of names, or an expression")
    return found


def _layers(found: Any, modules: Any) -> list[int]:
    listed = [] if found is None else [found] if isinstance(found, int) else found
    if not isinstance(listed, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
        raise ValueError(f"layers_to_transform is {found!r}, expected a list of layer numbers")
    if listed and isinstance(modules, str):
        raise ValueError(f"layers_to_transform is {found!r}, which PEFT does not take beside an expression")
    return listed


def _compile(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is no regular expression: {error}") from error
