"""A driver that stands still (SIGSTOP) beyond its lease, a successor in its folder, and then it goes on.

Real processes. Whatever it was about to do, the successor's rows, books and state stay, and the paused one ends.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.processes import command, environment, hits, rows, run, start, state, wait_for, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_ROWS = 48


@pytest.mark.parametrize("successor", ["--resume", "--overwrite"])
@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("late listed", 0),  # between the look and the deletion
        ("leaving", 0),  # before `checkpoint/` goes
        ("run.json staged", 0),  # as the run begins
        ("run.json staged", 2),  # as the figures of the session are written
        ("run.json staged", 3),  # as the books are closed
        ("run.json staged", 4),  # the last step
        ("report.json staged", 0),
    ],
)
def test_a_paused_driver_leaves_its_successor_alone(
    tiny_checkpoint: Path, tmp_path: Path, point: str, after: int, successor: str
) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", NUM_ROWS), tmp_path / "run"
    wanted = command(tiny_checkpoint, source, output)
    quick = {"SKIPDECODE_LEASE_S": "3"}
    plan = {point: {"signal": "SIGSTOP", "after": after}}
    paused = start(wanted, environment(plan, tmp_path, **quick))
    try:
        wait_for(lambda: hits(tmp_path), paused)
        second = run([*wanted, successor], environment(None, tmp_path, **quick), timeout_s=300)
        assert second.returncode == 0, second.stderr
        after_second = {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}
        os.kill(paused.pid, signal.SIGCONT)
        _, err = paused.communicate(timeout=300)
    finally:
        if paused.poll() is None:
            paused.kill()
    assert paused.returncode == 1, err
    assert "another run has taken over this folder; this one ends" in err or "interrupted" in err
    assert {path: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()} == after_second
    assert state(output)["state"] == "finished"
    assert len(rows(output, "ok")) == NUM_ROWS
    verified = run([sys.executable, "-m", "jobs.verify", str(output)], {**os.environ})
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout.splitlines()[-1])["rows"]["ok"] == NUM_ROWS
