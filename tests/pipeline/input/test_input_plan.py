"""What a plan knows of all files: duplicate ids, the limit; and a file that changes after its scan."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.input.read import read_file
from tests.support.input_helpers import column, make_config, make_plan, read_rows, write, write_jsonl, write_parquet


def test_duplicates_over_files(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"id": "x", "prompt": "1"}, {"id": 7, "prompt": "2"}, {"id": "x", "prompt": "3"}],
    )
    write(tmp_path / "b.jsonl", '\n{"id": "7", "prompt": "4"}\n\n{"id": "y", "prompt": "5"}\n{"id": "x"}\n')
    rows = read_rows(tmp_path, rows_per_block=2)
    assert column(rows, "error_code") == ["", "", "duplicate_id", "duplicate_id", "", "duplicate_id"]
    assert column(rows, "prompt") == ["1", "2", "3", "4", "5", None]  # a duplicate keeps its prompt
    assert rows[2]["error_message"] == "a.jsonl row 3: id 'x' was already used by a.jsonl row 1"
    assert rows[3]["error_message"] == "b.jsonl row 1: id '7' was already used by a.jsonl row 2"
    assert rows[5]["error_message"] == (
        "b.jsonl row 3: id 'x' was already used by a.jsonl row 1; "
        "prompt_missing: b.jsonl line 5: column 'prompt' is missing"
    )


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


def test_a_file_that_was_edited_and_is_as_long_as_before_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    config = make_config(path)
    plan = make_plan(config)
    before = path.stat()
    path.write_text(path.read_text().replace("x", "y"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    with pytest.raises(RuntimeError, match=r"a\.jsonl: changed or removed"):
        list(read_file(plan, 0, config))


def test_a_file_with_other_rows_than_were_scanned_is_refused(tmp_path: Path) -> None:
    """Also one whose size and time say nothing."""
    path = write(tmp_path / "a.txt", "one\ntwo\n")
    config = make_config(path)
    plan = make_plan(config)
    before = path.stat()
    path.write_text("one two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(RuntimeError, match=r"\(1, 1\) documents and rows now, \(2, 2\) when it was scanned"):
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
