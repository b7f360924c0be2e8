"""The figures of a run, computed from its files alone, so that a report can be rebuilt at any time.

Row and token totals come from the data files, times and layers from `metrics/`. Names follow vLLM's benchmarks where
they exist.
"""

import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import ConfigError
from pipeline.metrics import SCHEMAS
from pipeline.report_data import count_data, layers_by_step, lengths
from pipeline.report_html import render_report
from pipeline.report_time import Clock, actors, lanes, tail, throughput
from pipeline.run_folder import RunFolder

# Student's t, 97.5 % quantile for 1..30 degrees of freedom (any table of the distribution); 1.96 beyond.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def make_report(folder: RunFolder, state: dict[str, Any], price_per_hour: float | None = None) -> dict[str, Any]:
    """`report.json`; `state` is `run.json`, `price_per_hour` that of all machines of the run together."""
    totals = count_data(folder)
    batches = read_metrics(folder, "batches").to_pylist()
    windows = read_metrics(folder, "windows").to_pylist()
    clock = Clock.of(state["sessions"])
    duration_s = clock.duration_s
    all_tokens = totals.input_tokens + totals.output_tokens
    split = [b["split_error"] for b in batches if b["split_error"] is not None]
    decoded = {
        "rows": sum(b["rows"] for b in batches),
        "input": sum(b["input_tokens"] for b in batches),
        "output": sum(b["output_tokens"] for b in batches),
    }
    decode, num_layers = state["decode"], state["model"]["layers"]
    return {
        "duration_s": duration_s,
        "completed": totals.ok,
        "failed": totals.failed,
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.ok / duration_s,
        "output_throughput": totals.output_tokens / duration_s,
        "total_token_throughput": all_tokens / duration_s,
        "decode_output_throughput": _ratio(decoded["output"], sum(b["prefill_s"] + b["decode_s"] for b in batches)),
        "speedup": speedup(batches),
        "agreement": agreement(batches),
        "layers_per_token": _ratio(sum(b["layers_run"] for b in batches), decoded["output"] - decoded["rows"]),
        "ffns_per_token": _ratio(sum(b["ffns_run"] for b in batches), decoded["output"] - decoded["rows"]),
        "padding_fraction": 1
        - (_ratio(decoded["input"], sum(b["rows"] * b["prompt_columns"] for b in batches)) or 1.0),
        "prefill_s": sum(b["prefill_s"] for b in batches),
        "decode_s": sum(b["decode_s"] for b in batches),
        "baseline_s": sum(b["full_prefill_s"] + b["full_decode_s"] for b in _paired(batches)),
        "cost": None if price_per_hour is None else cost(price_per_hour, duration_s, totals.output_tokens, all_tokens),
        "actors": actors(read_metrics(folder, "workers").to_pylist(), windows, clock),
        "tail": tail(windows, clock),
        "throughput": throughput(batches, clock),
        "lengths": {"input": lengths(totals.input_lengths), "output": lengths(totals.output_lengths)},
        "layers_by_step": layers_by_step(totals, decode, num_layers, state["config"]["sampling"]["max_new_tokens"]),
        "errors": totals.errors,
        "error_examples": totals.examples,
        "split_batches": {"count": len(split), "first": split[0] if split else None},
        "books": state["books"],
        "model": state["model"],
        "decode": decode,
        "prefill": state["config"]["prefill"]["method"],
    }


def rebuild_report(path: str, price_per_hour: float | None = None) -> tuple[RunFolder, dict[str, Any]]:
    """Writes `report.json` and `report.html` of a run folder anew; ConfigError where there is none.

    Of a run that is not finished the figures so far. Only these two files change.
    """
    folder, state = open_run(path)
    report = make_report(folder, state, price_per_hour)
    write_report(folder, report, state)
    return folder, report


def open_run(path: str) -> tuple[RunFolder, dict[str, Any]]:
    """A run folder and its `run.json`, where sessions that have no end yet end with their last sign of life."""
    folder = RunFolder.open(path)
    state = folder.read_state()
    if state is None or not {"state", "sessions", "books", "config", "decode", "model"} <= state.keys():
        raise ConfigError(f"{path}: no run.json of a run, so not a run folder (-o of jobs.generate)")
    for session in state["sessions"]:
        session["ended_at"] = session["ended_at"] or last_sign_of_life(folder, session)
    if not Clock.of(state["sessions"]).duration_s:
        raise ConfigError(f"{path}: the run has written nothing yet, so there is nothing to report")
    return folder, state


