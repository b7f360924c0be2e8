"""The weight files of a model folder: which they are, what their headers say, and the tensors in them.

The files may come from anywhere. No code in them runs, and what they hold is checked by their headers before memory is
taken for it.
"""

import json
import math
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from skipdecode.backends.block_quantization import StoredBlocks
from skipdecode.checkpoint.hub import why_unreadable

SHARD_SUFFIXES = (".safetensors", ".bin")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of weights, by the names that safetensors has for them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of its file has it."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_float: bool
    """Whether weights may have its type, dequantised or not."""

    @classmethod
    def of(cls, shape: tuple[int, ...], dtype: str) -> "StoredTensor":
        is_float = dtype in FLOATS
        return cls(shape, dtype, math.prod(shape) * FLOATS[dtype].itemsize if is_float else 0, is_float)


class WeightFile:
    """A file of weights. ValueError names it where it cannot be read, or holds what cannot be weights."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def stored(self) -> dict[str, StoredTensor]:
        """By name, without reading the tensors."""
        raise NotImplementedError

    def tensors(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors, but for those `without` which it goes, one in memory at a time where the format allows
        it."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        return next(tensor for own, tensor in self.tensors() if own == name)

    def blocks(self) -> dict[str, StoredBlocks]:
        """By name, the matrices whose blocks can be kept as they are (`model.quantization: int4`)."""
        return {}


class _Safetensors(WeightFile):
    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        with self._open() as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
            return {name: StoredTensor.of(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}

    def tensors(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        with self._open() as file:
            for name in file.keys():  # noqa: SIM118
                if name not in without:
                    yield name, file.get_tensor(name)

    def tensor(self, name: str) -> Tensor:
        with self._open() as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def _open(self) -> Any:
        try:
            return safe_open(self.path, framework="pt")
        except Exception as error:  # a kind of safetensors' own
            raise ValueError(f"{self.path}: cannot be read: {why_unreadable(self.path, error)}") from error


class _Bin(WeightFile):
    @cached_property
    def _state(self) -> dict[str, Tensor]:
        mmap = zipfile.is_zipfile(self.path)  # files from before torch 1.6 are no zip archives and cannot be mapped
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # pickle and zip raise many kinds
            raise ValueError(f"{self.path}: cannot be read: {why_unreadable(self.path, error)}") from error
        if not isinstance(state, dict):
            raise ValueError(f"{self.path}: holds {type(state).__name__}, expected tensors by name")
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise ValueError(f"{self.path}: holds {type(value).__name__} under {name!r}, expected tensors by name")
            if value.layout is not torch.strided or value.device.type != "cpu":
                raise ValueError(f"{self.path}: tensor {name!r} has no plain values ({value.layout}, {value.device})")
        return state

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        names = {str(dtype): name for name, dtype in FLOATS.items()}
        return {
            name: StoredTensor.of(tuple(value.shape), names.get(str(value.dtype), str(value.dtype)))
            for name, value in self._state.items()
        }

    def tensors(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor) for name, tensor in self._state.items() if name not in without)
        del self._state

    def tensor(self, name: str) -> Tensor:
        return self._state[name]


class _Gguf(WeightFile):
    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        from skipdecode.checkpoint import gguf_file  # the worker of a checkpoint needs no gguf

        return {
            name: StoredTensor(info.shape, info.kind.name, info.num_bytes, is_float=True)
            for name, info in gguf_file.weights(self.path)
        }

    def tensors(self, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        from skipdecode.checkpoint import gguf_file

        yield from gguf_file.tensors(self.path, without)

    def blocks(self) -> dict[str, StoredBlocks]:
        from skipdecode.checkpoint import gguf_file

        return dict(gguf_file.blocks(self.path))


def open_weights(folder: Path) -> list[WeightFile]:
    """The weight files of a folder, or the GGUF file itself (`weight_files`)."""
    kinds = {".safetensors": _Safetensors, ".gguf": _Gguf}
    return [kinds.get(path.suffix, _Bin)(path) for path in weight_files(folder)]


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
