"""How Ray Data executes a run: backpressure between stages, how the driver waits, and which workers are kept.

- Ray Data limits the bytes queued between two stages relative to those that the next stage is processing, and not at
  all while it processes none. Windows of short prompts are small, and blocks under 100 KB live in the driver, so
  reading would run ahead by a whole corpus (`FewBlocksAhead`).
- Its scheduling loop polls ten times a second even if nothing has happened, which takes 2 to 3 % of a core. That is
  nothing on a machine with a core to spare, but decoding time on one without (`WaitForTasks`).
- It releases every idle worker as soon as its input has ended; such a worker could help others (`KeepWorkers`).

What the stages do is in `dataset`.
"""

import warnings
from collections.abc import Sequence

import ray
from ray.data import DataContext, Dataset

from pipeline.cluster.ray_internals import (
    InputPolicy,
    Operator,
    StepCallback,
    actors_to_hold,
    hide_restart_warnings,
    run_to_end,
    use_callbacks,
    use_policies,
)

BLOCKS_PER_TASK = 4
QUIET_S = 0.4  # the longest wait, and so the delay of anything that no task triggers (a growing pool, a timeout)
STEP_S = 0.1
BLOCK_BYTES = 8 << 20  # Ray joins blocks up to this before the next stage sees them; 128 MiB would delay the first row


class FewBlocksAhead(InputPolicy):
    """A stage takes no more input while BLOCKS_PER_TASK of its output blocks are queued for each task that the next
    stage may run. The last stage is not limited.
    """

    NAME = "FewBlocksAhead"

    def may_take_input(self, operator: Operator, num_waiting: int) -> bool:
        following = operator.output_dependencies
        return not following or num_waiting < BLOCKS_PER_TASK * max(map(_tasks, following))


def _tasks(operator: Operator) -> int:
    """The number of tasks that a stage may run at a time; 1 if it does not say."""
    return operator.get_max_concurrency_limit() or 1


class WaitForTasks(StepCallback):
    """Ends a step of the loop when a task has output, or after a wait that grows with every step without any."""

    def __init__(self) -> None:
        self.quiet_s = 0.0

    def on_step(self, operators: Sequence[Operator]) -> None:
        tasks = {task.get_waitable() for operator in operators for task in operator.get_active_tasks()}
        ready = ray.wait(list(tasks), num_returns=1, fetch_local=False, timeout=self.quiet_s)[0] if tasks else ()
        self.quiet_s = 0.0 if ready or not tasks else min(self.quiet_s + STEP_S, QUIET_S)


class KeepWorkers(StepCallback):
    """Keeps the workers until the run ends; in a pool that may shrink, only from the end of its input on."""

    def __init__(self) -> None:
        self._kept: set[object] = set()

    def on_step(self, operators: Sequence[Operator]) -> None:
        for operator in operators:
            self._kept |= actors_to_hold(operator)

    def on_end(self) -> None:
        self._kept.clear()


def prepare(*, keep_workers: bool, no_progress_timeout_s: float) -> None:
    """Applies the settings to all pipelines that are built from now on.

    `keep_workers`: idle workers stay to help others.
    """
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_no_progress_timeout_s = no_progress_timeout_s
    # a repeat within a task would name its files anew (`number_of_task`), and the first attempt's would stay
    context.retried_map_errors = False
    use_callbacks(context, [WaitForTasks, *([KeepWorkers] if keep_workers else [])])
    use_policies(context, [FewBlocksAhead])
    hide_restart_warnings()


def execute(dataset: Dataset) -> None:
    """Runs a pipeline to its end; its rows are dropped. Raises what the first failing task raised."""
    with warnings.catch_warnings():
        # a small input cannot use all the tasks it may have, and need not
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
        run_to_end(dataset)
