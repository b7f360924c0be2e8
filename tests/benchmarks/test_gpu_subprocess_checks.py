"""What `make gpu` starts, and what it makes of what that says; the processes themselves are stand-ins."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import run_every_kernel
from benchmarks.gpu import subprocess_checks as processes
from benchmarks.gpu.check_context import Check, CheckContext, CheckFailed
from benchmarks.gpu.decoding_checks import SMALL
from benchmarks.gpu.job_checks import workers_problem
from benchmarks.gpu.subprocess_checks import (
    LANE,
    LANE_NEEDS,
    ROOT,
    absent,
    check_job,
    check_lane,
    check_sanitizer,
    find_sanitizer,
    finished,
    job_problem,
    last_line,
    missing,
    parse_lane,
    parse_sanitizer,
)
from benchmarks.gpu.transformers_checks import timed_engine
from benchmarks.peer_engines import Spec
from jobs.generate import parse
from pipeline.config.job import load_config
from skipdecode.families import config_of

CONTEXT = CheckContext(torch.device("cpu"), config_of(SMALL))
PASSED = "......s.   [100%]\nSKIPPED [1] tests/x.py:1: no\n7 passed, 1 skipped in 61.20s (0:01:01)\n"
FAILED = "F.\nFAILED tests/x.py::test_a - AssertionError: apart\n1 failed, 1 passed, 2 warnings in 3.10s\n"
CLEAN = "========= COMPUTE-SANITIZER\nattention, OPT\n========= ERROR SUMMARY: 0 errors\n"
BAD = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at attend_kernel+0x1b0 in triton_attention.py:80
=========     by thread (31,0,0) in block (0,0,0)
========= ERROR SUMMARY: 3 errors
"""


