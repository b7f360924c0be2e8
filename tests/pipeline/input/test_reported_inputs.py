"""Inputs that users of such systems report as trouble: each is read as they meant it, or refused with the remedy."""

import bz2
import csv
import gzip
import io
import json
import os
import random
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.job import ConfigError
from pipeline.input.files import list_input
from pipeline.input.input_plan import plan_input, unread_partitions, unused_sampling
from pipeline.input.parquet_pages import read_pages, refuse_large_pages
from pipeline.input.prompt_templates import Prompter
from pipeline.input.read import read_file
from pipeline.input.sample_prompts import remark_on_bos
from pipeline.input.scan import scan_file
from tests.support.input_helpers import (
    column,
    make_config,
    make_plan,
    read_rows,
    refuse,
    write,
    write_jsonl,
    write_parquet,
)
from tests.support.measured_memory import most_bytes

TEXTS = ["name[The Mill], food[Italian]", "café, 10 €", "日本", "a 😀"]


def _text(kind: str) -> str:
    """TEXTS as a file of that kind, with the line ends of Windows."""
    if kind == "jsonl":
        return "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in TEXTS)
    if kind == "csv":
        target = io.StringIO(newline="")
        csv.writer(target).writerows([["prompt"], *([text] for text in TEXTS)])
        return target.getvalue()
    return "\r\n".join(TEXTS)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_byte_order_mark_is_honoured(tmp_path: Path, kind: str, encoding: str) -> None:
    mark = "\ufeff" if encoding.endswith("be") else ""
    data = (mark + _text(kind)).encode(encoding)
    for path in (write(tmp_path / f"a.{kind}", data), write(tmp_path / f"b.{kind}.gz", gzip.compress(data))):
        rows = read_rows(path)
        assert column(rows, "prompt") == TEXTS
        assert column(rows, "error_code") == [""] * len(TEXTS)


def test_utf16_longer_than_a_block_of_reading(tmp_path: Path) -> None:
    texts = [f"{n} " + "é😀" * 500 for n in range(1500)]
    rows = read_rows(write(tmp_path / "a.txt", "\n".join(texts).encode("utf-16")))
    assert column(rows, "prompt") == texts


@pytest.mark.parametrize("kind", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_refused(tmp_path: Path, kind: str, encoding: str) -> None:
    name = f"UTF-16{encoding[-2:].upper()}"
    path = write(tmp_path / f"a.{kind}", _text(kind).encode(encoding))
    refuse(path, rf"a\.{kind}: NUL bytes .*looks like {name}.*iconv -f {name}")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_and_without_ascii(tmp_path: Path, encoding: str) -> None:
    refuse(write(tmp_path / "a.txt", "日本\n東京\n".encode(encoding)), "NUL bytes")


@pytest.mark.parametrize(
    ("encoding", "text"), [("cp1252", "café"), ("latin-1", "naïve"), ("gbk", "中文"), ("shift-jis", "日本")]
)
def test_other_encodings_are_refused(tmp_path: Path, encoding: str, text: str) -> None:
    refuse(write(tmp_path / "a.txt", f"{text}\nplain\n".encode(encoding) * 20), r"20 of its first 40 lines .*iconv")


def test_cut_off_utf16_is_refused(tmp_path: Path) -> None:
    refuse(write(tmp_path / "a.txt", "one\ntwo".encode("utf-16")[:-1]), "utf-?16.*truncated data")


@pytest.mark.parametrize(
    ("kind", "start"), [("txt", "one\n"), ("csv", "prompt\none\n"), ("jsonl", '{"prompt": "one"}\n')]
)
def test_utf16_appended_to_utf8_fails_its_lines(tmp_path: Path, kind: str, start: str) -> None:
    """`>>` of PowerShell 5."""
    lines = "two two\r\nthree\r\n" if kind != "jsonl" else '{"prompt": "two"}\r\n'
    rows = read_rows(write(tmp_path / f"a.{kind}", start.encode() + lines.encode("utf-16-le")))
    assert column(rows, "error_code")[:2] == ["", "bad_line"]


def test_text_with_the_line_ends_of_old_macs_is_refused(tmp_path: Path) -> None:
    """Else the file would be one prompt. CSV has them too, and means it."""
    refuse(write(tmp_path / "a.txt", b"one\rtwo\rthree\r"), r"a\.txt: a single line, with carriage returns in it")
    refuse(write(tmp_path / "a.jsonl", b'{"prompt": "one"}\r{"prompt": "two"}\r'), "no line is a JSON object")
    assert column(read_rows(write(tmp_path / "a.csv", b"prompt\rone\rtwo\r")), "prompt") == ["one", "two"]
    assert column(read_rows(write(tmp_path / "b.txt", b"10 %\r100 %\ndone\n")), "prompt") == ["10 %\r100 %", "done"]


COMPRESSORS: dict[str, Any] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": partial(pa.compress, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("compression", COMPRESSORS)
@pytest.mark.parametrize("suffix", ["jsonl", "txt", "csv"])
def test_a_compressed_file_without_its_suffix_is_named(tmp_path: Path, compression: str, suffix: str) -> None:
    data = COMPRESSORS[compression](b'{"prompt": "one"}\n' * 9)
    refuse(write(tmp_path / f"a.{suffix}", data), rf"is compressed, .* \(\.{compression}\); name it so")


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_all_members_of_a_compressed_file_are_read(tmp_path: Path, compression: str) -> None:
    """As `cat a.gz b.gz` and writers of logs make them."""
    lines = [f"line {n}" for n in range(9)]
    data = b"".join(COMPRESSORS[compression](f"{line}\n".encode()) for line in lines)
    assert column(read_rows(write(tmp_path / f"a.txt.{compression}", data)), "prompt") == lines


def test_a_csv_file_of_another_delimiter_is_told_so(tmp_path: Path) -> None:
    """As Excel writes it in most of Europe."""
    hint = r"there are: id;prompt \(fields are separated by commas, not by ';'"
    refuse(write(tmp_path / "a.csv", "id;prompt\n1;one\n"), hint)
    refuse(write(tmp_path / "b.csv", "id, prompt\n1, one\n"), r"no column 'prompt'; there are: ' prompt', id$")


def test_a_stray_nul_is_text(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "a.txt", b"one\nt\x00wo\n"))
    assert column(rows, "prompt") == ["one", "t\x00wo"]


