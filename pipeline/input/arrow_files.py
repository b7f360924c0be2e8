"""Arrow IPC files, streams and files alike -> batches that are safe to use and that Parquet can hold.

A file on this machine is mapped and not read, so a batch of any size costs little memory. Arrow believes what an IPC
file says of its own offsets, so each column is checked before anybody looks at a value. Left out: footers of IPC files
(batches are read in their order), ids and failed rows (`scan`, `read`).
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.arrow_cast import num_nulls, retyped
from pipeline.input.arrow_messages import check_messages
from pipeline.input.files import SourceFile
from pipeline.input.memory_limits import block_cuts, decoded_bytes, own_values, row_sizes
from pipeline.input.parquet_columns import is_text_type, plain_type, unwritable, without_views
from pipeline.input.row import BLOCK_BYTES

MAGIC = b"ARROW1\0\0"
"""What an IPC file begins with; behind it is a stream."""
MOST_BYTES = 1 << 30
"""Of a batch that has to be in memory as a whole: of a file elsewhere, or compressed."""

MOST_NULLS = 1 << 24
"""Values of type null in a column of a batch, where they are not fewer than its bytes: they take none in the file."""
MOST_ROW_BYTES = 1 << 28
"""Of a row whose views are copied out."""

AS_BYTES = {"string": pa.binary(), "large_string": pa.large_binary(), "string_view": pa.binary_view()}


@contextmanager
def open_arrow(filesystem: pafs.FileSystem, file: SourceFile) -> Iterator[pa.RecordBatchReader]:
    """The batches of a file whose frames are as they should be; ArrowInvalid says what is wrong."""
    is_local = isinstance(filesystem, pafs.LocalFileSystem)
    with pa.memory_map(file.path) if is_local else filesystem.open_input_file(file.path) as source:
        start = len(MAGIC) if source.read(len(MAGIC)) == MAGIC else 0
        source.seek(start)
        check_messages(source, file.size_bytes, None if is_local else MOST_BYTES, MOST_BYTES)
        source.seek(start)
        with pa.ipc.open_stream(source) as reader:
            yield reader


def stored_schema(schema: pa.Schema, file: SourceFile) -> pa.Schema:
    """The columns as Parquet gives them back: times of whole seconds in milliseconds, views as plain text.

    ConfigError for a column that has no such type. Columns with dictionaries keep them.
    """
    fields = []
    for field in schema:
        try:
            stored = _stored_type(field.name, plain_type(without_views(field.type)))
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
            raise unwritable(field, file.path) from error
        is_encoded = plain_type(field.type) != field.type and stored == plain_type(field.type)
        fields.append(pa.field(field.name, field.type if is_encoded else stored))
    return pa.schema(fields)


@functools.lru_cache(maxsize=1024)
def _stored_type(name: str, type_: pa.DataType) -> pa.DataType:
    target = pa.BufferOutputStream()
    pq.write_table(pa.table({name: pa.nulls(1, type_)}), target)
    return pq.read_schema(pa.BufferReader(target.getvalue())).field(0).type


def arrow_batches(reader: pa.RecordBatchReader, stored: pa.Schema, most_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of `stored` (`stored_schema`), of 1 to `most_rows` rows; ArrowInvalid where a value is out of place."""
    for whole in reader:
        for name, column in zip(whole.schema.names, whole.columns, strict=True):
            _check_column(name, column)
        sizes = row_sizes(whole)
        _refuse_large_views(whole)
        for start, end in itertools.pairwise(block_cuts(sizes, BLOCK_BYTES, most_rows)):
            part = whole[start:end]  # lists may have values that no row has, here too
            columns = [_settle(own_values(own), field.type) for own, field in zip(part.columns, stored, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=stored)


def _check_column(name: str, column: pa.Array) -> None:
    """Text that is not UTF-8 fails its row later; inside lists and structs it is the file that is refused."""
    try:
        column.validate()
        if is_text_type(column.type) and not pa.types.is_dictionary(column.type):
            column = column.view(AS_BYTES[str(column.type)])
        column.validate(full=True)
        if pa.types.is_nested(column.type) and (nulls := num_nulls(column)) > max(MOST_NULLS, column.nbytes):
            raise pa.ArrowInvalid(f"it holds {nulls} values of type null; drop it, or give them another type")
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(f"column {name!r}: {error}") from error


def _refuse_large_views(batch: pa.RecordBatch) -> None:
    """ArrowInvalid for a row that would take too much before anybody can fail it: views in lists may be one text."""
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if without_views(field.type) == field.type:
            continue
        largest = int(decoded_bytes(column).max(initial=0))
        if largest > MOST_ROW_BYTES:
            reason = f"a row of {largest} bytes without views, more than {MOST_ROW_BYTES}"
            raise pa.ArrowInvalid(f"column {field.name!r}: {reason}; drop it, or save the column without views")


def _settle(column: pa.Array, type_: pa.DataType) -> pa.Array:
    if column.type == type_:
        return retyped(column, type_) if pa.types.is_nested(type_) else column
    return retyped(retyped(column, plain_type(column.type)), type_)
