"""Threads that take turns: each stops before everything that changes or judges a run folder, and goes on when told.

So a test decides who does which step when, and a process that is killed or stands still between two steps is one that
is not told to go on. `turns` puts the stops into the real code.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pyarrow.fs as pafs

from pipeline.store.lease import Lease
from pipeline.store.run_folder import RunFolder
from tests.support.upload_store import UploadStore

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


def stop() -> None:
    """A stop of the actor that calls this; nothing elsewhere."""
    actor = threading.current_thread()
    if isinstance(actor, Actor):
        actor.stop()


@contextmanager
def turns() -> Iterator[None]:
    """Actors stop before each change of names in a file system, before a folder is listed, and behind each look at a
    lease; nothing is flushed."""

    def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            stop()
            return real(*arguments, **keys)

        return call

    look = Lease.holds

    def holds(lease: Lease) -> bool:
        found = look(lease)
        stop()
        return found

    patches = [patch.object(os, name, stopping(getattr(os, name))) for name in STOPS]
    patches += [patch.object(os, "fsync", lambda _: None), patch.object(Lease, "holds", holds), _stop_before_lists()]
    with _all(patches):
        yield


@contextmanager
def turns_on_store() -> Iterator[UploadStore]:
    """A store on which actors stop before something is deleted, in the upload of a data file, before the data files are
    listed, and before each look at a lease.

    A small file appears at once behind the look at the lease: a session that stands still between the two puts an older
    `run.json` in place of a newer one, which a store cannot prevent, and which ends the next session with an error.
    """
    store = UploadStore(stop)
    look = Lease.holds

    def holds(lease: Lease) -> bool:
        stop()
        return look(lease)

    def write(filesystem: pafs.PyFileSystem, path: str, source: Any) -> None:
        upload = store.begin(path, bytes(source.read()))
        if "/data/" in path:
            stop()
        upload.land()

    patches = [
        patch("pipeline.store.atomic_files.UPLOADS", (pafs.PyFileSystem,)),
        patch("pipeline.store.atomic_files._write", write),
        patch("pipeline.store.atomic_files.run_uninterrupted", lambda work: work()),
        patch("pipeline.store.run_folder.ThreadPoolExecutor", _InThisThread),
        patch("pipeline.store.lease.TAKEOVER_WAIT_S", 0.0),
        patch.object(Lease, "holds", holds),
        _stop_before_lists(),
    ]
    with _all(patches):
        yield store


class _InThisThread:
    """In place of a pool of threads, which are no actors."""

    def __init__(self, _: int) -> None:
        self.map = map

    def __enter__(self) -> "_InThisThread":
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to wait for."""


def _stop_before_lists() -> Any:
    list_them = RunFolder.data_files

    def data_files(folder: RunFolder, status: str, place: str = "data") -> list[str]:
        if status == "ok":  # the other one is listed directly behind it
            stop()
        return list_them(folder, status, place)

    return patch.object(RunFolder, "data_files", data_files)


@contextmanager
def _all(patches: list[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield
