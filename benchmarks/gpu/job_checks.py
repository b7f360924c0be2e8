"""The checks `resume`, a job on Ray that is killed and resumed, and `workers`, one whose two workers share a GPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found, not_run
from benchmarks.gpu.subprocess_checks import JOB_NEEDS, ROOT, absent, finished, job_problem, last_line, missing

ROWS, DRY_ROWS = 20_000, 120
FILES = 3
"""Files of finished rows after which the driver is killed."""
KILL_S, RESUME_S, VERIFY_S = 45, 70, 30
"""Seconds that the parts may take on a GPU."""
SHARED_ROWS, DRY_SHARED_ROWS, SHARED_S = 12_000, 600, 75
"""Of the job with two workers: enough that the second one is loaded long before the first one has done all."""
LEAST_SHARE, MOST_SHARE = 0.7, 0.97
"""How much of a GPU two workers hold that take 0.425 of it each, with what CUDA takes for their processes."""
SETTLE_S = 3.0
"""What Ray still has in hand when its driver dies may land for so long."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}


def check_resume(context: CheckContext) -> Found:
    """A job whose driver gets SIGKILL in its middle, and `--resume`: by `verify` every row is there exactly once, and
    what was written before is not made again."""
    context.release()
    if why := missing(JOB_NEEDS) or absent(("models/opt-e2e", "configs/demo.yaml")):
        return not_run(why)
    count = DRY_ROWS if context.is_dry else ROWS
    with job(context, count) as (command, run):
        command += ["actors.num_actors=1", f"actors.num_gpus={0 if context.is_dry else 1}", "baseline.fraction=0"]
        # small windows, so that there is a middle
        command += ["actors.window_batches=1", "actors.batch_size=8"] if context.is_dry else ["actors.window_batches=4"]
        files, killed_s = killed(command, run, context.patience * KILL_S)
        found: Found = {"rows": count, "files_before": len(files), "killed_after_s": killed_s}
        context.note(found)
        start = time.perf_counter()
        done = finished([*command, "--resume"], context.patience * RESUME_S, ENVIRONMENT)
        found["resume_s"] = time.perf_counter() - start
        if done.returncode:
            raise CheckFailed(f"the resumed job ends with {done.returncode}: {last_line(done)}", found)
        verdict = finished([sys.executable, "-m", "jobs.verify", str(run)], context.patience * VERIFY_S, ENVIRONMENT)
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
        found |= {key: report.get(key) for key in ("books", "output_throughput", "duration_s")}
        if verdict.returncode:
            raise CheckFailed(f"verify ends with {verdict.returncode}: {verdict.stderr.strip()[-500:]}", found)
        found["verified"] = json.loads(verdict.stdout.splitlines()[-1])["rows"]
        changed = [path.name for path, stamp in files.items() if not path.exists() or path.stat().st_mtime_ns != stamp]
    if changed:
        raise CheckFailed(f"{len(changed)} files written before the kill were written again", found)
    if sentence := job_problem(report, count, on_gpu=not context.is_dry):
        raise CheckFailed(sentence, found)
    return found


def check_workers(context: CheckContext) -> Found:
    """A job with two workers on one GPU: each loads the model and takes its share of the memory, both answer rows, and
    by `verify` every row is there exactly once."""
    context.release()
    if why := missing(JOB_NEEDS) or absent(("models/opt-e2e", "configs/demo.yaml")):
        return not_run(why)
    count = DRY_SHARED_ROWS if context.is_dry else SHARED_ROWS
    with job(context, count) as (command, run):
        command += ["actors.num_actors=2", f"actors.num_gpus={0 if context.is_dry else 0.5}", "baseline.fraction=0"]
        # small windows, so that there are some for both
        command += ["actors.window_batches=1", f"actors.batch_size={4 if context.is_dry else 64}"]
        with watched_memory(context) as held:
            done = finished(command, context.patience * SHARED_S, ENVIRONMENT)
        found: Found = {"rows": count, "share_of_memory": max(held, default=None)}
        if done.returncode:
            raise CheckFailed(f"the job ends with {done.returncode}: {last_line(done)}", found)
        verdict = finished([sys.executable, "-m", "jobs.verify", str(run)], context.patience * VERIFY_S, ENVIRONMENT)
        report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    found |= {key: report.get(key) for key in ("books", "actors", "output_throughput", "duration_s")}
    if verdict.returncode:
        raise CheckFailed(f"verify ends with {verdict.returncode}: {verdict.stderr.strip()[-500:]}", found)
    problem = job_problem(report, count, on_gpu=not context.is_dry) or workers_problem(report, held)
    if problem is not None:
        raise CheckFailed(problem, found)
    return found


def workers_problem(report: Mapping[str, Any], held: Sequence[float]) -> str | None:
    """What is wrong with the report.json of a job whose two workers shared a GPU, of which they held these shares; None
    if nothing is."""
    rows = [actor["rows"] for actor in report["actors"]]
    if len(rows) != 2 or min(rows) == 0:
        return f"of two workers {sum(map(bool, rows))} answered rows: {rows}"
    if held and not LEAST_SHARE <= max(held) <= MOST_SHARE:
        return f"two workers held {max(held):.2f} of the GPU's memory at most, not {LEAST_SHARE} to {MOST_SHARE}"
    return None


@contextmanager
def watched_memory(context: CheckContext) -> Iterator[list[float]]:
    """The share of the GPU's memory that is in use, whoever has it, every tenth of a second; nothing without a GPU."""
    held: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            free, total = torch.cuda.mem_get_info(context.device)
            held.append(1 - free / total)

    thread = threading.Thread(target=watch, daemon=True)
    if context.device.type == "cuda":
        thread.start()
    try:
        yield held
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


@contextmanager
def job(context: CheckContext, rows: int) -> Iterator[tuple[list[str], Path]]:
    """The command of a job of the demo model on so many rows, and its run folder, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        prompts, run = folder / "prompts.jsonl", folder / "run"
        lines = (json.dumps({"id": f"row-{n}", "prompt": f"name[The Eagle {n}], eatType[pub]"}) for n in range(rows))
        prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "jobs.generate", "--config", "configs/demo.yaml"]
        yield [*command, "-i", str(prompts), "-o", str(run), "sampling.max_new_tokens=64"], run
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def killed(command: Sequence[str], run: Path, timeout_s: float) -> tuple[dict[Path, int], float]:
    """Starts a job and kills its driver once FILES files are written: the files that are there once Ray has settled,
    with their times, and the seconds until then. CheckFailed if it ends before, or writes too few in `timeout_s`."""
    start = time.perf_counter()
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8") as said:
        driver = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True, stdout=said, stderr=said, text=True
        )
        try:
            while len(written(run)) < FILES:
                if driver.poll() is not None or time.perf_counter() - start > timeout_s:
                    said.seek(0)
                    what = "ended" if driver.returncode is not None else f"wrote too little in {timeout_s:g} s"
                    raise CheckFailed(f"the job {what} before it could be killed: {said.read().strip()[-500:]}")
                time.sleep(0.02)
            driver.kill()
            seconds = time.perf_counter() - start
        finally:
            driver.kill()
            driver.wait()
            time.sleep(SETTLE_S)
    return {path: path.stat().st_mtime_ns for path in written(run)}, seconds


def written(run: Path) -> list[Path]:
    """The files of finished rows."""
    return list(run.glob("data/status=ok/*.parquet"))
