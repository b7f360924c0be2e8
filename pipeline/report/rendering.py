"""Formatting of figures, and rendering of pages by jinja2 with autoescape, so that every value is text.

`page` and `compare` supply the contents; the templates (`*.html.j2`) and `page.css` are beside this file.
"""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.formatting import count, mask
from pipeline.report.document import ActorFigures, Figures

HERE = Path(__file__).parent


def render(template: str, **values: object) -> str:
    """A page without the credentials of URIs."""
    return mask(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"as_text": as_text, "percent": percent, "shown": shown}
    environment.globals["css"] = (HERE / "page.css").read_text(encoding="utf-8")
    return environment


def as_text(value: object) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def shown(value: object) -> str:
    """A value formatted for reading: `-` for None, 12,345 or 0.25."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def interval(report: Figures) -> str:
    """The confidence interval of the measured speedup; empty if there is none."""
    ci95 = report["speedup"]["ci95"]
    return f"95 %: {ci95[0]:.2f} to {ci95[1]:.2f}" if ci95 else ""


def backends(actors: Sequence[ActorFigures]) -> str:
    """The back ends that decoded, the reason for each choice, and the number of workers."""
    found = Counter(f"{own['name']} ({own['reason']})" for actor in actors if (own := actor["backend"]))
    return "; ".join(f"{text}, {count(workers, 'worker')}" for text, workers in found.most_common())


def slow_workers(actors: Sequence[ActorFigures]) -> str:
    """Why workers decoded slower than they could, and how many; empty if none did."""
    found = Counter(why for actor in actors if (why := actor.get("why_slow")))
    return "; ".join(f"{why}, {count(workers, 'worker')}" for why, workers in found.most_common())
