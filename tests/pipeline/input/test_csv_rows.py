"""CSV and TSV: quoting, bad rows, headers; lines are cut as Python cuts them, and rows have limits."""

import io
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.input.csv_rows import CsvLines, csv_rows
from pipeline.input.line_reader import InputRow
from pipeline.input.read import read_file
from tests.pipeline.input.test_memory_limits import planned
from tests.support.input_helpers import column, make_config, read_rows, refuse, write


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


CONFIG = make_config("a.csv")
LIMIT = 6 << 20


@contextmanager
def most_bytes(most: int) -> Iterator[None]:
    """Of Python, beyond what it had before."""
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert taken < most, f"{taken >> 20} MiB"


def rows_of(data: bytes, limit: int = LIMIT) -> list[InputRow]:
    return list(csv_rows(io.BytesIO(data), "a.csv", CONFIG, limit))


def test_delimiters_in_a_text_are_no_fields() -> None:
    text = "a, " * (1 << 20)
    quotes = 'he said "", and, ' * 50_000
    lines = "1,2,\n" * 20_000
    data = f'id,prompt\n1,"{text}"\n"2","{quotes}"\n"{lines}","{lines}"\n'
    rows = rows_of(data.encode())
    assert [row.error_code for row in rows] == [""] * 3
    assert [row.prompt for row in rows] == [text, quotes.replace('""', '"'), lines]


def test_the_limit_is_of_bytes_and_not_of_characters() -> None:
    line = "\N{GRINNING FACE}".encode() * LIMIT
    data = b"id,prompt\n" + line + b"\nb,ok\n"
    with most_bytes(40 << 20):
        first, second = rows_of(data)
    assert "more bytes than limits.max_line_bytes allows" in first.error_message
    assert (second.id, second.prompt) == ("b", "ok")
    whole = b"id,prompt\na," + line[: LIMIT - 4] + b"\n"
    assert [len(row.prompt or "") for row in rows_of(whole)] == [LIMIT // 4 - 1]


def test_a_header_may_be_longer_than_a_row() -> None:
    assert [row.prompt for row in rows_of(b"prompt,a long name of a column\nx,y\n", 4)] == ["x"]


def test_a_header_of_too_many_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"prompt" + b",a" * 10_000 + b"\nx\n")
    refuse(path, r"input\.path: .*a\.csv: the CSV header has 10001 columns, more than 10000")


def test_wide_rows_come_in_smaller_blocks(tmp_path: Path) -> None:
    """Empty fields have no bytes in the file but their commas."""
    columns, count = 4_000, 120
    path = tmp_path / "a.csv"
    path.write_text(",".join(["prompt", *(f"c{n}" for n in range(columns))]) + ("\nx" + "," * columns) * count + "\n")
    plan = planned(make_config(path))
    assert [len(block) for block in read_file(plan, 0, make_config(path))] == [84, 36]


@given(st.text(st.sampled_from("a\r\n\N{GRINNING FACE}")), st.integers(1, 5))
def test_lines_are_cut_as_python_cuts_them(text: str, read: int) -> None:
    wanted = text.splitlines(keepends=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.input.csv_rows.READ_BYTES", read)
        lines = CsvLines(io.BytesIO(text.encode()), 1000)
        assert list(lines) == wanted
    assert lines.count == len(wanted)
