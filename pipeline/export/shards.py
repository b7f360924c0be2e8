"""Reads the rows of a run and writes one file of an export, JSON Lines or Parquet, batch by batch.

In JSON, times become ISO 8601, decimals strings, bytes base64, durations seconds, NaN and infinity null, and maps lists
of pairs.
"""

import base64
import datetime
import decimal
import json
import math
import uuid
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.arrow_cast import retyped, with_schema
from pipeline.export.export_plan import ExportPlan

READ_ROWS: Final = 1024
GROUP_ROWS, GROUP_BYTES = 10_000, 32 << 20  # of a row group, which is held in memory


def read_parts(plan: ExportPlan) -> Iterator[pa.RecordBatch]:
    """The rows of the data files in order, with the columns of the plan."""
    for path in plan.files:
        with plan.folder.filesystem.open_input_file(path) as source, pq.ParquetFile(
            source, page_checksum_verification=True
        ) as file:  # fmt: skip
            for batch in file.iter_batches(READ_ROWS, columns=plan.schema.names):
                table = pa.Table.from_batches([batch]).select(plan.schema.names)
                yield from with_schema(table, plan.schema).to_batches()


class Shard(Protocol):
    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None: ...


def open_shard(plan: ExportPlan, sink: BinaryIO) -> Shard:
    """The writer of one file."""
    compression = plan.options.compression
    if plan.options.format == "jsonl":
        return JsonlShard(sink, None if compression in (None, "none") else compression)
    return ParquetShard(sink, plan.schema, compression or "zstd")


class JsonlShard:
    def __init__(self, sink: BinaryIO, compression: str | None) -> None:
        self._stream = pa.PythonFile(_KeptOpen(sink), mode="w")
        if compression is not None:
            self._stream = pa.CompressedOutputStream(self._stream, compression)

    def write(self, batch: pa.RecordBatch) -> None:
        lines = (json.dumps(plain(row), ensure_ascii=False) for row in to_rows(batch))
        self._stream.write("".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        self._stream.close()


def to_rows(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """The rows as Python values; a time that Python cannot represent becomes Arrow's text for it."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError):
        columns = [[_value(column, row) for row in range(len(column))] for column in batch.columns]
        return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def _value(column: pa.Array, row: int) -> object:
    try:
        return column[row].as_py()
    except (ValueError, OverflowError):
        (value,) = retyped(column[row : row + 1], _times_as_text(column.type)).to_pylist()
        return value


def _times_as_text(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(type_):
        return pa.string()
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(_times_as_text(child.type)) for child in type_])
    if pa.types.is_map(type_):
        return pa.map_(_times_as_text(type_.key_type), _times_as_text(type_.item_type))
    if any(is_it(type_) for is_it in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        return pa.large_list(type_.value_field.with_type(_times_as_text(type_.value_type)))
    return type_


class _KeptOpen:
    """A wrapper for Arrow to close, so that the file itself stays open to be flushed and synced."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self.closed = False

    def write(self, data: bytes) -> int:
        return self._sink.write(data)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self.closed = True


class ParquetShard:
    def __init__(self, sink: BinaryIO, schema: pa.Schema, compression: str) -> None:
        self._writer = pq.ParquetWriter(sink, schema, compression=compression, write_page_checksum=True)
        self._group: list[pa.RecordBatch] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._group.append(batch)
        if sum(len(b) for b in self._group) >= GROUP_ROWS or sum(b.nbytes for b in self._group) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._group:
            self._writer.write_table(pa.Table.from_batches(self._group))
        self._group = []

    def close(self) -> None:
        self._flush()
        self._writer.close()


def plain(value: object) -> object:
    """The value with everything converted that JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, decimal.Decimal | uuid.UUID):
        return str(value)
    return value
