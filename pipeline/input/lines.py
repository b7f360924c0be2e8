"""A stream of bytes -> lines, for every format that has one row per line.

Left out: what a line means; CSV, where a row may span lines.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

from pipeline.config.job import MAX_LINE_BYTES

READ_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"


class LongLine(bytes):
    """In place of a line that is longer than may be: none of its bytes, and why."""

    reason: str

    @classmethod
    def of(cls, num_bytes: int, max_bytes: int) -> "LongLine":
        line = cls()
        line.reason = f"{num_bytes} bytes, more than limits.max_line_bytes allows ({max_bytes})"
        return line


def iter_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Lines ended by b"\\n" and nothing else, without byte order mark; a final empty remainder is no line.

    A line of more than `max_bytes` is a `LongLine`, and is never in memory.
    """
    pending: list[bytes] = []  # pieces of one long line: joining them once keeps a 30 MB line linear
    num_bytes = 0  # of that line, with what is not kept
    is_start = True

    def ended() -> bytes:
        return b"".join(pending) if num_bytes <= max_bytes else LongLine.of(num_bytes, max_bytes)

    while chunk := stream.read(READ_BYTES):
        first, *rest = (chunk.removeprefix(BOM) if is_start else chunk).split(b"\n")
        is_start = False
        num_bytes += len(first)
        if num_bytes <= max_bytes:
            pending.append(first)
        else:
            pending.clear()
        if rest:
            yield ended()
            yield from (line if len(line) <= max_bytes else LongLine.of(len(line), max_bytes) for line in rest[:-1])
            pending, num_bytes = [rest[-1]], len(rest[-1])
    if num_bytes:
        yield ended()
