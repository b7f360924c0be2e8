"""The report of a sweep: a line of progress per setting, a Markdown table, and a plot of quality against speedup.

Everything is made from the sweep's document (`quality.json`) alone.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

from pipeline.evaluation.documents import SweepDocument, SweepRow
from pipeline.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FigureOf = Callable[[SweepRow], float | None]
"""A column of the table, or a measure of the plot."""

Against = Literal["speedup", "ffn_skip_share"]

COLUMNS: tuple[tuple[str, FigureOf, str], ...] = (
    ("layers per token", lambda row: row["layers_per_token"], ".1f"),
    ("FFNs skipped, %", lambda row: _times(row.get("ffn_skip_share") or None, 100), ".1f"),
    ("BLEU", lambda row: row.get("bleu"), ".1f"),
    ("chrF", lambda row: row.get("chrf"), ".1f"),
    ("ROUGE-1", lambda row: row.get("rouge1"), ".1f"),
    ("ROUGE-2", lambda row: row.get("rouge2"), ".1f"),
    ("ROUGE-L", lambda row: row.get("rougeL"), ".1f"),
    ("ROUGE-L to full depth's text", lambda row: row.get("rougeL_to_full"), ".1f"),
    ("texts equal to it, %", lambda row: _times(row.get("equal_to_full"), 100), ".1f"),
    ("slots, %", lambda row: row["slot_share"], ".1f"),
    ("loss, nats", lambda row: row["loss"], ".3f"),
    ("perplexity", lambda row: row["perplexity"], ".3f"),
    ("as full depth, %", lambda row: _times(row["agreement"]["token_match"], 100), ".1f"),
    ("prefill, ms/row", lambda row: row.get("prefill_ms_per_row"), ".2f"),
    ("decode, ms/row", lambda row: row.get("decode_ms_per_row"), ".2f"),
    ("KV, kB/row", lambda row: _times(row.get("cache_bytes_per_row"), 1e-3), ".1f"),
    ("by layers", lambda row: row["speedup"]["layers"], ".2f"),
    ("predicted", lambda row: row["speedup"]["predicted"], ".2f"),
)
"""Heading, value, format. A column that no row has a value for is left out."""

PHASES = ("prefill, ms/row", "decode, ms/row", "KV, kB/row")
"""Columns that are shown only if a setting runs its prompt under SwiftKV."""

COMPARED = (
    "ROUGE-L against `{}`, and for other methods against the setting of the first one that runs about as much, prompt "
    "by prompt (95 %):"
)

AXES: dict[Against, str] = {
    "speedup": "measured speedup over full depth",
    "ffn_skip_share": "feed-forward blocks skipped, %",
}

COLORS = (
    "#0b6e99",
    "#d1495b",
    "#c98a00",
    "#5b8c3a",
    "#6f5aa8",
    "#555555",
)  # distinguishable in grey, too, with the markers
MARKERS = "osD^vP"


def write_report(document: SweepDocument, folder: Path) -> None:
    """`quality.json`, `quality.md`, `quality.svg`, `quality.png` in `folder`."""
    write_json(document, folder)
    (folder / "quality.md").write_text(markdown(document), encoding="utf-8")
    save_figure(plot(document), folder, "quality", dpi=150)


def write_json(document: SweepDocument, folder: Path) -> None:
    (folder / "quality.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def headline(row: SweepRow) -> str:
    """The figures of one setting as a line of progress."""
    columns = _columns([row])
    cells = [f"{name} {format(value, spec)}" for name, get, spec in columns if (value := get(row)) is not None]
    failed = [f"{row['failed']} FAILED"] * bool(row["failed"])
    return f"{row['name']}: {measured(row)}, {', '.join(cells + failed)} ({row['elapsed_s']:.0f} s)"


def _columns(rows: Sequence[SweepRow]) -> list[tuple[str, FigureOf, str]]:
    """The columns that have a value in some row."""
    has_swiftkv = any(row.get("prefill") == "swiftkv" for row in rows)
    shown = [column for column in COLUMNS if has_swiftkv or column[0] not in PHASES]
    return [column for column in shown if any(column[1](row) is not None for row in rows)]


def measured(row: SweepRow) -> str:
    """The measured speedup with its 95 % interval."""
    value, ci95 = row["speedup"]["measured"], row["speedup"]["ci95"]
    if value is None:
        return "-"
    return f"{value:.2f}x" + (f" ({ci95[0]:.2f} to {ci95[1]:.2f})" if ci95 else "")


def markdown(document: SweepDocument) -> str:
    """The table, followed by how it was measured."""
    rows = document["rows"]
    columns = _columns(rows)
    lines = [
        ["", "speedup, measured (95 %)", *(name for name, _, _ in columns)],
        ["---", *["---:"] * (len(columns) + 1)],
        *([row["name"], measured(row), *(_cell(get(row), spec) for _, get, spec in columns)] for row in rows),
    ]
    parts = [_table(lines), _legend(document)]
    if sizes := list(rows[0].get("speed_at", ())):
        head = ["", *(f"batch {size}" for size in sizes)]
        parts += [
            "Speedup by batch size, measured (predicted from what ran):",
            _table([head, ["---", *["---:"] * len(sizes)], *(_speeds(row, sizes) for row in rows)]),
        ]
    if len(compared := _compared(rows)) > 1:
        parts += [COMPARED.format(rows[0]["name"]), _table(compared)]
    return "\n\n".join(parts) + "\n"


def _speeds(row: SweepRow, sizes: Sequence[str]) -> list[str]:
    cells = [row["speed_at"][size] for size in sizes]
    return [row["name"], *(f"{_cell(c['measured'], '.2f')} ({_cell(c['predicted'], '.2f')})" for c in cells)]


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _compared(rows: Sequence[SweepRow]) -> list[list[str]]:
    """Compares each setting with the first one, and with the setting of the main label that runs about as many
    layers."""
    lines = [["", "layers per token", f"against {rows[0]['name']}", "against", "difference"], ["---", *["---:"] * 4]]
    labels = [row["label"] for row in rows]
    label = next((label for label in labels if labels.count(label) > 1), labels[0])
    main = [row for row in rows if row["label"] == label]
    for row in rows[1:]:
        if "rougeL_rows" in row and row["layers_per_token"]:
            near = min(main, key=lambda other: abs(_work(other) - _work(row)))
            cells = [row["name"], f"{row['layers_per_token']:.1f}", difference(row, rows[0])]
            cells += ["", ""] if row in main else [near["name"], difference(row, near)]
            lines.append(cells)
    return lines


def _work(row: SweepRow) -> float:
    """Layers per token, a layer without its feed-forward block being a third of one (4 of 12 d^2 weights in OPT)."""
    layers: float = row["layers_per_token"] or 0.0
    return layers * (1 - 2 / 3 * (row.get("ffn_skip_share") or 0.0))


def difference(row: SweepRow, other: SweepRow) -> str:
    """Mean ROUGE-L of one setting minus that of another on the same prompts, with its 95 % interval (paired normal)."""
    pairs = zip(row["rougeL_rows"], other["rougeL_rows"], strict=True)
    differences = [mine - theirs for mine, theirs in pairs]
    mean = fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.1f}"
    half = 1.96 * stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"


def _legend(document: SweepDocument) -> str:
    cores = f", {document['cores']} threads" if document["cores"] else ""
    failed = sum(row["failed"] for row in document["rows"])
    parts = [
        f"{document['prompts']} prompts, {document['references']} references, greedy, "
        f"{document['config']['max_new_tokens']} new tokens at most, {document['dtype']}; "
        f"{document['device']}{cores}, {document['date']}, torch {document['torch']}: `{document['command']}`.",
        "Speedup: time per token at full depth of the same checkpoint over time per token, same batches, prefill "
        "included.",
    ]
    if any(row.get("quantization") or row.get("kv_cache_dtype", "auto") != "auto" for row in document["rows"]):
        parts.append(
            "Quantized rows: `full depth's text` is of the model as it is; `as full depth` and the speedup are over "
            "full depth with the same weights, keys and values as the row."
        )
    share = document["config"].get("baseline_fraction")  # null: older figures, every batch
    if isinstance(share, float) and share < 1:
        parts.append(
            f"Speedup and `as full depth` are of the first, third and fifth batch of a setting and {share:.0%} of all, "
            "drawn. Texts and their scores are of every batch."
        )
    if document["slot_share_of_references"] is not None:
        parts.append(f"The references themselves hold {document['slot_share_of_references']:.1f} % of the slots.")
    if failed:
        parts.append(f"{failed} rows failed and count as empty texts.")
    return " ".join(parts)


def _cell(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


MEASURES: tuple[tuple[str, FigureOf], ...] = (
    ("BLEU", lambda row: row.get("bleu")),
    ("ROUGE-L", lambda row: row.get("rougeL")),
    ("loss, nats per token", lambda row: row["loss"]),
)
WITHOUT_REFERENCES: tuple[tuple[str, FigureOf], ...] = (
    ("slot values found, %", lambda row: row["slot_share"]),
    ("tokens as at full depth, %", lambda row: _times(row["agreement"]["token_match"], 100)),
)
"""Panels of the plot: title and value."""


def plot(document: SweepDocument) -> "Figure":
    """One panel per measure against measured speedup; a line per label, points with their layers per token."""
    panels = MEASURES if document["references"] else WITHOUT_REFERENCES
    figure, axes = new_figure(9, 4, len(panels))
    labels = list(dict.fromkeys(row["label"] for row in document["rows"]))
    is_share = document["config"].get("plot_against") == "ffn_skip_share"
    against: Against = "ffn_skip_share" if is_share else "speedup"
    for ax, (title, measure) in zip(axes, panels, strict=True):
        for index, label in enumerate(labels):
            _line(ax, index, label, points(document["rows"], label, measure, against), against)
        ax.set(title=title, xlabel=AXES[against])
        ax.grid(color="0.92")
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(labels), 4), frameon=False
    )
    return figure


def points(
    rows: Sequence[SweepRow], label: str, measure: FigureOf, against: Against = "speedup"
) -> list[tuple[float, float, SweepRow]]:
    """(x, figure, row) of the settings of one label that have both, by x: measured speedup, or `ffn_skip_share`."""
    found = []
    for row in rows:
        value = measure(row)
        x = row["speedup"]["measured"] if against == "speedup" else _times(row["ffn_skip_share"], 100)
        if row["label"] == label and value is not None and x is not None:
            found.append((x, value, row))
    return sorted(found, key=lambda point: point[0])


def _line(ax: "Axes", index: int, label: str, found: Sequence[tuple[float, float, SweepRow]], against: Against) -> None:
    from matplotlib.patheffects import withStroke

    color, marker = COLORS[index % len(COLORS)], MARKERS[index % len(MARKERS)]
    x, y = [at for at, _, _ in found], [value for _, value, _ in found]
    ax.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.5, label=label)
    if x in ([1.0], [0.0]):  # nothing skipped: the level that the others are held against
        ax.axhline(y[0], color=color, linewidth=1, linestyle=":")
    for speed, value, row in found if against == "speedup" else ():
        if row["speedup"]["ci95"]:
            ax.hlines(value, *row["speedup"]["ci95"], color=color, linewidth=1, alpha=0.5)
        if speed != 1.0 and (layers := row["layers_per_token"]) is not None:
            halo = [withStroke(linewidth=2, foreground="white")]  # readable where it crosses a line
            ax.annotate(
                f"{layers:.1f}".removesuffix(".0"),
                (speed, value),
                xytext=(0, 7) if index % 2 == 0 else (0, -14),
                textcoords="offset points",
                color=color,
                fontsize=9,
                ha="center",
                path_effects=halo,
            )
