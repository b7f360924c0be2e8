"""Arrow types of columns: the type that JSON values fit, and the type that the columns of two files both fit.

Nothing is rounded, and nothing can overflow in mid-run: where no type holds every value the answer is None, and `scan`
and `input_plan` decide what becomes of the column.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.formatting import Json

MAX_TYPE_DEPTH: Final = 16  # Arrow *reads* up to 100 levels of Parquet, a list being three: deeper is JSON text
MAX_TYPE_LEAVES: Final = 1000  # an object used as a map has new keys in every row: JSON text, not 10^6 columns
EXACT_DOUBLE: Final = 2**53  # integers up to here are exact in float64


def whole_number(value: float) -> str | None:
    """The digits of a float that is an integer; None for others, and for those that a float cannot tell apart."""
    return str(int(value)) if value.is_integer() and abs(value) <= EXACT_DOUBLE else None


def infer_json_type(values: Sequence[Json]) -> pa.DataType | None:
    """The Arrow type that holds every value exactly, or None: then the column has to be JSON text.

    An int32 leaf stands for integers that a double holds exactly, an int64 leaf for others, so that a chunk of integers
    and one of doubles merge only where nothing is lost. `final_json_type` drops the difference.
    """
    try:
        return _exact_type(pa.array(values))
    except (pa.ArrowException, OverflowError):
        return None


def _exact_type(array: pa.Array) -> pa.DataType:
    if pa.types.is_int64(array.type):
        ends = pc.min_max(array).as_py()
        small = ends["min"] is None or (ends["min"] >= -EXACT_DOUBLE and ends["max"] <= EXACT_DOUBLE)
        return pa.int32() if small else pa.int64()
    if pa.types.is_list(array.type):
        return pa.list_(_exact_type(array.flatten()))
    if pa.types.is_struct(array.type):
        children = zip(array.type, array.flatten(), strict=True)
        return pa.struct([pa.field(child.name, _exact_type(values)) for child, values in children])
    return array.type


Merge = Callable[[pa.DataType, pa.DataType], pa.DataType | None]


def merge_types(a: pa.DataType, b: pa.DataType, leaf: Merge) -> pa.DataType | None:
    """A type that holds all values of both, `leaf` deciding for types that are not nested, or None."""
    if a.equals(b) or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        value = merge_types(a.value_type, b.value_type, leaf)
        return None if value is None else pa.list_(value)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        merged = {child.name: child.type for child in a}
        for child in b:
            both = merge_types(merged.get(child.name, pa.null()), child.type, leaf)
            if both is None:
                return None
            merged[child.name] = both
        return pa.struct(list(merged.items())) if len(merged) <= MAX_TYPE_LEAVES else None
    return leaf(a, b)


def merge_json_leaf(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    kinds = {str(a), str(b)}
    if kinds == {"int32", "int64"}:
        return pa.int64()
    return pa.float64() if kinds == {"int32", "double"} else None


def merge_parquet_leaf(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Wider numbers, decimals, strings and binaries; nothing that could overflow or round in mid-run."""
    numbers = all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in (a, b))
    strings = all(pa.types.is_string(t) or pa.types.is_large_string(t) for t in (a, b))
    binaries = all(pa.types.is_binary(t) or pa.types.is_large_binary(t) for t in (a, b))
    decimals = all(pa.types.is_decimal(t) for t in (a, b))
    if not (numbers or strings or binaries or decimals):
        return None
    try:
        both = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
    except pa.ArrowException:
        return None
    wide = both.field("x").type
    if numbers and not all(_can_hold(wide, t) for t in (a, b)):
        return None
    return wide


def _can_hold(wide: pa.DataType, narrow: pa.DataType) -> bool:
    if pa.types.is_floating(wide) and pa.types.is_integer(narrow) and narrow.bit_width == 64:
        return False  # numpy calls int64 -> float64 safe; above 2^53 it rounds
    return bool(np.can_cast(narrow.to_pandas_dtype(), wide.to_pandas_dtype(), "safe"))


def final_json_type(type_: pa.DataType) -> pa.DataType | None:
    """The type a column is written with, never null or an empty struct; None: it has to be JSON text."""
    return None if _leaves(type_, 1) > MAX_TYPE_LEAVES else _finished(type_)


def _finished(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_int32(type_):
        return pa.int64()
    if pa.types.is_list(type_):
        return pa.list_(_finished(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(child.name, _finished(child.type)) for child in type_])
    return type_


def _leaves(type_: pa.DataType, depth: int) -> int:
    """The number of leaves, or more than the limit for a type that Parquet cannot hold."""
    if depth > MAX_TYPE_DEPTH or (pa.types.is_struct(type_) and type_.num_fields == 0):
        return MAX_TYPE_LEAVES + 1
    if pa.types.is_list(type_):
        return _leaves(type_.value_type, depth + 1)
    if pa.types.is_struct(type_):
        return sum(_leaves(child.type, depth + 1) for child in type_)
    return 1
