"""The queue of batches: starts a driver process per batch (`driver`), and ends what is cancelled or out of time.

It holds no state that matters: whichever runner looks at the storage next goes on from what is there. If two run for a
moment, the lease of a run folder lets one driver in. Which batch is next: that of the client with the fewest running,
among these the one whose turn is the longest ago, the oldest first.
"""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pipeline.batches.config import DAY_S, BatchesSection, StorageSection
from pipeline.batches.ending import end_batch
from pipeline.batches.status import BatchView
from pipeline.batches.storage import RESULTS, ClientStorage, Storage, StoredBatch
from pipeline.cluster.priority import run_in_background
from pipeline.formatting import Log

ROOT: Final = str(Path(__file__).resolve().parents[2])
DRIVER: Final = (sys.executable, "-m", "pipeline.batches.driver")
MAX_PAUSE_S: Final = 60.0
KILL_AFTER_S: Final = 45.0  # a driver that was told to end
SWEEP_S: Final = 60.0
Client: TypeAlias = str


@dataclass
class _Driver:
    """A process at work on a batch."""

    own: ClientStorage
    record: StoredBatch
    process: "subprocess.Popen[bytes]"
    began: float
    rows_before: int
    told_at: float | None = None
    """When it was told to end."""


@dataclass
class _Pause:
    """How long a batch waits after an attempt at it that came to nothing: a driver that made no row, or its ending."""

    seconds: float = 0.5
    ends_at: float = 0.0

    def grow(self) -> None:
        self.seconds = min(2 * self.seconds, MAX_PAUSE_S)
        self.ends_at = time.monotonic() + self.seconds


