"""CSV and TSV: quoting, bad rows, headers."""

from pathlib import Path

from tests.support.input_helpers import column, read_rows, refuse, write


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
