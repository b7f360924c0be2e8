"""A training that is killed in the middle: real processes, real SIGKILL, and the loss curve of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.finetune_helpers import arguments, curve, log, validations, write_pairs

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
NUM_STEPS = 1200  # a graceful end takes Ray Train some seconds
RECIPE = {"epochs": NUM_STEPS / 4, "checkpoint_every": 30, "validate_every": 300}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def start(pairs: Path, output: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jobs.finetune", *arguments(pairs, output, *more, **RECIPE)]
    err = (output.parent / f"{output.name}.err").open("a")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=err, text=True)


def finish(driver: subprocess.Popen[str], output: Path) -> None:
    driver.communicate(timeout=600)
    assert driver.returncode == 0, (output.parent / f"{output.name}.err").read_text()


@pytest.fixture(scope="module")
def undisturbed(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "model"
    finish(start(pairs, output), output)
    return output


def wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def wait_for_step(output: Path, step: int) -> None:
    def is_there() -> bool:
        if not (output / "training/log.jsonl").is_file():
            return False
        return (output / "training/log.jsonl").read_text().count("train_loss") > step

    wait(f"no step {step}", is_there)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def worker_pid(output: Path) -> int:
    return int([record["start"]["pid"] for record in log(output) if "start" in record][-1])


def assert_same(output: Path, undisturbed: Path) -> None:
    assert list(curve(output)) == list(range(1, NUM_STEPS + 1))
    assert curve(output) == pytest.approx(curve(undisturbed), abs=1e-6)
    for step, losses in validations(undisturbed).items():
        assert validations(output)[step] == pytest.approx(losses, abs=1e-6)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (output, undisturbed))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_a_killed_driver_takes_its_workers_along_and_resume_goes_on(
    pairs: Path, undisturbed: Path, tmp_path: Path, how: signal.Signals
) -> None:
    output = tmp_path / "model"
    driver = start(pairs, output)
    wait_for_step(output, 130)
    pid = worker_pid(output)
    os.kill(driver.pid, how)
    driver.communicate(timeout=120)
    assert driver.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 1)
    wait("the worker outlives its driver", lambda: is_gone(pid))
    at = max(curve(output))
    assert 130 <= at < NUM_STEPS, "it must die in the middle for this test to mean anything"
    finish(start(pairs, output, "--resume"), output)
    starts = [record["step"] for record in log(output) if "start" in record]
    assert starts[0] == 0
    assert 0 < starts[1] <= at
    assert len(starts) == 2
    assert_same(output, undisturbed)


def test_a_killed_worker_is_started_again_from_the_last_checkpoint(
    pairs: Path, undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "model"
    driver = start(pairs, output)
    wait_for_step(output, 130)
    os.kill(worker_pid(output), signal.SIGKILL)
    finish(driver, output)
    starts = [record["step"] for record in log(output) if "start" in record]
    assert len(starts) == 2
    assert 0 < starts[1] < NUM_STEPS, "it must die in the middle for this test to mean anything"
    assert_same(output, undisturbed)