# --- ids and prompts of other types


def _ids(path: Path) -> list[str]:
    rows = read_rows(path)
    assert column(rows, "error_code") == [""] * len(rows)
    return column(rows, "id")


def test_ids_of_jsonl_that_are_whole_floats(tmp_path: Path) -> None:
    lines = [{"id": 1.0, "prompt": "a"}, {"id": -2.0, "prompt": "b"}, {"id": 3, "prompt": "c"}]
    assert _ids(write_jsonl(tmp_path / "a.jsonl", lines)) == ["1", "-2", "3"]


@pytest.mark.parametrize("number", [1.5, 2.0**53 + 2, 1e300])
def test_ids_that_are_no_whole_number_fail_their_row(tmp_path: Path, number: float) -> None:
    for path in (
        write_jsonl(tmp_path / "a.jsonl", [{"id": number, "prompt": "a"}, {"id": 7.0, "prompt": "b"}]),
        write_parquet(tmp_path / "a.parquet", {"id": pa.array([number, 7.0]), "prompt": ["a", "b"]}),
    ):
        rows = read_rows(path)
        assert column(rows, "error_code") == ["bad_line", ""]
        assert rows[1]["id"] == "7"
        assert "whole number" in rows[0]["error_message"]


UUIDS = [uuid.UUID(int=n) for n in (7, 2**127 + 5)]


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        (pa.array([1.0, 20.0], pa.float64()), ["1", "20"]),
        (pa.array([1.0, 20.0], pa.float32()), ["1", "20"]),
        (pa.array([Decimal(1), Decimal(10**30)], pa.decimal128(38, 0)), ["1", str(10**30)]),
        (pa.array([u.bytes for u in UUIDS], pa.uuid()), [str(u) for u in UUIDS]),
        (pa.array([u.bytes for u in UUIDS], pa.binary(16)), [str(u) for u in UUIDS]),
        (pa.array([b"a", "é".encode()], pa.binary()), ["a", "é"]),
        (pa.array([b"a", "é".encode()], pa.large_binary()), ["a", "é"]),
        (pa.array([b"a", b"b"], pa.binary()).dictionary_encode(), ["a", "b"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_ids_of_other_types(tmp_path: Path, format: str, ids: pa.Array, wanted: list[str]) -> None:
    table = pa.table({"id": ids, "prompt": ["a", "b"]})
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert _ids(path) == wanted


def test_a_missing_float_id_is_made(tmp_path: Path) -> None:
    """pandas writes integers with a missing one as floats."""
    table = {"id": pa.array([1.0, float("nan"), None]), "prompt": ["a", "b", "c"]}
    assert _ids(write_parquet(tmp_path / "a.parquet", table)) == ["1", "a.parquet:1", "a.parquet:2"]


@pytest.mark.parametrize("type_", [pa.decimal128(10, 2), pa.timestamp("ms"), pa.bool_(), pa.list_(pa.int64())], ids=str)
def test_types_that_no_id_has(tmp_path: Path, type_: pa.DataType) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"id": pa.nulls(1, type_), "prompt": ["a"]})
    refuse(path, r"input\.id_column: 'id' in .* an id must be text or a whole number: cast it")


