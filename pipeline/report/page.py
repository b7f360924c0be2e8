"""`report.html`: one self-contained page with the figures of `report.json` and plots; light, dark, phone and paper.

Nothing is fetched, and every figure is one of `report.json`. The plots are `report_plots`, comparing runs is
`report_compare`.
"""

import datetime
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from pipeline.report import plots as plots
from pipeline.units import count, duration, mask

STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfd; --panel: #ffffff; --fg: #1b1f27; --muted: #667085; --grid: #e3e6ec;
  --c1: #2563c9; --c2: #c9761a; --c3: #8b98ad; --good: #1a7f4b; --bad: #c4352c; }
@media (prefers-color-scheme: dark) { :root { --bg: #101318; --panel: #181c23; --fg: #e8eaee; --muted: #98a2b3;
  --grid: #2c323d; --c1: #6ea3ff; --c2: #f0a453; --c3: #75829a; --good: #4cc38a; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--fg);
  background: var(--bg); max-width: 62rem; margin: 0 auto; padding: 1.75rem 1rem 3rem; }
h1 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; letter-spacing: -.01em; }
h2 { font-size: 1.05rem; margin: 0 0 .15rem; } section > p { margin: 0 0 .7rem; color: var(--muted); max-width: 52rem; }
.sub { color: var(--muted); margin: 0 0 1.25rem; } .sub b { color: var(--fg); font-weight: 600; }
.badge { display: inline-block; font-size: .78rem; font-weight: 600; border-radius: 1rem; padding: .05rem .6rem;
  border: 1px solid currentColor; vertical-align: .25em; margin-left: .5rem; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .75rem; }
.card, section { background: var(--panel); border: 1px solid var(--grid); border-radius: .6rem; }
.card { padding: .7rem .9rem; } .card span { color: var(--muted); font-size: .85rem; }
.card b { display: block; font-size: 1.5rem; line-height: 1.3; font-weight: 650; font-variant-numeric: tabular-nums; }
section { padding: 1rem 1.1rem; margin-top: .75rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1.25rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--grid); padding: .35rem .8rem .35rem 0; text-align: left; vertical-align: top; }
th { color: var(--muted); font-weight: 500; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; white-space: nowrap; padding: .35rem 0 .35rem .8rem; }
code, pre { font: .84rem/1.45 ui-monospace, SFMono-Regular, Menlo, monospace; }
td code { overflow-wrap: anywhere; } .scroll td:first-child code { white-space: nowrap; }
pre { overflow-x: auto; margin: .5rem 0 0; } summary { cursor: pointer; font-weight: 600; }
.key { display: inline-block; width: .7rem; height: .7rem; border-radius: .15rem; margin: 0 .3rem 0 .8rem; }
.key:first-child { margin-left: 0; }
.plot svg { display: block; width: 100%; height: auto; } .plot svg text { font-family: inherit !important; }
.plot .narrow, .pair .plot .wide { display: none; } .pair .plot .narrow { display: block; }
footer { color: var(--muted); font-size: .85rem; margin-top: 1.25rem; }
@media (max-width: 620px) { body { padding: 1rem .6rem 2rem; } section { padding: .85rem .8rem; }
  .cards { grid-template-columns: 1fr 1fr; gap: .5rem; } .card { padding: .55rem .65rem; }
  .card b { font-size: 1.2rem; }
  .pair { grid-template-columns: 1fr; gap: .5rem; }
  .plot .wide { display: none; } .plot .narrow { display: block; } }
