"""Checks that run in processes of their own: the `gpu` tests, our kernels under compute-sanitizer, and a job with
Ray."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run

ROOT = Path(__file__).parents[2]
LANE = ("tests/skipdecode/test_gpu.py", "tests/skipdecode/backends/test_gpu_kernels.py")
"""Test files that import no Ray when they are collected."""
LANE_NEEDS = ("pytest", "pytest_timeout", "hypothesis", "transformers", "pyarrow", "pydantic")
LANE_S, SANITIZER_S, JOB_S = 240, 150, 180
ERRORS_EXIT = 86
KEPT = 8000
"""Characters kept of the output of a process that was stopped."""
JOB_NEEDS = ("ray", "pyarrow", "pydantic", "yaml")
JOB_ROWS, DRY_JOB_ROWS = 256, 32
NO_GPU = "a dry run has no GPU"


def check_lane(context: CheckContext) -> Found:
    """Checks that the tests marked `gpu` pass, and that some of them run."""
    if why := missing(LANE_NEEDS) or absent(LANE) or (NO_GPU if context.is_dry else None):
        return not_run(why)
    start = time.perf_counter()
    # -v names each test before it runs: the last line says which one did not end
    done = finished([sys.executable, "-m", "pytest", "-v", "-m", "gpu", "--maxfail=3", *LANE], LANE_S)
    counts, failed = parse_lane(done.stdout)
    found: Found = {"counts": counts, "failed": failed, "seconds": time.perf_counter() - start}
    if done.returncode:
        raise CheckFailed(
            f"the gpu tests end with {done.returncode}: {failed[0] if failed else last_line(done)}", found
        )
    if not counts.get("passed"):
        raise CheckFailed(
            "no test of the gpu lane ran, though there is a device; the reasons are in `pytest -m gpu`", found
        )
    return found


def check_sanitizer(context: CheckContext) -> Found:
    """compute-sanitizer finds no access outside its memory in the kernels of our own."""
    if context.is_dry:
        return not_run(NO_GPU)
    program = find_sanitizer(os.environ)
    if program is None:
        return not_run("compute-sanitizer is neither on PATH nor in the folder of CUDA")
    if why := absent(("tests/support/triton_interpreted.py",)):
        return not_run(why)
    command = [program, "--tool", "memcheck", "--error-exitcode", str(ERRORS_EXIT)]
    # torch looks for symbols that older drivers lack, which is no error; Triton's compilers are none of our kernels
    command += ["--report-api-errors", "no", "--target-processes", "application-only"]
    # each tensor a piece of memory of its own: within torch's larger ones the tool would see no step over an edge
    done = finished(
        [*command, sys.executable, "-m", "benchmarks.gpu.run_every_kernel"],
        SANITIZER_S,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    errors, first = parse_sanitizer(done.stdout)
    found: Found = {"program": program, "errors": errors, "first": first}
    if errors:
        raise CheckFailed(
            f"compute-sanitizer counts {errors} errors in our kernels: {first or 'of an unknown kind'}", found
        )
    if errors is None or done.returncode:
        raise CheckFailed(f"our kernels did not run to their end under compute-sanitizer: {last_line(done)}", found)
    return found


def check_job(context: CheckContext) -> Found:
    """`jobs.generate` on Ray: every row comes back, decoded on the device by our kernels."""
    context.release()
    if why := missing(JOB_NEEDS) or absent(("models/opt-e2e", "configs/demo.yaml")):
        return not_run(why)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        prompts, run = Path(folder) / "prompts.jsonl", Path(folder) / "run"
        count = DRY_JOB_ROWS if context.is_dry else JOB_ROWS
        rows = [{"id": f"row-{n}", "prompt": f"name[The Eagle {n}], eatType[pub]"} for n in range(count)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        command = [sys.executable, "-m", "jobs.generate", "--config", "configs/demo.yaml"]
        command += ["-i", str(prompts), "-o", str(run), "actors.num_actors=1"]
        command += [f"actors.num_gpus={0 if context.is_dry else 1}"]
        done = finished(command, JOB_S, {"RAY_USAGE_STATS_ENABLED": "0"})
        if done.returncode:
            raise CheckFailed(f"the job ends with {done.returncode}: {last_line(done)}")
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    found: Found = {key: report.get(key) for key in ("books", "actors", "speedup", "output_throughput", "duration_s")}
    if sentence := job_problem(report, count, on_gpu=not context.is_dry):
        raise CheckFailed(sentence, found)
    return found


def job_problem(report: Mapping[str, object], rows: int, *, on_gpu: bool = True) -> str | None:
    """What is wrong with the report.json of a job; None if nothing is."""
    if (report["completed"], report["failed"]) != (rows, 0):
        return f"the job completed {report['completed']} of {rows} rows, and {report['failed']} failed"
    for actor in report["actors"] if on_gpu else ():  # type: ignore[attr-defined]
        name = (actor["backend"] or {}).get("name")
        if not actor["device"].startswith("cuda") or name != "triton":
            return f"a worker of the job decoded on {actor['device']} by {name}, not on the GPU by Triton's kernels"
    return None


def parse_lane(text: str) -> tuple[dict[str, int], list[str]]:
    """The counts in pytest's last line, and the failed tests with their reasons."""
    lines = text.rstrip().splitlines() or [""]
    counts = {what.rstrip("s"): int(number) for number, what in re.findall(r"(\d+) ([a-z]+)", lines[-1])}
    return counts, [line for line in lines if line.startswith(("FAILED ", "ERROR "))]


