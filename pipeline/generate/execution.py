"""How Ray Data executes a run: how far stages are ahead of each other, how the driver waits, which workers stay.

- Ray Data bounds what waits between two stages by bytes against those that the next stage has in hand, and not at all
  while it has none. Windows of short prompts are small, and blocks under 100 KB live in the driver: reading would run
  ahead by a whole corpus (`FewBlocksAhead`).
- Its loop looks at all that it runs ten times a second, whether anything has happened or not, and takes 2 to 3 % of a
  core for that: nothing on a machine with a core to spare, time of the decoder's where that takes all (`WaitForTasks`).
- It lets go of every idle worker as soon as its input has ended; such a worker could help others (`KeepWorkers`).

Left out: what the stages do (`dataset`).
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
QUIET_S = 0.4  # what is no task's doing (a pool that may grow, a timeout) waits for as long at most
STEP_S = 0.1
BLOCK_BYTES = 8 << 20  # Ray joins blocks up to this before the next stage sees them; 128 MiB would delay the first row


class FewBlocksAhead(InputPolicy):
    """A stage takes no more input while BLOCKS_PER_TASK blocks wait behind it for each task that the next one may run.

    Not the last stage: nobody waits for its blocks.
    """

    NAME = "FewBlocksAhead"

    def may_take_input(self, operator: Operator, num_waiting: int) -> bool:
        following = operator.output_dependencies
        return not following or num_waiting < BLOCKS_PER_TASK * max(map(_tasks, following))


def _tasks(operator: Operator) -> int:
    """Tasks that it may run at a time; 1 where it does not say."""
    return operator.get_max_concurrency_limit() or 1


class WaitForTasks(StepCallback):
    """Ends a step of the loop when a task has something for the next one, or after a wait that grows with every step
    in which none had."""

    def __init__(self) -> None:
        self.quiet_s = 0.0

    def on_step(self, operators: Sequence[Operator]) -> None:
        tasks = {task.get_waitable() for operator in operators for task in operator.get_active_tasks()}
        ready = ray.wait(list(tasks), num_returns=1, fetch_local=False, timeout=self.quiet_s)[0] if tasks else ()
        self.quiet_s = 0.0 if ready or not tasks else min(self.quiet_s + STEP_S, QUIET_S)


class KeepWorkers(StepCallback):
    """Holds on to the workers until the run ends; of a pool that may shrink from the end of its input on."""

    def __init__(self) -> None:
        self._kept: set[object] = set()

    def on_step(self, operators: Sequence[Operator]) -> None:
        for operator in operators:
            self._kept |= actors_to_hold(operator)

    def on_end(self) -> None:
        self._kept.clear()


def prepare(*, keep_workers: bool, no_progress_timeout_s: float) -> None:
    """Settings of Ray Data for pipelines that are built from here on.

    `keep_workers`: those that are idle early stay to help others.
    """
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_no_progress_timeout_s = no_progress_timeout_s
    context.retried_map_errors = False  # a repeat in a task would go on with its numbers of files (`store.write`)
    use_callbacks(context, [WaitForTasks, *([KeepWorkers] if keep_workers else [])])
    use_policies(context, [FewBlocksAhead])
    hide_restart_warnings()


def execute(dataset: Dataset) -> None:
    """Runs a pipeline to its end; its rows are dropped. Raises what the first failing task raised."""
    with warnings.catch_warnings():
        # a small input cannot use all the tasks it may have, and need not
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
        run_to_end(dataset)
