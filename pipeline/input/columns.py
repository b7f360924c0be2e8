"""Columns of the input: which are needed, reserved or carried through; plain types for them; their text and ids.

Text inside lists and structs is not checked for valid UTF-8. Which type several files' columns share is decided in
`arrow_types`.
"""

import uuid
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrow_cast import retyped
from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.arrow_types import whole_number
from pipeline.input.expansion import Expansion
from pipeline.input.files import SourceFile
from pipeline.input.ids import Mask, made_id
from pipeline.input.prompt_templates import reads_column
from pipeline.schema import PROMPT, RESERVED_COLUMNS, SOURCE_SCHEMA

UUID = pa.binary(16)


def own_columns(config: InputConfig) -> frozenset[str]:
    """Columns that the output has under another name, or that a rendered prompt replaces."""
    text = {config.text_column} if config.text_column is not None else set()
    return frozenset({config.id_column, *text, *([PROMPT] if reads_column(config, PROMPT) else [])})


def check_source(names: Collection[str], path: str, config: InputConfig) -> None:
    """ConfigError where a file with these columns lacks the one that prompts are read from."""
    key = "prompt_column" if config.messages_column is None else "messages_column"
    column = config.text_column or config.messages_column
    if column is not None and column not in names:
        raise ConfigError(f"input.{key}", f"{path} has {unknown_columns(column, names)}")


def check_chosen_id(names: Collection[str], path: str, config: InputConfig) -> None:
    """ConfigError where the id column is missing although the user chose it; the default one may be missing."""
    is_chosen = config.id_column != InputConfig.model_fields["id_column"].default
    if is_chosen and config.id_column not in names:
        raise ConfigError("input.id_column", f"{path} has {unknown_columns(config.id_column, names)}")


def refuse_reserved(names: Sequence[str], file: SourceFile, expansion: Expansion) -> None:
    """ConfigError for an input column with a name that the output uses."""
    reserved = RESERVED_COLUMNS | (set(SOURCE_SCHEMA.names) if expansion.is_on else set())
    for name in names:
        if name in reserved:
            raise ConfigError(
                "input.path",
                f"{file.path} has a column {name!r}, a name that the output uses; "
                "rename or drop it, or make it input.prompt_column or input.id_column",
            )


def unknown_columns(wanted: str, columns: Collection[str]) -> str:
    """The end of a message about a column that is missing."""
    names = sorted(columns)
    shown = [name if name.strip() == name else repr(name) for name in names[:20]] + ["..."] * (len(names) > 20)
    listed = f"no column {wanted!r}; there are: {', '.join(shown) or 'none'}"
    other = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)
    return listed if other is None else f"{listed} (fields are separated by commas, not by {other!r})"


def is_list_type(type_: pa.DataType) -> bool:
    """Whether it is a list type, with offsets or of a fixed size."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def list_of(type_: pa.DataType, value_type: pa.DataType) -> pa.DataType:
    """The list type `type_` with another type of values."""
    value = type_.value_field.with_type(value_type)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(value, type_.list_size)
    return pa.large_list(value) if pa.types.is_large_list(type_) else pa.list_(value)


def is_text_type(type_: pa.DataType) -> bool:
    """Whether it is string, large_string, string_view, or a dictionary of one of them."""
    type_ = type_.value_type if pa.types.is_dictionary(type_) else type_
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(type_) for check in checks)


def is_prompt_type(type_: pa.DataType) -> bool:
    """Whether it is text, or bytes, which writers without a type for text store."""
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    return is_text_type(type_) or any(check(plain) for check in checks)


def is_id_type(type_: pa.DataType) -> bool:
    """Whether it is text, bytes, or a type of whole numbers or UUIDs. A column of floats may hold whole numbers."""
    type_ = type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    is_number = pa.types.is_integer(plain) or pa.types.is_floating(plain)
    is_whole = pa.types.is_decimal(plain) and plain.scale == 0
    return is_prompt_type(type_) or is_number or is_whole or plain == UUID


def is_messages_type(type_: pa.DataType) -> bool:
    """Whether it may hold conversations: lists of structs or maps, or text with their JSON."""
    if not (pa.types.is_list(type_) or pa.types.is_large_list(type_)):
        return is_text_type(type_)
    value = type_.value_type
    return bool(pa.types.is_struct(value) or pa.types.is_map(value) or pa.types.is_null(value))


def plain_type(type_: pa.DataType) -> pa.DataType:
    """`type_` without dictionaries, which differ from file to file."""
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(plain_type(child.type)) for child in type_])
    if pa.types.is_map(type_):
        key, item = (field.with_type(plain_type(field.type)) for field in (type_.key_field, type_.item_field))
        return type_ if (key.type, item.type) == (type_.key_type, type_.item_type) else pa.map_(key, item)
    return list_of(type_, plain_type(type_.value_type)) if is_list_type(type_) else type_


def cast_plain(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """The column without dictionaries, cast to `type_`, which holds all its values."""
    plain = plain_type(column.type)
    for wanted in (plain, type_):
        if column.type != wanted:
            column = retyped(column, wanted)
    return column


def without_views(type_: pa.DataType) -> pa.DataType:
    """`type_` without string and binary views, which few of Arrow's functions take.

    ArrowNotImplementedError for list views, whose casts make invalid lists (pyarrow 26), and for dictionaries of views.
    """
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_) or _has_views(type_):
        raise pa.ArrowNotImplementedError(f"{type_}")
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(without_views(child.type)) for child in type_])
    if pa.types.is_map(type_):
        key, item = (field.with_type(without_views(field.type)) for field in (type_.key_field, type_.item_field))
        return type_ if (key.type, item.type) == (type_.key_type, type_.item_type) else pa.map_(key, item)
    return list_of(type_, without_views(type_.value_type)) if is_list_type(type_) else type_


def _has_views(type_: pa.DataType) -> bool:
    """Whether it is a dictionary whose values are views."""
    return bool(pa.types.is_dictionary(type_) and without_views(type_.value_type) != type_.value_type)


def unwritable(field: pa.Field, path: str) -> ConfigError:
    """The error for a column that the output cannot have."""
    return ConfigError(
        "input.path",
        f"column {field.name!r} in {path} has type {field.type}, which a run cannot write; drop it, or give it "
        "another type",
    )


def cast_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with plain columns in place of views."""
    for at, field in enumerate(batch.schema):
        if (plain := without_views(field.type)) != field.type:
            batch = batch.set_column(at, field.name, retyped(batch.column(at), plain))
    return batch


