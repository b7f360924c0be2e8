"""The plots of `report.html` as inline SVG, drawn by matplotlib, in colours that the page's style sheet decides.

Each plot is drawn twice, for a wide page and for a phone: scaled down, its text could not be read. Colours are drawn
as stand-ins and replaced by CSS variables, so that one drawing serves light, dark and paper.
"""

import html
import io
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import matplotlib
from matplotlib.figure import Figure

from pipeline.report.document import Figures, Lane

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 9.2, 4.0  # inches, at 72 points of which one is a CSS pixel
MAX_LANES = 32  # workers drawn; more would be a wall
Length = Literal["input", "output"]
LENGTHS: Final[tuple[Length, ...]] = ("input", "output")

# stand-in -> variable of the page
COLOURS = {
    "#010203": "--fg", "#040506": "--muted", "#070809": "--grid", "#0a0b0c": "--c1", "#0d0e0f": "--c2",
    "#101112": "--c3", "#131415": "--bad",
}  # fmt: skip
FG, MUTED, GRID, C1, C2, C3, BAD = COLOURS

STYLE = {
    "svg.fonttype": "none",  # text stays text
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": FG,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,  # a folder may be called a$b$
}

Draw = Callable[["Axes", bool], None]
"""Draws on matplotlib axes; the second argument: whether they are narrow."""


def plot(name: str, label: str, draw: Draw, height: float = 2.5) -> str:
    """Both drawings as HTML; `name` is unique in the page, `label` says in words what can be seen."""
    drawn = []
    for kind, width in (("wide", WIDE), ("narrow", NARROW)):
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": f"{name}-{kind}"}):
            figure = Figure(figsize=(width, height), layout="constrained")
            draw(figure.subplots(), kind == "narrow")
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        drawn.append(_inline(text.getvalue(), kind, label))
    return f'<div class="plot">{"".join(drawn)}</div>'


def _inline(svg: str, kind: str, label: str) -> str:
    svg = re.sub(r'<g id="[^"]*"', "<g", svg[svg.index("<svg") :])  # ids of groups are the same in every drawing
    for stand_in, variable in COLOURS.items():
        svg = svg.replace(stand_in, f"var({variable})")
    return svg.replace("<svg", f'<svg class="{kind}" role="img" aria-label="{html.escape(label)}"', 1)


def throughput_plot(report: Figures) -> str:
    bin_s, rates = report["throughput"]["bin_s"], report["throughput"]["output_tokens_per_s"]
    unit, per_unit = time_unit(report["duration_s"])
    edges = [i * bin_s / per_unit for i in range(len(rates) + 1)]
    mean = report["output_throughput"]

    def draw(axes: "Axes", is_narrow: bool) -> None:
        axes.stairs(rates, edges, fill=True, color=C1, alpha=0.25)
        axes.stairs(rates, edges, color=C1, linewidth=1.6, baseline=None)
        axes.axhline(mean, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlabel=f"{unit} of the run", ylim=(0, None), xlim=(0, edges[-1]))
        axes.set_title(f"output tokens per second, mean {mean:,.0f} (dashed)", loc="left", color=MUTED, fontsize=9.5)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return plot("throughput", f"Output tokens per second over the run, {mean:.0f} on average", draw)


def speedup_plot(report: Figures) -> str:
    s = report["speedup"]
    named = (("measured", s["measured"]), ("predicted", s["predicted"]), ("by layers", s["layers"]))
    bars = [(label, value) for label, value in named if value is not None]

    def draw(axes: "Axes", is_narrow: bool) -> None:
        rows = range(len(bars))
        axes.barh(rows, [value for _, value in bars], color=[C1, C3, C3][: len(bars)], height=0.55)
        end = max(value for _, value in bars)
        if s["ci95"] and s["measured"] is not None:
            low, high = s["ci95"]
            axes.errorbar(
                [s["measured"]], [0], xerr=[[s["measured"] - low], [high - s["measured"]]], color=FG, capsize=4, lw=1.4
            )
            end = max(end, high)
        for row, (label, value) in enumerate(bars):
            right = s["ci95"][1] if s["ci95"] and label == "measured" else value
            axes.annotate(f"{value:.2f}x", (right, row), (6, 0), textcoords="offset points", va="center", color=FG)
        axes.set_yticks(rows, [label for label, _ in bars], color=FG)
        axes.axvline(1, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlim=(0, end * (1.25 if is_narrow else 1.1)), ylim=(len(bars) - 0.5, -0.5))
        axes.set_title("times as fast as full depth (dashed)", loc="left", color=MUTED, fontsize=9.5)
        axes.grid(axis="y", visible=False)

    return plot("speedup", "Speedup over full depth: measured, predicted, by layers", draw, 1.8) if bars else ""


