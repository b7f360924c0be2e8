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


_URI = re.compile(r"\w+://[^\s<>\"']+")
_USER = re.compile(r"(\w+)://([^/@:]+(?::(?!\d+/)[^@]*)?)@")
"""A name, or a name and a secret, which may hold slashes: `s3://key:se/cret@bucket`."""
_SECRET = re.compile(r"([?&][^=&]*(?:secret|passw|token|signature|sig|key|credential)[^=&]*=)[^&]+", re.IGNORECASE)
_NAMES_ALONE = frozenset({"abfs", "abfss", "wasb", "wasbs", "hdfs", "viewfs"})
"""Schemes in which a name before `@` is no secret: `abfs://container@account/path`."""


def mask(text: str) -> str:
    """The text without credentials in URIs: s3://key:secret@bucket becomes s3://***@bucket, and values of parameters
    such as client_secret become ***."""
    return _URI.sub(lambda found: _SECRET.sub(r"\1***", _USER.sub(_without_user, found.group(), count=1)), text)


def _without_user(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    is_name = user == "anonymous" or (scheme in _NAMES_ALONE and ":" not in user)
    return found.group() if is_name else f"{scheme}://***@"


def printable(text: str) -> str:
    """The text with control characters escaped, so that a file name cannot move the cursor of a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
