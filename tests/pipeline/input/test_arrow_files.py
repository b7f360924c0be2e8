"""Arrow IPC files: columns come through as from Parquet, in blocks that take little memory."""

import decimal
import itertools
import os
from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError
from pipeline.input.line_reader import BLOCK_BYTES
from pipeline.input.read import read_file
from tests.pipeline.input.test_memory_limits import MOST, planned
from tests.support.input_helpers import BASE, column, make_config, make_plan, read_rows, read_table, refuse, write_jsonl
from tests.support.measured_memory import most_bytes
from tests.support.null_columns import NULLS
from tests.support.saved_datasets import write_stream

DEEP = pa.list_(pa.struct([("t", pa.list_(pa.timestamp("s")))]))
COLUMNS: dict[str, pa.Array] = {
    "id": pa.array([10, None, 12], pa.uint32()),
    "prompt": pa.array(["a", None, ""], pa.large_string()),
    "when": pa.array([datetime(2024, 1, 2, tzinfo=UTC), None, None], pa.timestamp("us", "Europe/Berlin")),
    "second": pa.array([datetime(2024, 1, 2), None, None], pa.timestamp("s")),
    "day": pa.array([date(2024, 1, 2), None, None], pa.date64()),
    "hour": pa.array([time(1, 2, 3), None, None], pa.time32("s")),
    "price": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(10, 2)),
    "nested": pa.array([{"a": [1, 2], "b": None}, None, {"a": [], "b": "x"}]),
    "deep": pa.array([[{"t": [datetime(2024, 1, 2)]}], None, []], DEEP),
    "f16": pa.array(np.array([1.5, 0, 2.5], np.float16)),
    "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
    "tags": pa.array([["p"], None, ["q"]], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    "fixed": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
    "big": pa.array(["l", None, "m"], pa.large_string()),
    "raw": pa.array([b"\xff", None, b""], pa.binary()),
    "view": pa.array(["v" * 50, None, "w"], pa.string_view()),
    "views": pa.array([["v" * 50], None, ["w", "x"]], pa.large_list(pa.string_view())),
    "nothing": pa.nulls(3),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    **NULLS,
}  # fmt: skip
STORED: dict[str, pa.DataType] = {
    "second": pa.timestamp("ms"),
    "day": pa.date32(),
    "hour": pa.time32("ms"),
    "deep": pa.list_(pa.struct([("t", pa.list_(pa.timestamp("ms")))])),
    "kind": pa.string(),
    "tags": pa.list_(pa.string()),
    "view": pa.string(),
    "views": pa.large_list(pa.string()),
    "null inside": pa.struct([("x", pa.large_list(pa.null())), ("when", pa.timestamp("ms"))]),
}
"""The columns that come with another type: that which Parquet has for it."""


