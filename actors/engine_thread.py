"""The engine in a thread of its own: requests from any thread in, progress out, a bounded queue, and its health.

The thread ends when the engine cannot go on (its device is lost); whoever waits is told, and `check` says so from then
on. No Ray, no HTTP.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from actors.batches import Ticket
from actors.engine import Engine, Progress
from skipdecode.request import Request

RATE_WINDOW_S = 10.0  # over which the rate of answers is taken, for Retry-After
MAX_RETRY_AFTER_S = 60


class Overloaded(RuntimeError):
    """The queue is full; `retry_after_s` is when it may have room again."""

    def __init__(self, num_waiting: int, retry_after_s: int) -> None:
        super().__init__(f"{num_waiting} requests are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class EngineDead(RuntimeError):
    """The engine cannot decode any more."""


class EngineThread:
    """`deliver` is called in the engine's thread after each turn that made something; it must not wait."""

    def __init__(
        self, engine: Engine, deliver: Callable[[Sequence[Progress]], None], *, max_waiting: int, stall_s: float
    ) -> None:
        self.engine, self._deliver = engine, deliver
        self._max_waiting, self._stall_s = max_waiting, stall_s
        self._inbox: deque[tuple[Callable[[Ticket], None], Ticket]] = deque()
        self._wake = threading.Condition()
        self._num_waiting = 0  # in the inbox or in the engine's queue, as of the last turn
        self.num_running = 0
        """Requests in a batch, as of the last turn."""
        self.cache_bytes = 0
        self._done_at: deque[float] = deque(maxlen=4096)
        self._error: str | None = None
        self._is_stopping = False
        self._turn_began: float | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return self._num_waiting

    def submit(self, requests: Sequence[Request], on_ticket: Callable[[list[Ticket]], None]) -> list[Ticket]:
        """Queues them all or none: `Overloaded`, `EngineDead`, or ValueError when one can never run.

        `on_ticket` hears of the tickets before the engine does.
        """
        tickets = [self.engine.ticket(request) for request in requests]
        with self._wake:
            self.check()
            if self._num_waiting + len(tickets) > self._max_waiting and self._num_waiting:
                raise Overloaded(self._num_waiting, self.retry_after_s())
            on_ticket(tickets)
            self._inbox.extend((self.engine.waiting.append, ticket) for ticket in tickets)
            self._num_waiting += len(tickets)
            self._wake.notify()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more."""
        with self._wake:
            self._inbox.extend((self.engine.cancel, ticket) for ticket in tickets)
            self._wake.notify()

    def check(self) -> None:
        """`EngineDead` when there will be no more answers: the thread has ended, or one turn takes for ever."""
        if self._error is not None:
            raise EngineDead(self._error)
        began = self._turn_began
        if began is not None and time.monotonic() - began > self._stall_s:
            raise EngineDead(f"a step has been running for more than {self._stall_s:g} s")

    def retry_after_s(self) -> int:
        """When the present queue may have been worked off, by the rate of the last answers; at least 1."""
        since = time.monotonic() - RATE_WINDOW_S
        recent = sum(at > since for at in self._done_at)
        wait_s = self._num_waiting * RATE_WINDOW_S / recent if recent else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def stop(self) -> None:
        """Ends the thread after its turn; what still waits is told."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while self._take_in():
                self._turn_began = time.monotonic()
                made = self.engine.turn()
                self._turn_began = None
                with self._wake:
                    self._num_waiting = len(self._inbox) + len(self.engine.waiting)
                self.num_running, self.cache_bytes = self.engine.num_running, self.engine.cache_bytes
                ended = sum(progress.finish_reason is not None for progress in made)
                self._done_at.extend([time.monotonic()] * ended)
                if made:
                    self._deliver(made)
            self._error = "the engine was stopped"
        except Exception as error:  # told to all who wait; the process is of no use any more
            self._error = f"{type(error).__name__}: {error}"[:2000]
        self._turn_began = None
        self._deliver([Progress(ticket, [], [], [], error=self._error, is_dead=True) for ticket in self._left()])

    def _take_in(self) -> bool:
        """Takes requests and cancellations in, waiting for some where there is nothing to do; False: stop."""
        with self._wake:
            while self.engine.is_idle and not self._inbox and not self._is_stopping:
                self._wake.wait()
            arrived = list(self._inbox)
            self._inbox.clear()
        for take, ticket in arrived:
            take(ticket)
        return not self._is_stopping

    def _left(self) -> list[Ticket]:
        with self._wake:
            arrived = [ticket for take, ticket in self._inbox if take == self.engine.waiting.append]
            self._inbox.clear()
        return [*self.engine.running_tickets(), *self.engine.waiting, *arrived]
