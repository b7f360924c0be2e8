"""Text files and the splitting into lines: every line is a prompt, good or failed."""

import io
from pathlib import Path
from typing import Any

import pytest

from pipeline.input.line_reader import iter_lines
from tests.support.input_helpers import column, read_rows, write


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
    monkeypatch.setattr("pipeline.input.line_reader.READ_BYTES", max(size, 3))
    data = b"a\n\nbcdefghij\r\n\nk" * 50
    expected = data.split(b"\n")
    assert list(iter_lines(io.BytesIO(data))) == expected
    assert list(iter_lines(io.BytesIO(data + b"\n"))) == expected
    assert list(iter_lines(io.BytesIO(b"\xef\xbb\xbf" + data))) == expected
