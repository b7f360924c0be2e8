"""The door for prompts, against real files: every row comes out once, with a stable id, good or failed.

Only the last section starts Ray; everything else runs on `pipeline.input` alone.
"""

import bz2
import csv
import decimal
import gzip
import io
import json
import os
import pickle
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import formats
from pipeline import input as door
from pipeline.config import ConfigError, InputConfig, SamplingConfig
from pipeline.input import InputPlan, digest_id, list_input, plan_input, read_file, row_digests, scan_file
from pipeline.schema import ERROR_CODES, RESERVED_COLUMNS

BASE = ["id", "prompt", "_prompt_tokens", "_sampling", "error_code", "error_message"]


def make_config(path: Any, **keys: Any) -> InputConfig:
    paths = path if isinstance(path, tuple) else (path,)
    return InputConfig(path=tuple(str(p) for p in paths), **keys)


def make_plan(config: InputConfig) -> InputPlan:
    listing = list_input(config)
    # Through pickle, because scans run on other machines.
    scans = [pickle.loads(pickle.dumps(scan_file(listing, i, config))) for i in range(len(listing.files))]
    plan: InputPlan = pickle.loads(pickle.dumps(plan_input(listing, scans, config)))
    return plan


def read_table(path: Any, rows_per_block: int = 1024, **keys: Any) -> pa.Table:
    """All rows, after checking what holds for every input."""
    config = make_config(path, **keys)
    plan = make_plan(config)
    blocks: list[pa.Table] = []
    for index, wanted in enumerate(plan.num_rows_per_file):
        own = list(read_file(plan, index, config, rows_per_block))
        assert sum(map(len, own)) == wanted
        assert all(0 < len(block) <= rows_per_block for block in own)
        blocks += own
    table = pa.concat_tables(blocks)  # refuses blocks of another schema
    table.validate(full=True)
    assert table.schema == plan.schema
    assert table.column_names[:6] == BASE
    assert table.num_rows == plan.num_rows
    assert set(table["error_code"].to_pylist()) <= ERROR_CODES | {""}
    for code, message in zip(table["error_code"].to_pylist(), table["error_message"].to_pylist(), strict=True):
        assert (code == "") == (message == "")
    assert table["id"].null_count == 0
    assert "" not in table["id"].to_pylist()
    return table


