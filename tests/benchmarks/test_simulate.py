"""The simulator of large runs: its books close, and it says what is known where the answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulate import RESULT, StepTimes
from benchmarks.simulation import SHARES, Plan, Simulation, simulate
from skipdecode.cost.predict import Workload

TIMES = StepTimes(step_s=0.01, step_row_s=0.0, prompt_token_s=0.0).batch_s
CALM = Plan(
    rows=64_000, sigma=0.0, mean_new_tokens=50, load_s=0.0, write_s=0.0, driver_s=0.0, straggler_share=0.0,
    speed_sigma=0.0, failures_per_worker_hour=0.0,
)  # fmt: skip


def test_a_batch_shrinks_by_halves() -> None:
    times = StepTimes(step_s=1.0, step_row_s=0.1, prompt_token_s=0.01)
    assert times.batch_s([10, 10], 5) == pytest.approx(0.1 + 10 * 1.2)
    assert times.batch_s([4, 10], 5) == pytest.approx(0.1 + 4 * 1.2 + 6 * 1.1)
    assert times.batch_s([4, 10, 10], 5) == pytest.approx(0.15 + 10 * 1.3), "a third has ended: carried along"


def test_step_times_are_fitted_to_what_was_measured() -> None:
    import json

    times = StepTimes.from_result(RESULT, "skipdecode 2")
    rows = [row for row in json.loads(RESULT.read_text())["rows"] if row["schedule"] == "skipdecode 2"]
    sizes, seconds = [row["batch_size"] for row in rows], [row["ms_per_step"] / 1e3 for row in rows]
    per_row, per_step = np.polyfit(sizes, seconds, 1)
    assert (times.step_row_s, times.step_s) == pytest.approx((per_row, per_step), rel=1e-6), "least squares"
    with pytest.raises(SystemExit, match="two batch sizes"):
        StepTimes.from_result(RESULT, "no such schedule")


def test_step_times_of_a_gpu_are_predicted() -> None:
    """OPT-1.3B on an H100: about 1 ms for the weights, and 512 columns of keys and values of each row; half at 2x."""
    work = Workload(num_prompt_tokens=256, new_tokens=512)
    full = StepTimes.of_gpu("h100", "opt-1.3b", "full", work)
    fast = StepTimes.of_gpu("h100", "opt-1.3b", "skipdecode 2", work)
    assert full.step_s == pytest.approx(1.05e-3, rel=0.1)
    assert full.step_row_s == pytest.approx(512 * 2 * 24 * 2048 * 2 / (0.8 * 3.35e12), rel=0.1)
    assert 1.7 < full.step_row_s / fast.step_row_s < 2.2
    assert full.prompt_token_s == pytest.approx(2 * 1.2e9 / (0.6 * 989e12), rel=0.2)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_calm_run_takes_the_time_of_its_batches(workers: int) -> None:
    found = simulate(CALM, TIMES, workers)
    assert found.hours * 3600 == pytest.approx(2000 * 50 * 0.01 / workers)
    assert found.efficiency == pytest.approx(1.0)
    assert found.cost == pytest.approx(found.hours * workers * CALM.price_per_hour)
    assert (found.tail, found.driver, found.restarts, found.load) == pytest.approx((0, 0, 0, 0))


def test_the_driver_bounds_a_large_run() -> None:
    found = simulate(replace(CALM, driver_s=0.1), TIMES, 200)
    assert found.hours * 3600 > 500 * 0.1, "500 windows, one after the other"
    assert found.driver > 0.5


@pytest.mark.parametrize("shares", [False, True])
def test_every_batch_is_written_once_however_many_die(shares: bool) -> None:
    plan = replace(CALM, sigma=0.5, failures_per_worker_hour=60.0, restart_s=5.0, load_s=5.0, straggler_share=0.2)
    run = Simulation(replace(plan, shares=shares), TIMES, 16)
    found = run.run()
    assert len(run.restarts) > 20
    assert sorted(run.written) == list(range(2000))
    assert not any(worker.left or worker.window or worker.current for worker in run.workers)
    assert 0 < found.restarts < 1
    assert found.efficiency < 0.9


def test_what_is_paid_for_is_accounted_for() -> None:
    """Every second of every worker, by what it went to."""
    plan = replace(
        CALM, sigma=0.6, load_s=3.0, write_s=0.1, driver_s=0.02, straggler_share=0.1, speed_sigma=0.05,
        failures_per_worker_hour=20.0, restart_s=4.0,
    )  # fmt: skip
    for workers in (1, 8, 50):
        found = simulate(plan, TIMES, workers)
        assert sum(getattr(found, name) for name in SHARES) == pytest.approx(1.0)
        assert min(found.load, found.checkpoints, found.restarts) > 0


def test_a_worker_that_dies_over_anothers_batch_loses_that_batch_alone() -> None:
    """Two workers; the second one has nothing left, takes a batch of the first's, and dies over it."""
    plan = replace(CALM, rows=32 * 6, restart_s=0.25)
    run = Simulation(plan, TIMES, 2)
    run.windows = [1, 5]  # from the end
    seconds = run.batches[0]
    run.workers[1].dies_at = 1.5 * seconds
    found = run.run()
    assert sorted(run.written) == list(range(6))
    assert run.lost_s == pytest.approx(0.5 * seconds), "its own window was written"
    assert found.hours * 3600 == pytest.approx(4 * seconds), "it came back and took another"


def test_sharing_shortens_the_tail() -> None:
    plan = replace(CALM, sigma=0.8, mean_new_tokens=60, straggler_share=0.1, straggler_factor=3.0, window_batches=8)
    naive, shared = (simulate(replace(plan, shares=shares), TIMES, 16) for shares in (False, True))
    assert shared.tail < 0.5 * naive.tail
    assert shared.hours < naive.hours


def test_the_same_seed_gives_the_same_run() -> None:
    plan = replace(Plan(), rows=50_000)
    times = StepTimes.from_result(RESULT, "skipdecode 2")
    assert simulate(plan, times.batch_s, 8) == simulate(plan, times.batch_s, 8)
