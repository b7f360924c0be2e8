"""How much memory rows of Parquet and Arrow will take, known before they take it.

A value that many rows share is stored once, in a dictionary or under views, so that a small file may stand for
gigabytes: a long context that every row repeats, for example. Such columns stay encoded until they are cut into blocks.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.input.columns import is_list_type
from pipeline.input.ids import Mask, Rows
from pipeline.input.line_reader import BLOCK_BYTES
from pipeline.input.parquet_pages import read_pages

OFFSET_BYTES = 4  # where a text begins
VIEW_INTS = 4  # int32 per view; the first is the length


def encoded_columns(file: pq.ParquetFile) -> list[int]:
    """The Parquet columns of text or bytes, nested ones too, of which some part is dictionary-encoded."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    leaves = [leaf for field in file.schema_arrow for leaf in _leaves(field.type)]
    if len(leaves) != file.metadata.num_columns:  # a type that is unknown here
        return []
    found = [index for index, leaf in enumerate(leaves) if _has_length(leaf) or _is_view(leaf)]
    return [index for index in found if any(group.column(index).has_dictionary_page for group in groups)]


def _num_leaves(field: pa.Field) -> int:
    return len(list(_leaves(field.type)))


def _leaves(type_: pa.DataType) -> Iterator[pa.DataType]:
    """The types of the Parquet columns that a column of this type is stored in, dictionaries taken off; null:
    unknown."""
    if isinstance(type_, pa.BaseExtensionType):
        yield from _leaves(type_.storage_type)
    elif pa.types.is_dictionary(type_):
        yield from _leaves(type_.value_type)
    elif pa.types.is_struct(type_):
        yield from (leaf for child in type_ for leaf in _leaves(child.type))
    elif pa.types.is_map(type_):
        yield from (leaf for part in (type_.key_type, type_.item_type) for leaf in _leaves(part))
    elif is_list_type(type_):
        yield from _leaves(type_.value_type)
    elif pa.types.is_nested(type_):
        yield from (pa.null() for _ in _leaves(type_.value_type))
    else:
        yield type_


