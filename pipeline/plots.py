"""How a figure of ours begins and ends: matplotlib without pyplot (no global state, no display), as SVG and PNG.

For figures in files. The plots inside `report.html` follow the page's style sheet: `pipeline.report.plots`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = ("svg", "png")


def new_figure(width: float, height: float, columns: int = 1) -> "tuple[Figure, list[Axes]]":
    """A white figure of that many inches, and its axes from left to right."""
    from matplotlib.figure import Figure  # here: who draws nothing does not wait for it

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def save_figure(
    figure: "Figure", place: Callable[[str], AbstractContextManager[Path]] | Path, name: str, dpi: int = 120
) -> None:
    """Writes `name`.svg and `name`.png: into the folder `place`, or to the path that `place(file name)` lends."""
    for suffix in SUFFIXES:
        if isinstance(place, Path):
            figure.savefig(place / f"{name}.{suffix}", dpi=dpi)
        else:
            with place(f"{name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=dpi)
