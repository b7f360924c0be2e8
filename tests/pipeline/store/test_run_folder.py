"""The run folder: what counts as taken, what is cleared, and how a writer of an earlier session is kept out."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError
from pipeline.store.row_writer import write_whole
from pipeline.store.run_folder import RunFolder


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
    for torn in (b"", b"{", b"[1]", b'{"a": "\xff'):
        (tmp_path / "run/run.json").write_bytes(torn)
        with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
            folder.read_state()


def test_clearing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "data/status=ok").mkdir(parents=True)
    (tmp_path / "data/status=ok/x.parquet").write_text("x")
    (tmp_path / "run.json").write_text("{}")
    RunFolder.open(str(tmp_path)).clear("s1", lambda: None)
    RunFolder.open(str(tmp_path)).release("s1")
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"precious.txt", "run.json"}, "the second knows whose late files may come, until it is replaced"


def test_who_lost_the_folder_while_it_clears_it_deletes_no_more(tmp_path: Path) -> None:
    """Asked before each step; and what is under way on a disk lies where no other session looks for it."""
    folder = RunFolder.open(str(tmp_path))
    for name in ("data/status=ok/x.parquet", "metrics/x.parquet", "run.json"):
        folder.write_text(name, "old")
    steps = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            folder.write_text("data/status=ok/new.parquet", "of the successor")
            raise RuntimeError("another run has taken over")

    with pytest.raises(RuntimeError, match="taken over"):
        folder.clear("s1", check)
    assert [path.name for path in (tmp_path / "data").rglob("*.parquet")] == ["new.parquet"]
    assert (tmp_path / "metrics/x.parquet").exists()
    assert (tmp_path / "run.json").exists()


def test_a_store_is_cleared_of_nothing_that_comes_later(tmp_path: Path) -> None:
    """There nothing can be moved aside; a session that stood still behind its look at the lease has a successor."""
    store = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    folder = RunFolder(store, "run", "store://run")

    def put(name: str) -> None:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).touch()

    for name in ("data/status=ok/part-s0-x-0.parquet", "metrics/batches-s0-0.parquet", "report.json", "run.json"):
        put(name)
    of_successor: list[str] = []

    def successor_writes() -> None:
        """At each look at the lease, which is then gone as soon as it was seen."""
        of_successor.append(f"data/status=ok/part-s2-x-{len(of_successor)}.parquet")
        put(of_successor[-1])

    folder.clear("s1", successor_writes)
    left = {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert of_successor
    assert left == {*of_successor, "run.json"}


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


@pytest.mark.parametrize(
    "left", [["run.json.tmp"], ["lease.json", "lease.json.tmp"], ["run.json.1f.tmp", "lease.json.2e.gone"]]
)
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


def test_a_file_that_came_late_is_found(tmp_path: Path) -> None:
    """As on an object store, where an upload cannot be called off. One of a later session is nobody's to judge."""
    folder = RunFolder.open(str(tmp_path))
    for name in ("part-s1-x-000000", "part-s1-x-000001", "part-s2-y-000000", "rest-s3-000000", "part-s4-z-000000"):
        for status in ("ok", "failed"):
            folder.write_text(f"data/status={status}/{name}.parquet", "")
    known = [f"data/status={status}/part-s1-x-000000.parquet" for status in ("ok", "failed")]
    sessions = [{"id": session} for session in ("s1", "s3", "s2")]
    state: Any = {"state": "running", "sessions": sessions, "former": [], "known": known}

    def names(paths: list[str]) -> set[str]:
        assert len(paths) == 2 * len({Path(path).stem for path in paths})
        return {Path(path).stem for path in paths}

    assert names(folder.run_files(state)) == {"part-s1-x-000000", "part-s2-y-000000"}
    assert names(folder.late_files(state)) == {"part-s1-x-000001", "rest-s3-000000"}
    assert names(folder.unattributed_files(state)) == {"part-s4-z-000000"}
    finished = state | {"state": "finished", "files": dict.fromkeys(known)}
    assert names(folder.run_files(finished)) == {"part-s1-x-000000"}
    assert names(folder.late_files(finished)) == {"part-s1-x-000001", "rest-s3-000000", "part-s2-y-000000"}


def test_known_files_are_looked_up_and_not_searched(tmp_path: Path) -> None:
    """A run may have ten thousand of them, and each resume and each end looks through all."""
    num_compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    names = [f"data/status=ok/part-s1-x-{number:06d}.parquet" for number in range(1000)]
    (tmp_path / "data/status=ok").mkdir(parents=True)
    for name in names:
        (tmp_path / name).touch()
    folder = RunFolder.open(str(tmp_path))
    known = dict.fromkeys(map(Name, names[1:]))
    state: Any = {"state": "finished", "sessions": [{"id": "s1"}], "former": [], "files": known}
    assert folder.late_files(state) == [folder.path(names[0])]
    assert 999 <= num_compared < 5000


def test_what_a_session_leaves_is_its_own(tmp_path: Path) -> None:
    """One that stood still ends when its successor writes: the staging folder of that one stays."""
    folder = RunFolder.open(str(tmp_path))
    folder.fence("s2")
    folder.write_text("checkpoint/retry-s1/x", "")
    folder.release("s1")
    write_whole(folder.filesystem, folder.root, "data/status=ok/1.parquet", pa.table({"id": ["a"]}), "s2")
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["staging"]
    folder.release("s2")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("stands_at", range(7))
def test_one_that_stood_still_takes_nothing_of_its_successor(tmp_path: Path, stands_at: int) -> None:
    """At each look at the lease of `--overwrite`: another session takes over behind it, and has written a row."""
    folder, table = RunFolder.open(str(tmp_path)), pa.table({"id": ["a"]})
    folder.fence("s0")
    folder.write_text("run.json", "of s0")
    write_whole(folder.filesystem, folder.root, "data/status=ok/part-s0-1.parquet", table, "s0")
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > stands_at + 1:
            raise RuntimeError("taken over")
        if looks == stands_at + 1:
            folder.fence("s2")
            folder.write_text("run.json", "of s2")
            write_whole(folder.filesystem, folder.root, "data/status=ok/part-s2-1.parquet", table, "s2")

    def overwrite() -> None:
        folder.fence("s1", check)
        folder.clear("s1", check)
        folder.write_text("run.json", "of s1", check)

    with pytest.raises(RuntimeError, match="taken over"):
        overwrite()
    assert folder.read_text("run.json") == "of s2"
    write_whole(folder.filesystem, folder.root, "data/status=ok/part-s2-2.parquet", table, "s2")
    assert len(list(tmp_path.glob("data/status=ok/part-s2-*"))) == 2


def test_two_that_replace_a_file_at_once_each_have_their_own(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path))
    with folder.replacing("run.json") as first:
        with folder.replacing("run.json") as second:
            second.write(b"second")
        first.write(b"first")
    assert folder.read_text("run.json") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    with pytest.raises(ZeroDivisionError), folder.replacing("run.json") as file:
        file.write(b"half of it" * (1 // 0))
    assert folder.read_text("run.json") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_a_killed_process_left_beside_a_file_is_taken_away(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path))
    left = ["run.json.0a1b2c3d.tmp", "report.json.0a1b2c3d.tmp", f"lease.json.{'0' * 12}.gone", "run.json.tmp"]
    for name in [*left, "run.json"]:
        (tmp_path / name).write_text("{")
    assert folder.unexpected_files() == []
    folder.fence("s1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "run.json"]


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
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
