"""Columns in another type, with parts of type null at any depth: the values stay, and what comes out is valid."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.arrow_cast import retyped, with_schema
from tests.support.examples import examples

TEXT = pa.string()
LEAVES = [
    (pa.null(), pa.null()),
    (TEXT, TEXT),
    (pa.dictionary(pa.int32(), TEXT), TEXT),
    (pa.timestamp("s"), pa.timestamp("ms")),
]


def nested(parts: st.SearchStrategy[tuple[pa.DataType, pa.DataType]]) -> st.SearchStrategy[Any]:
    """A type, and one that it is to become: every kind of list stays, or becomes large; and structs and maps."""

    def structs(made: list[tuple[pa.DataType, pa.DataType]]) -> tuple[pa.DataType, pa.DataType]:
        before, after = ([(f"f{place}", pair[side]) for place, pair in enumerate(made)] for side in (0, 1))
        return pa.struct(before), pa.struct(after)

    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(structs),
        parts.map(lambda pair: (pa.list_(pair[0]), pa.list_(pair[1]))),
        parts.map(lambda pair: (pa.large_list(pair[0]), pa.large_list(pair[1]))),
        parts.map(lambda pair: (pa.list_(pair[0], 2), pa.list_(pair[1], 2))),
        parts.map(lambda pair: (pa.list_(pair[0], 2), pa.large_list(pair[1]))),
        parts.map(lambda pair: (pa.map_(TEXT, pair[0]), pa.map_(TEXT, pair[1]))),
        parts.map(lambda pair: (pa.map_(TEXT, pair[0]), pairs_of(pair[1]))),
    )


def pairs_of(type_: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct([("key", TEXT), ("value", type_)]))


def values(type_: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_null(type_):
        return st.none()
    if pa.types.is_struct(type_):
        made = st.fixed_dictionaries({child.name: values(child.type) for child in type_})
    elif pa.types.is_map(type_):
        made = st.lists(st.tuples(st.sampled_from("kl"), values(type_.item_type)), max_size=3)
    elif pa.types.is_fixed_size_list(type_):
        made = st.lists(values(type_.value_type), min_size=2, max_size=2)
    elif pa.types.is_nested(type_):
        made = st.lists(values(type_.value_type), max_size=4)
    else:
        made = st.integers(0, 9) if pa.types.is_timestamp(type_) else st.sampled_from("abc")
    return st.none() | made


def without_pairs(value: Any) -> Any:
    """Entries of maps as the structs that they may become."""
    if isinstance(value, tuple):
        return {"key": value[0], "value": without_pairs(value[1])}
    if isinstance(value, dict):
        return {name: without_pairs(part) for name, part in value.items()}
    return [without_pairs(part) for part in value] if isinstance(value, list) else value


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), types=st.recursive(st.sampled_from(LEAVES), nested, max_leaves=6))
def test_values_stay_what_they_were(data: st.DataObject, types: tuple[pa.DataType, pa.DataType]) -> None:
    before, after = types
    try:
        column = pa.array(data.draw(st.lists(values(before), min_size=4, max_size=6)), before)
        column.validate(full=True)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # dictionaries that pyarrow cannot make of Python values
        return
    for wanted in (before, after):
        for part in (column, column[1:3], column[3:], column[:0], column.take(pa.array([2, None, 0, 0]))):
            made = retyped(part, wanted)
            made.validate(full=True)
            assert str(made.type) == str(wanted)
            assert without_pairs(made.to_pylist()) == without_pairs(part.to_pylist())


def test_names_of_list_items_are_those_of_the_type_and_a_missing_child_is_null() -> None:
    column = pa.array([[{"a": None}] * 3] * 2, pa.list_(pa.field("element", pa.struct([("a", pa.null())]))))
    wanted = pa.list_(pa.field("item", pa.struct([("b", pa.int8()), ("a", pa.null())])))
    made = retyped(column, wanted)
    made.validate(full=True)
    assert str(made.type) == str(wanted)
    assert made.to_pylist() == [[{"b": None, "a": None}] * 3] * 2


def test_a_table_has_the_types_of_the_schema_and_its_names_must_be_those() -> None:
    table = pa.table({"n": [1, 2], "calls": [[None] * 3, [None] * 2]})
    table = pa.concat_tables([table, table])
    schema = pa.schema([("n", pa.int8()), ("calls", pa.list_(pa.null()))])
    made = with_schema(table, schema)
    made.validate(full=True)
    assert made.schema == schema
    assert made.to_pylist() == table.to_pylist()
    with pytest.raises(ValueError, match="schema's field names are not matching"):
        with_schema(table, pa.schema([("m", pa.int8()), ("calls", pa.list_(pa.null()))]))
    with pytest.raises(pa.ArrowInvalid):
        with_schema(pa.table({"n": [300], "calls": [[None]]}), schema)
