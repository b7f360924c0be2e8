"""Live progress on stderr: rows, tokens per second, failures, actors, time to go.

A bar (rich) on a terminal; else a line every few seconds, so that a job log stays readable.
Under `ray job submit` the job's metadata says it too.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Self

import ray
from ray.actor import ActorHandle
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from pipeline.cluster.job_metadata import JobProgress, job_teller
from pipeline.cluster.worker_records import Counts
from pipeline.formatting import count, duration

LINE_S, REDRAW_S = 5.0, 1.0


def describe(counts: Counts, total: int, elapsed_s: float) -> str:
    """The progress line for `counts` (of `MetricsCollector`) after `elapsed_s` seconds."""
    if not counts["workers"]:
        return f"loading model   {duration(elapsed_s)}"
    rows = rows_done(counts, total)
    return f"{rows}/{total} rows ({100 * rows / max(total, 1):.0f} %)   {details(counts, total, elapsed_s)}"


def rows_done(counts: Counts, total: int) -> int:
    return min(counts["rows"], total)  # rows decoded again after a worker's death count twice


def details(counts: Counts, total: int, elapsed_s: float) -> str:
    """The text beside the bar. Tokens per second and ETA are by the rate since the first worker was ready."""
    rows, working_s = rows_done(counts, total), counts["working_s"]
    rate = counts["output_tokens"] / working_s if working_s > 0 else 0.0
    eta = duration(working_s * (total - rows) / rows) if rows and working_s > 0 else "?"
    actors = count(counts["workers"], "actor")
    notes = [count(counts["restarts"], "restart")] if counts["restarts"] else []
    notes += [f"{counts['sitting_out']} out of work"] if counts["sitting_out"] else []
    actors += f" ({', '.join(notes)})" if notes else ""
    return f"{rate:.0f} output tokens/s   {counts['failed']} failed   {actors}   {duration(elapsed_s)}   ETA {eta}"


class Ticker:
    """`with Ticker(tick, period_s):` calls `tick(False)` now and then, and `tick(True)` at the end.

    There is no last tick when a signal ends the block: stopping a job must not wait for figures.
    """

    def __init__(self, tick: Callable[[bool], None], period_s: float) -> None:
        self._tick, self._period_s = tick, period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="progress")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        if kind is None or issubclass(kind, Exception):
            self._thread.join()
            self._tick(True)

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self._tick(False)


class LiveLine(Ticker):
    """Shows what `line()` says now and then, and at the end; None: nothing new. Redrawn on a terminal."""

    def __init__(self, line: Callable[[], str | None]) -> None:
        self._line, self._is_terminal = line, sys.stderr.isatty()
        super().__init__(self._show, REDRAW_S if self._is_terminal else LINE_S)

    def _show(self, last: bool) -> None:
        line = self._line()
        if line is None:
            return
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            sys.stderr.write(f"progress: {line}\n")
        sys.stderr.flush()


CountsSource = Callable[[], Counts | None]
"""Gives the totals so far; None if they are not known at the moment."""


class LiveBar(Ticker):
    """A progress bar, for terminals."""

    def __init__(self, counts: CountsSource, total: int) -> None:
        super().__init__(self._show, REDRAW_S)
        self._counts, self._total, self._started = counts, total, time.monotonic()
        columns = (TextColumn("{task.percentage:>3.0f} %"), BarColumn(24), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        self._task = self._bar.add_task("loading model", total=self._total)
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        super().__exit__(kind, *error)
        self._bar.stop()

    def _show(self, last: bool) -> None:
        counts, elapsed_s = self._counts(), time.monotonic() - self._started
        if counts is None or self._task is None:
            return
        rows = rows_done(counts, self._total)
        text = f"loading model   {duration(elapsed_s)}"
        if counts["workers"]:
            text = f"{rows}/{self._total} rows   {details(counts, self._total, elapsed_s)}"
        self._bar.update(self._task, completed=rows, description=text)
        self._bar.refresh()


def live_progress(
    collector: ActorHandle,
    total: int,
    log: Callable[[str], None],
    on_counts: Callable[[Counts], None] = lambda _: None,
) -> Ticker:
    """`with live_progress(collector, total, log):` while the pipeline runs. Calls `on_counts` with every update."""
    started, tell = time.monotonic(), job_teller(log)

    def counts() -> Counts | None:
        try:
            found: Counts = ray.get(collector.counts.remote(), timeout=10)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return None  # figures only; the run itself says when something is wrong
        progress: JobProgress = {**found, "rows_done": rows_done(found, total), "rows_total": total}
        tell(progress, time.monotonic() - started)
        on_counts(found)
        return found

    def line() -> str | None:
        found = counts()
        return None if found is None else describe(found, total, time.monotonic() - started)

    return LiveBar(counts, total) if sys.stderr.isatty() else LiveLine(line)
