"""Runs that end before their last row: signals, hung and broken workers. Real processes."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.processes import (
    alive,
    command,
    descendants,
    environment,
    hits,
    rows,
    run,
    start,
    state,
    wait_for,
    workers,
    write_prompts,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
NUM_ROWS = 480


def written(output: Path) -> bool:
    return len(list(output.glob("data/status=ok/*.parquet"))) > 2


@pytest.mark.slow
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
    assert "interrupted; what was written is kept, and --resume continues the run" in err
    assert "Traceback" not in err
    assert json.loads(out)["exit_code"] == 1
    wait_for(lambda: not alive(family), timeout_s=60)
    assert 0 < len(rows(output)) < NUM_ROWS


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
def test_a_window_of_time_ends_a_run_that_can_go_on(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Here the worker hangs, so that the window is over before the last row on a machine of any speed."""
    source, output = write_prompts(tmp_path / "in.jsonl", 200), tmp_path / "run"
    wanted = command(tiny_checkpoint, source, output)
    hangs = environment({"decode r100": {"signal": "SIGSTOP"}}, tmp_path)
    done = run([*wanted, "limits.window_s=45"], hangs)
    assert done.returncode == 1, done.stderr
    left = re.search(
        r"the window of limits.window_s=45 is over, and (\d+) rows are left; --resume goes on", done.stderr
    )
    assert left, done.stderr
    assert "Traceback" not in done.stderr
    assert state(output)["state"] == "expired"
    before = rows(output)
    assert 0 < len(before) == 200 - int(left[1])
    done = run([*wanted, "--resume"], environment(None, tmp_path))
    assert done.returncode == 0, done.stderr
    after = rows(output, "ok")
    assert len(after) == 200
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
def test_a_worker_that_dies_at_its_start_ends_the_run_with_the_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 8)
    faults = {"load": {"signal": "SIGSEGV", "times": 100}}
    done = run(command(tiny_checkpoint, source, tmp_path / "run"), environment(faults, tmp_path))
    assert done.returncode == 1, done.stderr
    assert "died 3 times while it loaded the model" in done.stderr
    assert "the worker or its node is at fault, not a row" in done.stderr


@pytest.mark.slow
def test_a_worker_that_cannot_load_ends_the_run_with_the_reason(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 8)
    env = environment(None, tmp_path, RAY_OVERRIDE_RESOURCES='{"GPU": 1, "CPU": 8}')
    done = run(command(tiny_checkpoint, source, tmp_path / "run", "actors.num_gpus=1"), env)
    assert done.returncode == 1, done.stderr
    assert "cannot start: " in done.stderr.splitlines()[-2]
    assert "CUDA" in done.stderr.splitlines()[-2]


@pytest.mark.slow
def test_a_worker_whose_device_falls_sick_ends_no_run(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """It dies with a window in hand, and its successors cannot load; the other worker decodes all rows."""
    source, sick = write_prompts(tmp_path / "in.jsonl", 60), "CUDA error: an illegal memory access was encountered"
    faults = {"decode r9": {"signal": "SIGKILL"}, "load again": {"error": sick, "times": 100}}
    wanted = [*command(tiny_checkpoint, source, tmp_path / "run"), "actors.num_actors=2"]
    done = run(wanted, environment(faults, tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(hits(tmp_path)) == ["decode r9", *["load again"] * 3]
    assert rows(tmp_path / "run", "ok").keys() == {f"r{number}" for number in range(60)}
    assert f"cannot start: RuntimeError: {sick}; others decoded its rows" in done.stderr