def read_rows(path: Any, rows_per_block: int = 1024, **keys: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(path, rows_per_block, **keys).to_pylist()
    return rows


def refuse(path: Any, match: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        make_plan(make_config(path, **keys))


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def write_jsonl(path: Path, rows: list[Any], **keys: Any) -> Path:
    return write(path, "".join(json.dumps(row, **keys) + "\n" for row in rows))


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


# --- Paths -----------------------------------------------------------------------------------------------


def corpus(root: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt"):
        write(root / name, f"{name}\n")
    for name in ("_tmp.txt", ".hidden.txt", "_work/x.txt", ".git/y.txt", "README.md", "LICENSE", "notes.md"):
        write(root / name, "not a prompt\n")
    return root


def test_folder_is_recursive_sorted_and_skips_hidden_names_and_paperwork(tmp_path: Path) -> None:
    rows = read_rows(corpus(tmp_path / "in"))
    assert column(rows, "prompt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert column(rows, "id") == ["a.txt:0", "b.txt:0", "sub/c.txt:0", "sub/deep/d.txt:0"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("*", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("**/d*", ["sub/deep/d.txt"]),
        ("s*/c.txt", ["sub/c.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("*b", ["sub/c.txt", "sub/deep/d.txt"]),
        ("_*.txt", ["_tmp.txt"]),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_patterns(tmp_path: Path, scheme: str, pattern: str, names: list[str]) -> None:
    listing = list_input(make_config(f"{scheme}{corpus(tmp_path / 'in')}/{pattern}"))
    assert [file.name for file in listing.files] == names


def test_patterns_work_on_a_filesystem_that_is_not_local(tmp_path: Path, monkeypatch: Any) -> None:
    inner = pafs.SubTreeFileSystem(str(corpus(tmp_path / "bucket")), pafs.LocalFileSystem())

    class FakeFileSystem:
        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            assert uri.startswith("s3://")
            return inner, uri.removeprefix("s3://").split("?")[0]

    monkeypatch.setattr(pafs, "FileSystem", FakeFileSystem)
    listing = list_input(make_config("s3://sub/**/?.txt?region=eu-west-1"))
    assert [(file.path, file.name) for file in listing.files] == [
        ("sub/c.txt", "c.txt"),
        ("sub/deep/d.txt", "deep/d.txt"),
    ]


def test_a_name_with_wildcard_characters_is_taken_as_it_is_if_it_exists(tmp_path: Path) -> None:
    write(tmp_path / "a*.txt", "star\n")
    write(tmp_path / "ab.txt", "other\n")
    assert column(read_rows(tmp_path / "a*.txt"), "prompt") == ["star"]


def test_uri_options_are_no_wildcard() -> None:
    filesystem, path, pattern = door._resolve("s3://bucket/p?/x*.jsonl?region=eu-west-1&scheme=http")
    assert (type(filesystem).__name__, path, pattern) == ("S3FileSystem", "bucket", ["p?", "x*.jsonl"])


def test_uri_escapes(tmp_path: Path) -> None:
    write(tmp_path / "a b.txt", "x\n")
    assert column(read_rows(f"file://{tmp_path}/a%20b.txt"), "id") == ["a b.txt:0"]
    assert column(read_rows(f"file://{tmp_path}/a%20*.txt"), "id") == ["a b.txt:0"]


def test_same_file_reached_twice_is_read_once_and_order_is_as_given(tmp_path: Path) -> None:
    root = corpus(tmp_path / "in")
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    paths = (root / "b.txt", root, f"file://{root}/a.txt", tmp_path / "link", root / "sub" / ".." / "b.txt")
    rows = read_rows(paths)
    assert column(rows, "prompt") == ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in", target_is_directory=True)
    assert len(read_rows(tmp_path / "in")) == 1


def test_made_ids_stay_when_the_corpus_moves_or_grows(tmp_path: Path) -> None:
    for place in ("here", "there/mounted"):
        write(tmp_path / place / "x" / "same.txt", "1\n2\n")
        write(tmp_path / place / "y" / "same.txt", "3\n")
    before = column(read_rows(tmp_path / "here"), "id")
    assert before == ["x/same.txt:0", "x/same.txt:1", "y/same.txt:0"]
    assert column(read_rows(tmp_path / "there" / "mounted"), "id") == before
    write(tmp_path / "here" / "new.txt", "4\n")
    assert set(before) < set(column(read_rows(tmp_path / "here"), "id"))
    (tmp_path / "here" / "y" / "same.txt").unlink()
    (tmp_path / "here" / "new.txt").unlink()
    # One subfolder left: the name must not lose its "x/".
    assert column(read_rows(tmp_path / "here"), "id") == before[:2]


def test_files_of_one_name_from_two_paths_get_different_ids(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a" / "f.txt", "1\n"), write(tmp_path / "b" / "f.txt", "2\n")
    assert column(read_rows((a, b)), "id") == ["a/f.txt:0", "b/f.txt:0"]


def test_nothing_there(tmp_path: Path) -> None:
    refuse(tmp_path / "gone", r"input\.path: .*gone: no such file")
    refuse(tmp_path / "gone" / "*.txt", r"input\.path: .*gone/\*\.txt: no such file")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", r"input\.path: .*empty: no file matches")
    refuse(tmp_path / "empty" / "*.txt", r"input\.path: .*\*\.txt: no file matches")
    write(tmp_path / "a.txt", "x\n")
    refuse((tmp_path / "a.txt", tmp_path / "gone"), r"input\.path: .*gone")
    refuse("nosuch://bucket/x.jsonl", r"input\.path: nosuch://bucket/x\.jsonl")


def test_a_link_to_nowhere_is_not_left_out_silently(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "unmounted.txt")
    refuse(tmp_path / "in", r"b\.txt: a link to nowhere")


def test_special_files_and_unreadable_names(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    refuse(tmp_path / "in", r"pipe\.txt: not a regular file")
    os.unlink(tmp_path / "in" / "pipe.txt")
    with open(os.fsencode(tmp_path / "in") + b"/b\xff.txt", "wb"):
        pass
    refuse(tmp_path / "in", r"input\.path: .*in: cannot be read")


def test_two_filesystems(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x\n")
    refuse(
        (tmp_path / "a.txt", "mock:///b.txt"),
        r"input\.path: mock:///b\.txt: one run reads from one filesystem",
    )


def test_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", b"\xef\xbb\xbf")
    refuse(tmp_path, r"input\.path: no rows in ")
    write(tmp_path / "c.txt", "x\n")
    assert column(read_rows(tmp_path), "id") == ["c.txt:0"]


# --- Formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.jsonl", "jsonl"),
        ("a.NDJSON", "jsonl"),
        ("a.json", "jsonl"),
        ("a.csv", "csv"),
        ("a.tsv.gz", "csv"),
        ("a.txt", "text"),
        ("a.text.zst", "text"),
        ("a.parquet", "parquet"),
        ("a.jsonl.bz2", "jsonl"),
    ],
)
def test_format_from_the_name(name: str, format: str) -> None:
    assert door._suffix(f"folder.csv/{name}")[0] == format


def test_formats_do_not_mix(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    write(tmp_path / "b.csv", "prompt\nx\n")
    refuse(tmp_path, r"a\.jsonl is jsonl and .*b\.csv is csv")
    assert len(read_rows(tmp_path / "*.csv")) == 1


@pytest.mark.parametrize("name", ["data.xlsx", "prompts", "a.parquet.gz", "a.gz", "b.jsonl.lz4"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    write(tmp_path / name, '{"prompt": "y"}\n')
    refuse(tmp_path, rf"input\.format: cannot tell the format of .*{name}.*set input\.format")
    if not name.endswith("gz"):
        assert column(read_rows(tmp_path / name, format="jsonl"), "prompt") == ["y"]


def test_explicit_format_reads_any_name_but_never_parquet_as_text(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", '{"a": 1}\n')
    assert column(read_rows(path, format="text"), "prompt") == ['{"a": 1}']
    assert column(read_rows(write(tmp_path / "d" / "x.md", "md\n").parent, format="text"), "prompt") == ["md"]
    write_parquet(tmp_path / "p.parquet", {"prompt": ["x"]})
    refuse(tmp_path / "p.parquet", r"input\.format: text, but .*p\.parquet is a parquet file", format="text")
    refuse(path, r"input\.format: parquet, but .*log\.jsonl is a jsonl file", format="parquet")


def compress_zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, "zstd", asbytes=True)
    return packed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": compress_zstd,
}


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_compressed(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"id": f"i{n}", "prompt": f"ü{n}"}) + "\n" for n in range(5000)]
    halves = ["".join(lines[:2500]), "".join(lines[2500:])]
    data = b"".join(COMPRESS[suffix](half.encode()) for half in halves)  # two members, as pigz and cat make them
    write(tmp_path / f"a.jsonl.{suffix}", data)
    rows = read_rows(tmp_path)
    assert [(r["id"], r["prompt"]) for r in rows] == [(f"i{n}", f"ü{n}") for n in range(5000)]
    write(tmp_path / f"a.jsonl.{suffix}", data[:-5])
    refuse(tmp_path, rf"input\.path: .*a\.jsonl\.{suffix}: cannot be read: .*[Tt]runcated")
    for name, text in (("b.csv", "prompt\nhi\n"), ("c.txt", "hi\n"), ("d.tsv", "prompt\tx\nhi\t\n")):
        write(tmp_path / name / f"{name}.{suffix}", COMPRESS[suffix](text.encode()))
        assert column(read_rows(tmp_path / name), "prompt") == ["hi"]


# --- Text ------------------------------------------------------------------------------------------------


def test_text_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\n two \u2028\x85\x0b\x0c\rx\x00\nü\r\r\nlast".encode())
    rows = read_rows(path)
    assert column(rows, "prompt") == ["one", "", " two \u2028\x85\x0b\x0c\rx\x00", "ü\r", "last"]
    assert column(rows, "id") == [f"a.txt:{n}" for n in range(5)]
    assert column(rows, "error_code") == [""] * 5


def test_text_that_is_not_utf8_fails_its_line_alone(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.txt", b"good\nb\xffd\n\xed\xa0\x80\ngood\n"))
    assert column(rows, "error_code") == ["", "bad_line", "bad_line", ""]
    assert column(rows, "prompt") == ["good", None, None, "good"]
    assert rows[1]["error_message"] == "a.txt line 2: not valid UTF-8 (byte 0xff at offset 1)"


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
def test_lines_do_not_depend_on_where_reads_end(monkeypatch: Any, size: int) -> None:
    monkeypatch.setattr(formats, "READ_BYTES", max(size, 3))
    data = b"a\n\nbcdefghij\r\n\nk" * 50
    expected = data.split(b"\n")
    assert list(formats.iter_lines(io.BytesIO(data))) == expected
    assert list(formats.iter_lines(io.BytesIO(data + b"\n"))) == expected
    assert list(formats.iter_lines(io.BytesIO(b"\xef\xbb\xbf" + data))) == expected


# --- JSON Lines ------------------------------------------------------------------------------------------


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
            "id column 'id' must be a string or an integer, got a number",
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


# --- CSV -------------------------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    text = '\ufeffid,prompt,n\r\na,"two\r\nlines, ""quoted""",1\r\n\r\nb,,\r\n,plain,x\r\n'
    rows = read_rows(write(tmp_path / "a.csv", text))
    assert column(rows, "prompt") == ['two\r\nlines, "quoted"', "", "plain"]
    assert column(rows, "id") == ["a", "b", "a.csv:2"]
    assert column(rows, "n") == ["1", "", "x"]
    assert column(rows, "error_code") == [""] * 3


def test_csv_bad_rows(tmp_path: Path) -> None:
    data = b'id,prompt,n\na,x\nb,x,1,2\n"c","y\nz",1\nd,\xff,keep\ne,"x"y,1\nf,ok,\nlast,"torn'
    rows = read_rows(write(tmp_path / "a.csv", data))
    assert column(rows, "error_code") == ["bad_line", "bad_line", "", "bad_line", "bad_line", "", "bad_line"]
    assert column(rows, "id") == ["a.csv:0", "a.csv:1", "c", "d", "a.csv:4", "f", "a.csv:6"]
    assert column(rows, "prompt") == [None, None, "y\nz", None, None, "ok", None]
    assert column(rows, "n") == [None, None, "1", "keep", None, "", None]
    assert rows[0]["error_message"] == "a.csv line 2: 2 fields, but the header has 3"
    assert rows[3]["error_message"] == "a.csv line 6: column 'prompt' is not valid UTF-8"
    assert rows[6]["error_message"].startswith("a.csv line 9: not valid CSV: ")


def test_csv_huge_field(tmp_path: Path) -> None:
    prompt = "long " * (6 << 20)  # 30 MiB; the csv module's default limit is 128 KiB
    path = write(tmp_path / "a.csv", f'prompt\n"{prompt}"\nshort\n')
    assert column(read_rows(path), "prompt") == [prompt, "short"]


def test_csv_columns(tmp_path: Path) -> None:
    refuse(
        write(tmp_path / "a.csv", "Prompt,n\nx,1\n"),
        r"input\.prompt_column: .*a\.csv has no column 'prompt'; there are: Prompt, n",
    )
    refuse(
        write(tmp_path / "b.csv", "prompt,n,n\nx,1,2\n"),
        r"b\.csv: the CSV header names column 'n' more than once",
    )
    refuse(write(tmp_path / "c.csv", b"prompt,\xff\nx,1\n"), r"c\.csv: the CSV header cannot be read")
    write(tmp_path / "d" / "a.csv", "prompt,n\nx,1\n")
    write(tmp_path / "d" / "b.csv", "m,prompt\n2,y\n")
    write(tmp_path / "d" / "c.csv", "")
    write(tmp_path / "d" / "e.csv", "prompt\n")
    rows = read_rows(tmp_path / "d")
    assert [(r["prompt"], r["n"], r["m"]) for r in rows] == [("x", "1", None), ("y", None, "2")]


# --- Parquet ---------------------------------------------------------------------------------------------


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
        if name not in ("kind", "tags"):
            assert table.schema.field(name).type == stored.schema.field(name).type, name
    assert table.schema.field("kind").type == pa.string()
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
        write_parquet(tmp_path / "b.parquet", {"prompt": ["x"], "id": [0.5]}),
        r"input\.id_column: 'id' in .*type double",
    )
    other = write_parquet(tmp_path / "c.parquet", {"question": ["x"], "n": [1]})
    refuse(other, r"input\.prompt_column: .*c\.parquet has no column 'prompt'; there are: n, question")
    raw = write_parquet(tmp_path / "d.parquet", {"prompt": [b"x"]})
    refuse(raw, r"'prompt' in .*d\.parquet has type binary")


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


# --- OpenAI batch ----------------------------------------------------------------------------------------


def batch_line(body: Any, **keys: Any) -> dict[str, Any]:
    return {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": body} | keys


def read_batch(tmp_path: Path, line: dict[str, Any]) -> dict[str, Any]:
    return read_rows(write_jsonl(tmp_path / "one.jsonl", [line]), format="openai_batch")[0]


def test_batch_is_found_and_normalised(tmp_path: Path) -> None:
    body = {
        "model": "opt",
        "prompt": "Hi ü",
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": -1,
        "seed": -3,
        "stop": "END",
        "ignore_eos": True,
        "n": 1,
        "best_of": None,
        "echo": False,
        "stream": False,
        "stream_options": None,
        "logprobs": None,
        "suffix": None,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "user": "u",
        "min_p": None,
    }
    path = write(tmp_path / "a.jsonl", "\nnot json\n" + json.dumps(batch_line(body)) + "\n")
    assert list_input(make_config(path)).format == "openai_batch"
    bad, good = read_rows(path)
    assert (bad["error_code"], bad["id"], bad["body"]) == ("bad_line", "a.jsonl:1", None)
    assert (good["id"], good["prompt"], good["_prompt_tokens"], good["error_message"]) == (
        "r",
        "Hi ü",
        None,
        "",
    )
    own = json.loads(good["_sampling"])
    assert own == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 0,
        "seed": -3,
        "stop": ["END"],
        "ignore_eos": True,
    }
    SamplingConfig(**own)  # our names and ranges
    assert list(good)[6:] == ["method", "url", "body"]
    assert (good["method"], good["url"], json.loads(good["body"])) == ("POST", "/v1/completions", body)


@pytest.mark.parametrize(
    ("prompt", "text", "tokens"),
    [
        ("", "", None),
        (["one"], "one", None),
        ([1, 2, 0], None, [1, 2, 0]),
        ([[5]], None, [5]),
        ([2**31 - 1], None, [2**31 - 1]),
    ],
)
def test_batch_prompts(tmp_path: Path, prompt: Any, text: Any, tokens: Any) -> None:
    row = read_batch(tmp_path, batch_line({"prompt": prompt}))
    assert (row["prompt"], row["_prompt_tokens"], row["error_code"], row["_sampling"]) == (
        text,
        tokens,
        "",
        None,
    )


@pytest.mark.parametrize(
    ("prompt", "code", "match"),
    [
        (None, "prompt_missing", "missing or null"),
        (["a", "b"], "bad_parameters", "2 prompts; give one prompt per line"),
        ([[1], [2]], "bad_parameters", "one prompt per line"),
        ([], "prompt_not_text", "body.prompt must be"),
        ([[]], "prompt_not_text", "body.prompt must be"),
        ([1, -1], "prompt_not_text", "body.prompt must be"),
        ([1, True], "prompt_not_text", "body.prompt must be"),
        ([1.0], "prompt_not_text", "body.prompt must be"),
        ([2**31], "prompt_not_text", "body.prompt must be"),
        (5, "prompt_not_text", "body.prompt must be"),
        ({"a": 1}, "prompt_not_text", "body.prompt must be"),
    ],
)
def test_batch_bad_prompts(tmp_path: Path, prompt: Any, code: str, match: str) -> None:
    row = read_batch(tmp_path, batch_line({"prompt": prompt}))
    assert (row["id"], row["prompt"], row["_prompt_tokens"], row["error_code"]) == ("r", None, None, code)
    assert row["error_message"].startswith("one.jsonl line 1: ")
    assert match in row["error_message"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("max_tokens", [0, -1, 1.0, True, "5", 2**63]),
        ("temperature", [-0.1, True, "0", [0]]),
        ("top_p", [0, 1.1, -1, True]),
        ("top_k", [-2, 1.5, True, 2**63]),
        ("seed", [1.5, True, 2**63, "1"]),
        ("stop", ["", [""], ["a"] * 17, 5, [1], {"a": 1}]),
        ("ignore_eos", [1, 0, "true"]),
        ("n", [2, 0, True, 1.0]),
        ("best_of", [2, True]),
        ("echo", [True, 0, 1]),
        ("stream", [True, 0]),
        ("logprobs", [0, 1, 5]),
        ("suffix", ["", "x"]),
        ("presence_penalty", [0.1, True]),
        ("frequency_penalty", [-1]),
        ("logit_bias", [{"5": 1}, 0]),
        ("stream_options", [{}, {"include_usage": True}]),
        ("min_p", [0.1, 0]),
        ("messages", [[]]),
    ],
)
def test_batch_bad_parameters(tmp_path: Path, key: str, values: list[Any]) -> None:
    lines = [batch_line({"prompt": "x", key: value}, custom_id=str(n)) for n, value in enumerate(values)]
    for row in read_rows(write_jsonl(tmp_path / "a.jsonl", lines)):
        assert (row["error_code"], row["prompt"], row["_sampling"]) == ("bad_parameters", "x", None), row
        assert f"body.{key} " in row["error_message"]


@pytest.mark.parametrize(
    ("line", "code", "match"),
    [
        (batch_line({"prompt": "x"}, method="GET"), "bad_parameters", "method must be 'POST', got \"GET\""),
        (
            batch_line({"prompt": "x"}, url="/v1/chat/completions"),
            "bad_parameters",
            "url must be '/v1/completions'",
        ),
        (batch_line({"prompt": "x"}, custom_id=5), "bad_line", "custom_id must be a non-empty string, got 5"),
        (batch_line({"prompt": "x"}, custom_id=""), "bad_line", "custom_id"),
        ({"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}, "bad_line", "custom_id"),
        (batch_line("x"), "bad_line", "body must be an object, got a string"),
        (batch_line(None), "bad_line", "body must be an object, got null"),
        (batch_line({"prompt": "x", "temperature": float("nan")}), "bad_line", "NaN or infinite"),
        (batch_line({"prompt": "x"}, method=[1]), "bad_parameters", "method"),
    ],
)
def test_batch_bad_lines(tmp_path: Path, line: dict[str, Any], code: str, match: str) -> None:
    row = read_batch(tmp_path, line)
    assert row["error_code"] == code
    assert match in row["error_message"]
    assert row["id"] == ("r" if line.get("custom_id") == "r" else "one.jsonl:0")


def test_batch_and_other_lines_do_not_mix(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [batch_line({"prompt": "x"})])
    write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x"}])
    refuse(tmp_path, r"a\.jsonl holds OpenAI batch lines and .*b\.jsonl does not")
    os.rename(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    refuse(tmp_path, r"c\.jsonl holds OpenAI batch lines and .*b\.jsonl does not")


# --- Duplicates, limit -----------------------------------------------------------------------------------


def test_duplicates_over_files(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"id": "x", "prompt": "1"}, {"id": 7, "prompt": "2"}, {"id": "x", "prompt": "3"}],
    )
    write(tmp_path / "b.jsonl", '\n{"id": "7", "prompt": "4"}\n\n{"id": "y", "prompt": "5"}\n{"id": "x"}\n')
    rows = read_rows(tmp_path, rows_per_block=2)
    assert column(rows, "error_code") == ["", "", "duplicate_id", "duplicate_id", "", "prompt_missing"]
    assert column(rows, "prompt") == ["1", "2", "3", "4", "5", None]  # a duplicate keeps its prompt
    assert rows[2]["error_message"] == "a.jsonl row 3: id 'x' was already used by a.jsonl row 1"
    assert rows[3]["error_message"] == "b.jsonl row 1: id '7' was already used by a.jsonl row 2"


def test_an_id_that_looks_like_a_made_one(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"id": "b.jsonl:2", "prompt": "1"}, {"prompt": "2"}, {"id": "a.jsonl:1", "prompt": "3"}],
    )
    write(tmp_path / "b.jsonl", '{"prompt": "4"}\n\n{"prompt": "5"}\n')  # line 2 is row 1: no ids in this file
    rows = read_rows(tmp_path)
    assert column(rows, "id") == ["b.jsonl:2", "a.jsonl:1", "a.jsonl:1", "b.jsonl:0", "b.jsonl:2"]
    assert column(rows, "error_code") == ["", "", "duplicate_id", "", "duplicate_id"]


def test_ten_thousand_duplicates(tmp_path: Path) -> None:
    ids = [f"i{n % 2500}" for n in range(12_500)]
    write_parquet(tmp_path / "a.parquet", {"id": ids[:6000], "prompt": ["x"] * 6000})
    write_parquet(tmp_path / "b.parquet", {"id": ids[6000:], "prompt": ["x"] * 6500})
    assert make_plan(make_config(tmp_path)).num_duplicates == 10_000
    rows = read_rows(tmp_path)
    assert column(rows, "id") == ids
    assert column(rows, "error_code") == [""] * 2500 + ["duplicate_id"] * 10_000
    assert rows[-1]["error_message"] == "b.parquet row 6500: id 'i2499' was already used by a.parquet row 2500"


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 99])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv", "text"])
def test_limit(tmp_path: Path, kind: str, limit: int) -> None:
    for name, ids in (("a", ["p", "q"]), ("b", ["p", "r", "s"])):
        if kind == "jsonl":
            write_jsonl(tmp_path / f"{name}.jsonl", [{"id": id, "prompt": "x"} for id in ids])
        elif kind == "parquet":
            write_parquet(tmp_path / f"{name}.parquet", {"id": ids, "prompt": ["x"] * len(ids)})
        elif kind == "csv":
            write(tmp_path / f"{name}.csv", "id,prompt\n" + "".join(f"{id},x\n" for id in ids))
        else:
            write(tmp_path / f"{name}.txt", "x\n" * len(ids))
    rows = read_rows(tmp_path, limit=limit)
    made = ["a.txt:0", "a.txt:1", "b.txt:0", "b.txt:1", "b.txt:2"]
    assert column(rows, "id") == (made if kind == "text" else ["p", "q", "p", "r", "s"])[:limit]
    codes = ["", "", "" if kind == "text" else "duplicate_id", "", ""]
    assert column(rows, "error_code") == codes[:limit]


def test_limit_counts_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"prompt": "x"}\nbad\n{"prompt": "y"}\n')
    assert column(read_rows(path, limit=2), "error_code") == ["", "bad_line"]


def test_row_digests_tell_duplicates_apart(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "prompt": str(n)} for n in range(4)])
    digests = row_digests(read_table(path))
    assert digests[0] == np.array([digest_id("x")], dtype="S16")[0]
    assert len(set(digests.tolist())) == 4
    assert (row_digests(read_table(path, rows_per_block=1)) == digests).all()  # a resume sees the same


