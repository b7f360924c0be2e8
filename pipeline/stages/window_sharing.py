"""Sharing the last windows of a run: the owner's side, which gives parts away, and the helper's, which takes them.

Who is idle and who has what is known to the actor behind `LeftoversHandle` (`pipeline.stages.work_stealing`). When
that is
lost, nothing is shared from there on, and nothing else is amiss.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence

import ray

from actors.generator import Answer
from pipeline.cluster.ray_handles import LeftoversHandle, fetch
from pipeline.fault_injection import fault_point
from pipeline.stages.window_parts import Parts
from pipeline.stages.work_stealing import split_parts
from skipdecode.engine.request import Request

ASK_S = 0.05, 0.5  # an idle worker asks for work as often as this, at first and after a while
MIN_SHARED_ROWS = 4  # a part is not cut into smaller ones than this
HELP_TIMEOUT_S = 20.0  # beside three times its own longest part: how long an owner waits for a helper

Decode = Callable[[Sequence[Request]], Sequence[Answer]]
"""One answer per request, in order."""


class Sharing:
    """Decodes rows of this worker's own, with help when others are idle."""

    def __init__(self, leftovers: LeftoversHandle | None, parts: Parts) -> None:
        """`leftovers`: None where nothing is shared."""
        self.leftovers, self._parts = leftovers, parts
        if leftovers is not None:
            leftovers.started.remote(parts.worker)

    @property
    def is_on(self) -> bool:
        return self.leftovers is not None

    def began(self) -> None:
        """The worker has a window of its own."""
        if self.leftovers is not None:
            self.leftovers.began.remote(self._parts.worker)

    def answers(self, requests: Sequence[Request], decode: Decode) -> dict[str, Answer]:
        """Answers by row id, decoded batch by batch, those that take longest first; with help when others are idle.

        `decode` makes, by the ledger's plan, what helpers did not bring.
        """
        left = longest_first(self._parts.decoder.batches(requests))
        answers: dict[str, Answer] = {}
        while left:
            num_idle = self._num_idle()
            parts = split_parts(left, 1 + num_idle, MIN_SHARED_ROWS)
            if num_idle and len(parts) > 1:
                return answers | self._with_help(parts, decode)
            answers |= self._parts.take(left.pop(0))
        return answers

    def _num_idle(self) -> int:
        if self.leftovers is None:
            return 0
        try:
            return fetch(self.leftovers.num_idle.remote())
        except ray.exceptions.RayActorError:
            self.leftovers = None
            return 0

    def _with_help(self, parts: Sequence[Sequence[Request]], decode: Decode) -> dict[str, Answer]:
        """Answers by row id, of parts that others may take; does itself what does not come."""
        answers: dict[str, Answer] = {}
        try:
            self._share(parts, answers)
        except ray.exceptions.RayActorError:
            self.leftovers = None  # if it was the ledger that is lost, the run ends with the next question to it
        for part in parts:
            if part[0].id not in answers:  # a helper may have died of these rows: the ledger knows
                answers |= zip((request.id for request in part), decode(part), strict=True)
        return answers

    def _share(self, parts: Sequence[Sequence[Request]], answers: dict[str, Answer]) -> None:
        """Offers the parts, adds to `answers` those of its own and those that come in time."""
        leftovers = self.leftovers
        if leftovers is None:
            return
        key, longest_s = uuid.uuid4().hex, 0.0
        fetch(leftovers.offer.remote(key, self._parts.worker, parts))
        while (mine := fetch(leftovers.take.remote(key))) is not None:
            started = time.monotonic()
            answers |= self._parts.take(parts[mine])
            longest_s = max(longest_s, time.monotonic() - started)
            fault_point("sharing")
        ends_at = time.monotonic() + HELP_TIMEOUT_S + 3 * longest_s
        while (found := fetch(leftovers.collect.remote(key))).num_lent and time.monotonic() < ends_at:
            answers |= found.answers
            time.sleep(ASK_S[0])
        answers |= found.answers | fetch(leftovers.close.remote(key))


class Helper:
    """A thread that takes parts of other workers' windows whenever there is none of its own; ends with the run."""

    def __init__(self, sharing: Sharing, parts: Parts, hand: threading.Lock) -> None:
        """`hand` is held by whoever decodes: for a window, or for others."""
        self._sharing, self._parts, self._hand = sharing, parts, hand
        threading.Thread(target=self._loop, daemon=True, name="help").start()

    def _loop(self) -> None:
        wait_s = ASK_S[0]
        while self._sharing.is_on:
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, ASK_S[1])
            if not self._hand.acquire(blocking=False):
                wait_s = ASK_S[0]
                continue
            try:
                while self._help_once():
                    wait_s = ASK_S[0]
            except ray.exceptions.RayError:  # the driver's end of the run is gone, or the leftovers are
                return
            finally:
                self._hand.release()

    def _help_once(self) -> bool:
        """Whether there was a part to take."""
        leftovers = self._sharing.leftovers
        loan = None if leftovers is None else fetch(leftovers.ask.remote(self._parts.worker))
        if leftovers is None or loan is None:
            return False
        leftovers.give.remote(loan, self._parts.take(loan.requests, is_borrowed=True))
        self._parts.attempts.finished.remote(self._parts.worker, "", (), 0)
        return True


def longest_first(batches: Sequence[Sequence[Request]]) -> list[Sequence[Request]]:
    """By their longest row, prompt and answer: what decides how long a batch takes, as far as one can know before."""
    return sorted(
        batches,
        key=lambda batch: max(len(request.prompt_tokens) + request.sampling.max_new_tokens for request in batch),
        reverse=True,
    )
