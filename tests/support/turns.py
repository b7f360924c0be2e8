"""Threads that take turns: each stops before everything that changes or judges a run folder, and goes on when told.

So a test decides who does which step when, and a process that is killed or stands still between two steps is one that
is not told to go on. `turns` puts the stops into the real code.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from pipeline.store.lease import Lease
from pipeline.store.run_folder import RunFolder

STOPS = ("replace", "rename", "link", "unlink", "rmdir")
WAIT_S = 30.0


class Killed(BaseException):
    """This process is gone."""


class Actor(threading.Thread):
    """Runs `work` from stop to stop."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.is_killed = self.is_over = False
        self.outcome: BaseException | object = None
        self.start()
        assert self._has_stopped.acquire(timeout=WAIT_S)

    def run(self) -> None:
        try:
            self.stop()
            self.outcome = self._work()
        except BaseException as error:
            self.outcome = error
        self.is_over = True
        self._has_stopped.release()

    def stop(self) -> None:
        """Called by itself: waits for its turn."""
        if not self.is_killed:
            self._has_stopped.release()
            assert self._may_go.acquire(timeout=WAIT_S)
        if self.is_killed:
            raise Killed

    def go(self, steps: int) -> None:
        """Called by the test: so many steps, if there are."""
        for _ in range(steps):
            if self.is_over:
                return
            self._may_go.release()
            assert self._has_stopped.acquire(timeout=WAIT_S), "an actor does not come to its next stop"

    def kill(self) -> None:
        if not self.is_over:
            self.is_killed = True
            self._may_go.release()
            self.join(WAIT_S)
            assert not self.is_alive()


def _stop() -> None:
    actor = threading.current_thread()
    if isinstance(actor, Actor):
        actor.stop()


@contextmanager
def turns() -> Iterator[None]:
    """Actors stop before each change of names in a file system, before a folder is listed, and behind each look at a
    lease; nothing is flushed."""

    def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            _stop()
            return real(*arguments, **keys)

        return call

    def data_files(folder: RunFolder, status: str, place: str = "data") -> list[str]:
        if status == "ok":  # the other one is listed directly behind it
            _stop()
        return list_them(folder, status, place)

    look, list_them = Lease.holds, RunFolder.data_files

    def holds(lease: Lease) -> bool:
        found = look(lease)
        _stop()
        return found

    patches = [patch.object(os, name, stopping(getattr(os, name))) for name in STOPS]
    patches += [patch.object(os, "fsync", lambda _: None), patch.object(Lease, "holds", holds)]
    patches.append(patch.object(RunFolder, "data_files", data_files))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
