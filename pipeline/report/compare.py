"""Runs side by side: one table on stderr, one page; read from their files, their folders left alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.job import ConfigError
from pipeline.formatting import Json, Log, duration, mask
from pipeline.report.document import Figures
from pipeline.report.figures import make_report, open_run
from pipeline.report.rendering import interval, number, percent, render, times
from pipeline.report.svg_plots import C1, FG, MUTED, plot
from pipeline.store.run_state import RunState

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class ComparedRun:
    name: str
    """Its path as it was given, without credentials."""
    report: Figures
    state: RunState


def compare_runs(paths: Sequence[str], target: str, price_per_hour: float | None, log: Log) -> dict[str, object]:
    """Writes the page to `target`; gives back what differs in the configuration, and the figures by run."""
    if not Path(target).parent.is_dir() or Path(target).is_dir():
        raise ConfigError("", f"--output-html {target}: not a file in an existing folder")
    runs: list[ComparedRun] = []
    for path in paths:
        folder, state = open_run(path)
        runs.append(ComparedRun(mask(path), make_report(folder, state, price_per_hour).figures, state))
    rows = figures(runs)
    differing = differences(runs)
    for name, cells in [("", [run.name for run in runs]), *rows]:
        log("  ".join([f"{name:28}", *(f"{cell:>24}" for cell in cells)]))
    Path(target).write_text(_page(runs, rows, differing), encoding="utf-8")
    return {
        "runs": [{"output": run.name, **run.report} for run in runs],
        "differing": differing,
    }


def figures(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Lines of the table: a name, and a cell for each run."""
    reports = [run.report for run in runs]
    lines = [
        ("rows ok", [f"{r['completed']:,}" for r in reports]),
        ("rows failed", [f"{r['failed']:,}" for r in reports]),
        ("duration", [duration(r["duration_s"]) for r in reports]),
        ("workers", [f"{len(r['actors'])}" for r in reports]),
        ("output tokens", [f"{r['total_output_tokens']:,}" for r in reports]),
        ("output tokens/s, whole run", [f"{r['output_throughput']:,.0f}" for r in reports]),
        ("output tokens/s, decoding", [f"{r['decode_output_throughput'] or 0:,.0f}" for r in reports]),
        ("speedup, measured", [f"{times(r['speedup']['measured'])} {interval(r)}".strip() for r in reports]),
        ("speedup, predicted", [times(r["speedup"]["predicted"]) for r in reports]),
        ("speedup, by layers", [times(r["speedup"]["layers"]) for r in reports]),
        ("tokens as at full depth", [percent(r["agreement"]["token_match"]) for r in reports]),
        (
            "layers per token",
            [number(r["layers_per_token"], 2) for r in reports],
        ),
        ("padding", [percent(r["padding_fraction"]) for r in reports]),
        ("idle at the end", [percent(r["tail"]["idle_share"] if r["tail"] else None) for r in reports]),
    ]
    costs = [r["cost"]["per_million_output_tokens"] for r in reports if r["cost"]]
    if costs:  # of all runs, or of none
        lines.append(("per million output tokens", [number(cost, 3) for cost in costs]))
    return lines


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[Json]]:
    """Keys of the configuration in which the runs differ, dotted, with the value of each run, without credentials."""
    flat = [_flat(run.state["config"]) for run in runs]
    keys = sorted({key for config in flat for key in config})
    return {
        key: [_masked(value) for value in values]
        for key in keys
        for values in [[config.get(key) for config in flat]]
        if any(value != values[0] for value in values)
    }


def _masked(value: Json) -> Json:
    """Without the credentials of URIs, in lists too; `value` is no mapping, since those are flat here."""
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return mask(value) if isinstance(value, str) else value


def _flat(tree: Mapping[str, Json], prefix: str = "") -> dict[str, Json]:
    found: dict[str, Json] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _page(
    runs: Sequence[ComparedRun], rows: Sequence[tuple[str, list[str]]], differing: Mapping[str, list[Json]]
) -> str:
    return render(
        "compare.html.j2",
        title=f"{len(runs)} runs side by side",
        names=[run.name for run in runs],
        rows=[[name, *cells] for name, cells in rows],
        differing=[[key, *map(str, values)] for key, values in differing.items()],
        bars=_bars(runs),
    )


def _bars(runs: Sequence[ComparedRun]) -> str:
    rates = [run.report["output_throughput"] for run in runs]

    def draw(axes: "Axes", is_narrow: bool) -> None:
        axes.barh(range(len(runs)), rates, color=C1, height=0.55)
        for row, rate in enumerate(rates):
            axes.annotate(f"{rate:,.0f}", (rate, row), (6, 0), textcoords="offset points", va="center", color=FG)
        length = 14 if is_narrow else 40
        axes.set_yticks(range(len(runs)), [run.name[-length:] for run in runs], color=MUTED)
        axes.set(xlim=(0, max(rates) * 1.2 or 1), ylim=(len(runs) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)

    return plot("rates", "Output tokens per second of each run", draw, 0.8 + 0.35 * len(runs))
