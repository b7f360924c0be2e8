"""Estimates the size of JSON in memory before it is parsed: `[],` is three bytes in a file and 72 in memory.

Every value comes with a comma or an opening bracket, and these are counted without parsing.
"""

from typing import Final

import numpy as np

MAX_MARKS: Final = 500_000  # in a line of the input or the body of a request
MARK_BYTES: Final = 100  # about what a value takes in memory; an object of one key has two marks
FEW_MARKS: Final = 1 << 10  # that take little memory
COUNTED_BYTES: Final = 1 << 20  # at a time
_IS_MARK: Final = np.isin(np.arange(256), list(b",[{")).astype(np.uint8)


def count_marks(line: bytes) -> int:
    """The number of commas and opening brackets outside of JSON strings; if there are few, also those inside."""
    most = sum(line.count(mark) for mark in (b",", b"[", b"{"))
    return most if most <= FEW_MARKS else _count_outside_of_text(line)


def _count_outside_of_text(line: bytes) -> int:
    total, is_text, at = 0, 0, 0
    while at < len(line):
        part = line[at : at + COUNTED_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # no escape may be cut in two
            part = line[at : at + COUNTED_BYTES + 1]
        at += len(part)
        marks = np.frombuffer(part.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)
        inside = (np.add.accumulate(marks == ord('"'), dtype=np.uint8) + is_text) & 1
        total += int(np.count_nonzero(_IS_MARK[marks] > inside))
        is_text = int(inside[-1])
    return total
