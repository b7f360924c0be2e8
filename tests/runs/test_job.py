"""`ray job submit` against a real cluster of its own, as the README shows it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.finetune_helpers import arguments, curve, write_pairs
from tests.support.processes import free_ports, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`ray start --head` on ports of its own; the environment with which to talk to it."""
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}
    port, dashboard, agent, client = free_ports(4)
    env |= {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    start = [
        "ray", "start", "--head", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
        "--object-store-memory=300000000", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("cluster") / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(start, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_for(lambda: subprocess.run(["ray", "job", "list"], env=env, capture_output=True).returncode == 0, head)
            yield env
        finally:
            head.terminate()
            head.wait(60)


def submit(env: dict[str, str], *arguments: str, verb: str = "generate") -> tuple[int, str]:
    command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", "-m", f"jobs.{verb}", *arguments]
    for _ in range(10):  # the head takes a while to answer
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
        text = done.stdout + done.stderr
        if "Failed to connect" not in text and "ConnectionError" not in text:
            break
        subprocess.run(["sleep", "3"], check=True)
    return done.returncode, re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_submitted_job_generates_and_its_exit_code_is_kept(
    cluster: dict[str, str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i}"}) + "\n" for i in range(200)))
    fixed = [f"model.source={tiny_checkpoint}", "-i", str(source), "-o", str(tmp_path / "run")]
    code, text = submit(cluster, *fixed, "actors.num_actors=2")
    assert code == 0, text
    assert "done: 200 rows ok, 0 failed" in text
    assert json.loads((tmp_path / "run/report.json").read_text())["books"]["closed"]
    code, text = submit(cluster, *fixed)
    assert code != 0
    assert "exists already" in text
    assert "exit code 2" in text
    code, text = submit(cluster, *fixed, "--resume")
    assert code == 0, text
    assert "finished before, nothing to do" in text


def test_the_demo_model_travels_with_the_working_dir(cluster: dict[str, str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"prompt": "name[The Copper Kettle], eatType[pub], area[riverside]"}) + "\n")
    code, text = submit(cluster, "--config", "configs/generate.yaml", "-i", str(source), "-o", str(tmp_path / "run"))
    assert code == 0, text
    assert "done: 1 rows ok" in text


def test_a_submitted_training_trains(cluster: dict[str, str], tmp_path: Path) -> None:
    pairs, output = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "model"
    keys = arguments(pairs, output, "workers.num_workers=2")
    code, text = submit(cluster, *keys, verb="finetune")
    assert code == 0, text
    assert list(curve(output)) == list(range(1, 25))
    assert (output / "model.safetensors").is_file()
    code, text = submit(cluster, *keys, verb="finetune")
    assert code != 0
    assert "exit code 2" in text
    code, text = submit(cluster, *keys, "workers.num_workers=9", "--overwrite", verb="finetune")
    assert code != 0
    assert "workers.num_workers: 9 workers" in text


def ray_job(env: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(["ray", "job", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def job_info(env: dict[str, str], job: str) -> dict[str, Any]:
    """What the jobs API says of it, as `ray job list` and the dashboard do."""
    code = f"from ray.job_submission import JobSubmissionClient as C; import json; i = C().get_job_info({job!r}); "
    code += "print(json.dumps([i.status.name, i.driver_exit_code, i.metadata or {}]))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return dict(zip(("status", "exit_code", "metadata"), json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(("limit", "expected"), [("0", 3), ("5", 0), ("nonsense", 2)])
def test_the_drivers_exit_code_is_kept_and_logs_say_why(
    cluster: dict[str, str], tiny_checkpoint: Path, tmp_path: Path, limit: str, expected: int
) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"id": f"r{i}", "prompt": None if i < 3 else f"row {i}"} for i in range(20)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = f"exit-{expected}-{os.getpid()}"
    command = ["ray", "job", "submit", "--submission-id", job, "--working-dir", ".", "--", "python", "-m"]
    command += ["jobs.generate", f"model.source={tiny_checkpoint}", "-i", str(source), "-o", str(tmp_path / "run")]
    done = subprocess.run(
        [*command, f"limits.max_failed_rows={limit}"],
        cwd=ROOT,
        env=cluster,
        capture_output=True,
        text=True,
        timeout=300,
    )
    info = job_info(cluster, job)
    assert (info["status"], info["exit_code"]) == ("FAILED" if expected else "SUCCEEDED", expected)
    assert (done.returncode == 0) == (expected == 0)
    logs = ray_job(cluster, "logs", job)
    wanted = {0: "done: 17 rows ok, 3 failed", 2: "limits.max_failed_rows", 3: "exit code 3"}[expected]
    assert wanted in logs
    assert wanted in done.stdout + done.stderr, "submit shows the same log"


def test_a_job_tells_its_progress_and_is_stopped_and_resumed(
    cluster: dict[str, str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "run"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i}"}) + "\n" for i in range(6000)))
    generate = [
        "python",
        "-m",
        "jobs.generate",
        f"model.source={tiny_checkpoint}",
        "-i",
        str(source),
        "-o",
        str(output),
    ]
    generate += ["sampling.max_new_tokens=64", "sampling.ignore_eos=true", "decode.method=full", "model.dtype=float32"]
    generate += ["actors.batch_size=4", "actors.window_batches=2"]
    job = f"stopped-{os.getpid()}"
    submit_it = [
        "submit",
        "--no-wait",
        "--submission-id",
        job,
        "--metadata-json",
        '{"owner": "me"}',
        "--working-dir",
        ".",
    ]
    ray_job(cluster, *submit_it, "--", *generate)
    wait_for(lambda: list(output.glob("data/*/*")))
    told = wait_for(lambda: (m := job_info(cluster, job)["metadata"]).get("rows_done", "0") != "0" and m, timeout_s=120)
    assert told["owner"] == "me", "what was given at the submission stays"
    assert told["rows_total"] == "6000"
    assert 0 < int(told["rows_done"]) < 6000
    assert told["workers"] == "1"
    assert float(told["working_s"]) <= float(told["elapsed_s"]) + 0.5  # rounded; the model is loaded in between
    ray_job(cluster, "stop", job)
    assert job_info(cluster, job)["status"] == "STOPPED"
    state = json.loads((output / "run.json").read_text())
    assert state["state"] == "interrupted"
    assert 0 < state["books"]["ok"] < 6000
    code, text = submit(cluster, *generate[3:], "input.limit=6000", "--resume", "limits.max_failed_rows=0")
    assert code != 0
    assert "input.limit" in text, "another input is refused under a job too"
    logs = ray_job(cluster, "logs", job)
    assert re.search(r"progress: \d+/6000 rows", logs)
    before = state["books"]["ok"]
    code, text = submit(
        cluster, *generate[3:], "--resume", "actors.batch_size=128"
    )  # large batches: it takes less time
    assert code == 0, text
    assert f"{6000 - before} rows to do, {before} done" in text
    state = json.loads((output / "run.json").read_text())
    assert (state["state"], len(state["sessions"])) == ("finished", 2)
    assert state["books"] == {"input": 6000, "ok": 6000, "failed": 0, "closed": True}
