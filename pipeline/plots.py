"""Creating and saving figures as SVG and PNG by matplotlib without pyplot, so without global state or display.

The plots inside `report.html` follow the page's style sheet and are made by `pipeline.report.svg_plots`.
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
    figure: "Figure", target: Callable[[str], AbstractContextManager[Path]] | Path, name: str, dpi: int = 120
) -> None:
    """Writes `name`.svg and `name`.png into the folder `target`, or to the paths that `target(file name)` opens."""
    for suffix in SUFFIXES:
        if isinstance(target, Path):
            figure.savefig(target / f"{name}.{suffix}", dpi=dpi)
        else:
            with target(f"{name}.{suffix}") as path:
                figure.savefig(path, format=suffix, dpi=dpi)
