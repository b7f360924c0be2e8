"""Little on the disk and much in memory: such a row fails alone, or comes in smaller blocks. Memory is measured."""

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.job import InputConfig
from pipeline.input.expansion import Expansion
from pipeline.input.files import list_input
from pipeline.input.formats import iter_rows
from pipeline.input.ids import digest_id
from pipeline.input.input_plan import InputPlan, plan_input
from pipeline.input.line_reader import BLOCK_BYTES, LongLine, iter_lines
from pipeline.input.read import read_file
from pipeline.input.scan import scan_file
from pipeline.json_size import count_marks
from tests.support.input_helpers import make_config
from tests.support.measured_memory import most_bytes

MOST = 300 << 20
BOMB = 320 << 20


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
    monkeypatch.setattr("pipeline.input.line_reader.READ_BYTES", 4)
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


@pytest.mark.parametrize("type_", [pa.list_(pa.string()), pa.map_(pa.string(), pa.string())])
def test_a_list_of_texts_that_all_rows_share_comes_in_smaller_blocks(tmp_path: Path, type_: pa.DataType) -> None:
    """And a row that alone would be too much fails, its neighbours do not."""
    count, texts = 300, [letter * (512 << 10) for letter in "ab"]
    picks = [[row % 2] * (row % 4) if row % 7 else None for row in range(count)]
    picks[5] = [0] * 1000
    offsets = np.concatenate([[0], np.cumsum([len(pick or ()) for pick in picks])])
    values = pa.DictionaryArray.from_arrays(pa.array([i for pick in picks for i in pick or ()], pa.int32()), texts)
    mask = pa.array([pick is None for pick in picks])
    if pa.types.is_map(type_):
        keys = pa.array(["k"] * len(values)).dictionary_encode()
        column: pa.Array = pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, values, mask=mask)
    else:
        column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=mask)
    table = pa.table({"prompt": [f"row {row}" for row in range(count)], "tags": column})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    config, rows = make_config(tmp_path / "a.parquet"), 0
    with most_bytes(MOST):
        plan = planned(config)
        for block in read_file(plan, 0, config):
            assert block.nbytes < BLOCK_BYTES + (2 << 20)
            assert block.schema.field("tags").type == type_
            for offset, (code, tags) in enumerate(zip(block["error_code"], block["tags"], strict=True)):
                pick = picks[rows + offset]
                is_bomb = pick is not None and len(pick) == 1000
                assert code.as_py() == ("bad_line" if is_bomb else "")
                made = tags.as_py()
                found = made and [tag[1] if isinstance(tag, tuple) else tag for tag in made]
                assert found == (None if is_bomb or pick is None else [texts[i] for i in pick])
            rows += len(block)
    assert rows == count


