"""`report.html`: one self-contained page with the figures of `report.json` and plots; light, dark, phone and paper.

The page fetches nothing, and every figure in it is in `report.json`. This module computes the contents; the layout is
in `page.html.j2` and `page.css`, plots are drawn by `svg_plots`, and `compare` makes the page for several runs.
"""

import datetime
from collections.abc import Sequence
from operator import itemgetter
from typing import Final, Literal

import yaml

from pipeline.formatting import count, duration
from pipeline.report import svg_plots as plots
from pipeline.report.document import Example, Figures, Lane
from pipeline.report.rendering import backends, interval, number, percent, render, shown, slow_workers, times
from pipeline.store.run_state import RunState

Single = Literal[
    "duration_s", "request_throughput", "output_throughput", "total_token_throughput", "decode_output_throughput",
    "total_input_tokens", "total_output_tokens", "draft_acceptance", "tokens_per_pass",
    "layers_per_token", "ffns_per_token", "padding_fraction", "prefill_s",
    "decode_s", "baseline_s", "prefix_tokens_saved", "prefix_saved_s",
]  # fmt: skip
"""Keys of report.json that have a line of their own."""

TOO_FEW: Final = {0: "not measured", 1: "one batch", 2: "two batches"}
"""Beside a speedup without a confidence interval, by the number of batches it was measured in."""

LABELS: Final[dict[Single, tuple[str, str]]] = {  # what it is called on the page, and its unit
    "duration_s": ("duration", "s"),
    "request_throughput": ("rows per second", ""),
    "output_throughput": ("output tokens per second, over the whole run", ""),
    "total_token_throughput": ("input and output tokens per second", ""),
    "decode_output_throughput": ("output tokens per second of decoding, one worker", ""),
    "total_input_tokens": ("input tokens", ""),
    "total_output_tokens": ("output tokens", ""),
    "draft_acceptance": ("drafted tokens that full depth accepted", "%"),
    "tokens_per_pass": ("tokens per row and pass at full depth", ""),
    "layers_per_token": ("layers per output token", ""),
    "ffns_per_token": ("feed-forward blocks per output token", ""),
    "padding_fraction": ("padding, share of the prompts' columns", "%"),
    "prefill_s": ("time in prompts", "s"),
    "decode_s": ("time in decoding", "s"),
    "prefix_tokens_saved": ("prompt tokens run once for several rows", "tokens"),
    "prefix_saved_s": ("time they would have taken, estimated", "s"),
    "baseline_s": ("time spent measuring full depth", "s"),
}
WORKER_COLUMNS = ("worker", "host", "device", "dtype", "load_s", "busy_s", "idle_s", "restarts", "rows")


def render_report(report: Figures, state: RunState, lanes: Sequence[Lane]) -> str:
    """The page as text; `state` is `run.json`, `lanes` are those of `timeline`."""
    return render(
        "page.html.j2",
        title=f"{state['model']['source']}, run {state['sessions'][-1]['id']}",
        report=report,
        state=state,
        badges=_badges(report, state),
        decode=", ".join(f"{key} {value}" for key, value in report["decode"].items()),
        when=_when(report, state),
        card_items=_cards(report),
        speed_text=speed_text(report, state["config"]["baseline"]["fraction"]),
        layers_text=_layers_text(report),
        workers_text=_workers_text(report, lanes),
        backends=backends(report["actors"]),
        slow_workers=slow_workers(report["actors"]),
        worker_head=[name.replace("_s", ", s") for name in WORKER_COLUMNS],
        worker_rows=[itemgetter(*WORKER_COLUMNS)(actor) for actor in report["actors"]],
        errors=_errors(report),
        figures=_figures(report),
        configuration=yaml.safe_dump(state["config"], sort_keys=False, default_flow_style=None),
        plots={
            "speedup": plots.speedup_plot(report),
            "throughput": plots.throughput_plot(report),
            "layers": plots.layers_plot(report),
            "lengths": "".join(plots.lengths_plot(report, kind) for kind in plots.LENGTHS),
            "workers": plots.workers_plot(lanes, report["duration_s"]) if report["actors"] else "",
        },
    )


def _badges(report: Figures, state: RunState) -> list[tuple[str, bool]]:
    """Badges beside the title: text, and whether it is good news."""
    name, closed = state["state"], report["books"]["closed"]
    return [(name, name == "finished"), ("books closed" if closed else "books OPEN", closed)]


def _when(report: Figures, state: RunState) -> str:
    began = datetime.datetime.fromtimestamp(state["sessions"][0]["started_at"], datetime.UTC)
    resumed = f", {len(state['sessions'])} sessions" if len(state["sessions"]) > 1 else ""
    estimate = report["estimate"]
    expected = (
        ""
        if estimate is None
        else f" (expected after {count(estimate['seen_rows'], 'row')}: {duration(estimate['duration_s'])})"
    )
    return f"{began:%Y-%m-%d %H:%M} UTC, {duration(report['duration_s'])}{expected}{resumed}"


