"""How the driver waits: rarely when nothing happens, not a moment longer when something does. On a real Ray."""

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback

from pipeline.generate.execution import QUIET_S, WaitForTasks

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_is_up")]

BLOCK_S, NUM_BLOCKS = 2.0, 3


class Counting(ExecutionCallback):  # type: ignore[misc]
    steps: ClassVar[int] = 0

    def on_execution_step(self, executor: Any) -> None:
        Counting.steps += 1


class Slow:
    def __call__(self, table: pa.Table) -> pa.Table:
        time.sleep(BLOCK_S)
        return table


def steps_of(*callbacks: type[ExecutionCallback]) -> int:
    """Steps of the loop in a pipeline with a slow actor, all of whose rows come out."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    before, Counting.steps = context.custom_execution_callback_classes, 0
    context.custom_execution_callback_classes = [Counting, *callbacks]
    try:
        rows = ray.data.range(NUM_BLOCKS, override_num_blocks=NUM_BLOCKS)
        slow = rows.map_batches(Slow, batch_format="pyarrow", compute=ActorPoolStrategy(size=1), num_cpus=0.1)
        assert sorted(row["id"] for row in slow.iter_rows()) == list(range(NUM_BLOCKS))
    finally:
        context.custom_execution_callback_classes = before
    return Counting.steps


def running(task: Any) -> Any:
    """An executor with this one task."""
    operator = SimpleNamespace(get_active_tasks=lambda: [SimpleNamespace(get_waitable=lambda: task)])
    return SimpleNamespace(_topology=[operator])


@pytest.mark.slow
def test_few_steps_while_nothing_happens() -> None:
    assert steps_of(WaitForTasks) < 0.6 * steps_of()  # fails, too, when Ray Data waits for tasks itself


def test_a_task_that_has_something_ends_the_wait() -> None:
    @ray.remote(num_cpus=0.1)
    def soon() -> None:
        time.sleep(0.5)

    waits = WaitForTasks()
    ray.get(soon.remote())  # the worker is up
    waits.quiet_s, begun = 60.0, time.monotonic()
    waits.on_execution_step(running(soon.remote()))
    assert time.monotonic() - begun < 30
    assert waits.quiet_s == 0.0


def test_the_wait_grows_to_its_limit() -> None:
    @ray.remote(num_cpus=0.1)
    def late() -> None:
        time.sleep(60)

    waits, task = WaitForTasks(), late.remote()
    for _ in range(8):
        waits.on_execution_step(running(task))
    assert waits.quiet_s == QUIET_S
    waits.on_execution_step(SimpleNamespace(_topology=[]))
    assert waits.quiet_s == 0.0
    ray.cancel(task, force=True)
