"""Text files: every line is a prompt, blank lines included.

Left out: ids and other columns, which text has no place for.
"""

from collections.abc import Iterable, Iterator

from pipeline.input.lines import LongLine
from pipeline.input.row import Row, describe_utf8
from pipeline.schema import BAD_LINE


def text_rows(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines):
        row = Row(number, len(line))
        if isinstance(line, LongLine):
            row.fail(BAD_LINE, f"{name} line {number + 1}: {line.reason}")
            yield row
            continue
        try:
            row.prompt = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            row.fail(BAD_LINE, f"{name} line {number + 1}: {describe_utf8(error)}")
        yield row
