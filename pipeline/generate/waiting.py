"""How the driver waits while workers decode.

Ray Data's loop looks at all that it runs ten times a second, whether anything has happened or not, and takes 2 to 3 %
of a core for that: nothing on a machine with a core to spare, time of the decoder's where that takes all of them.
"""

from typing import Any

import ray
from ray.data._internal.execution.execution_callback import ExecutionCallback

QUIET_S = 0.4  # what is no task's doing (a pool that may grow, a timeout) waits for as long at most
STEP_S = 0.1


class WaitForTasks(ExecutionCallback):  # type: ignore[misc]
    """Ends a step of the loop when a task has something for the next one, or after a wait that grows with every step
    in which none had."""

    def __init__(self) -> None:
        self.quiet_s = 0.0

    def on_execution_step(self, executor: Any) -> None:
        tasks = {task.get_waitable() for operator in executor._topology for task in operator.get_active_tasks()}
        ready = ray.wait(list(tasks), num_returns=1, fetch_local=False, timeout=self.quiet_s)[0] if tasks else ()
        self.quiet_s = 0.0 if ready or not tasks else min(self.quiet_s + STEP_S, QUIET_S)
