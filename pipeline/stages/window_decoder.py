"""Decodes the windows of one worker, and keeps the attempt tracker and the collector informed.

`WindowDecoder.answer` asks the attempt tracker how to decode a window. The plan has one part, the whole window, unless
rows are suspects.

- Without a steal queue, as with a single worker, the window is decoded in one call (`_answer_part_by_part`).
- With one, it is decoded as long as no worker is idle (`_answer_sharing_batches`). When others are, at the end of a
  run, no more rows begin; those that are left are offered to them in the queue, in batches (`_share`), and an idle
  worker decodes what others offer (`steal`). Each window is still returned by its owner, which decodes what no other
  worker delivers in time. If the queue is lost, workers stop sharing and the run goes on.
- After the death of a worker that was decoding these rows, the tracker divides them into parts, which are decoded one
  by one until the row that kills workers is found (`_answer_part_by_part`). Quarantined rows are not decoded at all.

In all cases the tracker is told of rows before and after they are decoded.
"""

import hashlib
import threading
import time
import uuid
from array import array
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import cast

import ray
from ray.actor import ActorHandle

from actors.failures import RowFailure
from actors.generator import Answer, num_positions
from pipeline.cluster.worker_records import BatchRecord
from pipeline.fault_injection import fault_point
from pipeline.schema import POISON_ROW
from pipeline.stages.attempt_tracker import StopRun, WindowPlan
from pipeline.stages.endpoint_model import EndpointModel
from pipeline.stages.model_thread import ModelThread
from pipeline.stages.work_stealing import CollectedAnswers, StolenPart, split_parts
from skipdecode.engine.generate import ShouldContinue, always
from skipdecode.engine.request import Request

POLL_S = 0.05, 0.5  # an idle worker asks for work as often as this, at first and after a while
MIN_SHARED_ROWS = 4  # a part is not split into smaller ones than this
STEAL_TIMEOUT_S = 20.0  # how long an owner waits for stolen parts, in addition to three times its own longest part


