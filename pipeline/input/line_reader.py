"""`InputRow`, what every reader of lines makes of a row of its file, good or failed; lines of bytes; and text files.

Whatever bytes a file holds, no reader raises: a row that cannot be used comes out as a failed row with its reason.
Types of columns and blocks of rows are not known here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final, TypeAlias

from pipeline.config.job import MAX_LINE_BYTES
from pipeline.formatting import Json
from pipeline.input.encoding import UTF16_LINE, is_utf16
from pipeline.schema import BAD_LINE

BLOCK_BYTES: Final = 32 << 20  # a block ends here even if it has few rows: 1024 prompts of 30 MB are 30 GB


JsonObject: TypeAlias = dict[str, Json]
"""An object of JSON: a line of JSON Lines, or part of one."""


@dataclass(slots=True)
class InputRow:
    """One row as its file has it; a failed row holds what could be read."""

    number: int  # 0-based, with bad rows; the one in a made id
    num_bytes: int  # about what it takes in memory
    id: str | None = None  # None: the row has none of its own
    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[Json] | None = None  # a conversation in place of a prompt
    continues: bool = False  # whether the answer continues the last of `messages`
    chat_template_kwargs: Mapping[str, Json] | None = None  # variables for the chat template
    tools: Sequence[Mapping[str, Json]] | None = None  # for the chat template
    sampling: str | None = None  # JSON object
    samples: int | None = None  # how many answers it asks for; None: sampling.n
    error_code: str = ""
    error_message: str = ""
    fields: Mapping[str, Json] = field(default_factory=dict)  # all its columns, with prompt and id

    def fail(self, code: str, message: str) -> None:
        """Marks the row as failed; the first reason stays."""
        if not self.error_code:
            self.error_code, self.error_message = code, message


class RowError(Exception):
    """Why a row fails: an `error_code` and the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def describe_utf8(error: UnicodeDecodeError) -> str:
    return f"not valid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"


def is_clean(text: str) -> bool:
    """Whether `text` can be written as UTF-8, that is, has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


READ_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"


class LongLine(bytes):
    """Stands for a line that exceeds the limit: it has none of its bytes, but the reason."""

    reason: str

    @classmethod
    def of(cls, num_bytes: int, max_bytes: int) -> "LongLine":
        line = cls()
        line.reason = f"{num_bytes} bytes, more than limits.max_line_bytes allows ({max_bytes})"
        return line


def iter_lines(stream: BinaryIO, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Lines, ended by b"\\n" alone, without a byte order mark; a final empty remainder is no line.

    A line of more than `max_bytes` becomes a `LongLine` and is never held in memory.
    """
    pending: list[bytes] = []  # pieces of one long line: joining them once keeps a 30 MB line linear
    num_bytes = 0  # of that line, including what was dropped
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


def text_rows(lines: Iterable[bytes], name: str) -> Iterator[InputRow]:
    """The rows of a text file: every line is a prompt, blank lines included."""
    for number, line in enumerate(lines):
        row = InputRow(number, len(line))
        if isinstance(line, LongLine):
            row.fail(BAD_LINE, f"{name} line {number + 1}: {line.reason}")
            yield row
            continue
        try:
            row.prompt = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            row.fail(BAD_LINE, f"{name} line {number + 1}: {describe_utf8(error)}")
        if is_utf16(line):
            row.fail(BAD_LINE, f"{name} line {number + 1}: {UTF16_LINE}")
        yield row
