"""Arrow IPC files (`.arrow`), as `datasets` saves them: files and streams -> record batches that Parquet can hold.

They are trusted as Parquet is: what a file says of its own offsets is not checked. A file on this machine is mapped
and not read, so that a batch of any size costs little memory. Ids and failed rows are made in `scan` and `read`.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.arrow_cast import retyped
from pipeline.input.columns import plain_type, unwritable, without_views
from pipeline.input.files import SourceFile
from pipeline.input.line_reader import BLOCK_BYTES
from pipeline.input.memory_limits import block_cuts, own_values, row_sizes

FILE_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@contextmanager
def open_arrow(filesystem: pafs.FileSystem, file: SourceFile) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """The schema and the record batches of a file; ArrowInvalid for one that is cut off, or not Arrow's."""
    is_local = isinstance(filesystem, pafs.LocalFileSystem)
    with pa.memory_map(file.path) if is_local else filesystem.open_input_file(file.path) as source:
        if source.read(len(FILE_MAGIC)) == FILE_MAGIC:
            with pa.ipc.open_file(source) as reader:
                yield reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
            return
        source.seek(max(file.size_bytes - len(END_OF_STREAM), 0))
        if source.read(len(END_OF_STREAM)) != END_OF_STREAM:  # Arrow takes any end between two batches for the end
            raise pa.ArrowInvalid("not an Arrow IPC stream, or cut off: its end mark is missing")
        source.seek(0)
        with pa.ipc.open_stream(source) as reader:
            yield reader.schema, iter(reader)


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


def arrow_batches(batches: Iterator[pa.RecordBatch], stored: pa.Schema, max_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of the schema `stored` (`stored_schema`), each of 1 to `max_rows` rows and about BLOCK_BYTES."""
    for whole in batches:
        for start, end in itertools.pairwise(block_cuts(row_sizes(whole), BLOCK_BYTES, max_rows)):
            columns = []
            for column, field in zip(whole[start:end].columns, stored, strict=True):
                column = own_values(column)
                if column.type != field.type:
                    column = retyped(retyped(column, plain_type(column.type)), field.type)
                elif pa.types.is_nested(field.type):
                    column = retyped(column, field.type)
                columns.append(column)
            yield pa.RecordBatch.from_arrays(columns, schema=stored)
