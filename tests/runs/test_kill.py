"""A driver that is killed in the middle, and a run that goes on from what it left: real processes, real SIGKILL."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
NUM_ROWS = 160


def tokens(output: Path) -> dict[str, list[int]]:
    return {name: row["generated_tokens"] for name, row in rows(output).items()}


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_killed_run_is_resumed_exactly_once(tiny_checkpoint: Path, tmp_path: Path, how: signal.Signals) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i % 97}"}) + "\n" for i in range(NUM_ROWS)))
    command = [
        sys.executable, "-m", "jobs.generate", f"model.source={tiny_checkpoint}", "model.dtype=float32", "-i",
        str(source),
        "sampling.max_new_tokens=30", "actors.batch_size=4", "actors.window_batches=4", "sampling.temperature=0.9",
    ]  # fmt: skip
    run = [*command, "-o", str(tmp_path / "run")]
    driver = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "run").glob("data/status=ok/*.parquet"))) < 5:
        assert driver.poll() is None, driver.stderr.read().decode()
        assert time.monotonic() < deadline, "nothing was written in two minutes"
        time.sleep(0.05)
    os.kill(driver.pid, how)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 1), err.decode()
    time.sleep(3)  # what Ray still had in hand may land
    before = tokens(tmp_path / "run")
    assert 0 < len(before) < NUM_ROWS, "it must die in the middle for this test to mean anything"
    done = subprocess.run([*run, "--resume"], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    after = tokens(tmp_path / "run")
    assert after.keys() == {f"r{i}" for i in range(NUM_ROWS)}
    assert {key: after[key] for key in before} == before
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["books"] == {"input": NUM_ROWS, "ok": NUM_ROWS, "failed": 0, "closed": True}
    if how == signal.SIGINT:  # in the slow lane alone: a third run takes as long again
        whole = [*command, "-o", str(tmp_path / "whole")]
        undisturbed = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert undisturbed.returncode == 0, undisturbed.stderr
        assert tokens(tmp_path / "whole") == after
