"""JSON Lines: rows, bad lines, ids, and the Arrow types of other columns."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.input.read import read_file
from pipeline.schema import RESERVED_COLUMNS
from tests.support.input_helpers import (
    column,
    make_config,
    make_plan,
    read_rows,
    read_table,
    refuse,
    write,
    write_jsonl,
    write_parquet,
)


def test_jsonl_bad_lines(tmp_path: Path) -> None:
    lines: list[tuple[bytes, str, str]] = [
        (b'{"prompt": "ok", "id": "a"}', "", ""),
        (b'{"prompt": ', "bad_line", r"not valid JSON: Expecting value at column \d+"),
        (b"[1]", "bad_line", "expected a JSON object, got a list"),
        (b"null", "bad_line", "expected a JSON object, got null"),
        (b'{"prompt": "\xff"}', "bad_line", "not valid UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "bad_line", "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "bad_line", "lone surrogate.*prompt"),
        (b'{"prompt": "x", "k": [{"y": "\\uDFFF"}]}', "bad_line", "lone surrogate.*'k'"),
        (b'{"prompt": "\\ud83d\\ude00"}', "", ""),
        (b'{"prompt": "\\\\ud800"}', "", ""),
        (b"{}", "prompt_missing", "column 'prompt' is missing"),
        (b'{"prompt": null}', "prompt_missing", "column 'prompt' is null"),
        (b'{"prompt": ["x"]}', "prompt_not_text", "must be a string, got a list"),
        (b'{"prompt": 7}', "prompt_not_text", "got a number"),
        (b'{"prompt": ""}', "", ""),
        (
            b'{"prompt": "x", "id": 1.5}',
            "bad_line",
            "id column 'id' must be a string or a whole number, got a number",
        ),
        (b'{"prompt": "x", "id": true}', "bad_line", "got true/false"),
        (b'{"prompt": "x", "id": {"a": 1}}', "bad_line", "got an object"),
        (b'{"prompt": "x", "n": ' + b"1" * 5000 + b"}", "bad_line", "not readable JSON"),
        (b'{"prompt": "x", "k": ' + b"[" * 101 + b"]" * 101 + b"}", "bad_line", "nested deeper than 100"),
        (b"[" * 100_000, "bad_line", "nested deeper than 100"),
        (b'{"prompt": "torn', "bad_line", "not valid JSON"),
    ]
    rows = read_rows(write(tmp_path / "a.jsonl", b"\n".join(line for line, _, _ in lines)))
    assert column(rows, "error_code") == [code for _, code, _ in lines]
    for number, (row, (_, code, match)) in enumerate(zip(rows, lines, strict=True)):
        if code:
            assert row["error_message"].startswith(f"a.jsonl line {number + 1}: ")
            assert re.search(match, row["error_message"]), row
        assert row["id"] == ("a" if number == 0 else f"a.jsonl:{number}")
    assert rows[8]["prompt"] == "\U0001f600"
    assert rows[9]["prompt"] == "\\ud800"
    assert rows[6]["prompt"] is None
    assert rows[7]["prompt"] == "x"  # what could be read is kept


def test_jsonl_lines_end_at_newline_only_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    text = '\ufeff{"prompt": "a\u2028b\u00a0c\x85"}\r\n\n  \t\r\n{"prompt": "d"}\n\n'
    rows = read_rows(write(tmp_path / "a.jsonl", text))
    assert column(rows, "prompt") == ["a\u2028b\u00a0c\x85", "d"]
    assert column(rows, "id") == [
        "a.jsonl:0",
        "a.jsonl:3",
    ]  # line numbers: a stray blank line shows in the id


def test_jsonl_ids(tmp_path: Path) -> None:
    ids = ["s", 7, -1, 2**70, "", None, "ü:1"]
    rows = read_rows(write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "id": id} for id in ids]))
    assert column(rows, "id") == ["s", "7", "-1", str(2**70), "a.jsonl:4", "a.jsonl:5", "ü:1"]
    assert column(rows, "error_code") == [""] * 7


def test_failed_row_keeps_its_id_and_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"id": "mine", "prompt": 3, "source": "web"}])
    row = read_rows(path)[1]
    assert (row["id"], row["source"], row["prompt"], row["error_code"]) == (
        "mine",
        "web",
        None,
        "prompt_not_text",
    )


def test_jsonl_prompt_column_that_no_row_has(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "x", "id": 1, "n": 2}])
    refuse(tmp_path, r"input\.prompt_column: the input has no column 'prompt'; there are: id, n, question")
    rows = read_rows(tmp_path, prompt_column="question")
    assert (rows[0]["prompt"], rows[0]["n"], "question" in rows[0]) == ("x", 2, False)
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": None}])
    assert column(read_rows(tmp_path), "error_code") == ["prompt_missing", "prompt_missing"]


def test_chosen_id_column_that_no_row_has(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "key": "k"}])
    refuse(path, r"input\.id_column: the input has no column 'kye'; there are: key, prompt", id_column="kye")
    assert column(read_rows(path), "id") == ["a.jsonl:0"]
    assert column(read_rows(path, id_column="key"), "id") == ["k"]
    refuse(path, r"input\.id_column: is the prompt column too", id_column="prompt")


def test_json_array_is_named_as_such(tmp_path: Path) -> None:
    refuse(write(tmp_path / "a.json", '[\n  "x",\n  "y"\n]\n'), r"no line is a JSON object.*a\.json line 1.*jq")


@pytest.mark.parametrize("name", sorted(RESERVED_COLUMNS - {"id", "prompt"}))
def test_reserved_columns_are_refused(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}, {"prompt": "x", name: "y"}])
    refuse(tmp_path / "a.jsonl", rf"a\.jsonl has a column '{name}'")
    write_parquet(tmp_path / "a.parquet", {"prompt": ["x"], name: ["y"]})
    refuse(tmp_path / "a.parquet", rf"a\.parquet has a column '{name}'")
    refuse(write(tmp_path / "a.csv", f"prompt,{name}\nx,y\n"), rf"a\.csv has a column '{name}'")


def test_prompt_beside_another_prompt_column_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "question": "y", "id": "1", "uid": "2"}])
    refuse(path, r"has a column 'prompt'", prompt_column="question")
    refuse(path, r"has a column 'id'", id_column="uid")


def test_reserved_name_is_fine_as_the_prompt_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"generated_text": "x"}])
    assert column(read_rows(path, prompt_column="generated_text"), "prompt") == ["x"]


def extras_of(tmp_path: Path, values: list[Any], fill: int = 0) -> tuple[pa.DataType, list[Any]]:
    """Type and values of one JSONL column, `fill` rows without it after each value (to spread it over chunks)."""
    rows: list[dict[str, Any]] = []
    for value in values:
        rows += [{"prompt": "x", "c": value}, *({"prompt": "x"} for _ in range(fill))]
    table = read_table(write_jsonl(tmp_path / "extras.jsonl", rows))
    assert table["error_code"].unique().to_pylist() == [""]
    sink = io.BytesIO()
    pq.write_table(table, sink)  # what is read must be writable
    assert pq.read_table(io.BytesIO(sink.getvalue())).equals(table)
    kept = table["c"].to_pylist()[:: fill + 1]
    return table.schema.field("c").type, kept


NESTED: Any = "leaf"
for _ in range(40):
    NESTED = [NESTED]


@pytest.mark.parametrize("fill", [0, 5000])  # in one chunk of the scan, and each value in a chunk of its own
@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([1, None, -5], pa.int64()),
        ([2**63 - 1, -(2**63)], pa.int64()),
        ([1, 0.5], pa.float64()),
        ([2**53, 0.5], pa.float64()),
        (["a", "\x00"], pa.string()),
        ([True, False], pa.bool_()),
        ([None, None], pa.string()),
        ([["a"], [], None], pa.list_(pa.string())),
        ([[1], [0.5]], pa.list_(pa.float64())),
        ([[]], pa.list_(pa.string())),
        ([{"a": 1, "b": None}, {"a": None, "b": "x"}], pa.struct([("a", pa.int64()), ("b", pa.string())])),
        (
            [{"a": [{"b": 1}]}, {"a": [{"b": 0.5}]}],
            pa.struct([("a", pa.list_(pa.struct([("b", pa.float64())])))]),
        ),
    ],
)
def test_jsonl_column_types(tmp_path: Path, values: list[Any], type_: pa.DataType, fill: int) -> None:
    got, kept = extras_of(tmp_path, values, fill)
    assert got == type_
    assert kept == values


@pytest.mark.parametrize("fill", [0, 5000])
@pytest.mark.parametrize(
    "values",
    [
        [1, "a", None],
        [True, 1],
        [2**63],
        [10**30, 1],
        [2**53 + 1, 0.5],
        [[2**53 + 1], [0.5]],
        [{"a": 2**60}, {"a": 0.5}],
        [{}],
        [{"a": {}}],
        [{"a": 1}, {}, {"a": "s"}],
        [[1], {"a": 1}],
        [NESTED],
        [{f"key{n}": n for n in range(2000)}],
    ],
)
def test_jsonl_columns_that_fit_no_type_are_json_text(tmp_path: Path, values: list[Any], fill: int) -> None:
    got, kept = extras_of(tmp_path, values, fill)
    assert got == pa.string()
    assert [None if text is None else json.loads(text) for text in kept] == values


def test_jsonl_types_unify_over_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x", "n": 1, "m": 1, "only_a": [1]}])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "m": "s", "n": 0.5, "big": 2**60}])
    write_jsonl(tmp_path / "c.jsonl", [{"prompt": "x", "big": 0.5, "m": None}])
    table = read_table(tmp_path)
    assert dict(zip(table.column_names[6:], map(str, table.schema.types[6:]), strict=True)) == {
        "n": "double",
        "m": "string",
        "only_a": "list<item: int64>",
        "big": "string",
    }
    assert table["m"].to_pylist() == ["1", '"s"', None]
    assert table["big"].to_pylist() == [None, str(2**60), "0.5"]


def test_a_huge_prompt_ends_its_block_early(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * (20 << 20)} for _ in range(4)])
    config = make_config(path)
    blocks = list(read_file(make_plan(config), 0, config))
    assert [len(block) for block in blocks] == [2, 2]
