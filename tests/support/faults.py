"""Faults of runs on a disk, by name: each hurts one run with SIGKILL or SIGSTOP of real processes, and mends it as its
user would. Left out: faults of stores (`store_faults`), and who judges what is left (`trials`)."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tests.support.processes import descendants, programs, rows, state
from tests.support.trials import NODE, WINDOW_ROWS, Driver, Missed, Trial, retry_command

Fault: TypeAlias = Callable[[Trial], None]

COMMIT_STEPS = ("begun", "staged", "synced", "renamed")
DRIVER_STEPS = [
    ("lease made", 0),
    *((f"run.json {step}", after) for step in ("staged", "renamed") for after in range(5)),
    ("late listed", 0),
    ("report.json staged", 0),
    ("report.html renamed", 0),
    ("leaving", 0),
]
"""Fault points that a driver passes, and how often it does before."""
STORE_STEPS = [("late listed", 0), ("leaving", 0)]
"""Those of DRIVER_STEPS that a driver passes on an object store, where nothing is renamed."""
PAUSES = [*((point, after) for point, after in DRIVER_STEPS if "renamed" not in point and point != "lease made"), None]
"""Where it stands still; None: at a random moment of its work."""
RETRY_STEPS = [
    *(("run.json staged", after) for after in range(4)),
    *(("run.json renamed", after) for after in range(4)),
    ("checkpoint staged", 0),
    ("commit moved", 0),
    ("commit moved", 1),
    ("commit removed", 0),
    None,
]
QUICK_LEASE_S, REAL_LEASE_S = "3", "30"
GCS_PATIENCE_S = "5"  # how long processes try to reach a GCS that is gone; Ray's own is 60
DIES_WITH_RAY_S = 60.0


OWN_SEED = 7
OTHER_ROWS = "sampling.seed=8"
"""What makes a run another one, whose rows the judge tells from those of the trial's own."""


def ends_well(trial: Trial, driver: Driver) -> None:
    code, err = trial.end(driver)
    assert code == 0, f"exit code {code}: {err[-1500:]}"


def must_have_hit(trial: Trial, driver: Driver, plan: dict[str, object]) -> None:
    """Missed: the driver has ended, and nobody came to the fault."""
    if driver.poll() is not None and trial.hits() != list(plan):
        raise Missed


def actor_killed(trial: Trial) -> None:
    driver = trial.start("actors.num_actors=2")
    trial.wait_for_files(driver)
    victims = trial.wait(driver, lambda: trial.processes("ray::MapWorker"))
    os.kill(trial.rng.choice(sorted(victims)), signal.SIGKILL)
    ends_well(trial, driver)


def actor_killed_between_blocks(trial: Trial) -> None:
    """One that has given a window above 12 MiB and dies in its next one."""
    trial.corpus = "large"
    row = trial.rng.randrange(2 * WINDOW_ROWS, 6 * WINDOW_ROWS)
    plan = {f"decode r{row}": {"signal": "SIGKILL"}}
    driver = trial.start(f"actors.num_actors={trial.rng.choice((1, 2))}", plan=plan)
    ends_well(trial, driver)
    must_have_hit(trial, driver, plan)


def writer_killed(trial: Trial) -> None:
    plan = {f"data {trial.rng.choice(COMMIT_STEPS)}": {"signal": "SIGKILL", "after": trial.rng.randrange(3)}}
    driver = trial.start(plan=plan)
    ends_well(trial, driver)
    must_have_hit(trial, driver, plan)


def sink_killed_between_files(trial: Trial) -> None:
    """Behind the good rows of a window, before its failed ones."""
    trial.corpus = "mixed"
    plan = {"data renamed": {"signal": "SIGKILL", "after": trial.rng.choice((0, 0, 2))}}
    driver = trial.start(plan=plan)
    ends_well(trial, driver)
    must_have_hit(trial, driver, plan)


def driver_killed(trial: Trial) -> None:
    trial.corpus = trial.rng.choice(("plain", "mixed"))
    driver = trial.start()
    trial.wait_for_files(driver)
    trial.kill(driver)
    trial.resume()


def driver_killed_at_a_step(trial: Trial) -> None:
    point, after = trial.rng.choice(DRIVER_STEPS)
    plan = {point: {"signal": "SIGKILL", "after": after}}
    driver = trial.start(plan=plan)
    code, err = trial.end(driver)
    must_have_hit(trial, driver, plan)
    assert code == -signal.SIGKILL, err
    trial.resume()


