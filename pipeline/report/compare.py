"""Runs side by side: one table on stderr, one page; read from their files, their folders left alone."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import ConfigError
from pipeline.report.figures import make_report, open_run
from pipeline.report.page import interval, number, page, percent, table, times
from pipeline.report.plots import C1, FG, MUTED, plot
from pipeline.units import Note, duration, mask

Run = tuple[str, dict[str, Any], dict[str, Any]]
"""Name, report, run.json."""


def compare_runs(paths: Sequence[str], target: str, price_per_hour: float | None, note: Note) -> dict[str, Any]:
    """Writes the page to `target`; gives back what differs in the configuration, and the figures by run."""
    if not Path(target).parent.is_dir() or Path(target).is_dir():
        raise ConfigError("", f"--output-html {target}: not a file in an existing folder")
    runs: list[Run] = []
    for path in paths:
        folder, state = open_run(path)
        runs.append((mask(path), make_report(folder, state, price_per_hour).figures, state))
    rows = figures(runs)
    differing = differences(runs)
    for name, cells in [("", [mask(path) for path in paths]), *rows]:
        note("  ".join([f"{name:28}", *(f"{cell:>24}" for cell in cells)]))
    Path(target).write_text(_page(runs, rows, differing), encoding="utf-8")
    return {"runs": [{"output": path} | report for path, report, _ in runs], "differing": differing}


def figures(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Lines of the table: a name, and a cell for each run."""
    reports = [report for _, report, _ in runs]
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
        ("idle at the end", [percent(r["tail"] and r["tail"]["idle_share"]) for r in reports]),
    ]
    if reports[0]["cost"]:
        costs = [r["cost"]["per_million_output_tokens"] for r in reports]
        lines.append(("per million output tokens", [number(cost, 3) for cost in costs]))
    return lines


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Keys of the configuration in which the runs differ, dotted, with the value of each run."""
    flat = [_flat(state["config"]) for _, _, state in runs]
    keys = sorted({key for config in flat for key in config})
    return {
        key: values
        for key in keys
        for values in [[config.get(key) for config in flat]]
        if any(value != values[0] for value in values)
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _page(runs: Sequence[Run], rows: Sequence[tuple[str, list[str]]], differing: dict[str, list[Any]]) -> str:
    names = [path for path, _, _ in runs]
    columns = range(1, len(names) + 1)
    shown = table(["", *names], [[html.escape(n), *map(html.escape, cells)] for n, cells in rows], columns)
    keys = [[f"<code>{html.escape(k)}</code>", *(html.escape(str(v)) for v in vs)] for k, vs in differing.items()]
    body = (
        f"<h1>{len(runs)} runs side by side</h1>"
        f"<section><h2>Output tokens per second</h2><p>Over each whole run.</p>{_bars(runs)}</section>"
        f"<section><h2>Figures</h2>{shown}</section>"
        f"<section><h2>What differs in the configuration</h2>{table(['key', *names], keys)}</section>"
    )
    return page(f"{len(runs)} runs side by side", body)


def _bars(runs: Sequence[Run]) -> str:
    rates = [report["output_throughput"] for _, report, _ in runs]

    def draw(axes: Any, is_narrow: bool) -> None:
        axes.barh(range(len(runs)), rates, color=C1, height=0.55)
        for place, rate in enumerate(rates):
            axes.annotate(f"{rate:,.0f}", (rate, place), (6, 0), textcoords="offset points", va="center", color=FG)
        length = 14 if is_narrow else 40
        axes.set_yticks(range(len(runs)), [name[-length:] for name, _, _ in runs], color=MUTED)
        axes.set(xlim=(0, max(rates) * 1.2 or 1), ylim=(len(runs) - 0.5, -0.5))
        axes.grid(axis="y", visible=False)

    return plot("rates", "Output tokens per second of each run", draw, 0.8 + 0.35 * len(runs))