@pytest.mark.parametrize("type_", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.binary())], ids=str)
def test_prompts_in_bytes(tmp_path: Path, type_: pa.DataType) -> None:
    prompts = pa.array(["é 日本".encode(), b"\xff", None, b""], pa.binary()).cast(type_)
    rows = read_rows(write_parquet(tmp_path / "a.parquet", {"prompt": prompts}))
    assert column(rows, "prompt") == ["é 日本", None, None, ""]
    assert column(rows, "error_code") == ["", "bad_line", "prompt_missing", ""]


# --- columns with the names of sampling parameters


@pytest.mark.parametrize(
    ("columns", "format", "keys", "remark"),
    [
        ({"temperature", "prompt"}, "jsonl", {}, "the column temperature does not change how rows are sampled"),
        ({"max_tokens", "seed"}, "csv", {}, "the columns max_tokens, seed do not change how rows are sampled"),
        ({"prompt", "city"}, "parquet", {}, None),
        ({"temperature"}, "openai_batch", {}, None),
        ({"temperature"}, "jsonl", {"template": "{{ temperature }} degrees"}, None),
        ({"sampling_params", "seed"}, "jsonl", {"sampling_column": "sampling_params"}, "the column seed does not"),
    ],
)
def test_columns_named_like_sampling_parameters_are_remarked_on(
    columns: set[str], format: str, keys: dict[str, str], remark: str | None
) -> None:
    found = unused_sampling(columns, format, make_config("a", **keys))
    assert (found is None) == (remark is None)
    assert remark is None or remark in str(found)


# --- prompts that were rendered elsewhere


def test_prompts_that_begin_with_bos_are_remarked_on(tmp_path: Path) -> None:
    """The tokenizer puts another one before them, and texts become worse without a word."""
    rendered = "<s>[INST] Hi [/INST]"
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": rendered}, {"prompt": "Hi"}, {"prompt": 7}])

    def remark(front: str, **keys: Any) -> str | None:
        config = make_config(path, **keys)
        prompter = Prompter.of(config, "jsonl", None, datetime.now(UTC))
        return remark_on_bos(make_plan(config), config, prompter, front)

    assert str(remark("<s>")).startswith("1 of the first 3 prompts begin with <s>, which the tokenizer puts before")
    assert str(remark("<s>", template="<s>{{ prompt }}")).startswith("3 of the first 3 prompts begin with <s>")
    assert remark("<s>", template="{{ 1 }}{{ prompt }}") is None
    assert remark("") is None
    assert remark("</s>") is None


# --- folders that name a column, as Spark and Hive write them


def test_values_in_the_names_of_folders_are_remarked_on(tmp_path: Path) -> None:
    """Other readers make columns of them; here they would be gone without a word."""
    for date in ("2024-01-01", "2024-01-02"):
        write_parquet(tmp_path / f"in/date={date}/lang=de/part-0.parquet", {"prompt": ["a"]})
    plan = make_plan(make_config(tmp_path / "in"))
    assert plan.extra_schema.names == []
    remark = unread_partitions(plan.listing, {"prompt"})
    assert remark is not None
    assert "the value of date, lang is in the names of folders alone (such as date=2024-01-01)" in remark
    assert "value of lang is" in str(unread_partitions(plan.listing, {"prompt", "date"}))
    assert unread_partitions(plan.listing, {"prompt", "date", "lang"}) is None


@pytest.mark.parametrize("folder", ["in", "in/a-b", "in/=b", "in/a=", "x=y"])
def test_folders_that_name_no_column(tmp_path: Path, folder: str) -> None:
    write_parquet(tmp_path / folder / "a.parquet", {"prompt": ["a"]})
    plan = make_plan(make_config(tmp_path / folder.partition("/")[0]))
    assert unread_partitions(plan.listing, {"prompt"}) is None


# --- Parquet that is small in the file


def _write_value(path: Path, num_bytes: int, codec: str, **keys: Any) -> Path:
    pq.write_table(pa.table({"prompt": ["x" * num_bytes]}), path, compression=codec, **keys)
    return path


