"""A value that many rows share is stored once, whatever its type: its rows come in small blocks. Memory is measured."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.input.expansion import Expansion
from pipeline.input.files import list_input
from pipeline.input.ids import digest_id
from pipeline.input.read import read_file
from pipeline.input.rows import BLOCK_BYTES
from pipeline.input.scan import scan_file
from tests.pipeline.input.test_bombs import planned
from tests.support.input_helpers import make_config
from tests.support.measured_memory import most_bytes

TEXT = "c" * 20_000
COUNT = 8_000
MOST = 112 << 20
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
    with most_bytes(MOST):
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
    with most_bytes(MOST):
        _, digests = scan_file(list_input(config), 0, config)
    assert len(digests) == COUNT
    assert set(digests.tolist()) == {digest_id(TEXT)}


def test_values_under_nulls_count_too(tmp_path: Path) -> None:
    """A cast decodes them."""
    children = [shared(COUNT // 20, ENCODED) for _ in range(20)]
    names = [f"{child}" for child in range(20)]
    under = pa.StructArray.from_arrays(children, names, mask=pa.array([True] * (COUNT // 20)))
    config = make_config(write(tmp_path / "a.arrow", under))
    with most_bytes(MOST):
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
    with most_bytes(MOST):
        _, digests = scan_file(list_input(config, expansion=expansion), 0, config)
    assert digests.tolist() == [digest_id(f"{TEXT}-{sample}") for sample in range(40)] * 300


@pytest.mark.process
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