@media print { :root { --bg: #fff; --panel: #fff; --fg: #000; --muted: #555; --grid: #ddd; --c1: #2563c9; --c2: #c9761a;
  --c3: #8b98ad; --good: #1a7f4b; --bad: #c4352c; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 11pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .card, section { break-inside: avoid; } section.long { break-inside: auto; } .scroll, pre { overflow: visible; }
  pre { white-space: pre-wrap; } .plot .wide { display: block; } .plot .narrow, .pair .plot .wide { display: none; }
  .pair { grid-template-columns: 1fr 1fr; } .pair .plot .narrow { display: block; } }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body>
{body}
<script>addEventListener("beforeprint",()=>document.querySelectorAll("details").forEach(d=>d.open=true))</script>
</body></html>
"""

FIGURES = {  # of report.json -> what it is called on the page, and its unit
    "duration_s": ("duration", "s"),
    "request_throughput": ("rows per second", ""),
    "output_throughput": ("output tokens per second, over the whole run", ""),
    "total_token_throughput": ("input and output tokens per second", ""),
    "decode_output_throughput": ("output tokens per second of decoding, one worker", ""),
    "total_input_tokens": ("input tokens", ""),
    "total_output_tokens": ("output tokens", ""),
    "layers_per_token": ("layers per output token", ""),
    "ffns_per_token": ("feed-forward blocks per output token", ""),
    "padding_fraction": ("padding, share of the prompts' columns", "%"),
    "prefill_s": ("time in prompts", "s"),
    "decode_s": ("time in decoding", "s"),
    "baseline_s": ("time spent measuring full depth", "s"),
}
WORKER_COLUMNS = ("worker", "host", "device", "dtype", "load_s", "busy_s", "idle_s", "restarts", "rows")


def render_report(report: dict[str, Any], state: dict[str, Any], lanes: Sequence[dict[str, Any]]) -> str:
    """The page as text; `state` is `run.json`, `lanes` are those of `report_time`."""
    parts = [
        _header(report, state),
        cards(_cards(report)),
        _speed(report, state["config"]["baseline"]["fraction"]),
        _section("Throughput over time", "A gap is time without decoding.", plots.throughput_plot(report)),
        _layers(report),
        _lengths(report),
        _workers(report, lanes),
        _errors(report),
        _section("All figures", "", table(("", "in report.json", ""), _figures(report), [2])),
        _details(
            "Configuration",
            f"<pre>{html.escape(yaml.safe_dump(state['config'], sort_keys=False, default_flow_style=None))}</pre>",
        ),
        _details("Fingerprint", table(("key", "value"), [(k, _code(v)) for k, v in state["fingerprint"].items()])),
        "<footer>Made from the files of the run alone. <code>python -m jobs.report OUT</code> makes this page again, "
        "<code>python -m jobs.verify OUT</code> proves the books.</footer>",
    ]
    return page(f"{state['model']['source']}, run {state['sessions'][-1]['id']}", "\n".join(parts))


def page(title: str, body: str) -> str:
    return mask(PAGE.format(title=html.escape(title), style=STYLE, body=body))


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, small print); the value and the small print are text."""
    return '<div class="cards">' + "".join(
        f'<div class="card"><span>{html.escape(label)}</span><b>{html.escape(value)}</b>'
        f"<span>{html.escape(more)}</span></div>"
        for label, value, more in items
    ) + "</div>"  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; `numbers`: columns set to the right."""
    kinds = [' class="n"' if column in numbers else "" for column in range(len(head))]
    lines = ["".join(f"<th{kind}>{html.escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))]
    lines += ["".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) for row in rows]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def interval(report: dict[str, Any]) -> str:
    ci95 = report["speedup"]["ci95"]
    return f"95 %: {ci95[0]:.2f} to {ci95[1]:.2f}" if ci95 else ""


def _header(report: dict[str, Any], state: dict[str, Any]) -> str:
    name, closed = state["state"], report["books"]["closed"]
    badges = [(name, name == "finished"), ("books closed" if closed else "books OPEN", closed)]
    shown = "".join(f'<span class="badge {"good" if ok else "bad"}">{html.escape(text)}</span>' for text, ok in badges)
    session = state["sessions"][-1]
    began = datetime.datetime.fromtimestamp(state["sessions"][0]["started_at"], datetime.UTC)
    decode = ", ".join(f"{key} {value}" for key, value in report["decode"].items())
    resumed = f", {len(state['sessions'])} sessions" if len(state["sessions"]) > 1 else ""
    sub = (
        f"<b>{html.escape(decode)}</b>, prompts {html.escape(report['prefill'])} &middot; run {session['id']} &middot; "
        f"{began:%Y-%m-%d %H:%M} UTC, {duration(report['duration_s'])}{resumed}"
    )
    return f'<h1>{html.escape(state["model"]["source"])}{shown}</h1><p class="sub">{sub}</p>'


def _cards(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    s, a, books, price = report["speedup"], report["agreement"], report["books"], report["cost"]
    items = [
        ("rows", f"{report['completed']:,}", f"of {books['input']:,}, {report['failed']:,} failed"),
        ("output tokens/s", f"{report['output_throughput']:,.0f}", f"{report['total_output_tokens']:,} in all"),
        ("speedup", times(s["measured"]), interval(report) or ("one batch" if s["batches"] else "not measured")),
        ("as at full depth", percent(a["token_match"]), f"of tokens; {percent(a['exact_rows'])} of rows"),
        ("layers per token", number(report["layers_per_token"], 1), f"of {report['model']['layers']}"),
    ]
    if price:
        per_million = number(price["per_million_output_tokens"], 3)
        items.append(
            ("per M output tokens", per_million, f"{price['total']:,.2f} in all at {price['price_per_hour']:g}/h")
        )
    return items


def _speed(report: dict[str, Any], fraction: float) -> str:
    """`fraction`: baseline.fraction."""
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
    return _section("Worth it?", text, plots.speedup_plot(report) or "<!-- no bars -->")


def _is_full(report: dict[str, Any]) -> bool:
    """Whether every layer of every token was to run."""
    layers, decode = report["model"]["layers"], report["decode"]
    is_deep = all(step == layers for step in report["layers_by_step"]["planned"])
    return is_deep and "ffn_skip" not in decode and report["prefill"] == "full"


def _layers(report: dict[str, Any]) -> str:
    text = "What the schedule plans for each position of an answer, and what the rows ran."
    if reason := report["layers_by_step"]["reason"]:
        text += f" What ran is not shown by position: {reason}."
    return _section("Layers per position", text, plots.layers_plot(report))


def _lengths(report: dict[str, Any]) -> str:
    text = f"Padding took {percent(report['padding_fraction'])} of the prompts' columns."
    both = "".join(plots.lengths_plot(report, kind) for kind in ("input", "output"))
    return _section("Lengths", text, f'<div class="pair">{both}</div>' if both else "")


def _workers(report: dict[str, Any], lanes: Sequence[dict[str, Any]]) -> str:
    if not report["actors"]:
        return ""
    end, again = report["tail"], report["decoded_again"]
    text = (
        '<span class="key" style="background:var(--c2)"></span>loading'
        '<span class="key" style="background:var(--c1)"></span>decoding'
        '<span class="key" style="background:var(--grid)"></span>idle'
        '<span class="key" style="background:var(--bad)"></span>restarted'
    )
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
            "files: in hand at a death or an interruption, and decoded again. Times, layers, padding and the rows of "
            "workers count them."
        )
    if len(report["actors"]) > len(lanes):
        text += f" {len(lanes)} of {len(report['actors'])} workers are drawn."
    rows = [
        [_code(actor[name]) if name == "worker" else html.escape(_shown(actor[name])) for name in WORKER_COLUMNS]
        for actor in report["actors"]
    ]
    columns = table([name.replace("_s", ", s") for name in WORKER_COLUMNS], rows, range(4, 9))
    body = plots.workers_plot(lanes, report["duration_s"])
    return f'<section class="long"><h2>Workers</h2><p>{text}</p>{body}{columns}</section>'


def _errors(report: dict[str, Any]) -> str:
    split = report["split_batches"]
    rows = [
        (_code(code), f"{number_of:,}", "<br>".join(f"{_code(e['id'])} {html.escape(e['message'])}" for e in examples))
        for code, number_of in sorted(report["errors"].items(), key=lambda item: -item[1])
        for examples in [report["error_examples"].get(code, [])]
    ]
    body = table(("code", "rows", "first of them"), rows) if rows else ""
    if split["count"]:
        first = html.escape(split["first"])
        body += f"<p>{split['count']} batches are parts of larger ones that failed: <code>{first}</code></p>"
    text = "Failed rows lie beside the good ones, in data/status=failed." if rows else "No row failed."
    return _section("Errors", text, body or "<!-- none -->")


def _figures(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    shown = []
    for key, (label, unit) in FIGURES.items():
        value = report[key]
        text = percent(value) if unit == "%" else _shown(value) + (f" {unit}" if unit and value is not None else "")
        shown.append((html.escape(label), f"<code>{key}</code>", text))
    return shown


def _section(title: str, text: str, body: str) -> str:
    lead = f"<p>{html.escape(text)}</p>" if text else ""
    return f"<section><h2>{html.escape(title)}</h2>{lead}{body}</section>" if body else ""


def _details(title: str, body: str) -> str:
    return f'<section class="long"><details><summary>{html.escape(title)}</summary>{body}</details></section>'


def _code(value: Any) -> str:
    return f"<code>{html.escape(value if isinstance(value, str) else json.dumps(value))}</code>"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
