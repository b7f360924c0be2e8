"""Finished rows become files, each row in one, on a real Ray Data pipeline."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.data import TaskPoolStrategy

from pipeline import run
from pipeline.cluster import STAGE_CPUS, start_ray
from pipeline.run_folder import KNOWN_NAMES, RunFolder
from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.sink import RunSink

SESSION = "0" * 12


@pytest.fixture(scope="module", autouse=True)
def ray_stays_up() -> Iterator[None]:
    start_ray()
    yield
    ray.shutdown()


def sink_into(folder: Path, rows_per_file: int | None = None) -> RunSink:
    opened = RunFolder.open(str(folder))
    opened.fence(SESSION)
    return RunSink(opened.filesystem, opened.root, SESSION, OUTPUT_SCHEMA, rows_per_file)


def table(ids: list[str], status: str = "ok") -> pa.Table:
    columns = [pa.nulls(len(ids), field.type) for field in OUTPUT_SCHEMA]
    rows = pa.Table.from_arrays(columns, schema=OUTPUT_SCHEMA)
    rows = rows.set_column(rows.schema.get_field_index("id"), "id", pa.array(ids, pa.string()))
    return rows.append_column(STATUS, pa.array([status] * len(ids), pa.string()))


def files(folder: Path, status: str = "ok") -> dict[str, list[str]]:
    """Ids by file, in the order of the names."""
    paths = sorted((folder / f"data/status={status}").glob("*"))
    return {path.name: pq.ParquetFile(path).read()["id"].to_pylist() for path in paths}


def finished(numbers: pa.Table) -> pa.Table:
    """Every third row has failed."""
    ids = [f"row {n}" for n in numbers["id"].to_pylist()]
    rows = table(ids)
    failed = pc.equal(pc.cast(numbers["id"], pa.int64()), pc.multiply(pc.divide(numbers["id"], 3), 3))
    return rows.set_column(rows.num_columns - 1, STATUS, pc.if_else(failed, "failed", "ok"))


@pytest.mark.parametrize(("rows_per_file", "blocks_per_file"), [(None, 1), (30, 3)])
def test_every_row_is_in_one_file(tmp_path: Path, rows_per_file: int | None, blocks_per_file: int) -> None:
    light: dict[str, Any] = {"num_cpus": STAGE_CPUS, "batch_format": "pyarrow", "compute": TaskPoolStrategy(size=2)}
    rows = ray.data.range(100, override_num_blocks=10).map_batches(finished, batch_size=None, **light)
    for _ in rows.map_batches(sink_into(tmp_path, rows_per_file), batch_size=rows_per_file, **light).iter_batches():
        pytest.fail("a row came out")
    ok, failed = files(tmp_path), files(tmp_path, "failed")
    assert len(ok) == len(failed) == -(-10 // blocks_per_file)
    assert ok.keys() == failed.keys()
    assert all(KNOWN_NAMES.fullmatch(f"data/status=ok/{name}") for name in ok)
    assert sorted(chain(*failed.values())) == sorted(f"row {n}" for n in range(0, 100, 3))
    assert sorted(chain(*ok.values())) == sorted(f"row {n}" for n in range(100) if n % 3)


def test_a_task_that_is_repeated_replaces_its_own_file(tmp_path: Path) -> None:
    sink = sink_into(tmp_path)
    for number, ids in ((0, ["a", "b"]), (1, ["c"]), (0, ["a", "b"])):
        sink.write(table(ids), number)
    assert list(files(tmp_path).values()) == [["a", "b"], ["c"]]


def test_a_row_that_changes_sides_is_not_there_twice(tmp_path: Path) -> None:
    sink = sink_into(tmp_path)
    sink.write(table(["a", "b"]), 0)
    sink.write(table(["a", "b"], "failed"), 0)
    assert files(tmp_path) == {}
    assert list(files(tmp_path, "failed").values()) == [["a", "b"]]


def test_a_task_with_several_batches_makes_a_file_of_each(tmp_path: Path) -> None:
    """Where Ray hands it more rows at once than asked for."""
    sink = sink_into(tmp_path)
    sink.write(table(["a", "bc"]), 7)
    sink.write(table(["ab", "c"]), 7)
    assert sorted(files(tmp_path).values()) == [["a", "bc"], ["ab", "c"]]


@given(left=st.integers(1, 10**9), window_rows=st.integers(1, 4096))
def test_no_corpus_makes_more_files_than_allowed(left: int, window_rows: int) -> None:
    folder: Any = SimpleNamespace(filesystem=None, root="")
    spec: Any = SimpleNamespace(window_rows=window_rows, plan=SimpleNamespace(extra_schema=pa.schema([])))
    rows = run._make_sink(spec, folder, SESSION, left, "data").rows_per_file
    assert rows is None or rows % window_rows == 0, "else each file's last window would be cut in two"
    assert left <= run.MAX_FILES * (rows or window_rows)
