"""`Row`: one row as its file gives it, good or failed; what every row reader makes.

The invariant of all of them: whatever bytes a file holds, no row raises; one that cannot be used comes out as
a failed row with its reason. Left out: types and blocks of rows, which are Arrow's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from pipeline.formatting import Json

BLOCK_BYTES: Final = 32 << 20  # a block ends here even if it has few rows: 1024 prompts of 30 MB are 30 GB


JsonObject: TypeAlias = dict[str, Json]
"""A line of JSON Lines, or an object inside it."""


@dataclass(slots=True)
class Row:
    """One row as its file gives it; a failed row holds what could be read."""

    number: int  # 0-based, counts bad rows too; the one in a made id
    num_bytes: int  # about what it takes in memory
    id: str | None = None  # None: the row has none of its own
    prompt: str | None = None
    tokens: list[int] | None = None
    messages: list[Json] | None = None  # of a conversation, in place of a prompt
    sampling: str | None = None  # JSON object
    samples: int | None = None  # answers that it asks for; None: as many as the run makes
    error_code: str = ""
    error_message: str = ""
    fields: Mapping[str, Json] = field(default_factory=dict)  # every column the row has, prompt and id included

    def fail(self, code: str, message: str) -> None:
        """Marks the row as failed; the first reason stays."""
        if not self.error_code:
            self.error_code, self.error_message = code, message


class RowError(Exception):
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