def overwrite_and_kill(trial: Trial, steps: Sequence[tuple[str, int]] = DRIVER_STEPS) -> None:
    """A run is killed, and the one that overwrites it too, at one of `steps` or at a random moment; then its user goes
    on."""
    first = trial.start(OTHER_ROWS)
    trial.wait_for_files(first)
    trial.kill(first)
    place = trial.rng.choice([*steps, None])
    plan = {} if place is None else {place[0]: {"signal": "SIGKILL", "after": place[1]}}
    second = trial.start("--overwrite", plan=plan)
    if place is None:
        time.sleep(trial.rng.random() * 8)
        trial.kill(second)
    else:
        trial.end(second)
        must_have_hit(trial, second, plan)
    code, err = trial.end(trial.start("--resume"))
    if code == 2:  # it was killed before it had written its own run.json
        assert "sampling.seed: the run was started with 8, now it is 7" in err, err[-1500:]
        ends_well(trial, trial.start("--overwrite"))
    else:
        assert code == 0, err[-1500:]


def late_writer(trial: Trial) -> None:
    """A writer stands still in a step of its commit, its driver dies; it goes on when another session has begun."""
    point, mode = f"data {trial.rng.choice(COMMIT_STEPS)}", trial.rng.choice(("--resume", "--overwrite"))
    rows = [OTHER_ROWS] if mode == "--overwrite" else []
    driver = trial.start(*rows, plan={point: {"signal": "SIGSTOP", "after": trial.rng.randrange(2)}})
    trial.wait(driver, lambda: point in trial.hits())
    (hit,) = trial.site.plan_folder.glob(f"faults.json.{point}.*.hit")
    writer = int(hit.read_text())
    trial.kill(driver)
    next_one = trial.start(mode)
    trial.pause()
    with suppress(ProcessLookupError):  # Ray was faster
        os.kill(writer, signal.SIGCONT)
    ends_well(trial, next_one)


def pause_and_succeed(trial: Trial, lease_s: str) -> None:
    """A driver stands still beyond its lease, another takes its folder to the end, and it goes on."""
    successor = trial.rng.choice(("--resume", "--overwrite"))
    place = trial.rng.choice(PAUSES)
    plan = {} if place is None else {place[0]: {"signal": "SIGSTOP", "after": place[1]}}
    rows = [OTHER_ROWS] if successor == "--overwrite" else []
    paused = trial.start(*rows, plan=plan, SKIPDECODE_LEASE_S=lease_s)
    if place is None:
        trial.wait_for_files(paused)
        os.kill(paused.pid, signal.SIGSTOP)
    else:
        trial.wait(paused, trial.hits)
    ends_well(trial, trial.start(successor, SKIPDECODE_LEASE_S=lease_s))
    os.kill(paused.pid, signal.SIGCONT)
    code, err = trial.end(paused)
    assert code == 1, f"the paused driver ends with {code}: {err[-1500:]}"


def driver_paused(trial: Trial) -> None:
    pause_and_succeed(trial, QUICK_LEASE_S)


def driver_paused_30_s(trial: Trial) -> None:
    pause_and_succeed(trial, REAL_LEASE_S)


def two_drivers(trial: Trial) -> None:
    """Started together: one gets the folder, the other is refused, or finds it finished."""
    both = [trial.start("--resume", SKIPDECODE_LEASE_S=QUICK_LEASE_S) for _ in range(2)]
    ends = [trial.end(driver) for driver in both]
    codes = sorted(code for code, _ in ends)
    assert codes in ([0, 0], [0, 2]), ends


def attempt_tracker_killed(trial: Trial) -> None:
    """Or the collector of the figures, without which a run goes on."""
    name = trial.rng.choice(("AttemptTracker", "AttemptTracker", "MetricsCollector"))
    driver = trial.start()
    trial.wait_for_files(driver)
    for pid in trial.processes(f"ray::{name}"):
        os.kill(pid, signal.SIGKILL)
    code, err = trial.end(driver)
    assert name == "AttemptTracker" or code == 0, err
    assert code in (0, 1), err
    if code:
        trial.resume()