@pytest.mark.slow
def test_json_that_is_much_in_memory_fails_alone(tmp_path: Path) -> None:
    """60 MiB of empty lists; 30 MiB of text with commas is none of it."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "one", "a": [' + b"[]," * (20 << 20) + b"[]]}\n")
        file.write(b'{"prompt": "' + b"a, " * (10 << 20) + b'"}\n')
        file.write(b'{"prompt": "two"}\n')
    config = make_config(path)
    with most_bytes(MOST):
        plan = planned(config)
        tables = list(read_file(plan, 0, config))
    codes = [code for table in tables for code in table["error_code"].to_pylist()]
    lengths = [len(prompt or "") for table in tables for prompt in table["prompt"].to_pylist()]
    assert codes == ["bad_line", "", ""]
    assert lengths == [0, 30 << 20, 3]
    assert "commas and brackets, more than the 500000 that" in tables[0]["error_message"][0].as_py()


@pytest.mark.slow
def test_rows_of_many_values_come_in_smaller_blocks(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "x", "a": [{"k": 0}] * 30_000}).encode() + b"\n"
    path = tmp_path / "a.jsonl"
    path.write_bytes(line * 60)
    assert 60 * 30_000 * sys.getsizeof({"k": 0}) > MOST, "as objects, all at once"
    config = make_config(path)
    with most_bytes(MOST):
        plan = planned(config)
        assert [len(block) for block in read_file(plan, 0, config)] == [6] * 10


def test_an_object_of_too_many_keys_is_no_row() -> None:
    line = json.dumps({"prompt": "x"} | {f"k{n}": n for n in range(10_000)}).encode()
    rows = list(iter_rows(io.BytesIO(line + b'\n{"prompt": "y"}\n'), "a", "jsonl", make_config("a"), 1 << 20))
    assert [(row.error_code, row.prompt) for row in rows] == [("bad_line", None), ("", "y")]
    assert "an object of 10001 keys, more than 10000" in rows[0].error_message


JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('\\",[{aé')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('\\",[')), inner),
)


@given(value=JSON, chunk=st.integers(1, 9))
def test_marks_are_counted_outside_of_text(value: object, chunk: int) -> None:
    def count(value: object) -> int:
        """Of the marks `[`, `{` and `,`."""
        if not isinstance(value, list | dict):
            return 0
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(len(value) - 1, 0) + sum(map(count, inner))

    with patch("pipeline.json_size.FEW_MARKS", 0), patch("pipeline.json_size.COUNTED_BYTES", chunk):
        assert count_marks(json.dumps(value, ensure_ascii=False).encode()) == count(value)


TEXT = "c" * 20_000
COUNT = 8_000
MOST_SHARED = 112 << 20
"""Of memory; all rows have 153 MiB of the text."""
BLOCK = BLOCK_BYTES + (2 << 20)


def shared(count: int, type_: pa.DataType) -> pa.Array:
    """TEXT in all rows, somewhere inside of each."""
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, shared(count, type_.storage_type))
    if pa.types.is_struct(type_):
        return pa.StructArray.from_arrays([shared(count, child.type) for child in type_], fields=list(type_))
    if pa.types.is_fixed_size_list(type_):
        values = shared(count * type_.list_size, type_.value_type)
        return pa.FixedSizeListArray.from_arrays(values, type_.list_size)
    if pa.types.is_list(type_):
        return pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), shared(count, type_.value_type))
    if pa.types.is_dictionary(type_):
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), shared(1, type_.value_type))
    one = pa.array([TEXT.encode()]).cast(type_)
    if not (pa.types.is_string_view(type_) or pa.types.is_binary_view(type_)):
        return one.take(pa.array(np.zeros(count, np.int64)))
    _, views, *texts = one.buffers()
    return pa.Array.from_buffers(type_, count, [None, pa.py_buffer(views.to_pybytes() * count), *texts])


def write(path: Path, column: pa.Array, name: str = "c") -> Path:
    table = pa.table({"prompt": ["x"] * len(column), name: column})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", write_statistics=False, write_batch_size=len(table))
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    assert path.stat().st_size < 1 << 20
    return path


ENCODED = pa.dictionary(pa.int32(), pa.string())
PARQUET = {
    "string_view": pa.string_view(),
    "binary_view": pa.binary_view(),
    "in_struct": pa.struct([("a", pa.string_view())]),
    "in_list": pa.list_(pa.string_view()),
    "fixed_list": pa.list_(pa.string(), 1),
    "json": pa.json_(pa.string()),
}
ARROW = {
    "string_view": pa.string_view(),
    "binary_view": pa.binary_view(),
    "in_struct": pa.struct([("a", pa.string_view())]),
    "in_list": pa.list_(pa.string_view()),
    "fixed_list": pa.list_(pa.dictionary(pa.int32(), pa.binary(len(TEXT))), 20),
}
CASES = [(format, name) for format, types in (("parquet", PARQUET), ("arrow", ARROW)) for name in types]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "name"), CASES)
def test_its_rows_come_in_small_blocks(tmp_path: Path, format: str, name: str) -> None:
    type_ = PARQUET[name] if format == "parquet" else ARROW[name]
    count = COUNT // (type_.list_size if pa.types.is_fixed_size_list(type_) else 1)
    config = make_config(write(tmp_path / f"a.{format}", shared(count, type_)))
    rows = 0
    with most_bytes(MOST_SHARED):
        plan = planned(config)
        for block in read_file(plan, 0, config):
            assert block.nbytes < BLOCK
            assert set(map(str, block["error_code"].to_pylist())) == {""}
            rows += len(block)
            last = block["c"][-1].as_py()
    while isinstance(last, dict | list):
        last = last["a"] if isinstance(last, dict) else last[0]
    assert (last if isinstance(last, str) else last.decode()) == TEXT
    assert rows == count


@pytest.mark.parametrize("type_", [pa.string(), pa.string_view(), ENCODED], ids=str)
@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_ids_that_all_rows_share(tmp_path: Path, type_: pa.DataType, format: str) -> None:
    """Refused or not, they are digested a few at a time."""
    if format == "arrow" and type_ == pa.string():
        pytest.skip("Arrow stores these as often as they are there")
    config = make_config(write(tmp_path / f"a.{format}", shared(COUNT, type_), "id"))
    with most_bytes(MOST_SHARED):
        _, digests = scan_file(list_input(config), 0, config)
    assert len(digests) == COUNT
    assert set(digests.tolist()) == {digest_id(TEXT)}


def test_values_under_nulls_count_too(tmp_path: Path) -> None:
    """A cast decodes them."""
    children = [shared(COUNT // 20, ENCODED) for _ in range(20)]
    names = [f"{child}" for child in range(20)]
    under = pa.StructArray.from_arrays(children, names, mask=pa.array([True] * (COUNT // 20)))
    config = make_config(write(tmp_path / "a.arrow", under))
    with most_bytes(MOST_SHARED):
        plan = planned(config)
        assert sum(block["c"].null_count for block in read_file(plan, 0, config)) == len(under)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_neighbours_of_large_texts_are_in_other_blocks(tmp_path: Path, format: str) -> None:
    """Each text counts by its own bytes, not by the average of the file."""
    texts = ["x"] * 20_480 + [f"{row:06d}" * 13_400 for row in range(700)] + ["x"] * 18_520
    path = tmp_path / f"a.{format}"
    table = pa.table({"prompt": texts})
    if format == "parquet":
        pq.write_table(table, path, compression="zstd", use_dictionary=False, write_statistics=False)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    config = make_config(path)
    plan = planned(config)
    row = 0
    for block in read_file(plan, 0, config):
        assert block.nbytes < BLOCK
        assert block["prompt"].to_pylist() == texts[row : row + len(block)]
        row += len(block)
    assert row == len(texts)


def test_made_ids_of_a_large_file_are_not_held(tmp_path: Path) -> None:
    count = 300_000
    pq.write_table(
        pa.table({"prompt": pa.array(["x"]).take(pa.array(np.zeros(count, np.int64)))}), tmp_path / "a.parquet"
    )
    config = make_config(tmp_path / "a.parquet")
    with most_bytes(32 << 20):
        _, digests = scan_file(list_input(config), 0, config, index_all=True)
    assert len(digests) == count
    assert digests[[0, -1]].tolist() == [digest_id("a.parquet:0"), digest_id(f"a.parquet:{count - 1}")]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_ids_of_many_samples_are_a_few_at_a_time(tmp_path: Path, format: str) -> None:
    """Each row has 40 of them."""
    config = make_config(write(tmp_path / f"a.{format}", shared(300, pa.string_view()), "id"))
    expansion = Expansion(samples=40)
    with most_bytes(MOST_SHARED):
        _, digests = scan_file(list_input(config, expansion=expansion), 0, config)
    assert digests.tolist() == [digest_id(f"{TEXT}-{sample}") for sample in range(40)] * 300


def test_ids_are_scanned_without_pandas(tmp_path: Path) -> None:
    """Which takes as long to import as the scan of 100,000 rows."""
    pq.write_table(pa.table({"id": [f"row-{row}" for row in range(9)], "prompt": ["x"] * 9}), tmp_path / "a.parquet")
    code = (
        "import sys; from pipeline.input.files import list_input; from pipeline.input.scan import scan_file\n"
        "from tests.support.input_helpers import make_config\n"
        f"config = make_config({str(tmp_path)!r}); scan_file(list_input(config), 0, config)\n"
        "print('pandas' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
