"""Files are seen whole or not at all, on stores that show them early too, killed in every step; and on the disk."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.generate.check_paths import check_output
from pipeline.schema import STATUS
from pipeline.store.atomic_files import check_writable, is_whole_on_close
from pipeline.store.lease import Lease
from pipeline.store.row_writer import RunSink, write_whole
from pipeline.store.run_folder import RunFolder
from tests.support.early_store import EarlyStore, Killed

SCHEMA = pa.schema([("id", pa.string())])


def early(root: Path, replaces: bool = True) -> tuple[EarlyStore, RunFolder]:
    (root / "run").mkdir(parents=True)
    store = EarlyStore(root, replaces)
    return store, RunFolder(pafs.PyFileSystem(store), "run", "early://run")


def state_of(phase: str) -> Any:
    return {"version": "1.0.0", "state": phase, "fingerprint": {}, "books": {}, "sessions": []}


def work(folder: RunFolder, session: str, begun: Callable[[], None] = lambda: None) -> None:
    """What a session writes, in small; `begun` is told once there is a `run.json`."""
    with Lease(folder, session, lambda _: None):
        folder.write_state(state_of("running"))
        begun()
        folder.fence(session)
        for number in range(2):
            path = f"data/status=ok/part-{session}-x-{number}.parquet"
            write_whole(folder.filesystem, folder.root, path, pa.table({"id": [f"{session} {number}"]}), session)
        folder.write_state(state_of("finished"))
        folder.release(session)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.lease.TAKEOVER_WAIT_S", 0)
    monkeypatch.setattr("pipeline.store.lease.LEASE_S", 0.01)
    monkeypatch.setattr("pipeline.store.lease.RETRY_WAITS_S", (0.0,))


def resumed(folder: RunFolder) -> Any:
    """The state that `--resume` goes on with."""
    output = {"path": folder.shown, "if_exists": "resume"}
    config = build_config(JobConfig, {"model": {"source": "m"}, "input": {"path": "in"}, "output": output})
    return check_output(folder, config)


@pytest.mark.parametrize("replaces", [True, False], ids=["Azure", "HDFS"])
def test_killed_in_every_step_no_half_file_is_seen(tmp_path: Path, replaces: bool) -> None:
    """From the first `run.json` on there is one, or what it was to be, and `--resume` finds it."""
    store, folder = early(tmp_path / "whole", replaces)
    begins: list[int] = []
    work(folder, "s1", lambda: begins.append(store.num_steps))
    num_steps, phases = store.num_steps, set()
    assert num_steps > 15
    for at in range(1, num_steps + 1):
        store, folder = early(tmp_path / str(at), replaces)
        store.dies_at = at
        with pytest.raises(Killed):
            work(folder, "s1")
        store.dies_at = None
        for path in (tmp_path / str(at) / "run/data").rglob("*"):
            assert path.is_dir() or pq.read_metadata(path).num_rows == 1, f"killed in step {at}"
        # else `--resume` would find that another run has worked here meanwhile, again and again
        assert folder.read_state() == resumed(folder), f"killed in step {at}"
        if at > begins[0]:
            for state in (folder.read_state(), resumed(folder)):
                assert state in (state_of("running"), state_of("finished")), f"killed in step {at}"
            phases.add((state["state"], (tmp_path / str(at) / "run/run.json").exists()))
        folder.fence("s2")
        assert at <= begins[0] or (tmp_path / str(at) / "run/run.json").exists(), "the fence took it for left over"
        work(folder, "s2")
        assert folder.read_state() == state_of("finished")
        left = {path.name for path in (tmp_path / str(at) / "run").iterdir()}
        assert left == {"data", "run.json"}, f"killed in step {at}"
    assert phases == {("running", True), ("finished", True)} | (set() if replaces else {("finished", False)})


def test_a_store_that_cannot_rename_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, folder = early(tmp_path)
    check_writable(folder.filesystem, folder.root, folder.shown)

    def none(source: str, target: str) -> None:
        raise NotImplementedError("no move")

    monkeypatch.setattr(store, "move", none)
    with pytest.raises(ConfigError, match=r"output\.path: early://run: a file system \(py::early\) on which files are"):
        check_writable(folder.filesystem, folder.root, folder.shown)
    assert list((tmp_path / "run").iterdir()) == []


def test_which_stores_need_no_renaming(tmp_path: Path) -> None:
    assert is_whole_on_close(pafs.S3FileSystem(anonymous=True, region="eu-west-1"))
    assert not is_whole_on_close(pafs.LocalFileSystem())
    assert not is_whole_on_close(early(tmp_path)[1].filesystem)


def sink_on(root: Path) -> RunSink:
    folder = RunFolder.open(str(root))
    folder.fence("s1")
    return RunSink(folder.filesystem, folder.root, "s1", SCHEMA, None, execution_id="x")


def rows(**by_status: str) -> pa.Table:
    pairs = [(id, status) for status, ids in by_status.items() for id in ids]
    return pa.table({"id": [id for id, _ in pairs], STATUS: [status for _, status in pairs]})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"ok": "ab"}, {"ok": "abc"}),
        ({"failed": "c"}, {"failed": "abc"}),
        ({"ok": "a"}, {"ok": "bc", "failed": "a"}),
        ({"ok": "a", "failed": "b"}, {"ok": "bc", "failed": "a"}),
        ({"failed": "a"}, {"ok": "ab", "failed": "c"}),
        ({"ok": "a", "failed": "bc"}, {"ok": "bc", "failed": "a"}),
    ],
)
def test_of_a_repeated_task_one_whole_attempt_counts(
    tmp_path: Path, first: dict[str, str], second: dict[str, str]
) -> None:
    """Whatever the first had written when it was killed; a row may have changed sides."""
    sink, folder = sink_on(tmp_path), RunFolder.open(str(tmp_path))
    sink.write(rows(ok="d"), "000001-000-z")
    sink.write(rows(**first), "000000-000-b")
    before = {path: path.read_bytes() for path in tmp_path.glob("data/*/*.parquet")}
    for part in ({status: second[status]} for status in ("failed", "ok") if status in second):
        sink.write(rows(**part), f"000000-{part.keys() >= {'ok'}:03d}-a")
    assert before == {path: path.read_bytes() for path in before}, "another session may count the file by now"
    kept = folder.one_attempt_each(folder.all_data_files())
    assert sorted(id for path in kept for id in pq.ParquetFile(path).read()["id"].to_pylist()) == list("abcd")
    assert len({path.rpartition("-")[2] for path in kept}) == 2, "of each task"


def test_a_writer_that_outlived_its_session_deletes_nothing(tmp_path: Path) -> None:
    sink = sink_on(tmp_path)
    sink.write(rows(ok="a", failed="b"), "000000-000")
    RunFolder.open(str(tmp_path)).fence("s2")
    with pytest.raises(FileNotFoundError):
        sink.write(rows(ok="abc"), "000000-000")
    assert len(list(tmp_path.glob("data/*/*.parquet"))) == 2


def test_a_writer_on_a_store_asks_for_the_lease_of_its_session(tmp_path: Path) -> None:
    """Nothing else stops it there: there is no fence."""
    _, folder = early(tmp_path)
    sink = RunSink(folder.filesystem, "run", "s1", SCHEMA, None, execution_id="x")
    with Lease(folder, "s1", print):
        folder.fence("s1")
        sink.write(rows(ok="a"), "0")
    with pytest.raises(FileNotFoundError, match="session s1 holds this folder no more"):
        sink.write(rows(ok="b"), "1")
    with Lease(folder, "s2", print), pytest.raises(FileNotFoundError, match="session s1 holds this folder no more"):
        sink.write(rows(ok="b"), "1")
    assert [path.name for path in tmp_path.glob("run/data/*/*")] == ["part-s1-x-0.parquet"]
    assert list(tmp_path.glob("run/checkpoint/staging/*/*")) == []


def test_names_are_on_the_disk_when_a_write_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes before the name, then the name; folders that are new, from the top; and what was deleted."""
    sink = sink_on(tmp_path)
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def name(path: str) -> str:
        return Path(path).relative_to(tmp_path).as_posix() if "staging" not in path else "staged"

    monkeypatch.setattr(
        os, "fsync", lambda file: (steps.append(name(os.readlink(f"/proc/self/fd/{file}"))), fsync(file))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (steps.append("rename"), replace(*names)))
    sink.write(rows(ok="a"), "000000-000")
    assert steps == [".", "data", "staged", "rename", "data/status=ok"]
    steps.clear()
    sink.write(rows(failed="a"), "000001-000")
    assert steps == ["data", "staged", "rename", "data/status=failed"]
    steps.clear()
    RunFolder.open(str(tmp_path)).remove("data/status=failed/part-s1-x-000001-000.parquet")
    assert steps == ["data/status=failed"]


def test_the_sink_needs_few_requests(tmp_path: Path) -> None:
    store, folder = early(tmp_path)
    asked: list[Any] = []
    store.get_file_info = lambda paths: (asked.append(paths), EarlyStore.get_file_info(store, paths))[1]  # type: ignore[method-assign]
    with Lease(folder, "s1", print):
        folder.fence("s1")
        asked.clear()
        steps = store.num_steps
        RunSink(folder.filesystem, "run", "s1", SCHEMA, None, execution_id="x").write(rows(ok="a"), "0")
        assert asked == []
        assert store.num_steps - steps == 3  # opened, written, renamed
