"""Columns of Parquet as the rows need them: plain types, valid text, ids.

Left out: opening files (`scan`, `read`), and text inside lists and structs, which is not looked at.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.input.arrays import Mask, Rows
from pipeline.input.files import SourceFile
from pipeline.input.ids import made_id


def is_text_type(type_: pa.DataType) -> bool:
    """string, large_string, string_view, or a dictionary of one of them."""
    type_ = type_.value_type if pa.types.is_dictionary(type_) else type_
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(type_) for check in checks)


def is_id_type(type_: pa.DataType) -> bool:
    return is_text_type(type_) or pa.types.is_integer(type_.value_type if pa.types.is_dictionary(type_) else type_)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """`type_` with the type of the values for dictionaries, which differ from file to file."""
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(plain_type(type_.value_type)))
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(plain_type(child.type)) for child in type_])
    return type_


def to_text(column: pa.Array) -> tuple[pa.Array, Mask]:
    """A string or integer column as `string`, and which values are not valid UTF-8: those become null."""
    return without_invalid_utf8(column.cast(plain_type(column.type)).cast(pa.string()))


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


def parquet_ids(column: pa.Array, file: SourceFile, first: int) -> tuple[list[str], Mask, Mask]:
    """Every row's id, made where it has none; which are its own; which were there but are not valid UTF-8."""
    text, bad = to_text(column)
    given = text.to_pylist()
    ids = [id or made_id(file, first + offset) for offset, id in enumerate(given)]
    return ids, np.fromiter(map(bool, given), bool, len(given)), bad


def text_columns(file: pq.ParquetFile) -> list[str]:
    """Columns of text or bytes, at the top level, of which some part is written as a dictionary."""
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    places = {file.metadata.schema.column(place).path: place for place in range(file.metadata.num_columns)}
    names = [field.name for field in file.schema_arrow if _has_length(field.type)]
    return [name for name in names if any(group.column(places[name]).has_dictionary_page for group in groups)]


def block_cuts(batch: pa.RecordBatch, max_bytes: int) -> list[int]:
    """Where to cut a batch so that no part, without its dictionaries, has more than `max_bytes`, or else one row."""
    sizes = decoded_bytes(batch)
    cuts, total = [0], 0
    for row, size in enumerate(sizes.tolist()):
        if total + size > max_bytes and row > cuts[-1]:
            cuts.append(row)
            total = 0
        total += size
    return [*cuts, batch.num_rows]


def decoded_bytes(batch: pa.RecordBatch) -> Rows:
    """int64 [rows]: about what each row takes without dictionaries."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type) and _has_length(column.type.value_type):
            lengths = pc.fill_null(pc.binary_length(column.dictionary).cast(pa.int64()), 0)
            sizes += pc.fill_null(lengths.take(column.indices), 0).to_numpy(zero_copy_only=False)
        else:
            sizes += column.nbytes // max(batch.num_rows, 1)
    return sizes


def _has_length(type_: pa.DataType) -> bool:
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(type_) for check in checks)
