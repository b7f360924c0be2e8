"""Lines that Ray prints as errors about what is in order here, kept off the terminal; each says why it is no error.

Ray has no switch for them. Every other line passes. Left out: loggers (`pipeline.cluster.pool.NOISY_LOGGERS`).
"""

import io
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Final, TextIO

SERVE_END: Final = re.compile(r"Task ServeController\.\w+ failed\. There are infinite retries remaining")
"""Serve ends by killing its controller, and Ray reports the calls that this cuts off (`listen_error_messages`)."""
RESTART: Final = re.compile(rb"core_worker\.cc:\d+: Actor with class name: 'MapWorker\(.* and max_restarts > 0\.")
"""Ray Data gives its workers arguments by reference. It holds these itself for as long as a worker may restart."""


ONE_AT_A_TIME = threading.Lock()
"""Two threads that take over the process's stderr would put back each other's file."""


class LineFilter(io.TextIOBase):
    """A stream that hands on whole lines, but for those in which `noise` is found."""

    def __init__(self, target: TextIO, noise: re.Pattern[str]) -> None:
        self._target, self._noise, self._open = target, noise, ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._open = (self._open + text).split("\n")
            self._target.write("".join(f"{line}\n" for line in whole if not self._noise.search(line)))
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def isatty(self) -> bool:
        return self._target.isatty()

    def fileno(self) -> int:
        return self._target.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here
        return self._target.encoding

    def finish(self) -> None:
        """Hands on what has no end of line yet."""
        with self._lock:
            self._target.write(self._open)
            self._open = ""


@contextmanager
def without_printed_lines(noise: re.Pattern[str]) -> Iterator[None]:
    """Leaves such lines out of what Python prints to stdout meanwhile."""
    lines = LineFilter(sys.stdout, noise)
    try:
        with redirect_stdout(lines):
            yield
    finally:
        lines.finish()


@contextmanager
def without_stderr_lines(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Leaves such lines out of what the process writes to its stderr meanwhile, be it in C++. For a moment only: all
    other lines come at the end."""
    with ONE_AT_A_TIME:
        yield from _without_stderr_lines(noise)


def _without_stderr_lines(noise: re.Pattern[bytes]) -> Iterator[None]:
    if sys.__stderr__ is None:  # the descriptor is closed
        yield
        return
    try:
        held, terminal = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115 (closed below)
    except OSError:  # no room for a file: a line too much is better than no run
        yield
        return
    with held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            held.seek(0)
            with suppress(OSError):  # nobody reads any more
                for line in held:
                    if not noise.search(line):
                        os.write(2, line)
