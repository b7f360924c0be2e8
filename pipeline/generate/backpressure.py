"""How far the stages of a run may be ahead of each other.

Ray Data bounds that by bytes against those that the next stage has in hand, and not at all while it has none. Windows
of short prompts are small, and blocks under 100 KB live in the driver: reading would run ahead by a whole corpus.
"""

from typing import Any

from ray.data._internal.execution.backpressure_policy import BackpressurePolicy

BLOCKS_PER_TASK = 4


class FewBlocksAhead(BackpressurePolicy):  # type: ignore[misc]
    """A stage takes no more input while BLOCKS_PER_TASK blocks wait behind it for each task that the next one may run.

    Not the last stage: nobody waits for its blocks.
    """

    @property
    def name(self) -> str:
        return "FewBlocksAhead"

    def can_add_input(self, op: Any) -> bool:
        waiting: int = self._topology[op].output_queue.num_blocks
        return not op.output_dependencies or waiting < BLOCKS_PER_TASK * max(map(_tasks, op.output_dependencies))


def _tasks(op: Any) -> int:
    """Tasks that `op` may run at a time; 1 where it does not say."""
    limit: int | None = op.get_max_concurrency_limit()
    return limit or 1