@pytest.mark.parametrize("is_dictionary", [False, True])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["zstd", "gzip", "brotli", "lz4"])
def test_a_page_that_grows_a_hundredfold_is_refused_by_its_header(
    tmp_path: Path, codec: str, version: str, is_dictionary: bool
) -> None:
    path = _write_value(tmp_path / "a.parquet", 4 << 20, codec, data_page_version=version, use_dictionary=is_dictionary)
    assert path.stat().st_size < 1 << 19
    refuse_pages(
        path, 1 << 20, r"a page of column 'prompt' takes \d+ bytes .* 4194\d+ in memory.*limits\.max_line_bytes"
    )
    with pq.ParquetFile(path) as file:
        refuse_large_pages(pa.OSFile(str(path)), file.metadata, "a", 5 << 20, is_local=True)


def refuse_pages(path: Path, limit: int, match: str) -> None:
    listing = list_input(make_config(path), limit)
    with pytest.raises(ConfigError, match=match):
        scan_file(listing, 0, make_config(path))
    with pq.ParquetFile(path) as file, pa.OSFile(str(path)) as source, pytest.raises(ConfigError, match=match):
        refuse_large_pages(source, file.metadata, str(path), limit, is_local=False)


def test_a_footer_that_belittles_its_pages(tmp_path: Path) -> None:
    """The headers of pages are looked at where that costs nothing, whatever the footer says."""
    path = _write_value(tmp_path / "a.parquet", 4 << 20, "zstd", use_dictionary=False)
    with pq.ParquetFile(path) as file:
        column = file.metadata.row_group(0).column(0)
        sizes = [
            page.num_bytes for page in read_pages(pa.OSFile(str(path)), column.data_page_offset, path.stat().st_size)
        ]
    assert sizes[0] > 4 << 20


def test_pages_of_many_values_are_taken(tmp_path: Path) -> None:
    """As DuckDB writes them: larger than any value may be, and made of small ones."""
    texts = [f"{n} {n * n} " * 20 for n in range(20_000)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": texts}), path, data_page_size=1 << 30, use_dictionary=False, compression="zstd")
    with pq.ParquetFile(path) as file, pa.OSFile(str(path)) as source:
        column = file.metadata.row_group(0).column(0)
        start, end = column.data_page_offset, column.data_page_offset + column.total_compressed_size
        assert max(page.num_bytes for page in read_pages(source, start, end)) > 1 << 20
        refuse_large_pages(source, file.metadata, "a", 1 << 20, is_local=True)


def test_a_large_value_that_is_large_in_the_file_fails_its_row(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(1 << 20).hex()
    path = write_parquet(tmp_path / "a.parquet", {"id": ["a", "b"], "prompt": [noise, "short"], "n": [1, 2]})
    listing = list_input(make_config(path), 1 << 20)
    scan, _ = scan_file(listing, 0, make_config(path))
    plan = plan_input(listing, [scan], make_config(path))
    (table,) = read_file(plan, 0, make_config(path))
    assert table["id"].to_pylist() == ["a", "b"]
    assert table["prompt"].to_pylist() == [None, "short"]
    assert table["n"].to_pylist() == [None, 2]
    assert table["error_code"].to_pylist() == ["bad_line", ""]
    assert "limits.max_line_bytes" in table["error_message"][0].as_py()


def test_texts_that_share_their_beginning_are_decoded_a_few_at_a_time(tmp_path: Path) -> None:
    """As writers of Parquet's second version store a context that every row repeats: 256 MiB in less than 1."""
    context = "".join(map(str, range(10_000)))[: 1 << 14]
    path, count = tmp_path / "a.parquet", 1 << 14
    table = pa.table({"prompt": [f"{context} {n}" for n in range(count)]})
    encoding = {"prompt": "DELTA_BYTE_ARRAY"}
    pq.write_table(table, path, use_dictionary=False, column_encoding=encoding, compression="zstd")
    del table
    assert path.stat().st_size < 1 << 20
    config = make_config(path)
    plan = make_plan(config)
    with most_bytes(130 << 20):
        assert sum(map(len, islice(read_file(plan, 0, config), 4))) > 0


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_as_page_headers(data: bytes) -> None:
    for page in read_pages(pa.BufferReader(data), 0, len(data)):
        assert page.num_stored >= 0


# --- a file that changes while it is read


def test_an_edit_that_keeps_the_size_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo\n")
    plan = make_plan(make_config(path))
    path.write_bytes(b"one\nTWO\n")
    os.utime(path, ns=(1, 1))
    with pytest.raises(RuntimeError, match="changed or removed since it was scanned"):
        list(read_file(plan, 0, make_config(path)))