def layers_plot(report: Figures) -> str:
    planned, run = report["layers_by_step"]["planned"], report["layers_by_step"]["run"]
    num_layers = report["model"]["layers"]
    if not planned:
        return ""

    def draw(axes: "Axes", is_narrow: bool) -> None:
        if run:
            edges = [run[0]["first"], *(piece["last"] + 1 for piece in run)]
            axes.stairs([piece["layers"] for piece in run], edges, color=C2, fill=True, alpha=0.4, label="run")
        axes.stairs(planned, range(len(planned) + 1), color=C1, linewidth=1.8, baseline=None, label="planned")
        axes.axhline(num_layers, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), label="full depth")
        axes.set(xlabel="decode step (position in the answer)", ylim=(0, num_layers * 1.08), xlim=(0, len(planned)))
        axes.set_title("layers", loc="left", color=MUTED, fontsize=9.5)
        axes.grid(axis="x", visible=False)
        axes.legend(loc="upper right", ncols=3, bbox_to_anchor=(1, 1.17), labelcolor=FG, columnspacing=1.2)

    return plot("layers", f"Layers per decode step, planned and run, of {num_layers}", draw)


def lengths_plot(report: Figures, kind: Length) -> str:
    found = report["lengths"][kind]
    if found is None:
        return ""
    colour, what = (C3, "prompt") if kind == "input" else (C1, "answer")

    def draw(axes: "Axes", is_narrow: bool) -> None:
        axes.stairs(found["rows"], found["edges"], fill=True, color=colour, alpha=0.55)
        top = max(found["rows"])
        for name in ("p50", "p95"):
            axes.axvline(found[name], color=FG, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlabel=f"tokens per {what}", ylim=(0, top * 1.05), xlim=(found["edges"][0], found["edges"][-1]))
        title = f"rows (dashed: median {found['p50']:,}, 95 % up to {found['p95']:,})"
        if found["beyond"]:
            title += f"\n{found['beyond']:,} longer ones, up to {found['max']:,}, not drawn"
        axes.set_title(title, loc="left", color=MUTED, fontsize=9.5)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return plot(f"lengths-{kind}", f"Histogram of tokens per {what}, median {found['p50']}", draw, 2.2)


def workers_plot(lanes: Sequence[Lane], duration_s: float) -> str:
    """`lanes`: of `timeline`."""
    unit, per_unit = time_unit(duration_s)

    def scaled(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(start / per_unit, length / per_unit) for start, length in spans]

    def draw(axes: "Axes", is_narrow: bool) -> None:
        for row, lane in enumerate(lanes):
            axes.broken_barh([(0, duration_s / per_unit)], (row - 0.3, 0.6), color=GRID, alpha=0.5)
            axes.broken_barh(scaled(lane["load"]), (row - 0.3, 0.6), color=C2)
            axes.broken_barh(scaled(lane["busy"]), (row - 0.3, 0.6), color=C1)
            at = [moment / per_unit for moment in lane["restarts"]]
            axes.plot(at, [row - 0.42] * len(at), "v", color=BAD, markersize=6)
        axes.set_yticks(range(len(lanes)), [lane["worker"][: 6 if is_narrow else 12] for lane in lanes])
        axes.set(xlabel=f"{unit} of the run", xlim=(0, duration_s / per_unit), ylim=(len(lanes) - 0.4, -0.75))
        axes.grid(axis="y", visible=False)

    height = 0.75 + 0.28 * len(lanes)
    return plot("workers", f"When each of {len(lanes)} workers loaded, worked and stood still", draw, height)


def time_unit(duration_s: float) -> tuple[str, float]:
    """The unit for a time axis of that length, and its seconds."""
    return next(
        (unit, seconds)
        for unit, seconds, least in (("hours", 3600.0, 7200), ("minutes", 60.0, 180), ("seconds", 1.0, 0))
        if duration_s >= least
    )
