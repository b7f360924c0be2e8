"""Columns of Parquet as the rows need them: plain types, valid text, ids.

Left out: opening files (`scan`, `read`), and text inside lists and structs, which is not looked at.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import ConfigError
from pipeline.input.arrays import Mask, Rows
from pipeline.input.files import SourceFile
from pipeline.input.ids import made_id
from pipeline.retype import retyped

VALUE_BYTES = 8  # of a value in a list: a number, or where its text begins
LISTS = ((pa.types.is_list, pa.list_), (pa.types.is_large_list, pa.large_list))


def is_text_type(type_: pa.DataType) -> bool:
    """string, large_string, string_view, or a dictionary of one of them."""
    type_ = type_.value_type if pa.types.is_dictionary(type_) else type_
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(type_) for check in checks)


def is_id_type(type_: pa.DataType) -> bool:
    return is_text_type(type_) or pa.types.is_integer(type_.value_type if pa.types.is_dictionary(type_) else type_)


def is_messages_type(type_: pa.DataType) -> bool:
    """Lists of structs or maps, or text, which is then their JSON."""
    if not any(is_it(type_) for is_it, _ in LISTS):
        return is_text_type(type_)
    value = type_.value_type
    return bool(pa.types.is_struct(value) or pa.types.is_map(value) or pa.types.is_null(value))


def plain_type(type_: pa.DataType) -> pa.DataType:
    """`type_` with the type of the values for dictionaries, which differ from file to file."""
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(plain_type(child.type)) for child in type_])
    if pa.types.is_map(type_):
        key, item = (field.with_type(plain_type(field.type)) for field in (type_.key_field, type_.item_field))
        return type_ if (key.type, item.type) == (type_.key_type, type_.item_type) else pa.map_(key, item)
    for is_it, make in LISTS:
        if is_it(type_):
            return make(type_.value_field.with_type(plain_type(type_.value_type)))
    return type_


def cast_plain(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """The column without dictionaries, and in a type that holds it."""
    plain = plain_type(column.type)
    for wanted in (plain, type_):
        if column.type != wanted:
            column = retyped(column, wanted)
    return column


def without_views(type_: pa.DataType) -> pa.DataType:
    """`type_` with offsets in place of views, which few of Arrow's functions take; ArrowNotImplementedError for views
    of lists, whose casts make lists that are not valid (pyarrow 26)."""
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        raise pa.ArrowNotImplementedError(f"{type_}")
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(without_views(child.type)) for child in type_])
    if pa.types.is_map(type_):
        key, item = (field.with_type(without_views(field.type)) for field in (type_.key_field, type_.item_field))
        return type_ if (key.type, item.type) == (type_.key_type, type_.item_type) else pa.map_(key, item)
    for is_it, make in LISTS:
        if is_it(type_):
            return make(type_.value_field.with_type(without_views(type_.value_type)))
    return type_


def unwritable(field: pa.Field, path: str) -> ConfigError:
    """Of a column whose values the output cannot have."""
    return ConfigError(
        "input.path",
        f"column {field.name!r} in {path} has type {field.type}, which a run cannot write; drop it, or give it "
        "another type",
    )


def settle_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch without views, in the columns that have some."""
    for place, field in enumerate(batch.schema):
        if (plain := without_views(field.type)) != field.type:
            batch = batch.set_column(place, field.name, retyped(batch.column(place), plain))
    return batch


def to_text(column: pa.Array) -> tuple[pa.Array, Mask]:
    """A string or integer column as `string`, and which values are not valid UTF-8: those become null."""
    return without_invalid_utf8(column.cast(plain_type(column.type)).cast(pa.string()))


