"""Reads the header of a GGUF file: its metadata, and the locations of its tensors. No torch.

Every length is checked against the size of the file before it is used, so that a truncated or foreign file is a
ValueError that names it.
"""

import math
import mmap
import struct
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.checkpoint.hub import why_unreadable

if TYPE_CHECKING:  # otherwise imported when a file is read, since every task that reads prompts imports this module
    from gguf.constants import GGMLQuantizationType

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` format of each type of value: u8 i8 u16 i16 u32 i32 f32 bool u64 i64 f64."""
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_HEADER_BYTES = 64 << 20
"""Most of a header is the vocabulary and its merges, 10 to 20 MB in the largest ones. As Python's objects they take a
multiple of it."""


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch."""
    kind: "GGMLQuantizationType"
    start: int
    """Offset from the beginning of the file."""
    num_bytes: int


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    num_bytes: int
    """Size of the header; the tensors follow."""


def read_header(path: str | Path) -> Header:
    """Reads the header; ValueError names the file and what is wrong with it."""
    try:
        with Path(path).open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ValueError("is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no GGUF file that can be read: {why_unreadable(Path(path), error)}") from error


class _Cursor:
    """Reads values one after another; ValueError if the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.size = data, 0, len(data)

    def need(self, count: int) -> None:
        if count > self.size - self.at:
            raise ValueError(f"it is truncated, or damaged: {count} bytes should follow byte {self.at} of {self.size}")
        if self.at + count > MAX_HEADER_BYTES:
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES >> 20} MiB")

    def take(self, kinds: str) -> tuple[Any, ...]:
        width = struct.calcsize("<" + kinds)
        self.need(width)
        values = struct.unpack_from("<" + kinds, self.data, self.at)
        self.at += width
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        self.need(length)
        start, self.at = self.at, self.at + length
        try:
            return self.data[start : self.at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"the text at byte {start} is no UTF-8: {error}") from error

    def value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self.take(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"it is damaged: there is no type {kind} of values, before byte {self.at}")
        inner, count = self.take("IQ")
        if inner == STRING:
            self.need(8 * count)  # every text takes at least as many bytes
            return [self.text() for _ in range(count)]
        if inner not in SCALARS:
            raise ValueError(f"arrays of type {inner} are not supported, before byte {self.at}")
        num_bytes = struct.calcsize("<" + SCALARS[inner]) * count
        self.need(num_bytes)
        start, self.at = self.at, self.at + num_bytes
        values = array("B" if SCALARS[inner] == "?" else SCALARS[inner], self.data[start : self.at])
        if sys.byteorder == "big":
            values.byteswap()
        return values


def _parse(cursor: _Cursor) -> Header:
    if cursor.data[:4] != MAGIC:
        raise ValueError(f"it begins with {cursor.data[:4]!r}, expected {MAGIC!r}")
    cursor.at = 4
    version, num_tensors, num_values = cursor.take("IQQ")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, supported are {', '.join(map(str, VERSIONS))} (little-endian)")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        (kind,) = cursor.take("I")
        metadata[key] = cursor.value(kind)
    if metadata.get("split.count", 1) != 1:
        raise ValueError(
            f"it is one of {metadata['split.count']} parts (split.count); merge them with llama-gguf-split"
        )
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}, expected a positive integer")
    found = []
    for _ in range(num_tensors):
        found.append(_tensor(cursor))
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in found:
        info = TensorInfo(name, shape, kind, start + offset, _num_bytes(name, shape, kind))
        if info.start + info.num_bytes > cursor.size:
            raise ValueError(
                f"it is truncated: tensor {name!r} ends at byte {info.start + info.num_bytes} of {cursor.size}"
            )
        if name in tensors:
            raise ValueError(f"tensor {name!r} is there twice")
        tensors[name] = info
    if (total := sum(info.num_bytes for info in tensors.values())) > cursor.size:
        raise ValueError(f"its tensors overlap: they have {total} bytes, the file {cursor.size}")
    return Header(metadata, tensors, min(start, cursor.size))


def _tensor(cursor: _Cursor) -> "tuple[str, tuple[int, ...], GGMLQuantizationType, int]":
    from gguf.constants import GGMLQuantizationType

    name = cursor.text()
    (num_dims,) = cursor.take("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    dims = cursor.take(f"{num_dims}Q")
    kind, offset = cursor.take("IQ")
    try:
        return name, tuple(reversed(dims)), GGMLQuantizationType(kind), offset
    except ValueError:
        raise ValueError(f"tensor {name!r} has values of an unknown type {kind}") from None


def _num_bytes(name: str, shape: tuple[int, ...], kind: "GGMLQuantizationType") -> int:
    from gguf.constants import GGML_QUANT_SIZES

    values, width = map(int, GGML_QUANT_SIZES[kind])
    if shape[-1] % values or 0 in shape:
        raise ValueError(f"tensor {name!r} is {list(shape)}, and {kind.name} has {values} values to a block")
    return math.prod(shape) // values * width
