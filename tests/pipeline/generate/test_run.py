"""Which files and sessions a run counts as its own: the real code of a session, without decoding."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from tests.support.sessions import (
    DONE,
    NOTHING_TO_DO,
    ROWS,
    Driver,
    Folder,
    Session,
    finished,
    rows_of,
    run_of,
    sessions,
)


@pytest.fixture(autouse=True)
def _sessions() -> Iterator[None]:
    with sessions():
        yield


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def run(root: Path, mode: str, streams: Callable[[], None] = lambda: None, expected: str = DONE) -> RunState:
    """One session to its end; `streams` is called before it writes its first row. Returns `run.json`."""

    class Watched(Session):
        def stream(self, left: list[str], state: RunState) -> None:
            streams()
            super().stream(left, state)

    driver = Driver(Watched(Folder.open(str(root)), mode))
    driver.go(100_000)
    assert driver.outcome == expected
    state = RunFolder.open(str(root)).read_state()
    assert state is not None
    return state


def check_rows(root: Path, state: RunState) -> None:
    """Every row is there once, made by this run."""
    folder = RunFolder.open(str(root))
    assert sorted(rows_of(folder, folder.all_data_files())) == [(row, run_of(state)) for row in ROWS]


def keep_files(root: Path, aside: Path) -> Callable[[], None]:
    """Keeps the present data files; the function that is returned puts them back, as late uploads do."""
    shutil.copytree(root / "data", aside)
    return lambda: (shutil.copytree(aside, root / "data", dirs_exist_ok=True), None)[1]


def test_a_run_and_a_look_at_it(root: Path) -> None:
    state = run(root, "resume")
    check_rows(root, state)
    assert "known" not in state
    assert run(root, "resume", expected=NOTHING_TO_DO) == state


def test_files_of_the_overwritten_run_that_come_before_the_new_one_lists_its_own_do_not_count(
    root: Path, tmp_path: Path
) -> None:
    """An upload may be accepted by a store before `--overwrite` clears the folder, and appear afterwards."""
    run(root, "resume")
    upload = keep_files(root, tmp_path / "aside")
    clear = RunFolder.clear

    def late(folder: RunFolder, session: str, check: Callable[[], None]) -> None:
        clear(folder, session, check)
        upload()

    with patch.object(RunFolder, "clear", late):
        check_rows(root, run(root, "overwrite"))


def test_files_of_the_overwritten_run_that_come_while_the_new_one_works_are_removed(root: Path, tmp_path: Path) -> None:
    run(root, "resume")
    upload = keep_files(root, tmp_path / "aside")
    check_rows(root, run(root, "overwrite", streams=upload))


def test_files_of_runs_before_the_overwritten_one_are_removed(root: Path, tmp_path: Path) -> None:
    first = run(root, "resume")
    upload = keep_files(root, tmp_path / "aside")
    second = run(root, "overwrite")
    third = run(root, "overwrite", streams=upload)
    assert {run_of(first), run_of(second)} <= set(third["former"])
    check_rows(root, third)


def test_files_of_an_earlier_session_of_the_same_run_count(root: Path) -> None:
    """Those that it wrote before it died; what it adds once its successor has listed them does not."""
    run(root, "resume")
    (lost,) = sorted((root / "data/status=ok").iterdir())[:1]
    content = lost.read_bytes()
    lost.unlink()
    state = run(root, "resume", streams=lambda: (lost.write_bytes(content), None)[1])
    assert len(state["sessions"]) == 2
    assert len({name.split("-")[1] for name in state["files"]}) == 2
    check_rows(root, state)


def test_the_session_whose_lease_was_taken_over_is_remembered(root: Path, tmp_path: Path) -> None:
    """It may have died before it wrote its own name into `run.json`."""
    root.mkdir()
    lease = {"session": "f" * 12, "host": "elsewhere", "machine": "another boot", "pid": 1, "beat": 3}
    (root / "lease.json").write_text(json.dumps(lease))
    name = root / f"data/status=ok/part-{'f' * 12}-0a0b0c-000000-000.parquet"

    def upload() -> None:
        name.parent.mkdir(parents=True)
        name.write_bytes(b"of a session that nobody knows otherwise")

    state = run(root, "overwrite", streams=upload)
    assert state["former"] == ["f" * 12]
    check_rows(root, state)


def test_a_writer_of_the_overwritten_run_adds_nothing_to_the_new_one(root: Path) -> None:
    """On a disk the fence falls before the folder is cleared: what it stages is gone, and so is its way in."""
    folder = RunFolder.open(str(root))
    folder.fence("a" * 12)
    folder.write_state({"version": "1", "state": "running", "former": [], "sessions": [{"id": "a" * 12}], "known": [],
                        "fingerprint": {}, "books": {}})  # type: ignore[typeddict-item]  # fmt: skip
    table = finished(ROWS, set(), "a" * 12).drop_columns(["status"])
    clear = RunFolder.clear

    def late(folder: RunFolder, session: str, check: Callable[[], None]) -> None:
        with pytest.raises(FileNotFoundError):
            RunSink(folder.filesystem, folder.root, "a" * 12, table.schema, None).write(
                finished(ROWS, set(), "a" * 12), "000000-000"
            )
        clear(folder, session, check)

    with patch.object(RunFolder, "clear", late):
        check_rows(root, run(root, "overwrite"))
