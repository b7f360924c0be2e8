"""The fault plan of the tests itself: real signals in a process of its own, counted over processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT, environment, hits

PASS = "from pipeline.fault_injection import fault_point\nfor _ in range(4): fault_point('a b')\nprint('alive')"


def pass_the_point(folder: Path, plan: dict[str, object] | None) -> int:
    command = [sys.executable, "-c", PASS]
    return subprocess.run(command, cwd=ROOT, env=environment(plan, folder), capture_output=True).returncode


def test_a_fault_happens_as_often_as_planned_and_leaves_its_mark(tmp_path: Path) -> None:
    plan = {"a b": {"signal": "SIGKILL", "times": 2, "after": 3}}
    assert [pass_the_point(tmp_path, plan) for _ in range(3)] == [-signal.SIGKILL, -signal.SIGKILL, 0]
    assert hits(tmp_path) == ["a b", "a b"]


def test_other_points_and_no_plan_do_nothing(tmp_path: Path) -> None:
    assert pass_the_point(tmp_path, None) == 0
    assert pass_the_point(tmp_path, {"a": {"signal": "SIGKILL"}}) == 0
    assert hits(tmp_path) == []
    assert json.loads((tmp_path / "faults.json").read_text()) == {"a": {"signal": "SIGKILL"}}
