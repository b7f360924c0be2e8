"""The exchange of rows at the end of a retry, with a real SIGKILL before each of its steps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.store.retry_commit import finish_commit
from pipeline.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
NUM_STEPS = 6  # run.json, three moves, two deletions

# Commits in a process of its own and dies before step `at`; steps are what changes the folder.
CHILD = """
import os, signal, sys
from pipeline.store.retry_commit import finish_commit, start_commit
from pipeline.store.run_folder import RunFolder

root, at, count = sys.argv[1], int(sys.argv[2]), 0

def dying(real):
    def step(*arguments):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)
    return step

for name in ("move", "remove", "write_text"):
    setattr(RunFolder, name, dying(getattr(RunFolder, name)))
folder = RunFolder.open(root)
state = folder.read_state()
place = "checkpoint/retry-x"
names = ["status=ok/new.parquet", "status=failed/new.parquet", "status=failed/rest.parquet"]
start_commit(folder, state, [[f"{place}/{n}", f"data/{n}"] for n in names],
             ["data/status=failed/1.parquet", "data/status=failed/2.parquet"])
finish_commit(folder, state, print)
print(count)
"""


def put(path: Path, *ids: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": ids}), path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Good: a, b. Failed: c, d, e, f; of which c is good now, d failed again, and e and f were not tried."""
    for name, ids in (
        ("data/status=ok/0", "ab"),
        ("data/status=failed/1", "cde"),
        ("data/status=failed/2", "f"),
        ("checkpoint/retry-x/status=ok/new", "c"),
        ("checkpoint/retry-x/status=failed/new", "d"),
        ("checkpoint/retry-x/status=failed/rest", "ef"),
    ):
        put(tmp_path / f"{name}.parquet", *ids)
    (tmp_path / "run.json").write_text('{"state": "retrying"}')
    return tmp_path


def ids_by_status(run: Path) -> dict[str, list[str]]:
    return {
        status: sorted(id for path in (run / f"data/status={status}").iterdir() for id in read_ids(path))
        for status in ("ok", "failed")
    }


def read_ids(path: Path) -> list[str]:
    return pq.ParquetFile(path).read()["id"].to_pylist()


def commit(run: Path, at: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CHILD, str(run), str(at)], cwd=ROOT, capture_output=True, text=True)


BEFORE, AFTER = {"ok": ["a", "b"], "failed": list("cdef")}, {"ok": ["a", "b", "c"], "failed": list("def")}


def test_a_commit_exchanges_the_rows(run: Path) -> None:
    done = commit(run, 0)
    assert done.stdout == f"{NUM_STEPS}\n", done.stderr
    assert ids_by_status(run) == AFTER


@pytest.mark.parametrize("at", range(1, NUM_STEPS + 1))
def test_a_commit_that_is_killed_is_finished_by_the_next(run: Path, at: int) -> None:
    assert commit(run, at).returncode == -signal.SIGKILL
    state = json.loads((run / "run.json").read_text())
    seen = ids_by_status(run)
    assert set("abcdef") == {*seen["ok"], *seen["failed"]}, "at no moment is a row lost"
    if at == 1:
        assert (state, seen) == ({"state": "retrying"}, BEFORE)
        return
    assert state["state"] == "committing"
    for _ in range(2):  # doing it again changes nothing
        finish_commit(RunFolder.open(str(run)), dict(state), print)
        assert ids_by_status(run) == AFTER


@pytest.mark.parametrize(("at", "expected"), [(2, BEFORE), (3, BEFORE), (4, BEFORE), (5, AFTER), (6, AFTER)])
def test_a_commit_whose_new_files_are_gone_is_taken_back(run: Path, at: int, expected: dict[str, list[str]]) -> None:
    assert commit(run, at).returncode == -signal.SIGKILL
    os.rename(run / "checkpoint", run / "lost")
    finish_commit(RunFolder.open(str(run)), json.loads((run / "run.json").read_text()), print)
    assert ids_by_status(run) == expected


def test_a_commit_is_not_taken_back_once_an_old_file_is_gone(run: Path) -> None:
    """New files are gone, and an old one too: without the new ones that are there, its rows would be nowhere."""
    moves = [[f"checkpoint/retry-x/{name}", f"data/{name}"] for name in
             ("status=ok/new.parquet", "status=failed/new.parquet", "status=failed/rest.parquet")]  # fmt: skip
    removes = ["data/status=failed/1.parquet", "data/status=failed/2.parquet"]
    state: Any = {"state": "committing", "commit": {"moves": moves, "removes": removes}}
    (run / moves[0][0]).unlink()
    (run / removes[0]).unlink()
    finish_commit(RunFolder.open(str(run)), state, print)
    assert ids_by_status(run) == {"ok": ["a", "b"], "failed": list("def")}, "c is made again by --resume"
