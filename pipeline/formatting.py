"""How figures and paths are shown to humans; the types of JSON values and of a log function."""

import re
from collections.abc import Callable
from typing import TypeAlias

Log = Callable[[str], None]
"""Takes one line for a human."""

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""A JSON value."""


def duration(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    """1 actor, 2 actors, 1,200 actors."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def mask(text: str) -> str:
    """The text without credentials in URIs: s3://key:secret@bucket becomes s3://***@bucket."""
    return re.sub(r"(://)[^/@\s<>\"']+@", r"\1***@", text)
