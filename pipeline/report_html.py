"""`report.html`: one self-contained page with the figures of `report.json` and a plot. First form."""

import html
import io
import json
from typing import Any

from skipdecode.schedule import make_schedule

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2rem; }}
.cards {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.card {{ border: 1px solid #8886; border-radius: .5rem; padding: .75rem 1rem; min-width: 9rem; }}
.card b {{ display: block; font-size: 1.4rem; }}
table {{ border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }}
td, th {{ border-bottom: 1px solid #8884; padding: .3rem .6rem; text-align: left; }}
svg {{ max-width: 100%; height: auto; background: #fff; border-radius: .5rem; }}
pre {{ overflow-x: auto; background: #8882; padding: 1rem; border-radius: .5rem; }}
</style></head><body><h1>{title}</h1><div class="cards">{cards}</div>{sections}</body></html>
"""


def render_report(report: dict[str, Any], state: dict[str, Any]) -> str:
    """The page as text; `state` is `run.json`."""
    s, a = report["speedup"], report["agreement"]
    interval = f" (95 %: {s['ci95'][0]:.2f} to {s['ci95'][1]:.2f})" if s["ci95"] else ""
    cards = [
        ("rows ok", f"{report['completed']:,}"),
        ("rows failed", f"{report['failed']:,}"),
        ("output tokens/s", f"{report['output_throughput']:,.0f}"),
        ("speedup, measured", _times(s["measured"]) + interval),
        ("speedup, by layers", _times(s["layers"])),
        ("speedup, predicted", _times(s["predicted"])),
        ("tokens as at full depth", "-" if a["token_match"] is None else f"{100 * a['token_match']:.1f} %"),
        ("books", "closed" if report["books"]["closed"] else "OPEN"),
    ]
    figures = {k: v for k, v in report.items() if not isinstance(v, dict | list)}
    sections = [
        _section("Layers per position", _layers_plot(state)),
        _section("Figures", _table([{"figure": k, "value": v} for k, v in figures.items()])),
        _section("Workers", _table(report["actors"])),
        _section("Errors", _table([{"code": k, "rows": v} for k, v in report["errors"].items()])),
        _section("Configuration", f"<pre>{html.escape(json.dumps(state['config'], indent=2))}</pre>"),
        _section("Fingerprint", _table([{"key": k, "value": v} for k, v in state["fingerprint"].items()])),
    ]
    return PAGE.format(
        title=html.escape(f"Run {state['sessions'][-1]['id']}: {state['model']['source']}"),
        cards="".join(f'<div class="card">{html.escape(k)}<b>{html.escape(v)}</b></div>' for k, v in cards),
        sections="".join(sections),
    )


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>{body}" if body else ""


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(v))}</td>" for v in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _shown(value: Any) -> str:
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


def _layers_plot(state: dict[str, Any]) -> str:
    """Planned layers over generated tokens, full depth beside it, as SVG."""
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    layers, num_new = state["model"]["layers"], state["config"]["sampling"]["max_new_tokens"]
    schedule = make_schedule(state["decode"], num_layers=layers, max_new_tokens=num_new)
    steps = range(max(num_new - 1, 1))
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    axes.step(steps, [schedule.step(k).num_layers_run for k in steps], where="post", label="this run")
    axes.axhline(layers, color="0.6", linestyle="--", label="full depth")
    axes.set(xlabel="decode step", ylabel="layers", ylim=(0, layers + 1))
    axes.legend(frameon=False)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]
