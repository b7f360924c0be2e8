"""The run folder: what counts as taken, what is cleared, and how a writer of an earlier session is kept out."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from pipeline.config import ConfigError
from pipeline.store.run_folder import RunFolder
from pipeline.store.write import write_whole


def test_an_empty_folder_is_free_and_a_file_is_not(tmp_path: Path) -> None:
    assert not RunFolder.open(str(tmp_path / "no")).exists()
    assert not RunFolder.open(str(tmp_path)).exists()
    (tmp_path / "file").write_text("")
    assert RunFolder.open(str(tmp_path)).exists()
    assert RunFolder.open(str(tmp_path / "file")).exists()


def test_state_is_replaced_whole_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path / "run"))
    assert folder.read_state() is None
    folder.write_state({"a": 1})
    folder.write_state({"a": 2})
    assert folder.read_state() == {"a": 2}
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.json"]
    (tmp_path / "run/run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
        folder.read_state()


def test_clearing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "data/status=ok").mkdir(parents=True)
    (tmp_path / "data/status=ok/x.parquet").write_text("x")
    (tmp_path / "run.json").write_text("{}")
    RunFolder.open(str(tmp_path)).clear()
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_what_no_run_wrote_is_named_before_it_is_cleared(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path))
    (tmp_path / "data/status=ok").mkdir(parents=True)
    (tmp_path / f"data/status=ok/part-{'0' * 12}-{'0' * 6}-000000.parquet").write_text("")
    assert folder.foreign_files() == ["data"]
    folder.write_text("run.json", '{"jobs": "of another program"}')
    assert folder.foreign_files() == ["data", "run.json"]
    folder.write_state({"fingerprint": {}, "books": {}, "sessions": []})
    assert folder.foreign_files() == []
    (tmp_path / "data/notes.csv").write_text("mine")
    (tmp_path / "notes.csv").write_text("stays")
    assert folder.foreign_files() == ["data/notes.csv"]


@pytest.mark.parametrize("left", [["run.json.tmp"], ["lease.json", "lease.json.tmp"]])
def test_a_run_that_was_killed_before_it_had_begun_leaves_a_free_folder(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_text("{")
    assert not RunFolder.open(str(tmp_path)).exists()


def test_two_attempts_at_one_file_do_not_tear_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray repeats a task of a process that it believes dead, and that is about to rename what it has written."""
    folder = RunFolder.open(str(tmp_path))
    folder.fence("s1")
    path, real = "data/status=ok/1.parquet", os.replace

    def meanwhile(source: str, target: str) -> None:
        monkeypatch.setattr(os, "replace", real)
        write_whole(folder.filesystem, folder.root, path, pa.table({"id": ["a", "b"]}), "s1")
        real(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_whole(folder.filesystem, folder.root, path, pa.table({"id": ["a", "b"]}), "s1")
    assert folder.count_rows("ok") == 2
    assert len(list(tmp_path.rglob("*parquet*"))) == 1


def test_a_repeated_task_replaces_its_file(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path))
    folder.fence("s1")
    for ids in (["a"], ["a", "b"]):
        write_whole(folder.filesystem, folder.root, "data/status=ok/1.parquet", pa.table({"id": ids}), "s1")
    assert (folder.count_rows("ok"), folder.count_rows("failed")) == (2, 0)
    assert not list((tmp_path / "checkpoint").rglob("*.parquet"))


def test_a_writer_that_outlived_its_session_adds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence falls at the worst moment: the file is whole and about to be renamed."""
    folder = RunFolder.open(str(tmp_path))
    folder.fence("s1")
    real = os.replace

    def late(source: str, target: str) -> None:
        monkeypatch.setattr(os, "replace", real)
        folder.fence("s2")
        real(source, target)

    monkeypatch.setattr(os, "replace", late)
    table = pa.table({"id": ["a"]})
    for _ in range(2):  # in mid-write, and a new write
        with pytest.raises(FileNotFoundError):
            write_whole(folder.filesystem, folder.root, "data/status=ok/1.parquet", table, "s1")
    assert not list((tmp_path / "data").rglob("*.parquet"))
    write_whole(folder.filesystem, folder.root, "data/status=ok/2.parquet", table, "s2")
    assert folder.count_rows("ok") == 1


def test_a_file_that_came_late_is_removed(tmp_path: Path) -> None:
    """As on an object store, where an upload cannot be called off."""
    folder = RunFolder.open(str(tmp_path))
    for name in ("part-s1-x-000000", "part-s1-x-000001", "part-s2-y-000000"):
        for status in ("ok", "failed"):
            path = tmp_path / f"data/status={status}/{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
    known = [str(path) for path in tmp_path.rglob("part-s1-x-000000.parquet")]
    folder.write_known("s2", known)
    assert folder.read_known() == ("s2", known)  # when the session that wrote it is killed, the next one does the same
    tmp_path.rename(tmp_path.with_name("moved"))
    moved = RunFolder.open(str(tmp_path.with_name("moved"))).read_known()
    assert moved == ("s2", [path.replace(str(tmp_path), str(tmp_path.with_name("moved"))) for path in known])
    tmp_path.with_name("moved").rename(tmp_path)
    late = folder.remove_late("s2", known)
    assert {path.rpartition("data/")[2] for path in late} == {
        "status=ok/part-s1-x-000001.parquet",
        "status=failed/part-s1-x-000001.parquet",
    }
    assert len(list(tmp_path.rglob("*.parquet"))) == 4


def test_a_write_that_fails_leaves_no_file_among_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pq.write_table

    def torn(table: pa.Table, where: str, **more: object) -> None:
        real(table, where, **more)
        Path(where).write_bytes(Path(where).read_bytes()[:20])
        raise OSError(28, "No space left on device")

    RunFolder.open(str(tmp_path)).fence("s1")
    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="No space"):
        write_whole(pafs.LocalFileSystem(), str(tmp_path), "data/status=ok/1.parquet", pa.table({"id": ["a"]}), "s1")
    assert not list((tmp_path / "data").rglob("*.parquet"))
