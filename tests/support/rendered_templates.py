"""Templates of the sandbox as the tests render them, at one time."""

from collections.abc import Mapping
from datetime import datetime

from actors.templates.jinja_sandbox import Template

NOW = datetime(2026, 7, 26, 12, 30)


def ours(source: str, values: Mapping[str, object], *, strict: bool = False) -> str:
    return Template(source, strict=strict).render(values, now=NOW)
