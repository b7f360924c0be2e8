"""CSV that is more in memory than in its file: its row fails alone, and lines are cut as Python cuts them."""

import csv
import io
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.input.csv_rows import FEW_FIELDS, CsvLines, _scan, csv_rows
from pipeline.input.read import read_file
from pipeline.input.row import Row
from tests.pipeline.input.test_bombs import planned
from tests.support.input_helpers import make_config, refuse

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


def rows_of(data: bytes, limit: int = LIMIT) -> list[Row]:
    return list(csv_rows(io.BytesIO(data), "a.csv", CONFIG, limit))


MANY = {
    "plain": b"aa," * (1 << 18) + b"aa\n",
    "quoted": b'"a",' * (1 << 18) + b"a\n",
    "behind_a_quote": b'a",' + b"aa," * (1 << 18) + b"aa\n",
    "behind_a_text": b'"a,""b",' + b"aa," * (1 << 18) + b"aa\n",
    "over_lines": b'aa,"\n"' + b",a" * 9_000 + (b',"\n"' + b",a" * 9_000) * 100 + b"\n",
}


@pytest.mark.parametrize("name", MANY)
def test_a_row_of_far_too_many_fields_takes_no_memory(name: str) -> None:
    data = b"id,prompt\n" + MANY[name] + b"b,ok\n"
    with most_bytes(8 << 20):
        first, *_, last = rows_of(data)
    assert (first.error_code, first.prompt) == ("bad_line", None)
    assert f"more than {2 + 2 * FEW_FIELDS} fields, but the header has 2" in first.error_message
    assert (last.id, last.prompt, last.error_code) == ("b", "ok", "")


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
    for count, said in ((10_001, "10001 columns, more than 10000"), (1 << 20, "more than 30000 fields")):
        path = tmp_path / f"{count}.csv"
        path.write_bytes(b"prompt" + b",a" * (count - 1) + b"\nx\n")
        refuse(path, rf"input\.path: .*{count}\.csv: the CSV header .*{said}")


def test_wide_rows_come_in_smaller_blocks(tmp_path: Path) -> None:
    """Empty fields have no bytes in the file but their commas."""
    columns, count = 4_000, 120
    path = tmp_path / "a.csv"
    path.write_text(",".join(["prompt", *(f"c{n}" for n in range(columns))]) + ("\nx" + "," * columns) * count + "\n")
    plan = planned(make_config(path))
    assert [len(block) for block in read_file(plan, 0, make_config(path))] == [84, 36]


@given(st.lists(st.text(st.sampled_from('a,"\n')), min_size=1))
def test_delimiters_are_those_that_csv_finds(fields: list[str]) -> None:
    target = io.StringIO()
    csv.writer(target, lineterminator="").writerow(fields)
    line = target.getvalue()
    assert _scan(line, ",", False) == (len(fields) - 1, False)
    assert _scan(f'a"",\n",{line}', ",", True) == (len(fields), False)
    assert _scan(f'{line},"a""', ",", False) == (len(fields), True)


@given(st.text(st.sampled_from("a\r\n\N{GRINNING FACE}")), st.integers(1, 5))
def test_lines_are_cut_as_python_cuts_them(text: str, read: int) -> None:
    wanted = text.splitlines(keepends=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.input.csv_rows.READ_BYTES", read)
        lines = CsvLines(io.BytesIO(text.encode()), 1000, ",")
        assert list(lines) == wanted
    assert lines.count == len(wanted)