# --- The file changes between scan and read --------------------------------------------------------------


def test_a_file_that_changed_since_the_scan_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    config = make_config(path)
    plan = make_plan(config)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"prompt": "y"}\n')
    with pytest.raises(RuntimeError, match=r"a\.jsonl: changed or removed"):
        list(read_file(plan, 0, config))
    path.unlink()
    with pytest.raises(RuntimeError, match=r"a\.jsonl: changed or removed"):
        list(read_file(plan, 0, config))


def test_a_damaged_parquet_page_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": [f"{n:09d}" for n in range(5000)]})
    pq.write_table(table, path, compression=None, use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    at = data.index(b"000000100")
    data[at : at + 9] = b"x" * 9  # still text of the same length: only the checksum tells
    write(path, bytes(data))
    config = make_config(path)
    plan = make_plan(config)  # footer and ids only: the scan does not see it
    with pytest.raises(RuntimeError, match=r"input file .*a\.parquet: cannot be read after row 0"):
        list(read_file(plan, 0, config))


# --- Any text --------------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# The kinds of the Big List of Naughty Strings: what a reader, a quoter or a line splitter trips over.
NAUGHTY = [
    "",
    " ",
    "\n",
    "\r\n",
    "\t",
    '"',
    '""',
    "'",
    ",",
    "\\",
    "\\u0000",
    "\x00",
    "\x1a",
    "\x85",
    "a\r",
    "\ra",
]
NAUGHTY += [
    "\u2028",
    "\u2029",
    "\ufeff",
    "\ufffe",
    "\u00a0",
    "\u202e",
    "\U0001f468\u200d\U0001f469",
    "Ω≈ç√∫",
    "ﷺ",
]
NAUGHTY += [
    "NaN",
    "null",
    "None",
    "undefined",
    "1e999",
    "${HOME}",
    "{{7*7}}",
    "<|endoftext|>",
    "</s>",
    "';--",
]
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(prompts=st.lists(ANY_TEXT, min_size=1, max_size=8), escape=st.booleans())
def test_jsonl_round_trip(tmp_path: Path, prompts: list[str], escape: bool) -> None:
    rows_in = [{"id": f"{n}:{prompt}", "prompt": prompt} for n, prompt in enumerate(prompts)]
    rows = read_rows(write_jsonl(tmp_path / "a.jsonl", rows_in, ensure_ascii=escape), rows_per_block=3)
    assert [(r["id"], r["prompt"], r["error_code"]) for r in rows] == [(r["id"], r["prompt"], "") for r in rows_in]


@SETTINGS
@given(
    prompts=st.lists(ANY_TEXT, min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_csv_round_trip(tmp_path: Path, prompts: list[str], quoting: Any, end: str) -> None:
    with open(tmp_path / "a.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=quoting, lineterminator=end)
        writer.writerow(["id", "prompt"])
        writer.writerows((f"{n}:{prompt}", prompt) for n, prompt in enumerate(prompts))
    rows = read_rows(tmp_path / "a.csv", rows_per_block=3)
    expected = [(f"{n}:{prompt}", prompt, "") for n, prompt in enumerate(prompts)]
    assert [(r["id"], r["prompt"], r["error_code"]) for r in rows] == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_naughty_strings(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_jsonl(path, [{"prompt": text} for text in NAUGHTY], ensure_ascii=False)
    elif kind == "parquet":
        write_parquet(path, {"prompt": NAUGHTY})
    else:
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["prompt"], *([text] for text in NAUGHTY)])
    rows = read_rows(path, rows_per_block=4)
    assert column(rows, "prompt") == NAUGHTY
    assert column(rows, "error_code") == [""] * len(NAUGHTY)


@SETTINGS
@given(data=st.binary(max_size=200), name=st.sampled_from(["a.jsonl", "a.csv", "a.txt", "a.tsv"]))
def test_no_bytes_kill_the_job(tmp_path: Path, data: bytes, name: str) -> None:
    """Behind one good line, any bytes are rows, good or failed, and scan and read agree on how many."""
    start = {"a.txt": b"ok", "a.jsonl": b'{"prompt": "ok"}'}.get(name, b"prompt\nok")
    table = read_table(write(tmp_path / name, start + b"\n" + data))
    assert table["prompt"][0].as_py() == "ok"


# --- Ray -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_data() -> Any:
    import ray
    import ray.data

    ray.init(num_cpus=4, include_dashboard=False, ignore_reinit_error=True, log_to_driver=False)
    yield ray.data
    ray.shutdown()


def ray_corpus(root: Path) -> Path:
    for number in range(3):
        rows = [{"id": f"{number}-{n}", "prompt": f"p{n}", "n": n} for n in range(2500)]
        write_jsonl(root / f"{number}.jsonl", [*rows, {"id": "0-0", "prompt": "again"}])
    write(root / "empty.jsonl", "")
    write(root / "bad.jsonl", "bad\n")
    return root


def test_ray_reads_every_row_once_and_skips_what_is_done(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.source import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    plan = make_plan(config)
    expected = read_table(tmp_path / "in").to_pylist()
    assert len(expected) == 3 * 2501 + 1

    def read(skip: Any = None) -> list[dict[str, Any]]:
        dataset = ray_data.read_datasource(CorpusDatasource(plan, config, skip))
        assert dataset.columns() == plan.schema.names
        rows: list[dict[str, Any]] = dataset.take_all()
        assert dataset.count() == len(rows)
        return sorted(rows, key=lambda row: (row["id"], row["error_message"]))

    everything = read()
    assert everything == sorted(expected, key=lambda row: (row["id"], row["error_message"]))
    done = pa.Table.from_pylist(expected[1000:5000], schema=plan.schema)
    rest = read(np.sort(row_digests(done)))
    assert rest == sorted(expected[:1000] + expected[5000:], key=lambda row: (row["id"], row["error_message"]))
    # Of the four rows with id "0-0" one duplicate is done: the other three have to come again.
    assert sum(row["id"] == "0-0" for row in rest) == 2 + (2 - sum(row["id"] == "0-0" for row in expected[1000:5000]))
    assert read(np.sort(row_digests(pa.Table.from_pylist(expected, schema=plan.schema)))) == []


def test_ray_tasks_are_small_and_tell_the_truth(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.source import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    plan = make_plan(config)
    tasks = CorpusDatasource(plan, config).get_read_tasks(100)
    assert [task.metadata.num_rows for task in tasks] == [2501, 2501, 2501, 1]  # no task for the empty file
    blocks = iter(tasks[0]())
    assert len(next(blocks)) == 1024  # a generator: the rest is not read yet
    assert sum(map(len, blocks)) == 2501 - 1024
    skip = np.sort(row_digests(read_table(tmp_path / "in")))
    tasks = CorpusDatasource(plan, config, skip).get_read_tasks(1)
    assert [task.metadata.num_rows for task in tasks] == [None] * 4
    assert [block.schema for block in tasks[0]()] == [plan.schema]
    with pytest.raises(ValueError, match="sorted"):
        CorpusDatasource(plan, config, skip[::-1])


def test_ray_honours_limit_and_block_splits(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.source import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    source = CorpusDatasource(make_plan(config), config)
    assert ray_data.read_datasource(source).limit(30).count() == 30
    split = ray_data.read_datasource(source, override_num_blocks=16).materialize()
    assert split.count() == 3 * 2501 + 1
    assert len({row["id"] for row in split.take_all()}) == 7501