def write_report(folder: RunFolder, report: dict[str, Any], state: dict[str, Any]) -> None:
    windows, starts = (read_metrics(folder, kind).to_pylist() for kind in ("windows", "workers"))
    workers = lanes(starts, windows, Clock.of(state["sessions"]))
    folder.write_text("report.html", render_report(report, state, workers))
    folder.write_text("report.json", json.dumps(report, indent=2) + "\n")


def cost(price_per_hour: float, duration_s: float, output_tokens: int, all_tokens: int) -> dict[str, Any]:
    """In the currency of the price; `per_million_output_tokens` is what a corpus costs, null without tokens."""
    total = price_per_hour * duration_s / 3600
    return {
        "price_per_hour": price_per_hour,
        "total": total,
        "per_million_output_tokens": _ratio(1e6 * total, output_tokens),
        "per_million_tokens": _ratio(1e6 * total, all_tokens),
    }


def read_metrics(folder: RunFolder, kind: str) -> pa.Table:
    """All records of one kind (`batches`, `windows`, `workers`)."""
    paths = [path for path in folder.files("metrics") if path.rpartition("/")[2].startswith(f"{kind}-")]
    tables = [pq.read_table(path, filesystem=folder.filesystem, partitioning=None) for path in paths]
    # a run of an earlier version may lack a column
    return pa.concat_tables([SCHEMAS[kind].empty_table(), *tables], promote_options="default")


def last_sign_of_life(folder: RunFolder, session: dict[str, Any]) -> float:
    """When a session that was killed wrote its last file or record (epoch seconds): its end, as far as one can tell."""
    written = [
        info.mtime.timestamp()
        for status in ("ok", "failed")
        for info in folder.filesystem.get_file_info(folder.data_files(status))
        if info.mtime is not None
    ]
    paths = [path for path in folder.files("metrics") if f"windows-{session['id']}-" in path]
    tables = [pq.read_table(path, columns=["ended_at"], filesystem=folder.filesystem) for path in paths]
    return float(max([session["started_at"], *written, *(pc.max(table["ended_at"]).as_py() for table in tables)]))


def speedup(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Time per output token at full depth over time per output token, prefill included.

    `measured`: geometric mean over the batches decoded both ways in the same actor; `ci95`: its t-interval (null below
    two such batches). `measured_decode`: the same without prefill. `layers`: layers of the model over layers run per
    decode step. `predicted`: by `skipdecode.cost` from ceilings measured in the actor.
    """
    pairs = _paired(batches)
    measured, ci95 = _geometric([_per_token_ratio(b, ("prefill_s", "decode_s")) for b in pairs])
    measured_decode, _ = _geometric([_per_token_ratio(b, ("decode_s",)) for b in pairs])
    steps = sum(b["layers"] * (b["output_tokens"] - b["rows"]) for b in batches)
    predicted = [sum(b[f"{p}predicted_{x}_s"] for b in pairs for x in ("prefill", "decode")) for p in ("full_", "")]
    return {
        "measured": measured,
        "ci95": ci95,
        "measured_decode": measured_decode,
        "layers": _ratio(steps, sum(b["layers_run"] for b in batches)),
        "predicted": _ratio(*predicted),
        "batches": len(pairs),
    }


def agreement(batches: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of rows and of token positions that equal full depth, on the rows decoded both ways."""
    pairs = _paired(batches)
    return {
        "exact_rows": _ratio(sum(b["exact_rows"] for b in pairs), sum(b["rows"] for b in pairs)),
        "token_match": _ratio(sum(b["matched_tokens"] for b in pairs), sum(b["compared_tokens"] for b in pairs)),
        "rows": sum(b["rows"] for b in pairs),
    }


def _paired(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [b for b in batches if b["full_output_tokens"] is not None]


def _per_token_ratio(batch: dict[str, Any], parts: Sequence[str]) -> float:
    ours = sum(batch[part] for part in parts) / batch["output_tokens"]
    full = sum(batch[f"full_{part}"] for part in parts) / batch["full_output_tokens"]
    return float(full / ours)


def _geometric(ratios: Sequence[float]) -> tuple[float | None, list[float] | None]:
    """Geometric mean and its 95 % t-interval."""
    if not ratios:
        return None, None
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), None
    t = T_975[len(logs) - 2] if len(logs) <= len(T_975) + 1 else 1.96
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), [math.exp(mean - half), math.exp(mean + half)]


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None