class Standing:
    """In place of `finished`: ends as told, and keeps what it was asked."""

    def __init__(self, out: str = "", code: int = 0, err: str = "") -> None:
        self.out, self.code, self.err = out, code, err
        self.command: Sequence[str] = ()
        self.more: Mapping[str, str] = {}

    def __call__(
        self, command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        self.command, self.more = command, more or {}
        assert 0 < timeout_s <= 240
        return subprocess.CompletedProcess(command, self.code, self.out, self.err)


def wrong(check: Check, process: Standing, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(processes, "finished", process)
    with pytest.raises(CheckFailed) as raised:
        check(CONTEXT)
    return str(raised.value.args[0])


def test_the_lane_is_every_file_with_the_marker() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    marked = {str(path.relative_to(ROOT)) for path, text in texts.items() if re.search(r"mark\.gpu\b", text)}
    assert marked == set(LANE)
    assert missing(LANE_NEEDS) is None
    assert absent(LANE) is None


def test_counts_and_failures_of_pytest() -> None:
    verbose = f"tests/x.py::test_a FAILED [ 50%]\n{FAILED.replace('1 failed', '=== 1 failed').strip()} ===\n"
    assert parse_lane(verbose) == parse_lane(FAILED)
    assert parse_lane(PASSED) == ({"passed": 7, "skipped": 1}, [])
    counts, failed = parse_lane(FAILED)
    assert counts == {"failed": 1, "passed": 1, "warning": 2}
    assert failed == ["FAILED tests/x.py::test_a - AssertionError: apart"]
    assert parse_lane("") == ({}, [])


def test_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Standing(PASSED)
    monkeypatch.setattr(processes, "finished", process)
    assert check_lane(CONTEXT)["counts"] == {"passed": 7, "skipped": 1}
    assert process.command[1:3] == ["-m", "pytest"]
    assert wrong(check_lane, Standing(FAILED, 1), monkeypatch).endswith(
        "end with 1: FAILED tests/x.py::test_a - AssertionError: apart"
    )
    assert wrong(check_lane, Standing("", 4, "no such option\n"), monkeypatch).endswith("4: no such option")
    assert wrong(check_lane, Standing("93 skipped in 2.0s\n"), monkeypatch).startswith("no test of the gpu lane ran")
    monkeypatch.setattr(processes, "LANE_NEEDS", ("json", "no_such_module"))
    assert check_lane(CONTEXT) == {"not_run": "not installed: no_such_module"}


def test_errors_that_the_sanitizer_counts() -> None:
    assert parse_sanitizer(CLEAN) == (0, None)
    first = "Invalid __global__ read of size 2 bytes at attend_kernel+0x1b0 in triton_attention.py:80"
    assert parse_sanitizer(BAD) == (3, first)
    assert parse_sanitizer("Traceback: no sum\n") == (None, None)


def test_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "find_sanitizer", lambda _: "/opt/compute-sanitizer")
    process = Standing(CLEAN)
    monkeypatch.setattr(processes, "finished", process)
    assert check_sanitizer(CONTEXT)["errors"] == 0
    assert process.command[0] == "/opt/compute-sanitizer"
    assert process.more == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    assert "counts 3 errors in our kernels: Invalid __global__" in wrong(
        check_sanitizer, Standing(BAD, 86), monkeypatch
    )
    crashed = Standing(CLEAN, 1, "ImportError: no triton\n")
    assert wrong(check_sanitizer, crashed, monkeypatch).endswith("under compute-sanitizer: ImportError: no triton")
    assert "did not run to their end" in wrong(check_sanitizer, Standing("driver too old\n", 0), monkeypatch)
    monkeypatch.setattr(processes, "find_sanitizer", lambda _: None)
    assert "neither on PATH" in str(check_sanitizer(CONTEXT)["not_run"])


def test_the_sanitizer_is_found_in_the_folder_of_cuda(tmp_path: Path) -> None:
    assert find_sanitizer({"PATH": str(tmp_path)}) == find_sanitizer({"PATH": ""})
    program = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    assert find_sanitizer({"PATH": "", "CUDA_HOME": str(tmp_path / "cuda")}) == str(program)
    assert find_sanitizer({"PATH": str(program.parent)}) == str(program)


def test_every_kernel_runs_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_every_kernel.main() == 2 or torch.cuda.is_available()
    ran: list[str] = []
    cases = {"gate": lambda: ran.append("gate"), "decoder, OPT": lambda: ran.append("decoder")}
    monkeypatch.setattr(run_every_kernel, "CASES", cases)
    monkeypatch.setattr(run_every_kernel, "DEVICE", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert run_every_kernel.main() == 0
    assert ran == ["gate"]


def report(**keys: object) -> dict[str, Any]:
    actor = {"device": "cuda:0", "backend": {"name": "triton", "reason": ""}}
    return {"completed": 256, "failed": 0, "actors": [actor], "books": {"ok": 256}, "duration_s": 9.0} | keys


def test_what_is_wrong_with_a_job() -> None:
    assert job_problem(report(), 256) is None
    assert job_problem(report(completed=250, failed=6), 256) == "the job completed 250 of 256 rows, and 6 failed"
    on_cpu = {"device": "cpu", "backend": {"name": "avx512", "reason": ""}}
    assert "decoded on cpu by avx512" in str(job_problem(report(actors=[on_cpu]), 256))
    plain = {"device": "cuda:0", "backend": None}
    assert "decoded on cuda:0 by None" in str(job_problem(report(actors=[plain]), 256))


def test_what_is_wrong_with_two_workers_on_a_gpu() -> None:
    both = {"actors": [{"rows": 90}, {"rows": 30}]}
    assert workers_problem(both, [0.1, 0.6, 0.88]) is None
    assert workers_problem(both, []) is None, "a dry run has no GPU"
    for rows in ([120, 0], [120]):
        alone = workers_problem({"actors": [{"rows": count} for count in rows]}, [0.88])
        assert str(alone).startswith("of two workers 1 answered rows")
    for most in (0.45, 0.99):
        assert f"two workers held {most:.2f} of the GPU's memory" in str(workers_problem(both, [0.1, most]))


@pytest.mark.parametrize("limits", [{"limit_s": 0.2}, {"memory_bytes": 32 << 20}], ids=["time", "memory"])
def test_an_engine_takes_no_more_than_it_may(limits: dict[str, Any], tmp_path: Path) -> None:
    spec = Spec("full", str(tmp_path), str(tmp_path), "float32", "cpu", 1, 2)
    found = timed_engine(spec, [[2, 3]], 2, **limits)
    assert found.keys() == {"refused"}
    assert "limit_s" not in limits or found["refused"] == "it did not end within 0.2 s"


@pytest.mark.slow
def test_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command line is one that `jobs.generate` takes, and its report is read."""
    written: dict[str, Any] = report()

    def job(
        command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        arguments = parse(list(command[3:]))
        config = load_config(ROOT / arguments.config, arguments.overrides)
        assert (config.actors.num_actors, config.actors.num_gpus) == (1, 1)
        assert len(Path(arguments.input[0]).read_text().splitlines()) == 256
        folder = Path(arguments.output)
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(written))
        return subprocess.CompletedProcess(command, 0, "{}", "")

    monkeypatch.setattr(processes, "finished", job)
    found = check_job(CONTEXT)
    assert found["books"] == {"ok": 256}
    written["failed"] = 1
    with pytest.raises(CheckFailed, match="and 1 failed"):
        check_job(CONTEXT)
    assert (
        wrong(check_job, Standing("", 2, "no GPU in the cluster\n"), monkeypatch)
        == "the job ends with 2: no GPU in the cluster"
    )
    monkeypatch.setattr(processes, "JOB_NEEDS", ("no_such_ray",))
    assert check_job(CONTEXT) == {"not_run": "not installed: no_such_ray"}


def test_files_that_a_copy_does_not_have() -> None:
    assert absent(["README.md", "no/such"]) == "not in this copy of the project: no/such"
    assert last_line(subprocess.CompletedProcess([], 1, "a\n", "")) == "a"
    assert last_line(subprocess.CompletedProcess([], 1, "", "")) == "it said nothing"


def test_a_process_that_does_not_end_is_stopped_with_its_own(tmp_path: Path) -> None:
    done = finished([sys.executable, "-c", "import os; print(os.environ['MARK'], os.getcwd())"], 60, {"MARK": "here"})
    assert done.stdout.split() == ["here", str(ROOT)]
    pid = tmp_path / "pid"
    with pytest.raises(CheckFailed, match="did not end within 2 s; the last that it said: test_b") as raised:
        finished(
            ["sh", "-c", f"sleep 600 & echo $! > '{pid}'; echo test_a; echo test_b; echo oh >&2; exec sleep 600"], 2
        )
    assert raised.value.args[1] == {"timed_out": True, "stdout": "test_a\ntest_b\n", "stderr": "oh\n"}
    until = time.monotonic() + 10
    while is_running(pid.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.05)  # what got its signal has not ended at once
    assert not is_running(pid.read_text().strip())


def is_running(pid: str) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
