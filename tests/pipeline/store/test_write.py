"""Finished rows become files, each row in one, on a real Ray Data pipeline."""

import errno
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.data import TaskPoolStrategy
from ray.data._internal.execution.interfaces.task_context import TaskContext

from pipeline.cluster.pool import STAGE_CPUS
from pipeline.cluster.ray_internals import number_of_task
from pipeline.generate.data_pipeline import MAX_FILES, rows_per_file
from pipeline.generate.stopping import RunStopped, reason_to_stop
from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.stages.attempt_tracker import start_attempt_tracker
from pipeline.store import row_writer as sink_module
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import KNOWN_NAMES, RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_is_up")]

SESSION = "0" * 12


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
    """Ids by file, in the order of the names; of one attempt at each task."""
    opened = RunFolder.open(str(folder))
    paths = [Path(path) for path in opened.one_attempt_each(opened.all_data_files()) if f"/status={status}/" in path]
    return {path.name: pq.ParquetFile(path).read()["id"].to_pylist() for path in paths}


def finished(numbers: pa.Table) -> pa.Table:
    """Every third row has failed."""
    rows = table([f"row {n}" for n in numbers["id"].to_pylist()])
    statuses = ["ok" if n % 3 else "failed" for n in numbers["id"].to_pylist()]
    return rows.set_column(rows.num_columns - 1, STATUS, pa.array(statuses, pa.string()))


def write(rows: ray.data.Dataset, sink: RunSink, finish: Callable[[pa.Table], pa.Table] = finished) -> None:
    light: dict[str, Any] = {"num_cpus": STAGE_CPUS, "batch_format": "pyarrow", "compute": TaskPoolStrategy(size=2)}
    for _ in rows.map_batches(
        sink, fn_kwargs={"finish": finish, "number_of_task": number_of_task}, batch_size=sink.rows_per_file, **light
    ).iter_batches():
        pytest.fail("a row came out")


@pytest.mark.parametrize(("rows_per_file", "blocks_per_file"), [pytest.param(None, 1, marks=pytest.mark.slow), (30, 3)])
def test_every_row_is_in_one_file(tmp_path: Path, rows_per_file: int | None, blocks_per_file: int) -> None:
    write(ray.data.range(100, override_num_blocks=10), sink_into(tmp_path, rows_per_file))
    ok, failed = files(tmp_path), files(tmp_path, "failed")
    assert len(ok) == len(failed) == -(-10 // blocks_per_file)
    assert ok.keys() == failed.keys()
    assert all(KNOWN_NAMES.fullmatch(f"data/status=ok/{name}") for name in ok)
    assert sorted(chain(*failed.values())) == sorted(f"row {n}" for n in range(0, 100, 3))
    assert sorted(chain(*ok.values())) == sorted(f"row {n}" for n in range(100) if n % 3)


@pytest.mark.filterwarnings("ignore:The maximum number of concurrent tasks for")
def test_a_task_with_several_batches_makes_a_file_of_each(tmp_path: Path) -> None:
    """Where Ray hands it more rows at once than asked for; the ids may be the same."""
    sink = sink_into(tmp_path, rows_per_file=6)
    write(ray.data.range(30, override_num_blocks=1), sink)
    ok = files(tmp_path)
    assert [len(ids) for ids in ok.values()] == [4] * 5
    assert all(KNOWN_NAMES.fullmatch(f"data/status=ok/{name}") for name in ok)
    assert sorted(chain(*ok.values())) == sorted(f"row {n}" for n in range(30) if n % 3)


def test_a_task_that_is_repeated_counts_once(tmp_path: Path) -> None:
    """A process that dies when its file is there and nobody knows of it."""
    died = tmp_path / "died"

    class Dying(RunSink):
        def write(self, table: pa.Table, name: str) -> None:
            super().write(table, name)
            if "row 10" in table["id"].to_pylist() and not died.exists():
                died.touch()
                os._exit(1)

    opened = sink_into(tmp_path / "run")
    sink = Dying(opened.filesystem, opened.root, SESSION, OUTPUT_SCHEMA, None)
    write(ray.data.range(30, override_num_blocks=3), sink)
    assert died.exists()
    ok = files(tmp_path / "run")
    assert len(ok) == 3
    assert len(list((tmp_path / "run/data/status=ok").iterdir())) == 4
    assert sorted(chain(*ok.values())) == sorted(f"row {n}" for n in range(30) if n % 3)


def test_many_rows_are_finished_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "FINISHED_AT_ONCE", 4)
    sizes: list[int] = []

    def finish(numbers: pa.Table) -> pa.Table:
        sizes.append(numbers.num_rows)
        return finished(numbers)

    with TaskContext.current(TaskContext(0, "here")):
        sink = sink_into(tmp_path)
        assert sink(pa.table({"id": pa.array(range(10))}), finish, number_of_task).num_rows == 0
        assert sink(pa.table({"id": pa.array([], pa.int64())}), finish, number_of_task).num_rows == 0
    assert sizes == [4, 4, 2, 0]
    assert [len(ids) for ids in files(tmp_path).values()] == [6]


class Full(RunSink):
    def write(self, table: pa.Table, name: str) -> None:
        with patch.object(sink_module, "write_whole", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            super().write(table, name)


def finish_on_a_full_disk(numbers: pa.Table) -> pa.Table:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("kind", "finish", "is_told"), [(Full, finished, True), (RunSink, finish_on_a_full_disk, False)]
)
def test_a_full_disk_under_the_rows_is_told_from_one_elsewhere(
    tmp_path: Path, kind: type[RunSink], finish: Callable[[pa.Table], pa.Table], is_told: bool
) -> None:
    opened = sink_into(tmp_path)
    attempts = start_attempt_tracker(1, 1, 0.0, 0)
    with pytest.raises(Exception, match="No space left") as caught:
        write(ray.data.range(10), kind(opened.filesystem, opened.root, SESSION, OUTPUT_SCHEMA, None), finish)
    reason = reason_to_stop(caught.value, attempts, "out/run")
    assert isinstance(reason, RunStopped) == is_told
    assert ("output.path: out/run: no space left" in str(reason)) == is_told


@given(left=st.integers(1, 10**9), window_rows=st.integers(1, 4096))
def test_files_hold_whole_windows_and_are_not_more_than_allowed(left: int, window_rows: int) -> None:
    rows = rows_per_file(left, window_rows)
    assert rows is None or rows % window_rows == 0, "else each file's last window would be cut in two"
    assert left <= MAX_FILES * (rows or window_rows)