def parse_sanitizer(text: str) -> tuple[int | None, str | None]:
    """The number of errors that compute-sanitizer reports (None if it does not), and the first one."""
    output = [line.strip("= ").strip() for line in text.splitlines() if line.startswith("=========")]
    sums = [found for line in output if (found := re.search(r"ERROR SUMMARY: (\d+) error", line))]
    if not sums:
        return None, None
    errors = [number for number, line in enumerate(output) if re.match(r"Invalid |Misaligned ", line)]
    first = " ".join(output[errors[0] : errors[0] + 2]) if errors else None
    return int(sums[-1][1]), first


def find_sanitizer(environment: Mapping[str, str]) -> str | None:
    """The program on PATH or in CUDA's folder; None if it is in neither."""
    folders = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    places = [
        f"{folder}/{inside}" for folder in (*folders, "/usr/local/cuda") for inside in ("bin", "compute-sanitizer")
    ]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([environment.get("PATH", os.defpath), *places]))


def missing(modules: Iterable[str]) -> str | None:
    """A sentence that names the packages which are not installed; None if all are."""
    names = [name for name in modules if find_spec(name) is None]
    return f"not installed: {', '.join(names)}" if names else None


def absent(paths: Iterable[str]) -> str | None:
    """A sentence that names the files which this copy of the project lacks; None if it has all."""
    names = [path for path in paths if not (ROOT / path).exists()]
    return f"not in this copy of the project: {', '.join(names)}" if names else None


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The part of a process's output where people look for the reason."""
    lines = (done.stdout + "\n" + done.stderr).split("\n")
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "it said nothing")


def finished(
    command: Sequence[str], timeout_s: float, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a process to its end, from the root of the project. After `timeout_s` it is stopped, and CheckFailed has the
    last line of its output, and the end of all of it."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | (more or {}), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _stop(process)
        found: Found = {"timed_out": True, "stdout": out[-KEPT:], "stderr": err[-KEPT:]}
        last = (out.strip() or err.strip() or "nothing").splitlines()[-1].strip()[:500]
        what = f"{' '.join(command[:4])} ... did not end within {timeout_s:g} s"
        raise CheckFailed(f"{what}; the last that it said: {last}", found) from None
    except BaseException:  # Ctrl-C: what runs in a session of its own does not hear it
        _stop(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _stop(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Stops a process and everything it has started, giving a job time to shut Ray down; returns stdout and stderr."""
    for sign, wait_s in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            return process.communicate(timeout=wait_s)
        except subprocess.TimeoutExpired:
            continue
    return "", ""