def row_bytes(source: pa.NativeFile, metadata: pq.FileMetaData, indices: Sequence[int]) -> int:
    """About what these columns of a row take, in the row group where they take most; text and bytes of dictionaries
    count once for the group."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return max(
        (
            sum(_value_bytes(source, group.column(index), max(group.num_rows, 1)) for index in indices)
            for group in groups
        ),
        default=0,
    )


def _value_bytes(source: pa.NativeFile, column: pq.ColumnChunkMetaData, num_rows: int) -> int:
    """About what a value of a column chunk takes.

    Values that are stored as what they do not share with the one before may each be as long as the page.
    """
    if "DELTA_BYTE_ARRAY" not in column.encodings:
        return int(column.total_uncompressed_size // num_rows)
    start, end = column.data_page_offset, column.data_page_offset + column.total_compressed_size
    return max((page.num_bytes for page in read_pages(source, start, end)), default=0)


def parquet_batches(
    source: pa.NativeFile, footer: pq.ParquetFile, most_rows: int, names: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Batches of all columns or those with these names, in which dictionary-encoded text and bytes stay encoded.

    A batch has at most `most_rows` rows, and about BLOCK_BYTES besides its dictionaries.
    """
    wanted = None if names is None else list(names)
    indices = [
        index
        for index, name in enumerate(
            name for field in footer.schema_arrow for name in [field.name] * _num_leaves(field)
        )
        if wanted is None or name in wanted
    ]
    rows = max(1, min(most_rows, BLOCK_BYTES // max(row_bytes(source, footer.metadata, indices), 1)))
    encoded = [index for index in encoded_columns(footer) if index in indices]
    with pq.ParquetFile(
        source,
        metadata=footer.metadata,
        page_checksum_verification=True,
        read_dictionary=encoded,
        arrow_extensions_enabled=False,  # else text of an extension type such as JSON does not stay encoded
    ) as file:
        yield from file.iter_batches(rows, columns=wanted)


def block_cuts(sizes: Rows, max_bytes: int, max_rows: int) -> list[int]:
    """Where to cut rows of these sizes so that no part has more than `max_rows` rows, nor more than `max_bytes` unless
    it is a single row."""
    if sizes.sum() <= max_bytes:
        return [*range(0, len(sizes), max_rows), len(sizes)]
    ends, cuts = np.cumsum(sizes), [0]
    while (start := cuts[-1]) < len(sizes):
        before = int(ends[start - 1]) if start else 0
        fit = int(np.searchsorted(ends, before + max_bytes, side="right"))
        cuts.append(min(max(fit, start + 1), start + max_rows, len(sizes)))
    return cuts


def row_sizes(batch: pa.RecordBatch) -> Rows:
    """int64 [rows]: about how many bytes each row takes once it is decoded."""
    return sum((decoded_bytes(column) for column in batch.columns), np.zeros(batch.num_rows, dtype=np.int64))


def own_values(column: pa.Array) -> pa.Array:
    """The column, copied if it is a slice of nested values: it would keep its neighbours' values, which casts decode
    too."""
    return pa.concat_arrays([column[:0], column]) if pa.types.is_nested(column.type) else column


def own_rows(batch: pa.RecordBatch, start: int, end: int) -> pa.RecordBatch:
    """Some rows of a batch, without the nested values of their neighbours."""
    if end - start == batch.num_rows:
        return batch
    part = batch[start:end]
    return pa.RecordBatch.from_arrays([own_values(column) for column in part.columns], schema=part.schema)


def without_oversized_rows(batch: pa.RecordBatch, max_bytes: int, id_column: str) -> tuple[pa.RecordBatch, Mask]:
    """The batch with nulls in rows of more than `max_bytes`, but for their ids, and which rows: bool [rows]."""
    bad = row_sizes(batch) > max_bytes
    if bad.any():
        rows = pa.array(np.arange(batch.num_rows), mask=bad)  # a null index gives a null
        for at, field in enumerate(batch.schema):
            if field.name != id_column:
                batch = batch.set_column(at, field.name, batch.column(at).take(rows))
    return batch, bad


def decoded_bytes(column: pa.Array) -> Rows:
    """int64 [rows]: about how many bytes each value takes once it is decoded, without dictionaries and views."""
    type_ = column.type
    if isinstance(type_, pa.BaseExtensionType):
        return decoded_bytes(column.storage)
    if pa.types.is_dictionary(type_):
        return np.append(decoded_bytes(column.dictionary), 0)[_numbers(column.indices, null=-1)]
    if _has_length(type_):
        return _numbers(pc.binary_length(column)) + OFFSET_BYTES
    if _is_view(type_):
        return _view_lengths(column) + OFFSET_BYTES
    if pa.types.is_struct(type_):  # a null has values too, which a cast decodes
        children = (column.field(index) for index in range(type_.num_fields))
        return sum((decoded_bytes(child) for child in children), np.zeros(len(column), dtype=np.int64))
    if pa.types.is_map(type_) or is_list_type(type_):
        values = [column.keys, column.items] if pa.types.is_map(type_) else [column.values]
        sizes = sum((decoded_bytes(part) for part in values), np.zeros(len(values[0]), dtype=np.int64))
        total = np.concatenate([[0], np.cumsum(sizes)])
        if pa.types.is_fixed_size_list(type_):
            return np.asarray(
                np.diff(total[np.arange(column.offset, column.offset + len(column) + 1) * type_.list_size])
            )
        return np.asarray(np.diff(total[_numbers(column.offsets)]))
    return np.full(len(column), column.nbytes // max(len(column), 1), dtype=np.int64)


def _numbers(column: pa.Array, null: int = 0) -> Rows:
    """`to_numpy` without importing pandas, which takes longer than reading many a file."""
    end = column.offset + len(column)
    found = np.frombuffer(column.buffers()[1] or b"", str(column.type), end)[column.offset :].astype(np.int64)
    return np.where(_is_valid(column), found, null) if column.null_count else found


def _view_lengths(column: pa.Array) -> Rows:
    """The lengths of views, with which each begins; Arrow's own function does not take views."""
    end = column.offset + len(column)
    views = np.frombuffer(column.buffers()[1] or b"", np.int32, end * VIEW_INTS).reshape(end, VIEW_INTS)
    return np.where(_is_valid(column), views[column.offset :, 0], 0).astype(np.int64)


def _is_valid(column: pa.Array) -> Mask:
    valid = column.is_valid()
    bits = np.frombuffer(valid.buffers()[1] or b"", np.uint8)
    return np.unpackbits(bits, bitorder="little")[valid.offset : valid.offset + len(column)].astype(bool)


def _has_length(type_: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(type_) for check in checks)


def _is_view(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(type_) or pa.types.is_binary_view(type_))
