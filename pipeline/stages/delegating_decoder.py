"""The windows of a worker that sits out, whose device is sick for instance: other workers decode them.

Ray Data gives windows to every worker of a pool, and repeats those of one that dies on that worker alone. So a worker
that cannot work keeps what it was given, at most a window or two, and offers all rows of it in the steal queue. Others
take them when they have no window of their own, at the latest at the end of the run.
"""

import threading
import time
import uuid
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from actors.failures import RowFailure
from actors.generator import Answer
from pipeline.schema import POISON_ROW
from pipeline.stages.attempt_tracker import StopRun, WindowPlan
from pipeline.stages.window_decoder import MIN_SHARED_ROWS, prompt_key, report_rows
from pipeline.stages.work_stealing import CollectedAnswers, split_parts
from skipdecode.engine.request import Request

COLLECT_S = 0.5  # between two looks at what others have decoded
NUM_TAKERS = 4  # a window is cut into parts for at least so many workers


class DelegatingDecoder:
    """`WindowDecoder` without a model: it answers a window with what other workers make of it."""

    def __init__(self, worker: str, attempts: ActorHandle, collector: ActorHandle, steal_queue: ActorHandle) -> None:
        """Actor handles of `AttemptTracker`, `MetricsCollector` and `StealQueue`."""
        self.worker, self.attempts, self.collector, self.steal_queue = worker, attempts, collector, steal_queue
        self.lock = threading.Lock()
        steal_queue.worker_started.remote(worker)

    def begin_window(self, num_failed: int) -> None:
        """As `WindowDecoder.begin_window`."""
        self._report_failed(num_failed)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order. StopRun when the attempt tracker ends the run.

        Suspects are offered in the parts that the tracker plans, so that a row that kills its worker is found here too.
        """
        by_id = {request.id: request for request in requests}
        keys = [prompt_key(request) for request in by_id.values()]
        plan: WindowPlan | str = ray.get(self.attempts.plan_window.remote(self.worker, list(by_id), keys))
        if isinstance(plan, str):
            raise StopRun(plan)
        self._report_failed(len(plan.quarantined))
        answers: dict[str, Answer] = dict(plan.answers)
        for part in plan.parts:
            rows = [by_id[row] for row in part]
            if rows:  # no control: whoever takes a part is known to work
                answers |= self._answers_of_others(
                    split_parts([rows], NUM_TAKERS if plan.is_clear else 1, MIN_SHARED_ROWS)
                )
        left = [request for row, request in by_id.items() if row not in answers and row not in plan.quarantined]
        if left:  # who took them has died; the tracker knows of what
            answers |= zip((request.id for request in left), self.answer(left), strict=True)
        answers |= {row: RowFailure(POISON_ROW, why) for row, why in plan.quarantined.items()}
        return [answers[request.id] for request in requests]

    def _answers_of_others(self, parts: Sequence[Sequence[Request]]) -> dict[str, Answer]:
        """Answers by row id, but for those of parts whose takers have died."""
        key, answers = uuid.uuid4().hex, dict[str, Answer]()
        ray.get(self.steal_queue.share.remote(key, self.worker, parts))
        while True:
            found: CollectedAnswers = ray.get(self.steal_queue.collect.remote(key))
            answers |= found.answers
            if not found.num_stolen and not found.num_waiting:
                answers |= ray.get(self.steal_queue.close.remote(key))
                return answers
            if (verdict := ray.get(self.attempts.verdict.remote())) is not None:
                raise StopRun(verdict["reason"])
            time.sleep(COLLECT_S)

    def _report_failed(self, rows: int) -> None:
        report_rows(self.collector, self.worker, time.time(), rows, rows)
