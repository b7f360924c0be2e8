"""Casts of Arrow columns that also work for types with parts of type null, which Arrow's own casts break (pyarrow 26).

A cast from null to null inside lists and structs gives as many values as the column has rows. So columns with such a
part are taken apart, cast part by part, and put together again.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def retyped(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """The column as `type_`, with its names of children; ArrowInvalid where a value does not fit."""
    if not (_has_null(type_) and _has_null(column.type)):
        return column.cast(type_)
    if not len(column):
        return pa.array([], type_)
    if pa.types.is_null(type_) and pa.types.is_null(column.type):
        return column
    if pa.types.is_struct(type_) and pa.types.is_struct(column.type):
        return _struct(column, type_)
    if _is_fixed(type_) and _is_fixed(column.type) and type_.list_size == column.type.list_size:
        size = type_.list_size
        values = retyped(column.values[column.offset * size :][: len(column) * size], type_.value_type)
        return pa.Array.from_buffers(type_, len(column), [_validity(column)], children=[values])
    if _is_list(type_) and (_is_list(column.type) or _is_fixed(column.type)):
        return _list(column, type_)
    return column.cast(type_)


def with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's columns, which have these names, with the types of `schema`."""
    if not any(map(_has_null, schema.types)) or table.column_names != schema.names:
        return table.cast(schema)
    columns = [
        pa.chunked_array([retyped(chunk, field.type) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _has_null(type_: pa.DataType) -> bool:
    """Whether `type_` is null, or has children that are."""
    return pa.types.is_null(type_) or any(_has_null(type_.field(index).type) for index in range(type_.num_fields))


def _is_fixed(type_: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(type_))


def _is_list(type_: pa.DataType) -> bool:
    """Whether its arrays are offsets and one child: in a map that is structs of keys and items."""
    return any(is_it(type_) for is_it in (pa.types.is_list, pa.types.is_large_list, pa.types.is_map))


def _struct(column: pa.StructArray, type_: pa.StructType) -> pa.StructArray:
    """Children are found by name, as Arrow's cast finds them; one that is not there is null."""
    children = []
    for field in type_:
        index = column.type.get_field_index(field.name)
        child = pa.nulls(len(column), field.type) if index < 0 else retyped(column.field(index), field.type)
        children.append(child)
    return pa.StructArray.from_arrays(
        children, fields=list(type_), mask=column.is_null() if column.null_count else None
    )


def _list(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Lists of any kind, without values that belong to no row of a slice."""
    if _is_fixed(column.type):
        ends = (np.arange(len(column) + 1) + column.offset) * column.type.list_size
    else:
        ends = np.asarray(column.offsets).astype(np.int64)
    values = _entries(column, type_) if pa.types.is_map(column.type) else column.values
    values = retyped(values[ends[0] : ends[-1]], type_.field(0).type)
    ends = (ends - ends[0]).astype(np.int64 if pa.types.is_large_list(type_) else np.int32)
    return pa.Array.from_buffers(type_, len(column), [_validity(column), pa.py_buffer(ends)], children=[values])


def _entries(column: pa.MapArray, type_: pa.DataType) -> pa.StructArray:
    """The keys and items of a map, with the names that `type_` has for them."""
    names = [field.name for field in type_.field(0).type]
    return pa.StructArray.from_arrays([column.keys, column.items], names=names)


def _validity(column: pa.Array) -> pa.Buffer | None:
    return pc.is_valid(column).buffers()[1] if column.null_count else None