def kill_of_own_ray(trial: Trial, program: str) -> None:
    """The run's own Ray loses a process that it cannot do without; whoever started the run waits a while for it."""
    trial.is_embedded = True
    driver = trial.start(RAY_gcs_rpc_server_reconnect_timeout_s=GCS_PATIENCE_S)
    trial.wait_for_files(driver)
    trial.note_processes(driver)
    (victim,) = programs(descendants(driver.pid), program)
    os.kill(victim, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        driver.communicate(timeout=DIES_WITH_RAY_S)
    if driver.poll() is None:
        trial.kill(driver)
    trial.is_embedded = False  # the same rows, and no second Ray to wait for
    trial.resume()


def gcs_killed(trial: Trial) -> None:
    kill_of_own_ray(trial, "gcs_server")


def raylet_killed(trial: Trial) -> None:
    kill_of_own_ray(trial, "raylet")


def node_lost(trial: Trial) -> None:
    cluster = trial.site.cluster
    driver = trial.start("actors.num_actors=2")
    trial.wait_for_files(driver)
    cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
    cluster.add_node(**NODE)
    if driver.poll() is not None:
        raise Missed
    ends_well(trial, driver)


def batch_killed_between_answers(trial: Trial) -> None:
    """Of an OpenAI batch: behind its answers, before its errors; or one of the two is torn afterwards."""
    trial.corpus = "batch"
    point = f"batch_{trial.rng.choice(('output', 'errors'))}.jsonl {trial.rng.choice(('staged', 'renamed'))}"
    driver = trial.start(plan={point: {"signal": "SIGKILL"}})
    code, err = trial.end(driver)
    assert code == -signal.SIGKILL, err
    trial.resume()
    output = Path(trial.output)
    if trial.rng.random() < 0.5:
        tear(output / f"batch_{trial.rng.choice(('output', 'errors'))}.jsonl", trial)
        trial.resume()
    for status, name in (("ok", "batch_output.jsonl"), ("failed", "batch_errors.jsonl")):
        lines = [json.loads(line)["custom_id"] for line in (output / name).read_text().splitlines()]
        assert sorted(lines) == sorted(rows(output, status)), f"{name} lacks rows, or has some twice"


def torn_metadata(trial: Trial) -> None:
    """What a power cut leaves of small files; beside them the driver died."""
    driver = trial.start()
    trial.wait_for_files(driver)
    trial.kill(driver)
    output = Path(trial.output)
    kind = trial.rng.choice(("lease.json", "metrics", "both"))
    if kind != "metrics":
        tear(output / "lease.json", trial)
    if kind != "lease.json":
        for path in output.glob("metrics/*.parquet"):
            tear(path, trial)
    (output / "run.json.0a1b2c3d.tmp").write_text("{")
    trial.resume(SKIPDECODE_LEASE_S=QUICK_LEASE_S)


def tear(path: Path, trial: Trial) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: trial.rng.randrange(len(data))])


def retry_killed(trial: Trial) -> None:
    """While it generates, or in a step of its exchange; then another retry, or --resume."""
    trial.corpus, trial.retried = "mixed", True
    shutil.copytree(trial.site.undisturbed("mixed"), trial.output)
    place = trial.rng.choice(RETRY_STEPS)
    plan = {} if place is None else {place[0]: {"signal": "SIGKILL", "after": place[1]}}
    driver = trial.launch(retry_command(trial.output), trial.env(plan))
    if place is None:
        data = Path(trial.output)
        trial.wait(driver, lambda: list(data.glob("checkpoint/retry-*/status=*/*.parquet")))
        trial.kill(driver)
    trial.end(driver)
    must_have_hit(trial, driver, plan)
    if trial.rng.random() < 0.5 or state(Path(trial.output))["state"] == "finished":
        ends_well(trial, trial.launch(retry_command(trial.output), trial.env()))
    else:
        trial.resume()


DISK_FAULTS: dict[str, Fault] = {
    "actor killed": actor_killed,
    "actor killed between two blocks": actor_killed_between_blocks,
    "writer killed": writer_killed,
    "sink killed between two files": sink_killed_between_files,
    "driver killed": driver_killed,
    "driver killed at a step": driver_killed_at_a_step,
    "writer that outlives its driver": late_writer,
    "overwriting run killed": overwrite_and_kill,
    "driver paused": driver_paused,
    "driver paused, lease of 30 s": driver_paused_30_s,
    "two drivers at once": two_drivers,
    "attempt tracker killed": attempt_tracker_killed,
    "gcs_server killed": gcs_killed,
    "head's raylet killed": raylet_killed,
    "node lost": node_lost,
    "batch killed between its answer files": batch_killed_between_answers,
    "torn metadata": torn_metadata,
    "retry killed": retry_killed,
}