def write_arrow(path: Path, columns: dict[str, Any], kind: str = "stream", **options: Any) -> Path:
    table = pa.table(columns)
    writer = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}[kind]
    batch_rows = options.pop("batch_rows", None)
    with writer(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as sink:
        sink.write_table(table, max_chunksize=batch_rows)
    return path


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize("batch_rows", [None, 1])
def test_columns_come_through_unchanged(
    tmp_path: Path, kind: str, compression: str | None, batch_rows: int | None
) -> None:
    path = write_arrow(tmp_path / "a.arrow", COLUMNS, kind, compression=compression, batch_rows=batch_rows)
    for rows_per_block in (1, 2, 1024):
        table = read_table(path, rows_per_block)
        assert table["id"].to_pylist() == ["10", "a.arrow:1", "12"]
        assert table["error_code"].to_pylist() == ["", "prompt_missing", ""]
        assert table["error_message"][1].as_py() == "a.arrow row 2: column 'prompt' is null"
        assert table.column_names[6:] == list(COLUMNS)[2:]
        for name, made in list(COLUMNS.items())[2:]:
            assert table[name].to_pylist() == made.to_pylist(), name
            assert table.schema.field(name).type == STORED.get(name, made.type), name
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    stored = pq.read_table(pa.BufferReader(sink.getvalue()))
    assert stored.schema.types == table.schema.types, "verify compares them"
    assert stored.to_pylist() == table.to_pylist()


def test_rows_have_numbers_over_batches_and_a_limit_holds(tmp_path: Path) -> None:
    columns = {"prompt": [f"p{i}" for i in range(2500)]}
    write_arrow(tmp_path / "a.arrow", columns, batch_rows=1000)
    write_arrow(tmp_path / "b.arrow", columns, "file", batch_rows=2500)
    rows = read_rows(tmp_path, 64)
    assert column(rows, "id") == [f"{name}.arrow:{i}" for name in "ab" for i in range(2500)]
    assert column(rows, "prompt") == 2 * columns["prompt"]
    assert column(read_rows(tmp_path, limit=2600), "id") == column(rows, "id")[:2600]
    assert len(read_rows(tmp_path / "a.arrow", limit=3)) == 3


def test_ids_that_occur_twice(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"id": ["x", "y", "x"], "prompt": ["1", "2", "3"]})
    write_arrow(tmp_path / "b.arrow", {"id": ["y"], "prompt": ["4"]})
    rows = read_rows(tmp_path)
    assert column(rows, "error_code") == ["", "", "duplicate_id", "duplicate_id"]
    assert rows[3]["error_message"].startswith("b.arrow row 1: id 'y' was already used by a.arrow row 2")


def test_a_file_without_rows_has_no_say(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"question": pa.array([], pa.string())})
    refuse(tmp_path, "no rows in")
    write_arrow(tmp_path / "b.arrow", {"prompt": ["x"]})
    assert column(read_rows(tmp_path), "prompt") == ["x"]


def test_columns_and_formats_that_are_refused(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", {"question": ["x"], "n": [1]})
    refuse(path, r"input\.prompt_column: .*a\.arrow has no column 'prompt'; there are: n, question")
    refuse(write_arrow(path, {"prompt": [1]}), r"'prompt' in .*a\.arrow has type int64")
    refuse(write_arrow(path, {"prompt": ["x"], "status": ["x"]}), "a column 'status', a name that the output uses")
    refuse(path, r"input\.format: parquet, but .*a\.arrow is arrow", format="parquet")
    refuse(write_jsonl(tmp_path / "b.jsonl", [{"prompt": "x"}]), r"b\.jsonl is jsonl", format="arrow")


@pytest.mark.parametrize(
    "column",
    [
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.array([{}], pa.struct([])),
        pa.array([["a"]], pa.list_view(pa.string())),
        pa.RunEndEncodedArray.from_arrays([1], ["a"]),
        pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array(["a"])]),
    ],
    ids=lambda made: str(made.type).partition("<")[0],
)
def test_a_type_that_the_output_cannot_have_is_named(tmp_path: Path, column: pa.Array) -> None:
    path = write_arrow(tmp_path / "a.arrow", {"prompt": ["x"], "odd": column})
    refuse(path, r"input\.path: column 'odd' in .*a\.arrow has type .*, which a run cannot write; drop it")


def test_a_time_that_milliseconds_cannot_hold_is_refused_before_the_start(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", {"prompt": ["x"], "t": pa.array([2**62], pa.timestamp("s"))})
    refuse(path, r"a\.arrow: cannot be read: .*would result in out of bounds")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, kind: str) -> None:
    path = write_arrow(tmp_path / "a.arrow", {"prompt": ["p"] * 20}, kind, batch_rows=10)
    data = path.read_bytes()
    for size in range(0, len(data), 8):  # frames begin and end at multiples of 8
        path.write_bytes(data[:size])
        with pytest.raises(ConfigError, match="cannot be read"):
            make_plan(make_config(path))
    path.write_bytes(data)
    assert len(read_rows(path)) == 20


def as_text(data: bytes) -> pa.Array:
    """A text per byte, be it UTF-8 or not."""
    offsets = pa.array(range(len(data) + 1), pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(data), [None, offsets, pa.py_buffer(data)])


