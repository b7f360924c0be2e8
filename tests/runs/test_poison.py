"""Rows that kill their worker, in whole runs: real segmentation faults in real worker processes."""

import json
from pathlib import Path

import pytest

from tests.support.processes import command, environment, hits, rows, run, write_prompts

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