class BatchRunner:
    """`step` is called again and again, and does all that is to be done now."""

    def __init__(
        self,
        storage: StorageSection,
        batches: BatchesSection,
        log: Log,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = DRIVER,
        endpoint: Sequence[str] = (),
    ) -> None:
        """`environment`: of the drivers, beside that of this process; `command`: starts one; `endpoint`: the names of
        the deployment that decodes for them, if any."""
        assert storage.path is not None
        self._path, self._limits, self._config, self._log = storage.path, storage, batches, log
        self._command, self._endpoint = command, endpoint
        self._storage = Storage(storage.path)
        path = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
        self._environment = os.environ | {"PYTHONPATH": path} | dict(environment or {})
        self._drivers: dict[str, _Driver] = {}
        self._ended: dict[str, BatchView] = {}
        """Batches that will not change any more, by id."""
        self._last_turn: dict[Client, float] = {}
        self._pauses: dict[str, _Pause] = {}
        self._swept_at = -SWEEP_S
        self.counts: Counter[str] = Counter()
        """Batches by state, when they were last looked at."""
        self.lines: Counter[str] = Counter()
        """Lines of all batches that are stored: completed, failed."""

    def step(self) -> None:
        self._collect()
        views = self._look()
        for view in views:
            self._end_if_over(view)
        self._start([view for view in views if not view.has_ended and not self._is_over(view)])
        if time.monotonic() - self._swept_at > SWEEP_S:
            self._swept_at = time.monotonic()
            self._sweep()

    def stop(self) -> None:
        """Ends the drivers; their batches wait for the next runner."""
        for driver in self._drivers.values():
            _tell(driver)
        ends_at = time.monotonic() + KILL_AFTER_S
        for driver in self._drivers.values():
            try:
                driver.process.wait(max(ends_at - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                driver.process.kill()
        self._drivers.clear()

    def _look(self) -> list[BatchView]:
        """The batches that have not ended, the oldest first; counts all of them."""
        views: list[BatchView] = []
        counts, lines, there = Counter[str](), Counter[str](), set[str]()
        for own in self._storage.clients():
            for batch_id in own.batch_ids():
                there.add(batch_id)
                view = self._ended.get(batch_id) or self._view(own, batch_id)
                if view is not None and batch_id not in self._ended:
                    if view.has_ended:
                        self._ended[batch_id] = view
                    else:
                        views.append(view)
                if view is not None:  # its rows are counted already, or it has ended
                    counts[view.status] += 1
                    lines.update({name: count for name, count in view.counts().items() if name != "total"})
        self._ended = {name: view for name, view in self._ended.items() if name in there}
        self.counts, self.lines = counts, lines
        return sorted(views, key=lambda view: (view.record["created_at"], view.record["id"]))

    def _view(self, own: ClientStorage, batch_id: str) -> BatchView | None:
        """None for a batch that is gone, or cannot be read, which must not stop the others."""
        try:
            if (record := own.batch(batch_id)) is None:
                return None
            view = BatchView(own, record)
            view.counts()  # reads its data files
            return view
        except Exception as error:
            self._log(f"{batch_id}: cannot be read: {type(error).__name__}: {error}")
            return None

    def _collect(self) -> None:
        """Takes note of drivers that have ended, and kills those that do not."""
        for batch_id, driver in list(self._drivers.items()):
            if driver.process.poll() is None:
                if driver.told_at is not None and time.monotonic() - driver.told_at > KILL_AFTER_S:
                    driver.process.kill()
                continue
            if driver.process.stdin is not None:
                driver.process.stdin.close()
            del self._drivers[batch_id]
            view = BatchView(driver.own, driver.record)
            if view.has_ended or driver.told_at is not None or sum(view.rows().values()) > driver.rows_before:
                self._pauses.pop(batch_id, None)
                continue
            pause = self._pauses.setdefault(batch_id, _Pause())
            pause.grow()
            self._log(
                f"{batch_id}: its driver ended with {driver.process.returncode} and made no rows; "
                f"the next one starts in {pause.seconds:g} s"
            )

    def _is_over(self, view: BatchView) -> bool:
        return view.cancelling_at is not None or time.time() >= view.record["expires_at"]

    def _end_if_over(self, view: BatchView) -> None:
        """Ends a batch that was cancelled, or whose window is over, once no driver is at work on it."""
        if not self._is_over(view):
            return
        batch_id = view.record["id"]
        if (driver := self._drivers.get(batch_id)) is not None:
            _tell(driver)
            return
        if self._pauses_now(batch_id):
            return
        status: Literal["cancelled", "expired"] = "expired" if view.cancelling_at is None else "cancelled"
        try:
            end_batch(view.own, view.record, status, self._log)
            self._pauses.pop(batch_id, None)
        except Exception as error:  # no space is left, another driver is at work: the other batches must go on
            pause = self._pauses.setdefault(batch_id, _Pause())
            pause.grow()
            self._log(
                f"{batch_id}: not {status} yet: {type(error).__name__}: {error}; the next try is in {pause.seconds:g} s"
            )

    def _pauses_now(self, batch_id: str) -> bool:
        return (pause := self._pauses.get(batch_id)) is not None and time.monotonic() < pause.ends_at

    def _start(self, views: list[BatchView]) -> None:
        ids = ((view, view.record["id"]) for view in views)
        waiting = [view for view, own in ids if own not in self._drivers and not self._pauses_now(own)]
        while waiting and len(self._drivers) < self._config.max_running:
            running = Counter(driver.own.name for driver in self._drivers.values())
            # the oldest of those that come first: `waiting` is sorted by age
            chosen = min(waiting, key=lambda view: (running[view.own.name], self._last_turn.get(view.own.name, 0.0)))
            waiting.remove(chosen)
            self._launch(chosen)
        clients = {driver.own.name for driver in self._drivers.values()}
        if any(view.own.name not in clients for view in waiting):
            self._make_room()

    def _make_room(self) -> None:
        """Tells the driver that has had its turn for longest to end, for the sake of a client that has none."""
        if any(driver.told_at is not None for driver in self._drivers.values()):
            return
        oldest = min(self._drivers.values(), key=lambda driver: driver.began)
        if time.monotonic() - oldest.began > self._config.turn_s:
            _tell(oldest)

    def _launch(self, view: BatchView) -> None:
        batch_id, name, rows = view.record["id"], view.own.name, sum(view.rows().values())
        process = subprocess.Popen(
            [*self._command, self._path, name, batch_id, *self._endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            process_group=0,  # and no session of its own: `run_in_background` counts inside one
        )
        if view.record["job"]["actors"]["background"]:
            with suppress(OSError):  # it has ended
                run_in_background(process.pid)  # what it imports takes seconds, too
        self._last_turn[name] = time.monotonic()
        self._drivers[batch_id] = _Driver(view.own, view.record, process, time.monotonic(), rows)

    def _sweep(self) -> None:
        """Deletes what is too old: files, result files, batches."""
        now = time.time()
        for own in self._storage.clients():
            for file in own.files():
                if now >= file["expires_at"]:
                    own.delete_file(file["id"])
            own.sweep(now - DAY_S)
        for view in list(self._ended.values()):
            batch_id, expires_at = view.record["id"], view.results_expire_at()
            if now >= (view.ended_at() or now) + self._limits.expires_after_s:
                view.own.delete_batch(batch_id)
                del self._ended[batch_id]  # a request with its `Idempotency-Key` may come at once
            elif expires_at is not None and now >= expires_at:
                for kind in RESULTS:
                    view.own.delete_result(batch_id, kind)


def _tell(driver: _Driver) -> None:
    """Tells a driver to end, once."""
    if driver.told_at is None:
        driver.told_at = time.monotonic()
        driver.process.terminate()
