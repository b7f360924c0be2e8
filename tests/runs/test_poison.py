"""Rows that kill their worker, in whole runs: real segmentation faults in real worker processes."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.processes import command, environment, hits, rows, run, start, wait_for, write_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_poison_row_is_quarantined_and_its_neighbours_are_generated(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 200)
    fixed = ["actors.batch_size=4", "actors.window_batches=1", "limits.max_row_attempts=2", "sampling.temperature=0.9"]
    faults = {"decode r117": {"signal": "SIGSEGV", "times": 100}}
    done = run(command(tiny_checkpoint, source, tmp_path / "run", *fixed), environment(faults, tmp_path))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert json.loads(done.stdout)["books"] == report["books"]
    assert report["books"] == {"input": 200, "ok": 199, "failed": 1, "closed": True}
    assert report["errors"] == {"poison_row": 1}
    failed = rows(tmp_path / "run", "failed")
    assert failed.keys() == {"r117"}
    assert "its worker died 2 times while decoding this row alone: " in failed["r117"]["error_message"]
    assert failed["r117"]["finish_reason"] == "error"
    assert len(hits(tmp_path)) <= 2 + 2, "log2(window) + max_row_attempts deaths"
    undisturbed = run(command(tiny_checkpoint, source, tmp_path / "whole", *fixed), environment(None, tmp_path))
    assert undisturbed.returncode == 0, undisturbed.stderr
    whole, ok = rows(tmp_path / "whole"), rows(tmp_path / "run", "ok")
    assert whole.keys() == ok.keys() | {"r117"}
    assert {row: whole[row] for row in ok} == ok


@pytest.mark.slow
def test_samples_of_a_poison_prompt_fail_together_and_a_resume_knows_them(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", 40), tmp_path / "run"
    fixed = ["sampling.n=8", "sampling.temperature=0.9", "limits.max_row_attempts=2", "limits.max_failed_rows=1.0"]
    faults = {f"decode r11-{sample}": {"signal": "SIGSEGV", "times": 100} for sample in range(8)}
    line = command(tiny_checkpoint, source, output, *fixed)
    driver = start(line, environment(faults, tmp_path))
    wait_for(lambda: any('prompts": {\n' in path.read_text() for path in output.glob("quarantine-*.json")), driver)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.communicate()
    before = hits(tmp_path)
    # a process that dies of one sample may pass the fault points of others meanwhile
    died = {path.read_text() for path in tmp_path.glob("faults.json.*.hit")}
    assert len(died) <= 3 + 2 + 2, "log2(window) + max_row_attempts, and two for the prompt"
    resumed = run([*line, "--resume"], environment(faults, tmp_path))
    assert resumed.returncode == 0, resumed.stderr
    assert "killed workers in earlier sessions, and are not tried again" in resumed.stderr
    assert rows(output, "failed").keys() == {f"r11-{sample}" for sample in range(8)}
    assert len(rows(output, "ok")) == 39 * 8
    assert hits(tmp_path) == before
    assert not list(output.glob("quarantine-*")), "a finished run has no use for them"
