"""What `make gpu` is expected to find, its limits, and the calls of benchmarks/gpu/plan.md."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import job_checks
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from benchmarks.gpu.job_checks import killed
from benchmarks.gpu.predictions import LIMIT_S, PLANNED
from benchmarks.gpu.transformers_checks import equal_to_transformers
from benchmarks.gpu_check import CHECKS, TINY, chosen_checks, limited, main, run_checks
from skipdecode.checkpoint.weights import load_model
from skipdecode.families import config_of, released

PLAN = Path(gpu_check.__file__).parent / "gpu/plan.md"
LONGER = {"lane", "sanitizer", "job"}
CALL_S = 600


def calls() -> list[list[str]]:
    return [shlex.split(line) for line in PLAN.read_text().splitlines() if "-m benchmarks.gpu_check --keep" in line]


def test_each_check_has_a_prediction_and_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(PLANNED) == list(CHECKS)
    assert {name for name, planned in PLANNED.items() if planned.limit_s > LIMIT_S} == LONGER
    assert {name for name, planned in PLANNED.items() if planned.needs_ray} == {"job", "resume", "workers"}
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CHECKS)
    assert all(PLANNED[line.split()[0]].prediction in line for line in lines)


def test_the_plan_has_every_check_and_calls_below_ten_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    planned: set[str] = set()
    by_part: dict[str, int] = {}
    for call in calls():
        assert call[0] == "timeout"
        assert call[2:6] == ["python3", "-m", "benchmarks.gpu_check", "--keep-going"]
        assert main([*call[5:], "--list"]) == 0, "the arguments are those of the program"
        planned |= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
        if "--shape" in call:
            assert released(call[call.index("--shape") + 1]).num_hidden_layers
        part = re.search(r"--output results/gpu-(\d)", " ".join(call))
        assert part is not None
        by_part[part[1]] = by_part.get(part[1], 0) + int(call[1])
    assert planned == set(CHECKS)
    assert list(by_part) == ["1", "2", "3", "4"]
    assert max(by_part.values()) < CALL_S
    outputs = [call[call.index("--output") + 1] for call in calls()]
    assert len(set(outputs)) == len(outputs), "a file is named by day and device"


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", calls(), ids=lambda call: call[call.index("--output") + 1])
def test_a_dry_run_tries_every_check_on_a_cpu(
    call: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each call of the plan, in a process of its own, whose back end it replaces; jobs on Ray included."""
    assert main([*call[5:], "--list"]) == 0
    wanted = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    command = [sys.executable, *call[3:], "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"wrong": None, "dry_run": True}
    lines = done.stderr.split("dry run, no GPU was used:\n")[1].splitlines()
    states = {line.split()[0]: line[15:23].strip() for line in lines}
    not_run = {"lane", "sanitizer", "overlap", "replays"}  # for want of a device, of two, and of its kernels
    assert states == {name: "not run" if name in not_run else "well" for name in wanted}
    assert not list(tmp_path.iterdir())


def test_some_checks_with_what_they_need() -> None:
    assert list(chosen_checks(["sampled"], [])) == ["captures", "sampled"]
    assert list(chosen_checks(["job", "corpus"], [])) == ["corpus", "job"]
    assert list(chosen_checks([], ["job"])) == [name for name in CHECKS if name != "job"]


def test_a_check_that_takes_too_long_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it had noted stays, and the next check runs."""
    ours, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's own alarm
    saved: list[object] = []

    def slow(context: CheckContext) -> Found:
        context.note({"half": True})
        try:
            time.sleep(30)
        except Exception:  # as a `Generator` does, whose batch fails then
            return {"swallowed": True}
        return {}

    monkeypatch.setattr(gpu_check, "PLANNED", {"corpus": gpu_check.PLANNED["corpus"].__class__("", 0.2)})
    try:
        context = CheckContext(torch.device("cpu"), config_of(TINY))
        checks = {"corpus": slow, "job": lambda _: {"well": True}}
        found = run_checks(
            context, checks, lambda _: None, lambda document: saved.append(document.get("corpus")), keep_going=True
        )
        assert found["wrong"] == "corpus: it did not end within 0.2 s"
        assert found["corpus"] == {"half": True} == saved[0]
        assert found["job"] == {"well": True}
        with limited(None):
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, ours)


def test_tokens_that_are_not_those_of_transformers(tiny_checkpoint: Path) -> None:
    context = CheckContext(torch.device("cpu"), config_of(TINY), is_dry=True)
    model = load_model(tiny_checkpoint)
    found = equal_to_transformers(context, model, tiny_checkpoint)
    assert (found["rows"], found["wrong_rows"]) == (4, 0)
    assert model.final_norm is not None
    model.final_norm.weight.data[::2] *= -1
    assert equal_to_transformers(context, model, tiny_checkpoint)["wrong_rows"] == 4


def test_a_driver_is_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_checks, "SETTLE_S", 0.0)
    folder = tmp_path / "data/status=ok"
    folder.mkdir(parents=True)
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n"
        f"for n in range(3): pathlib.Path({str(folder)!r}, f'{{n}}.parquet').touch()\n"
        "time.sleep(600)"
    )
    files, seconds = killed([sys.executable, "-c", code], tmp_path, 60)
    assert sorted(path.name for path in files) == ["0.parquet", "1.parquet", "2.parquet"]
    assert seconds < 60
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists(), "it is dead"
    with pytest.raises(CheckFailed, match="the job ended before it could be killed: no model"):
        killed([sys.executable, "-c", "print('no model')"], tmp_path / "none", 60)
    with pytest.raises(CheckFailed, match=r"wrote too little in 0\.1 s before"):
        killed([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "none", 0.1)
