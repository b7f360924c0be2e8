"""Parquet: columns come through unchanged, over files whose schemas differ; bad text fails its row alone."""

import decimal
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.input_helpers import BASE, column, read_rows, read_table, refuse, write, write_parquet


def test_parquet_columns_come_through_unchanged(tmp_path: Path) -> None:
    columns = {
        "id": pa.array([10, None, 12], pa.uint32()),
        "prompt": pa.array(["a", None, ""], pa.large_string()),
        "when": pa.array([datetime(2024, 1, 2, tzinfo=UTC), None, None], pa.timestamp("us", "Europe/Berlin")),
        "price": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(10, 2)),
        "nested": pa.array([{"a": [1, 2], "b": None}, None, {"a": [], "b": "x"}]),
        "f16": pa.array([1.5, None, 2.5], pa.float32()),
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
        "tags": pa.array([["p"], None, ["q"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        "big": pa.array(["l", None, "m"], pa.large_string()),
        "raw": pa.array([b"\xff", None, b""], pa.binary()),
        "view": pa.array(["v", None, "w"], pa.string_view()),
        "views": pa.array([["v"], None, []], pa.list_(pa.string_view())),
        "nothing": pa.nulls(3),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    }
    path = write_parquet(tmp_path / "a.parquet", columns)
    table = read_table(path)
    assert table["id"].to_pylist() == ["10", "a.parquet:1", "12"]
    assert table["error_code"].to_pylist() == ["", "prompt_missing", ""]
    assert table["error_message"][1].as_py() == "a.parquet row 2: column 'prompt' is null"
    stored = pq.read_table(path)
    assert table.column_names[6:] == list(columns)[2:]
    for name in list(columns)[2:]:
        assert table[name].to_pylist() == stored[name].to_pylist(), name
        if name not in ("kind", "tags", "view", "views"):
            assert table.schema.field(name).type == stored.schema.field(name).type, name
    assert table.schema.field("kind").type == table.schema.field("view").type == pa.string()
    assert table.schema.field("views").type == pa.list_(pa.string())
    assert table.schema.field("tags").type == pa.list_(pa.string())


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_parquet_text_types(tmp_path: Path, type_: pa.DataType) -> None:
    path = write_parquet(
        tmp_path / "a.parquet", {"id": pa.array(["i", ""], type_), "prompt": pa.array(["x", None], type_)}
    )
    rows = read_rows(path)
    assert column(rows, "id") == ["i", "a.parquet:1"]
    assert column(rows, "prompt") == ["x", None]


@pytest.mark.parametrize("type_", [pa.int8(), pa.uint64(), pa.int64()])
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_parquet_integer_ids(tmp_path: Path, type_: pa.DataType, is_dictionary: bool) -> None:
    ids = pa.array([0, None, 7], type_)
    columns = {"id": ids.dictionary_encode() if is_dictionary else ids, "prompt": ["x"] * 3}
    assert column(read_rows(write_parquet(tmp_path / "a.parquet", columns)), "id") == [
        "0",
        "a.parquet:1",
        "7",
    ]


def test_parquet_wrong_types(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": [1], "id": [0.5], "t": ["x"], "raw": [b"x"]})
    refuse(path, r"input\.prompt_column: 'prompt' in .*a\.parquet has type int64")
    refuse(
        write_parquet(tmp_path / "b.parquet", {"prompt": ["x"], "id": [True]}),
        r"input\.id_column: 'id' in .*type bool",
    )
    other = write_parquet(tmp_path / "c.parquet", {"question": ["x"], "n": [1]})
    refuse(other, r"input\.prompt_column: .*c\.parquet has no column 'prompt'; there are: n, question")


def test_parquet_views_of_lists_are_refused(tmp_path: Path) -> None:
    columns = {"prompt": ["x"], "odd": pa.array([["a"]], pa.list_view(pa.string()))}
    refuse(write_parquet(tmp_path / "a.parquet", columns), r"column 'odd' in .* has type list_view.*, which a run")


def test_parquet_that_is_broken(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["x"] * 1000})
    data = path.read_bytes()
    for broken in (data[:-10], data[: len(data) // 2], b"", b"not parquet at all"):
        write(path, broken)
        refuse(path, r"input\.path: .*a\.parquet: cannot be read")


def test_parquet_without_rows_has_no_say(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"prompt": pa.nulls(0), "n": pa.array([], pa.binary())})
    pq.write_table(pa.table({}), tmp_path / "b.parquet")
    write_parquet(tmp_path / "c.parquet", {"prompt": ["x"], "n": [1]})
    assert read_rows(tmp_path)[0]["n"] == 1


def test_parquet_schemas_that_differ(tmp_path: Path) -> None:
    one = {
        "prompt": ["x"],
        "w": pa.array([1], pa.int32()),
        "f": pa.array([1], pa.int32()),
        "s": pa.array([{"a": 1}]),
    }
    two = {
        "prompt": ["y"],
        "w": pa.array([2**40]),
        "f": [0.5],
        "s": pa.array([{"b": "z"}]),
        "new": ["n"],
        "null": pa.nulls(1),
    }
    write_parquet(tmp_path / "a.parquet", one)
    write_parquet(tmp_path / "b.parquet", two)
    table = read_table(tmp_path)
    types = dict(zip(table.column_names, table.schema.types, strict=True))
    assert (types["w"], types["f"], types["new"]) == (pa.int64(), pa.float64(), pa.string())
    assert table.drop_columns(BASE).to_pylist() == [
        {"w": 1, "f": 1.0, "s": {"a": 1, "b": None}, "new": None, "null": None},
        {"w": 2**40, "f": 0.5, "s": {"a": None, "b": "z"}, "new": "n", "null": None},
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (pa.string(), pa.int64()),
        (pa.int64(), pa.float64()),  # 2^53 + 1 would be rounded
        (pa.uint64(), pa.int64()),
        (pa.timestamp("s"), pa.timestamp("ns")),  # the year 9999 would overflow in mid-run
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (pa.bool_(), pa.int8()),
        (pa.string(), pa.binary()),
        (pa.list_(pa.int64()), pa.int64()),
    ],
)
def test_parquet_schemas_that_clash(tmp_path: Path, a: pa.DataType, b: pa.DataType) -> None:
    write_parquet(tmp_path / "a.parquet", {"prompt": ["x"], "c": pa.nulls(1, a)})
    write_parquet(tmp_path / "b.parquet", {"prompt": ["x"], "c": pa.nulls(1, b)})
    refuse(tmp_path, r"column 'c' is .* in .*a\.parquet and .* in .*b\.parquet")


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    def text(values: list[bytes | None]) -> pa.Array:
        raw = pa.array(values, pa.binary())
        return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())

    columns = {
        "id": text([b"a", b"\xff", b"c", b"d"]),
        "prompt": text([b"ok", b"ok", b"\xff", None]),
        "extra": text([b"\xff", None, b"e", b"f"]),
    }
    rows = read_rows(write_parquet(tmp_path / "a.parquet", columns))
    assert column(rows, "error_code") == ["bad_line", "bad_line", "bad_line", "prompt_missing"]
    assert column(rows, "id") == ["a", "a.parquet:1", "c", "d"]
    assert column(rows, "prompt") == ["ok", "ok", None, None]
    assert column(rows, "extra") == [None, None, "e", "f"]
    assert rows[0]["error_message"] == "a.parquet row 1: column 'extra' is not valid UTF-8"


def test_parquet_row_groups_blocks_and_made_ids(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": [str(n) for n in range(1000)]}), tmp_path / "a.parquet", row_group_size=130)
    rows = read_rows(tmp_path, rows_per_block=64)
    assert [(r["id"], r["prompt"]) for r in rows] == [(f"a.parquet:{n}", str(n)) for n in range(1000)]


def test_parquet_repeated_column_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["x"])] * 3, names=["prompt", "n", "n"])
    pq.write_table(table, tmp_path / "a.parquet")
    refuse(tmp_path, r"a\.parquet has more than one column 'n'")
