"""How far the stages of a run may be ahead of each other, on a real Ray Data pipeline."""

import time
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import ray
from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)

from pipeline.generate.execution import BLOCKS_PER_TASK, FewBlocksAhead

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_is_up")]

NUM_BLOCKS = 300


class Watching(BackpressurePolicy):  # type: ignore[misc]
    """Lets everything through, and keeps the most blocks that waited behind a stage."""

    most: ClassVar[dict[str, int]] = {}
    name = "Watching"

    def can_add_input(self, op: Any) -> bool:
        waiting = self._topology[op].output_queue.num_blocks
        self.most[op.name] = max(waiting, self.most.get(op.name, 0))
        return True


class Slow:
    def __call__(self, table: pa.Table) -> pa.Table:
        time.sleep(0.01)
        return table


def tokenize(table: pa.Table) -> pa.Table:
    return table


def most_waiting(policies: list[Any]) -> int:
    """Blocks that waited for a slow actor in a pipeline of many small ones, which all come out."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    Watching.most.clear()
    before = context.get_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, ENABLED_BACKPRESSURE_POLICIES)
    # not those of `before`: a run in this process may have left its own
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, *policies, Watching])
    try:
        rows = ray.data.range(10 * NUM_BLOCKS, override_num_blocks=2, concurrency=1)
        rows = rows.repartition(target_num_rows_per_block=10, strict=True)
        rows = rows.map_batches(tokenize, batch_format="pyarrow", batch_size=None, compute=TaskPoolStrategy(size=2))
        rows = rows.map_batches(Slow, batch_format="pyarrow", batch_size=None, compute=ActorPoolStrategy(size=1))
        assert sorted(row["id"] for row in rows.take_all()) == list(range(10 * NUM_BLOCKS))
    finally:
        context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, before)
    return next(waiting for name, waiting in Watching.most.items() if "tokenize" in name)


@pytest.mark.slow
def test_few_blocks_wait_for_a_slow_stage() -> None:
    """An actor has 2 tasks at a time; what two more tasks of the stage before it make comes on top."""
    assert most_waiting([FewBlocksAhead]) <= BLOCKS_PER_TASK * 2 + 2


@pytest.mark.slow
def test_without_it_reading_runs_ahead() -> None:
    """The reason why it is there; when Ray Data bounds this by itself, it can go."""
    assert most_waiting([]) > BLOCKS_PER_TASK * 2 + 2
