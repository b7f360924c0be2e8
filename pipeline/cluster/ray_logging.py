"""Keeps lines off the terminal that Ray prints although nothing is wrong. Ray has no switch for them."""

import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, Final, TextIO

SERVE_END: Final = re.compile(r"Task ServeController\.\w+ failed\. There are infinite retries remaining")
"""Serve ends by killing its controller, and Ray reports the calls that this cuts off."""
SERVE_NOTES: Final = re.compile(r"Connecting to existing Serve app|Started <ray\.serve\.")
"""Said by `serve.run` after `serve.start` in the same process, and where a handle is asked for the first time."""
RESTART: Final = re.compile(rb"core_worker\.cc:\d+: Actor with class name: 'MapWorker\(.* and max_restarts > 0\.")
"""Ray Data passes arguments to its workers by reference, and holds these as long as a worker may restart."""

_STDERR_LOCK = threading.Lock()


class _LineFilter:
    """A stream that passes on whole lines, except those in which `noise` is found."""

    def __init__(self, target: TextIO, noise: re.Pattern[str]) -> None:
        self._target, self._noise, self.unfinished = target, noise, ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self.unfinished = (self.unfinished + text).split("\n")
            self._target.write("".join(f"{line}\n" for line in lines if not self._noise.search(line)))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@contextmanager
def without_printed_lines(noise: re.Pattern[str]) -> Iterator[None]:
    """Drops such lines from what Python prints to stdout in the block."""
    target = sys.stdout
    lines = _LineFilter(target, noise)
    try:
        with redirect_stdout(lines):
            yield
    finally:
        target.write(lines.unfinished)


@contextmanager
def without_log_records(logger: logging.Logger, noise: re.Pattern[str]) -> Iterator[None]:
    """Drops such records of that logger in the block."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return noise.search(record.getMessage()) is None

    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


@contextmanager
def without_stderr_lines(noise: re.Pattern[bytes]) -> Iterator[None]:
    """Drops such lines from what the process, C++ included, writes to its stderr in the block; other lines come when
    the block ends."""
    with _STDERR_LOCK:
        try:
            held, terminal = tempfile.TemporaryFile(), os.dup(2)  # noqa: SIM115 (closed below)
        except OSError:  # stderr is closed, or there is no room for a file
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
                with suppress(OSError):  # nobody reads stderr any more
                    for line in held:
                        if not noise.search(line):
                            os.write(2, line)
