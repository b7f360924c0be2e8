"""Columns of Parquet as the rows need them: plain types, valid text, ids.

Left out: opening files (`scan`, `read`), and text inside lists and structs, which is not looked at.
"""

import numpy as np
import pyarrow as pa

from pipeline.input.arrays import Mask
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
