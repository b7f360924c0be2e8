"""Standard streams that are closed, or whose reader goes away: a run must not end for its log."""

import io
import os
import sys
from typing import Any, TextIO


class _TolerantFile(io.FileIO):
    """An output that is discarded from the moment it cannot be written any more: its reader or terminal has gone, or
    its disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            discard(self.fileno())
            return memoryview(data).nbytes


def open_closed_streams() -> None:
    """Opens /dev/null for standard streams that the caller has closed (`2>&-`).

    Otherwise the next file that is opened, a data file for instance, would receive what libraries print.
    """
    for stream in (0, 1, 2):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest number that is free


def tolerant_stderr() -> TextIO:
    """stderr, where what cannot be written is lost without an error."""
    file = io.BufferedWriter(_TolerantFile(2, "w", closefd=False))
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"  # None: it was closed when the interpreter started
    return io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


def discard(stream: int) -> None:
    """Sends all further output of a file descriptor to /dev/null."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream)
    os.close(devnull)
