"""A stream of bytes -> lines, for every format that has one row per line.

Left out: what a line means; CSV, where a row may span lines.
"""

from collections.abc import Iterator
from typing import BinaryIO, Final

READ_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"


def iter_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Lines ended by b"\\n" and nothing else, without byte order mark; a final empty remainder is no line."""
    pending: list[bytes] = []  # pieces of one long line: joining them once keeps a 30 MB line linear
    is_start = True
    while chunk := stream.read(READ_BYTES):
        first, *rest = (chunk.removeprefix(BOM) if is_start else chunk).split(b"\n")
        is_start = False
        pending.append(first)
        if rest:
            yield b"".join(pending)
            yield from rest[:-1]
            pending = [rest[-1]]
    if last := b"".join(pending):
        yield last