def to_text(column: pa.Array) -> tuple[pa.Array, Mask]:
    """A column of prompts or ids as `string`, with nulls for invalid UTF-8 and for fractions, and where these are: bool
    [rows]."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    column = column.cast(plain_type(column.type))
    if pa.types.is_floating(column.type):
        return _whole_numbers(column)
    if column.type == UUID:
        column = pa.array([value and str(uuid.UUID(bytes=value)) for value in column.to_pylist()], pa.string())
    elif pa.types.is_binary(column.type):
        column = column.view(pa.string())  # a cast would raise for invalid UTF-8
    elif pa.types.is_large_binary(column.type):
        column = column.view(pa.large_string())
    return without_invalid_utf8(column.cast(pa.string()))


def _whole_numbers(column: pa.Array) -> tuple[pa.Array, Mask]:
    """Integers that other programs wrote as floats; NaN is how pandas has a missing one."""
    values = [None if value is None or value != value else value for value in column.to_pylist()]
    texts = [None if value is None else whole_number(value) for value in values]
    bad = [value is not None and text is None for value, text in zip(values, texts, strict=True)]
    return pa.array(texts, pa.string()), np.array(bad, dtype=bool)


def bad_text(type_: pa.DataType) -> str:
    """What is wrong with a value of that type of which `to_text` makes a null."""
    plain = type_.value_type if pa.types.is_dictionary(type_) else type_
    return "is not a whole number" if pa.types.is_floating(plain) else "is not valid UTF-8"


def to_python(batch: pa.RecordBatch) -> list[dict[str, object]]:
    """The rows as Python dictionaries, maps as dictionaries too. ValueError for values that Python does not have."""
    try:
        columns = {
            name: [_as_python(value, column.type) for value in column.to_pylist()]
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
    except OverflowError as error:  # a year outside of Python's range
        raise ValueError(str(error)) from error
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def python_values(batch: pa.RecordBatch) -> tuple[list[dict[str, object]], dict[int, str]]:
    """The rows as `to_python` gives them, and why the ones that cannot be read, which are empty, cannot."""
    try:
        return to_python(batch), {}
    except ValueError:  # invalid UTF-8, or a time that Python does not have
        found: list[dict[str, object]] = []
    bad: dict[int, str] = {}
    for row in range(batch.num_rows):
        try:
            found += to_python(batch[row : row + 1])
        except ValueError as error:
            found.append({})
            bad[row] = str(error)
    return found, bad


def _as_python(value: Any, type_: pa.DataType) -> object:
    if value is None or not pa.types.is_nested(type_):
        return value
    if pa.types.is_map(type_):
        return {key: _as_python(item, type_.item_type) for key, item in value}
    if pa.types.is_struct(type_):
        return {child.name: _as_python(value[child.name], child.type) for child in type_}
    if is_list_type(type_):
        return [_as_python(item, type_.value_type) for item in value]
    return value


def without_invalid_utf8(column: pa.Array) -> tuple[pa.Array, Mask]:
    """The column with nulls for text that is not valid UTF-8, and where: bool [rows]. Nested text is not checked.

    Parquet marks bytes as text without checking them, and the first .as_py() would raise in mid-run.
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
    """The ids of all rows, made where missing; which are the rows' own; which are not valid UTF-8: bool [rows] each."""
    text, bad = to_text(column)
    # no comparison by Arrow: it would import pandas, which is slower than the whole file
    if not text.null_count and pc.min(pc.binary_length(text)).as_py():
        return text, np.ones(len(text), bool), bad
    given = text.to_pylist()
    ids = [id or made_id(file.name, first + offset) for offset, id in enumerate(given)]
    return pa.array(ids, pa.string()), np.fromiter(map(bool, given), bool, len(given)), bad
