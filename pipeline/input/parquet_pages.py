"""Refuses Parquet files with pages that are small in the file and huge in memory, before a page is decompressed.

A few kilobytes of zstd can stand for gigabytes, which Arrow takes memory for at once. pyarrow does not show page
headers, so they are read here (parquet.thrift, PageHeader, in Thrift's compact protocol).
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.job import ConfigError

EXPANSION: Final = {"UNCOMPRESSED": 1, "SNAPPY": 32, "LZ4": 256, "LZ4_RAW": 256, "GZIP": 1100, "ZSTD": 1 << 15}
"""The most bytes that a codec makes of one."""
MAX_RATIO: Final = 100
"""A page that is larger than a value may be, as some writers make them, must have at least a hundredth of its bytes in
the file."""
SUSPICIOUS_RATIO: Final = 16
"""By which a footer has to say that its pages grow before those of a file that is not local are looked at."""
HEADER_BYTES: Final = 1 << 10
MAX_HEADER_BYTES: Final = 1 << 20


class Page(NamedTuple):
    """A page as its header has it."""

    num_bytes: int
    """Decompressed."""
    num_stored: int
    """Bytes in the file."""


def refuse_large_pages(
    source: pa.NativeFile, metadata: pq.FileMetaData, path: str, max_bytes: int, *, is_local: bool
) -> None:
    """ConfigError where a page grows to more than `max_bytes` from next to nothing.

    A page that is large in the file, too, is read: the rows in it that are too large fail.
    """
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            stored, plain = column.total_compressed_size, column.total_uncompressed_size
            if stored * EXPANSION.get(column.compression, 1 << 20) <= max_bytes:
                continue
            if not is_local and (plain <= max_bytes or plain < SUSPICIOUS_RATIO * stored):
                continue
            start, pages = column.data_page_offset, source
            if column.has_dictionary_page and column.dictionary_page_offset is not None:
                start = min(start, column.dictionary_page_offset)
            if not is_local:  # one request, and not one for each page
                source.seek(start)
                pages, start = pa.BufferReader(source.read(stored)), 0
            for page in read_pages(pages, start, start + stored):
                if page.num_bytes > max(max_bytes, MAX_RATIO * page.num_stored):
                    raise ConfigError(
                        "input.path",
                        f"{path}: a page of column {column.path_in_schema!r} takes {page.num_stored} bytes in the file "
                        f"and {page.num_bytes} in memory, and limits.max_line_bytes allows {max_bytes}; raise it, or "
                        "write the file with smaller pages",
                    )


def read_pages(source: pa.NativeFile, start: int, end: int) -> Iterator[Page]:
    """The pages between two offsets, as their headers have them; ends where there is no header."""
    while start < end:
        header, length = _read_header(source, start, end)
        num_bytes, num_stored = header.get(2), header.get(3)
        if not isinstance(num_bytes, int) or not isinstance(num_stored, int) or num_stored < 0:
            return  # Arrow says what is wrong
        yield Page(num_bytes, num_stored)
        start += length + num_stored


def _read_header(source: pa.NativeFile, start: int, end: int) -> tuple[dict[int, Any], int]:
    """The page header at an offset by field number, and its length; nothing where it cannot be read."""
    num_bytes = HEADER_BYTES
    while num_bytes <= MAX_HEADER_BYTES:  # statistics may make it long
        source.seek(start)
        data = source.read(min(num_bytes, end - start))
        try:
            header = _Compact(data)
            return header.struct(), header.at
        except IndexError:  # cut off
            num_bytes = num_bytes * 16 if len(data) == num_bytes else MAX_HEADER_BYTES + 1
        except (ValueError, RecursionError):
            break
    return {}, 0


class _Compact:
    """Reads Thrift's compact protocol; IndexError at the end of the data, ValueError for what it does not have."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct(self) -> dict[int, Any]:
        """The integers of a struct by field number; whatever else it has is skipped."""
        found: dict[int, Any] = {}
        field = 0
        while (head := self._byte()) != 0:
            field = field + (head >> 4) if head >> 4 else self._zigzag()
            found[field] = self._value(head & 15)
        return found

    def _value(self, kind: int, *, in_list: bool = False) -> Any:
        if kind in (1, 2):  # a flag is in the field's head, or in a list a byte
            return self._byte() if in_list else None
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._zigzag()
        if kind == 12:
            return self.struct()
        if kind == 7:
            return self._skip(8)
        if kind == 8:
            return self._skip(self._varint())
        if kind not in (9, 10):  # PageHeader has no maps
            raise ValueError(f"no type {kind}")
        head = self._byte()
        for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
            self._value(head & 15, in_list=True)
        return None

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise IndexError

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
