"""The engine in a thread of its own: takes requests from any thread, delivers progress, bounds the queue.

The thread ends when the engine cannot go on (its device is lost, or a step does not return). All waiting requests are
told, and `check` raises from then on. No Ray, no HTTP.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from actors.generator import Answer
from actors.serving.engine import Engine, Progress
from actors.serving.scheduler import Ticket
from skipdecode.engine.request import Request

RATE_WINDOW_S = 10  # over which the rate of answers is measured, for Retry-After
MAX_RETRY_AFTER_S = 60


class Overloaded(RuntimeError):
    """The queue is full; it may have room again after `retry_after_s`."""

    def __init__(self, num_waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):
    """The engine can no longer decode."""


class EngineThread:
    """`deliver` is called in the engine's thread after each step that produced something; it must not block.

    The end of the engine is delivered in whichever thread finds out. What a step that took too long produced may come
    after that.
    """

    def __init__(
        self, engine: Engine, deliver: Callable[[Sequence[Progress]], None], *, max_waiting: int, stall_s: float
    ) -> None:
        self.engine, self._deliver = engine, deliver
        self._max_waiting, self._stall_s = max_waiting, stall_s
        self._inbox: deque[tuple[Callable[[Ticket], None], Ticket]] = deque()
        self._wake = threading.Condition()
        self._num_waiting = 0  # in the inbox or in the engine's queue, as of the last step
        self.num_running = self.num_background = 0
        """Requests in batches, and those in the background, as of the last step."""
        self.cache_bytes = 0
        self._ended: deque[tuple[int, int]] = deque(maxlen=RATE_WINDOW_S)  # (second, answers that ended in it)
        self._error: str | None = None
        self._is_stopping = False
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return self._num_waiting

    def submit(self, requests: Sequence[Request], on_ticket: Callable[[list[Ticket]], None]) -> list[Ticket]:
        """Queues all of them or none. Raises `Overloaded`, `EngineDead`, or ValueError if one can never run.

        `on_ticket` is called with the tickets before the engine sees them.
        """
        if len(requests) > self._max_waiting:
            raise ValueError(
                f"{len(requests)} prompts in one request, and at most {self._max_waiting} may wait (limits.max_waiting)"
            )
        tickets = [self.engine.ticket(request) for request in requests]
        with self._wake:
            self.check()
            missing = self._num_waiting + len(tickets) - self._max_waiting
            if missing > 0:
                raise Overloaded(self._num_waiting, self.retry_after_s(missing))
            on_ticket(tickets)
            self._inbox.extend((self.engine.enqueue, ticket) for ticket in tickets)
            self._num_waiting += len(tickets)
            self._wake.notify()
        return tickets

    def submit_background(self, request: Request, on_answer: Callable[[Answer], None]) -> Ticket:
        """Queues a request in the background, however many wait. `on_answer` is called in the engine's thread with its
        answer, unless the engine ends before. Raises `EngineDead`, or ValueError if it can never run here."""
        ticket = self.engine.ticket(request, on_answer)
        with self._wake:
            self.check()
            self._inbox.append((self.engine.enqueue, ticket))
            self._wake.notify()
        return ticket

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Drops requests."""
        with self._wake:
            self._inbox.extend((self.engine.cancel, ticket) for ticket in tickets)
            self._wake.notify()

    def check(self) -> None:
        """Raises `EngineDead` if there will be no more answers: the thread has ended, or a step does not return."""
        began = self._step_started
        if began is not None and time.monotonic() - began > self._stall_s:
            self._end(f"a step has been running for more than {self._stall_s:g} s")
        if not self._thread.is_alive():
            self._end("its thread has ended")
        if self._error is not None:
            raise EngineDead(self._error)

    def retry_after_s(self, num_requests: int = 1) -> int:
        """Seconds until so many more may have left the queue, by the recent rate of answers; at least 1."""
        with self._wake:
            since = time.monotonic() - RATE_WINDOW_S
            recent = sum(count for second, count in self._ended if second > since)
        wait_s = num_requests * RATE_WINDOW_S / recent if recent else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def stop(self) -> None:
        """Ends the thread after its current step, and tells the requests that still wait."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            while self._take_in():
                self._step_started = time.monotonic()
                made = self.engine.step()
                self._step_started = None
                with self._wake:
                    arrived = sum(not ticket.is_background for _, ticket in self._inbox)
                    self._num_waiting = arrived + len(self.engine.waiting)
                    self._count(sum(progress.finish_reason is not None for progress in made))
                self.num_running, self.cache_bytes = self.engine.num_running, self.engine.cache_bytes
                self.num_background = self.engine.num_background
                if made:
                    self._deliver(made)
        except BaseException as error:  # told to all that wait: the process is of no use any more
            reason = f"{type(error).__name__}: {error}"[:2000]
        self._step_started = None
        self._end(reason)

    def _count(self, num_ended: int) -> None:
        second = int(time.monotonic())
        if self._ended and self._ended[-1][0] == second:
            num_ended += self._ended.pop()[1]
        if num_ended:
            self._ended.append((second, num_ended))

    def _end(self, reason: str) -> None:
        """Tells all waiting requests, once, that there will be no more answers."""
        with self._wake:
            if self._error is not None:
                return
            self._error, self._is_stopping = reason, True
            left = [*self.engine.open, *(ticket for take, ticket in self._inbox if take == self.engine.enqueue)]
            self._inbox.clear()
        told = [ticket for ticket in left if not ticket.is_background]
        self._deliver([Progress(ticket, [], [], [], error=reason, is_dead=True) for ticket in told])

    def _take_in(self) -> bool:
        """Hands requests and cancellations to the engine, and waits for some if it is idle. False: stop."""
        with self._wake:
            while self.engine.is_idle and not self._inbox and not self._is_stopping:
                self._wake.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
        for take, ticket in arrived:
            take(ticket)
        return not self._is_stopping
