"""`ray job submit` against a real cluster of its own, as the README shows it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.finetune_helpers import arguments, curve, write_pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PORT, DASHBOARD = 26379, 28265


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """`ray start --head` on ports of its own; the environment with which to talk to it."""
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}
    env |= {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{DASHBOARD}"}
    start = [
        "ray", "start", "--head", f"--port={PORT}", f"--dashboard-port={DASHBOARD}", "--num-cpus=2",
        "--object-store-memory=300000000", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("cluster") / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(start, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
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
    code, text = submit(
        cluster, "--config", "configs/generate-cpu.yaml", "-i", str(source), "-o", str(tmp_path / "run")
    )
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