def test_text_that_is_not_utf8_fails_its_row(tmp_path: Path) -> None:
    bad = as_text(b"a\xffc")
    path = write_arrow(tmp_path / "a.arrow", {"id": ["i", "j", "k"], "prompt": bad, "extra": bad})
    rows = read_rows(path)
    assert column(rows, "error_code") == ["", "bad_line", ""]
    assert rows[1]["error_message"] == "a.arrow row 2: column 'prompt' is not valid UTF-8"
    assert column(rows, "extra") == ["a", None, "c"]


@pytest.mark.slow
def test_a_batch_of_any_size_comes_in_blocks_and_takes_little_memory(tmp_path: Path) -> None:
    """As a table that was written at once."""
    count, text = 4000, "y" * (256 << 10)
    indices = pa.array(np.zeros(count), pa.int32())
    long = pa.DictionaryArray.from_arrays(indices, [text]).cast(pa.string())
    lists = pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), pa.array([f"{i}" for i in range(count)]))
    path = write_arrow(tmp_path / "a.arrow", {"prompt": ["x"] * count, "text": long, "lists": lists})
    del long
    assert path.stat().st_size > 900 << 20
    with most_bytes(MOST):
        config = make_config(path)
        plan, rows = planned(config), 0
        for block in read_file(plan, 0, config):
            assert block.nbytes < BLOCK_BYTES + (2 << 20)
            assert block["lists"].to_pylist() == [[f"{rows + i}"] for i in range(len(block))]
            rows += len(block)
    assert rows == count
    path.unlink()


def test_a_dictionary_that_stands_for_much_comes_in_smaller_blocks(tmp_path: Path) -> None:
    count, texts = 1100, [letter * (512 << 10) for letter in "ab"]
    shared = pa.DictionaryArray.from_arrays(pa.array([i % 2 for i in range(count)], pa.int32()), pa.array(texts))
    offsets = pa.array(range(0, 4 * count + 1, 4), pa.int32())
    lists = pa.ListArray.from_arrays(
        offsets, pa.DictionaryArray.from_arrays(pa.array([0] * 4 * count, pa.int32()), texts)
    )
    path = write_arrow(tmp_path / "a.arrow", {"prompt": ["x"] * count, "context": shared, "lists": lists})
    assert path.stat().st_size < 4 << 20
    config, rows = make_config(path), 0
    with most_bytes(MOST):
        plan = planned(config)
        for block in read_file(plan, 0, config):
            assert block.nbytes < BLOCK_BYTES + (2 << 20)
            assert block["context"][0].as_py() == texts[rows % 2]
            rows += len(block)
    assert rows == count


def test_schemas_that_differ(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", {"prompt": ["x"], "w": pa.array([1], pa.int32())})
    write_stream(tmp_path / "b.arrow", pa.table({"prompt": ["y"], "w": [2**40], "new": [[("k", "v")]]}))
    table = read_table(tmp_path)
    assert table.drop_columns(BASE).to_pylist()[1]["w"] == 2**40
    write_arrow(tmp_path / "c.arrow", {"prompt": ["x"], "w": ["text"]})
    refuse(tmp_path, r"column 'w' is .* in .* and string in .*c\.arrow")


def test_files_that_are_none_of_arrows(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    old = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        old, pa.schema([("prompt", pa.string())]), options=pa.ipc.IpcWriteOptions(use_legacy_format=True)
    ):
        pass
    for content in (b"", b"ARROW1\0\0", b"not arrow at all, by any means", os.urandom(1000), bytes(old.getvalue())):
        path.write_bytes(content)
        refuse(path, r"input\.path: .*a\.arrow: cannot be read")


def test_every_pair_of_blocks_is_in_order(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "a.arrow", {"prompt": [str(i) for i in range(100)]}, batch_rows=7)
    config = make_config(path)
    blocks = [int(block["prompt"][0].as_py()) for block in read_file(make_plan(config), 0, config, 3)]
    assert all(first < second for first, second in itertools.pairwise(blocks))
