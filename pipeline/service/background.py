"""Rows of a batch that a replica decodes in places of its own batches: in the background of its engine. No Ray."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from actors.generator import Answer
from actors.serving.engine_thread import EngineThread
from actors.serving.scheduler import Ticket
from pipeline.fault_injection import fault_point
from skipdecode.engine.request import Request


class BackgroundRows:
    """Rows that were handed over together. To be made in the event loop that waits for them."""

    def __init__(self, thread: EngineThread, requests: Sequence[Request]) -> None:
        self._thread, self._requests, self._loop = thread, requests, asyncio.get_running_loop()
        self.answers: list[Answer | None] = [None] * len(requests)
        """Complete after `wait`; None for a row that the engine has refused, or not answered before it ended."""
        self._left, self._lock = len(requests), threading.Lock()
        self._tickets: list[Ticket] = []
        self._has_ended = asyncio.Event()

    def submit(self) -> None:
        """Queues the rows. Called in a thread, since grammars take time to compile. EngineDead."""
        for number, request in enumerate(self._requests):
            fault_point(f"decode in background {request.id}")
            try:
                self._tickets.append(self._thread.submit_background(request, partial(self._answered, number)))
            except ValueError:  # it needs more memory than the background has, for instance
                self._answered(number, None)

    async def wait(self, timeout_s: float) -> bool:
        """Whether all rows are answered, `timeout_s` from now at the latest. EngineDead if they will not be."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_ended.wait(), timeout_s)
        if not self._has_ended.is_set():
            self._thread.check()
        return self._has_ended.is_set()

    def cancel(self) -> None:
        """Drops the rows that have not ended."""
        self._thread.cancel(self._tickets)

    def _answered(self, number: int, answer: Answer | None) -> None:
        """Called in any thread."""
        self.answers[number] = answer
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._has_ended.set)