class WindowDecoder:
    """Decodes one worker's windows, and the parts that it steals from the windows of other workers."""

    def __init__(
        self,
        worker: str,
        model: ModelThread | EndpointModel,
        attempts: ActorHandle,
        collector: ActorHandle,
        steal_queue: ActorHandle | None,
    ) -> None:
        """Actor handles of `AttemptTracker`, `MetricsCollector` and `StealQueue`. `steal_queue`: None where nothing is
        shared."""
        self.worker, self.model = worker, model
        self.attempts, self.collector, self.steal_queue = attempts, collector, steal_queue
        self.num_windows = 0
        """Windows that this worker has begun, stolen parts not counted."""
        self.lock = threading.Lock()
        """Held while a window, or a stolen part, is decoded."""
        if steal_queue is not None:
            steal_queue.worker_started.remote(worker)

    def begin_window(self, num_failed: int) -> None:
        """Called when a window of this worker begins; `num_failed` of its rows failed in an earlier stage."""
        self.num_windows += 1
        if self.steal_queue is not None:
            self.steal_queue.window_begun.remote(self.worker)
        self._report_rows(time.time(), num_failed, num_failed)

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """One answer per request, in order, decoded as the attempt tracker plans it. StopRun when it ends the run."""
        by_id = {request.id: request for request in requests}
        keys = [prompt_key(request) for request in by_id.values()]
        plan: WindowPlan | str = ray.get(self.attempts.plan_window.remote(self.worker, list(by_id), keys))
        if isinstance(plan, str):
            raise StopRun(plan)
        quarantined = {row: RowFailure(POISON_ROW, why) for row, why in plan.quarantined.items()}
        self._report_rows(time.time(), len(quarantined), len(quarantined))
        if self.steal_queue is not None and plan.is_clear and plan.parts:
            answers = plan.answers | self._answer_sharing_batches([by_id[row] for row in plan.parts[0]])
        else:
            answers = self._answer_part_by_part(plan, by_id)
        answers |= quarantined
        return [answers[request.id] for request in requests]

    def _answer_part_by_part(self, plan: WindowPlan, by_id: dict[str, Request]) -> dict[str, Answer]:
        """Answers by row id: those that an earlier attempt made, and those of the plan's parts, decoded one by one."""
        answers = dict(plan.answers)
        for number, part in enumerate(plan.parts):
            if number:  # the tracker has noted the first part already
                ray.get(self.attempts.part_started.remote(self.worker, part))
            made: dict[str, Answer] = {}
            if part:
                made = self._decode([by_id[row] for row in part], answers.keys(), is_alone=not plan.is_clear)
            else:  # a control: the worker shows that it can decode anything at all
                self.model.check()
            self.attempts.part_decoded.remote(self.worker, made if len(plan.parts) > 1 else None)
            answers |= made
        return answers

    def _answer_sharing_batches(self, requests: Sequence[Request]) -> dict[str, Answer]:
        """Answers by row id. Once other workers are idle, the rows that are left are shared with them, the longest
        batches first."""
        left, answers = list(requests), dict[str, Answer]()
        while left:
            num_idle = self._num_idle()
            parts = split_parts(longest_first(self.model.batches(left)), 1 + num_idle, MIN_SHARED_ROWS)
            if num_idle and len(parts) > 1:
                try:
                    self._share(parts, answers)
                except ray.exceptions.RayActorError:
                    self.steal_queue = None  # if the attempt tracker is what is lost, the next call to it ends the run
                for part in parts:
                    if part[0].id not in answers:  # the worker that stole them may have died of them
                        answers |= zip((request.id for request in part), self.answer(part), strict=True)
                return answers
            answers |= self._decode_part(left, should_continue=lambda: not self._num_idle())
            left = [request for request in left if request.id not in answers]
        return answers

    def _num_idle(self) -> int:
        if self.steal_queue is None:
            return 0
        try:
            return int(ray.get(self.steal_queue.num_idle.remote()))
        except ray.exceptions.RayActorError:
            self.steal_queue = None
            return 0

    def _share(self, parts: Sequence[Sequence[Request]], answers: dict[str, Answer]) -> None:
        """Offers the parts to other workers and decodes those that nobody takes.

        Adds the answers of both to `answers`; those of a thief that takes too long are missing.
        """
        queue = self.steal_queue
        if queue is None:
            return
        key, longest_s = uuid.uuid4().hex, 0.0
        ray.get(queue.share.remote(key, self.worker, parts))
        while (index := ray.get(queue.take.remote(key))) is not None:
            started = time.monotonic()
            answers |= self._decode_part(parts[index])
            longest_s = max(longest_s, time.monotonic() - started)
            fault_point("sharing")
        ends_at = time.monotonic() + STEAL_TIMEOUT_S + 3 * longest_s
        while True:
            found: CollectedAnswers = ray.get(queue.collect.remote(key))
            answers |= found.answers
            if not found.num_stolen or time.monotonic() >= ends_at:
                break
            time.sleep(POLL_S[0])
        answers |= ray.get(queue.close.remote(key))

    def start_stealing(self) -> None:
        """Starts a thread that takes parts of other workers' windows whenever this worker is idle."""
        threading.Thread(target=self._steal_loop, daemon=True, name="steal").start()

    def _steal_loop(self) -> None:
        wait_s = POLL_S[0]
        while self.steal_queue is not None:
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, POLL_S[1])
            if not self.lock.acquire(blocking=False):
                wait_s = POLL_S[0]
                continue
            try:
                while self.steal():
                    wait_s = POLL_S[0]
            except ray.exceptions.RayError:  # the driver has ended the run, or the queue is lost
                return
            finally:
                self.lock.release()

    def steal(self) -> bool:
        """Decodes a part of another worker's window; False if there was none to take."""
        queue = self.steal_queue
        stolen: StolenPart | None = None if queue is None else ray.get(queue.steal.remote(self.worker))
        if queue is None or stolen is None:
            return False
        queue.complete.remote(stolen, self._decode_part(stolen.requests, is_stolen=True))
        self.attempts.worker_idle.remote(self.worker)
        return True

    def _decode_part(
        self, requests: Sequence[Request], is_stolen: bool = False, should_continue: ShouldContinue = always
    ) -> dict[str, Answer]:
        """Answers by row id, of the rows that were begun. If this worker dies meanwhile, the attempt tracker knows
        which rows it was decoding."""
        ray.get(self.attempts.part_started.remote(self.worker, tuple(request.id for request in requests)))
        if is_stolen:
            fault_point("help")
        answers = self._decode(requests, is_stolen=is_stolen, should_continue=should_continue)
        self.attempts.part_decoded.remote(self.worker, None)
        return answers

    def _decode(
        self,
        requests: Sequence[Request],
        known: Set[str] = frozenset(),
        is_stolen: bool = False,
        should_continue: ShouldContinue = always,
        is_alone: bool = False,
    ) -> dict[str, Answer]:
        """Answers by row id. Rows that were answered before (`known`) are not recorded again. `is_alone`: one of them
        may end the process that decodes it."""
        started_at = time.time()
        for request in requests:
            fault_point(f"decode {request.id}")
        if is_alone:
            result = self.model.decode_alone(requests)
        else:
            result = self.model.decode(requests, may_measure=not is_stolen, should_continue=should_continue)
        left = set(result.left)
        begun = [request for row, request in enumerate(requests) if row not in left]
        answers = {request.id: answer for request, answer in zip(begun, result.answers, strict=True)}
        fresh = [answer for row, answer in answers.items() if row not in known]
        failed = sum(isinstance(answer, RowFailure) for answer in fresh)
        batches = cast("list[BatchRecord]", result.batches)  # `actors` does not know the pipeline's records
        self._report_rows(started_at, len(fresh), failed, batches, is_stolen)
        return answers

    def _report_rows(
        self,
        started_at: float,
        rows: int,
        failed: int,
        batches: Sequence[BatchRecord] = (),
        is_stolen: bool = False,
    ) -> None:
        number = 0 if is_stolen else self.num_windows
        report_rows(self.collector, self.worker, started_at, rows, failed, batches, number)


def report_rows(
    collector: ActorHandle,
    worker: str,
    started_at: float,
    rows: int,
    failed: int,
    batches: Sequence[BatchRecord] = (),
    window: int = 0,
) -> None:
    """Reports rows of a worker to the collector; `started_at` (seconds since the epoch): when the first was begun.
    `window` as in `WindowRecord`."""
    if rows or batches:
        collector.window_done.remote(
            worker,
            {"started_at": started_at, "ended_at": time.time(), "rows": rows, "failed": failed, "window": window},
            batches,
        )


def prompt_key(request: Request) -> str:
    """The same for requests that differ in nothing but id and seed, as the samples of a prompt do."""
    digest = hashlib.blake2b(array("i", request.prompt_tokens).tobytes(), digest_size=16)
    rest = replace(request, id="", prompt_tokens=[], sampling=replace(request.sampling, seed=0))
    digest.update(repr(rest).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def longest_first(batches: Sequence[Sequence[Request]]) -> list[Sequence[Request]]:
    """Batches by the longest row (prompt and answer) in each, which decides how long a batch takes."""
    return sorted(
        batches,
        key=lambda batch: max(map(num_positions, batch)),
        reverse=True,
    )