def to_python(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """Rows as Python has them, maps as dictionaries. ValueError for what Python cannot say."""
    try:
        columns = {
            name: [_as_python(value, column.type) for value in column.to_pylist()]
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
    except OverflowError as error:  # a year that is none of Python's
        raise ValueError(str(error)) from error
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _as_python(value: Any, type_: pa.DataType) -> object:
    if value is None or not pa.types.is_nested(type_):
        return value
    if pa.types.is_map(type_):
        return {key: _as_python(item, type_.item_type) for key, item in value}
    if pa.types.is_struct(type_):
        return {child.name: _as_python(value[child.name], child.type) for child in type_}
    if any(is_it(type_) for is_it, _ in LISTS):
        return [_as_python(item, type_.value_type) for item in value]
    return value


def without_invalid_utf8(column: pa.Array) -> tuple[pa.Array, Mask]:
    """The column with nulls for text that is not UTF-8, and where: bool [rows]. Nested text is not looked at.

    Parquet marks bytes as text without looking at them, and the first .as_py() would raise in mid-run.
    """
    bad = np.zeros(len(column), dtype=bool)
    if not is_text_type(column.type):
        return column, bad
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for index, value in enumerate(column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()):
            bad[index] = value is not None and not _decodes(value)
        column = column.take(pa.array(np.arange(len(column)), mask=bad))  # a null index gives a null
    return column, bad


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def parquet_ids(column: pa.Array, file: SourceFile, first: int) -> tuple[pa.Array, Mask, Mask]:
    """Every row's id, made where it has none; which are its own; which were there but are not valid UTF-8."""
    text, bad = to_text(column)
    # without Arrow's comparisons and NumPy's view of them: the first would import pandas, slower than the whole file
    if not text.null_count and pc.min(pc.binary_length(text)).as_py():
        return text, np.ones(len(text), bool), bad
    given = text.to_pylist()
    ids = [id or made_id(file, first + offset) for offset, id in enumerate(given)]
    return pa.array(ids, pa.string()), np.fromiter(map(bool, given), bool, len(given)), bad


def encoded_columns(file: pq.ParquetFile) -> list[int]:
    """Columns of text or bytes, nested ones too, of which some part is written as a dictionary; as Parquet counts."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    leaves = [leaf for field in file.schema_arrow for leaf in _leaves(field.type)]
    if len(leaves) != file.metadata.num_columns:  # a type that we do not know
        return []
    found = [place for place, leaf in enumerate(leaves) if _has_length(leaf)]
    return [place for place in found if any(group.column(place).has_dictionary_page for group in groups)]


def _leaves(type_: pa.DataType) -> Iterator[pa.DataType]:
    """Types of the columns that Parquet has for one of this type, without dictionaries; null: of no use here."""
    if pa.types.is_dictionary(type_):
        yield from _leaves(type_.value_type)
    elif pa.types.is_struct(type_):
        yield from (leaf for child in type_ for leaf in _leaves(child.type))
    elif pa.types.is_map(type_):
        yield from (leaf for part in (type_.key_type, type_.item_type) for leaf in _leaves(part))
    elif any(is_it(type_) for is_it, _ in LISTS):
        yield from _leaves(type_.value_type)
    elif pa.types.is_nested(type_):
        yield from (pa.null() for _ in _leaves(type_.value_type))
    else:
        yield type_


def row_bytes(metadata: pq.FileMetaData) -> int:
    """About what a row takes in memory, in the row group where it takes most: also where many values in its lists are
    few bytes in the file. Dictionaries are left out."""
    schema = metadata.schema
    repeated = [place for place in range(metadata.num_columns) if schema.column(place).max_repetition_level]
    most = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        values = sum(group.column(place).num_values for place in repeated)
        most = max(most, max(group.total_byte_size, values * VALUE_BYTES) // max(group.num_rows, 1))
    return most


def block_cuts(sizes: Rows, max_bytes: int, max_rows: int) -> list[int]:
    """Where to cut rows of these sizes so that no part has more than `max_rows`, or more than `max_bytes` in more than
    one row."""
    if sizes.sum() <= max_bytes:
        return [*range(0, len(sizes), max_rows), len(sizes)]
    cuts, total = [0], 0
    for row, size in enumerate(sizes.tolist()):
        if row > cuts[-1] and (total + size > max_bytes or row - cuts[-1] == max_rows):
            cuts.append(row)
            total = 0
        total += size
    return [*cuts, len(sizes)]


def row_sizes(batch: pa.RecordBatch) -> Rows:
    """int64 [rows]: about what each takes without dictionaries."""
    return sum((decoded_bytes(column) for column in batch.columns), np.zeros(batch.num_rows, dtype=np.int64))


def own_values(column: pa.Array) -> pa.Array:
    """A slice of nested values, copied: it still has the values of its neighbours, which a cast would decode too."""
    return pa.concat_arrays([column[:0], column]) if pa.types.is_nested(column.type) else column


def without_bombs(batch: pa.RecordBatch, max_bytes: int) -> tuple[pa.RecordBatch, Mask]:
    """Rows whose lists and structs would take more than `max_bytes` have null in these, and which they are."""
    nested = {name: column for name, column in zip(batch.schema.names, batch.columns, strict=True)
              if pa.types.is_nested(column.type)}  # fmt: skip
    if not nested:
        return batch, np.zeros(batch.num_rows, dtype=bool)
    sizes = sum((decoded_bytes(column) for column in nested.values()), np.zeros(batch.num_rows, dtype=np.int64))
    bad = sizes > max_bytes
    if bad.any():
        rows = pa.array(np.arange(batch.num_rows), mask=bad)  # a null index gives a null
        for name, column in nested.items():
            batch = batch.set_column(batch.schema.get_field_index(name), name, column.take(rows))
    return batch, bad


def decoded_bytes(column: pa.Array) -> Rows:
    """int64 [rows]: about what each value takes without dictionaries."""
    type_ = column.type
    if pa.types.is_dictionary(type_) and _has_length(type_.value_type):
        lengths = pc.binary_length(column.dictionary).cast(pa.int64()).take(column.indices)
        found: Rows = (pc.fill_null(lengths, 0) if lengths.null_count else lengths).to_numpy(zero_copy_only=False)
        return found
    if pa.types.is_struct(type_):
        return sum((decoded_bytes(child) for child in column.flatten()), np.zeros(len(column), dtype=np.int64))
    if pa.types.is_map(type_) or any(is_it(type_) for is_it, _ in LISTS):
        values = [column.keys, column.items] if pa.types.is_map(type_) else [column.values]
        sizes = sum((decoded_bytes(part) for part in values), np.zeros(len(values[0]), dtype=np.int64))
        ends = np.concatenate([[0], np.cumsum(sizes)])[column.offsets.to_numpy()]
        return np.asarray(np.diff(ends))
    return np.full(len(column), column.nbytes // max(len(column), 1), dtype=np.int64)


def _has_length(type_: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(type_) for check in checks)
