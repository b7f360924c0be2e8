"""Little on the disk and much in memory: such a row fails alone, or comes in smaller blocks. Memory is measured."""

import gzip
import io
import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import InputConfig
from pipeline.input.files import list_input
from pipeline.input.formats import iter_rows
from pipeline.input.lines import LongLine, iter_lines
from pipeline.input.plan import InputPlan, plan_input
from pipeline.input.read import read_file
from pipeline.input.row import BLOCK_BYTES
from pipeline.input.scan import scan_file
from tests.support.input_helpers import make_config

MOST = 300 << 20
BOMB = 200 << 20
POOLS: list[pa.MemoryPool] = []  # tables live longer than the measurement


@contextmanager
def most_bytes(most: int) -> Iterator[None]:
    """Of Python and Arrow together, beyond what they had before."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert taken < most, f"{taken >> 20} MiB"


def planned(config: InputConfig, **limit: int) -> InputPlan:
    listing = list_input(config, **limit)
    return plan_input(listing, [scan_file(listing, 0, config)[0]], config)


def write_bomb(path: Path, before: bytes, after: bytes, rest: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(before)
        for _ in range(BOMB >> 20):
            file.write(bytes([97]) * (1 << 20))
        file.write(after + rest)
    return path


LINES = {
    "jsonl": (b'{"prompt": "one"}\n{"prompt": "', b'"}\n', b'{"prompt": "two"}\n'),
    "text": (b"one\n", b"\n", b"two\n"),
    "csv": (b"prompt\none\n", b"\n", b"two\n"),
}


@pytest.mark.parametrize("format", LINES)
def test_a_line_that_is_too_long_fails_alone_and_takes_no_memory(tmp_path: Path, format: str) -> None:
    path = write_bomb(tmp_path / f"a.{format}.gz", *LINES[format])
    assert path.stat().st_size < 2 << 20
    config = make_config(path, format=format)
    with most_bytes(MOST):
        plan = planned(config)
        (table,) = read_file(plan, 0, config)
    assert table["prompt"].to_pylist() == ["one", None, "two"]
    assert table["error_code"].to_pylist() == ["", "bad_line", ""]
    message = table["error_message"][1].as_py()
    assert message.startswith(f"{path.name} line {3 if format == 'csv' else 2}: ")
    assert "limits.max_line_bytes" in message
    assert "67108864" in message


def test_a_row_of_csv_over_many_lines_has_the_limit_too() -> None:
    text = 'prompt,n\n"a\nb",1\n"' + "\n" * 80 + '",2\n"d",3\n'
    rows = list(iter_rows(io.BytesIO(text.encode()), "a.csv", "csv", make_config("a.csv"), 60))
    assert [row.prompt for row in rows][:2] == ["a\nb", None]
    assert "limits.max_line_bytes" in rows[1].error_message
    assert all(row.error_code for row in rows[1:-1])


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_line_as_long_as_the_limit_is_a_row(line_end: str) -> None:
    made: dict[str, Callable[[str], str]] = {
        "text": lambda text: text,
        "csv": lambda text: text,
        "jsonl": lambda text: json.dumps({"prompt": text}, ensure_ascii=False),
    }
    for format, line in made.items():
        for text in ("x" * 50, "ж" * 25):
            for is_more in (False, True):
                limit = len(line(text).encode()) + (len(line_end) - 1 if format != "csv" else 0) - is_more
                data = ("prompt" + line_end) * (format == "csv") + line(text) + line_end + line("y") + line_end
                rows = list(iter_rows(io.BytesIO(data.encode()), "a", format, make_config("a"), limit))
                assert [row.prompt for row in rows] == [None if is_more else text, "y"], (format, text, is_more)


def test_lines_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.input.lines.READ_BYTES", 4)
    data = b"\xef\xbb\xbfab\n" + b"c" * 13 + b"\n\nd\n" + b"e" * 9
    found = list(iter_lines(io.BytesIO(data), 8))
    assert [line if not isinstance(line, LongLine) else line.reason for line in found] == [
        b"ab", "13 bytes, more than limits.max_line_bytes allows (8)", b"", b"d",
        "9 bytes, more than limits.max_line_bytes allows (8)",
    ]  # fmt: skip
    assert list(iter_lines(io.BytesIO(data), 13)) == [b"ab", b"c" * 13, b"", b"d", b"e" * 9]


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_dictionary_that_stands_for_much_comes_in_smaller_blocks(tmp_path: Path, type_: pa.DataType) -> None:
    """A context that all rows share, as a join makes it."""
    count, texts = 1100, [letter * (512 << 10) for letter in "ab"]
    pick = [row % 2 if row % 7 else None for row in range(count)]
    shared = pa.DictionaryArray.from_arrays(pa.array(pick, pa.int32()), pa.array(texts))
    table = pa.table({"prompt": [f"row {row}" for row in range(count)], "context": shared})
    if not pa.types.is_dictionary(type_):
        table = table.set_column(1, "context", shared.cast(pa.string()).cast(type_))
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    del table
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    config = make_config(tmp_path / "a.parquet")
    with most_bytes(MOST):
        plan, rows = planned(config), 0
        for block in read_file(plan, 0, config):
            assert block.nbytes < BLOCK_BYTES + (2 << 20)
            for offset, (prompt, text) in enumerate(zip(block["prompt"], block["context"], strict=True)):
                wanted = pick[rows + offset]
                assert prompt.as_py() == f"row {rows + offset}"
                assert text.as_py() == (None if wanted is None else texts[wanted])
            rows += len(block)
    assert rows == count
