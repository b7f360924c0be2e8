"""Runs that end before their last row: signals, the error budget, hung and broken workers. Real processes."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.processes import (
    alive,
    command,
    descendants,
    environment,
    rows,
    run,
    start,
    state,
    wait_for,
    workers,
    write_prompts,
)

pytestmark = pytest.mark.timeout(900)
NUM_ROWS = 480


def written(output: Path) -> bool:
    return len(list(output.glob("data/status=ok/*.parquet"))) > 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_within_seconds_and_leaves_nothing_behind(
    tiny_checkpoint: Path, tmp_path: Path, how: signal.Signals
) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", NUM_ROWS), tmp_path / "run"
    slow = ["sampling.max_new_tokens=60", "actors.batch_size=4"]
    driver = start(command(tiny_checkpoint, source, output, *slow), environment(None, tmp_path))
    wait_for(lambda: written(output), driver)
    family = descendants(driver.pid)
    assert workers(family)
    if how == signal.SIGINT:
        os.killpg(driver.pid, how)  # as a terminal does
    else:
        os.kill(driver.pid, how)
    told = time.monotonic()
    wait_for(lambda: state(output)["state"] == "interrupted", timeout_s=60)
    noted_s = time.monotonic() - told
    out, err = driver.communicate(timeout=120)
    print(f"{how.name}: state after {noted_s:.1f} s, end after {time.monotonic() - told:.1f} s")
    assert driver.returncode == 1, err
    assert "interrupted; what is written stays, --resume goes on with the run" in err
    assert "Traceback" not in err
    assert out == ""
    wait_for(lambda: not alive(family), timeout_s=60)
    assert 0 < len(rows(output)) < NUM_ROWS


def test_an_overdrawn_budget_ends_the_run_early_and_a_larger_one_goes_on(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "run"
    lines = [{"id": f"r{i}", "prompt": None if i % 20 == 0 else f"row {i % 97}"} for i in range(NUM_ROWS)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    wanted = command(tiny_checkpoint, source, output, "limits.max_failed_rows=5")
    done = run(wanted, environment(None, tmp_path))
    assert done.returncode == 3, done.stderr
    assert "rows have failed, more than limits.max_failed_rows allows" in done.stderr
    assert "good rows stay, --resume with a larger limit goes on" in done.stderr
    assert state(output)["state"] == "interrupted"
    before = rows(output)
    assert len(before) < NUM_ROWS / 2, "it must end early"
    done = run([*wanted, "--resume", "limits.max_failed_rows=0.05"], environment(None, tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["books"] == {"input": NUM_ROWS, "ok": 456, "failed": 24, "closed": True}
    after = rows(output)
    assert {row: after[row] for row in before} == before
    done = run([*wanted, "--resume", "limits.max_failed_rows=23"], environment(None, tmp_path))
    assert done.returncode == 3, "a finished run is judged by the limit of today"


@pytest.mark.slow
def test_a_hung_worker_ends_the_run_with_the_state_of_each(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source, output = write_prompts(tmp_path / "in.jsonl", 200), tmp_path / "run"
    wanted = command(tiny_checkpoint, source, output, "limits.no_progress_timeout_s=45")
    driver = start(wanted, environment({"decode r100": {"signal": "SIGSTOP"}}, tmp_path))
    wait_for(lambda: written(output), driver)
    family = descendants(driver.pid)
    _, err = driver.communicate(timeout=600)
    assert driver.returncode == 1, err
    assert "no stage made progress for limits.no_progress_timeout_s; the workers:" in err
    (stopped,) = (hit.read_text() for hit in tmp_path.glob("faults.json.*.hit"))
    (said,) = (line for line in err.splitlines() if f"pid {stopped}, decoding " in line)
    assert re.search(r"decoding \d+ rows \(first id 'r\d+'\) for \d+ s, started 1 times", said)
    assert "--resume goes on with the run" in err
    assert state(output)["state"] == "interrupted"
    wait_for(lambda: not alive(family), timeout_s=60)
    done = run([*wanted, "--resume"], environment(None, tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(rows(output, "ok")) == 200


@pytest.mark.slow
def test_a_worker_that_dies_at_its_start_ends_the_run_with_the_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 8)
    faults = {"load": {"signal": "SIGSEGV", "times": 100}}
    done = run(command(tiny_checkpoint, source, tmp_path / "run"), environment(faults, tmp_path))
    assert done.returncode == 1, done.stderr
    assert "died 3 times while it loaded the model" in done.stderr
    assert "the worker or its node is at fault, not a row" in done.stderr


def test_a_worker_that_cannot_load_ends_the_run_with_the_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 8)
    env = environment(None, tmp_path, RAY_OVERRIDE_RESOURCES='{"GPU": 1, "CPU": 8}')
    done = run(command(tiny_checkpoint, source, tmp_path / "run", "actors.num_gpus=1"), env)
    assert done.returncode == 1, done.stderr
    assert "cannot start: " in done.stderr.splitlines()[-2]
    assert "CUDA" in done.stderr.splitlines()[-2]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_room(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    source, disk = tmp_path / "in.jsonl", tmp_path / "disk"
    lines = [
        {"id": f"r{i}", "prompt": f"row {i}", "ballast": random.Random(i).randbytes(4000).hex()} for i in range(300)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode()}")
    try:
        wanted = command(tiny_checkpoint, source, disk / "run", "actors.batch_size=16")
        done = run(wanted, environment(None, tmp_path))
        assert done.returncode == 1, done.stderr
        assert f"error: output.path: {disk / 'run'}: no space left; make room, and --resume" in done.stderr
        before = rows(disk / "run")
        assert 0 < len(before) < 300
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        done = run([*wanted, "--resume"], environment(None, tmp_path))
        assert done.returncode == 0, done.stderr
        after = rows(disk / "run", "ok")
        assert len(after) == 300
        assert {row: after[row] for row in before} == before
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