def _cards(report: Figures) -> list[tuple[str, str, str]]:
    """Label, value, small print."""
    s, a, books, price = report["speedup"], report["agreement"], report["books"], report["cost"]
    documents = report["documents"]
    of = f"{books['input']:,}" + ("" if documents == books["input"] else f" from {documents:,} documents")
    items = [
        ("rows", f"{report['completed']:,}", f"of {of}, {report['failed']:,} failed"),
        ("output tokens/s", f"{report['output_throughput']:,.0f}", f"{report['total_output_tokens']:,} in all"),
        ("speedup", times(s["measured"]), interval(report) or TOO_FEW.get(s["batches"], "")),
        ("as at full depth", percent(a["token_match"]), f"of tokens; {percent(a['exact_rows'])} of rows"),
        ("layers per token", number(report["layers_per_token"], 1), f"of {report['model']['layers']}"),
    ]
    if price:
        per_million = number(price["per_million_output_tokens"], 3)
        items.append(
            ("per M output tokens", per_million, f"{price['total']:,.2f} in all at {price['price_per_hour']:g}/h")
        )
    return items


def speed_text(report: Figures, fraction: float) -> str:
    """Explains how the speedup was measured, or why it was not. `fraction` is baseline.fraction."""
    s, a, failed = report["speedup"], report["agreement"], report["baseline_errors"]
    if s["measured"] is not None:
        text = (
            f"Time per output token at full depth over that of this run, prompts included: {s['batches']} batches "
            f"({a['rows']:,} rows) were decoded both ways in the same worker. Predicted: from what the device can do "
            "at best. By layers: what skipping would gain if layers were all."
        )
    elif _is_full(report):
        text = "This run is at full depth itself: there is nothing to compare it with."
    elif failed["count"]:
        text = "Nothing was measured: every pass at full depth failed."
    elif not fraction:
        text = "No batch was decoded at full depth too, so nothing was measured: set baseline.fraction above 0."
    else:
        text = "No batch was decoded at full depth too, so nothing was measured."
    if failed["count"]:
        text += f" Of the passes at full depth {failed['count']} failed, the first with: {failed['first']}"
    return text


def _is_full(report: Figures) -> bool:
    """True if the run skips nothing."""
    layers, decode = report["model"]["layers"], report["decode"]
    is_deep = all(step == layers for step in report["layers_by_step"]["planned"])
    return is_deep and not decode.keys() & {"ffn_skip", "lossless"} and report["prefill"] == "full"


def _layers_text(report: Figures) -> str:
    text = "What the schedule plans for each position of an answer, and what the rows ran."
    if reason := report["layers_by_step"]["reason"]:
        text += f" What ran is not shown by position: {reason}."
    return text


def _workers_text(report: Figures, lanes: Sequence[Lane]) -> str:
    """The caption of the workers' plot, which follows the legend."""
    end, again, text = report["tail"], report["decoded_again"], ""
    if end:
        text += (
            f". At the end workers waited for the last one for {end['idle_s']:.1f} s in all, "
            f"{percent(end['idle_share'])} of their time."
        )
        if end["left"]:
            text += f" {count(end['left'], 'worker')} had left before, and count as idle up to their last row only."
    if again["output_tokens"]:
        text += (
            f" {again['output_tokens']:,} tokens ({count(again['rows'], 'row')}) were decoded beyond those in the data "
            "files: they were lost when a worker died or the run was interrupted, and were decoded again. Times, "
            "layers, padding and the rows of workers count them."
        )
    if len(report["actors"]) > len(lanes):
        text += f" {len(lanes)} of {len(report['actors'])} workers are drawn."
    return text


def _errors(report: Figures) -> list[tuple[str, int, list[Example]]]:
    """Code, number of rows, the first of them; the most frequent code first."""
    examples = report["error_examples"]
    most_first = sorted(report["errors"].items(), key=lambda item: -item[1])
    return [(code, number_of, examples.get(code, [])) for code, number_of in most_first]


def _figures(report: Figures) -> list[tuple[str, str, str]]:
    """Label, key, figure with its unit."""
    lines: list[tuple[str, str, str]] = []
    for key, (label, unit) in LABELS.items():
        value = report[key]
        if value is None and key in ("draft_acceptance", "tokens_per_pass"):
            continue  # no drafts
        text = percent(value) if unit == "%" else shown(value) + (f" {unit}" if unit and value is not None else "")
        lines.append((label, key, text))
    return lines
