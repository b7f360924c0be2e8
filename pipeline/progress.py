"""Live progress on stderr: rows, tokens per second, failures, time to go. One line, redrawn on a terminal; else a line
every few seconds, so that a job log stays readable."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import ray

LINE_S, REDRAW_S = 5.0, 1.0


def describe(counts: dict[str, int], total: int, elapsed_s: float) -> str:
    """The progress line for `counts` (of `MetricsCollector`) after `elapsed_s` seconds."""
    rows = min(counts["rows"], total)  # rows decoded again after a worker's death count twice
    share = f"{rows}/{total} rows ({100 * rows / max(total, 1):.0f} %)"
    if not counts["workers"]:
        return f"loading model   {elapsed_s:.0f} s"
    rate = counts["output_tokens"] / elapsed_s if elapsed_s > 0 else 0.0
    eta = f"{elapsed_s * (total - rows) / rows:.0f} s" if rows else "?"
    return f"{share}   {rate:.0f} output tokens/s   {counts['failed']} failed   {elapsed_s:.0f} s   ETA {eta}"


class LiveLine:
    """`with LiveLine(line):` shows what `line()` says now and then, and at the end; None: nothing new."""

    def __init__(self, line: Callable[[], str | None]) -> None:
        self._line = line
        self._is_terminal = sys.stderr.isatty()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="progress")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show(last=True)

    def _loop(self) -> None:
        while not self._stop.wait(REDRAW_S if self._is_terminal else LINE_S):
            self._show(last=False)

    def _show(self, last: bool) -> None:
        line = self._line()
        if line is None:
            return
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            sys.stderr.write(f"progress: {line}\n")
        sys.stderr.flush()


class Progress(LiveLine):
    """`with Progress(collector, total):` while the pipeline runs."""

    def __init__(self, collector: Any, total: int) -> None:
        super().__init__(self._describe)
        self._collector, self._total = collector, total
        self._started = time.monotonic()

    def _describe(self) -> str | None:
        try:
            counts = ray.get(self._collector.counts.remote(), timeout=10)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return None  # figures only; the run itself says when something is wrong
        return describe(counts, self._total, time.monotonic() - self._started)
