"""The figures of a run, computed from its files alone, so that a report can be rebuilt at any time.

Row and token totals come from the data files, times and layers from `metrics/`. Names follow vLLM's benchmarks where
they exist.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.job import ConfigError
from pipeline.formatting import Log
from pipeline.report.batches import COLUMNS, BatchTotals, Errors, agreement, ratio, speedup
from pipeline.report.collector import read_metrics
from pipeline.report.data_files import DataTotals, count_data, layers_by_step, lengths
from pipeline.report.document import Cost, CountedFigures, ErrorCount, Estimated, Figures, Lane
from pipeline.report.metrics_schemas import StoredStart
from pipeline.report.page import render_report
from pipeline.report.svg_plots import MAX_LANES
from pipeline.report.timeline import BATCH_COLUMNS, WINDOW_COLUMNS, Clock, Throughput, Windows, actors, lanes, tail
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState, Session
from skipdecode import __version__


@dataclass(frozen=True)
class Report:
    figures: Figures
    lanes: list[Lane]
    """Data of the workers' plot, which is not part of `report.json`."""


def make_report(
    folder: RunFolder, state: RunState, price_per_hour: float | None = None, log: Log = lambda _: None
) -> Report:
    """Computes all figures. `state` is `run.json`, and `price_per_hour` the price of all machines of the run together;
    damaged metrics files are left out and reported to `log`."""
    clock = Clock.of(state["sessions"])
    batches, throughput = BatchTotals(), Throughput(clock)
    for table in read_metrics(folder, state, "batches", tuple(dict.fromkeys((*COLUMNS, *BATCH_COLUMNS))), log):
        batches.add(table)
        throughput.add(table)
    windows = Windows.of(read_metrics(folder, state, "windows", WINDOW_COLUMNS, log))
    starts: list[StoredStart] = [
        start for table in read_metrics(folder, state, "workers", (), log) for start in table.to_pylist()
    ]
    figures: Figures = {
        "version": __version__,
        **_counted(count_data(folder, state), batches, state, clock.duration_s, price_per_hour),
        "actors": actors(starts, windows, clock),
        "tail": tail(windows, clock),
        "throughput": throughput.figures(),
    }
    return Report(figures, lanes(starts, windows, clock, MAX_LANES))


def _counted(
    totals: DataTotals, batches: BatchTotals, state: RunState, duration_s: float, price_per_hour: float | None
) -> CountedFigures:
    """The figures that need neither windows nor workers."""
    all_tokens = totals.input_tokens + totals.output_tokens
    if price_per_hour is None:
        price_per_hour = state["config"]["actors"]["price_per_hour"]
    decode, num_layers = state["decode"], state["model"]["layers"]
    padding = batches.total("prompt_padding")
    return {
        "duration_s": duration_s,
        "completed": totals.ok,
        "failed": totals.failed,
        "agreement": agreement(batches),
        "speedup": speedup(batches),
        "total_input_tokens": totals.input_tokens,
        "total_output_tokens": totals.output_tokens,
        "request_throughput": totals.ok / duration_s,
        "output_throughput": totals.output_tokens / duration_s,
        "total_token_throughput": all_tokens / duration_s,
        "decode_output_throughput": ratio(batches.total("output_tokens"), batches.total("prefill_s", "decode_s")),
        "draft_acceptance": batches.drafts.acceptance,
        "tokens_per_pass": batches.drafts.tokens_per_pass,
        "drafts": batches.drafts.figures(),
        "layers_per_token": ratio(batches.total("layers_run"), batches.decode_steps),
        "ffns_per_token": ratio(batches.total("ffns_run"), batches.decode_steps),
        "padding_fraction": ratio(padding, batches.total("prompt_padding", "input_tokens")) or 0.0,
        "prefill_s": batches.total("prefill_s") or 0.0,
        "decode_s": batches.total("decode_s") or 0.0,
        "prefix_tokens_saved": int(batches.total("prefix_tokens_saved") or 0),
        "prefix_saved_s": batches.prefix_saved_s,
        "baseline_s": batches.paired_total("full_prefill_s", "full_decode_s") or 0.0,
        "cost": None if price_per_hour is None else cost(price_per_hour, duration_s, totals.output_tokens, all_tokens),
        "estimate": estimated(state, duration_s, totals.output_tokens),
        "decoded_again": {
            "rows": max(0, int(batches.total("rows") or 0) - totals.ok),
            "output_tokens": max(0, int(batches.total("output_tokens") or 0) - totals.output_tokens),
        },
        "lengths": {"input": lengths(totals.input_lengths), "output": lengths(totals.output_lengths)},
        "layers_by_step": layers_by_step(totals, decode, num_layers, state["config"]["sampling"]["max_new_tokens"]),
        "finish_reasons": dict(totals.finish_reasons),
        "reasoning": {"tokens": totals.reasoning_tokens, "unfinished": totals.unfinished_reasoning},
        "errors": totals.errors,
        "error_examples": totals.examples,
        "split_batches": _errors(batches.split),
        "baseline_errors": _errors(batches.full),
        "books": state["books"],
        "documents": state["input"]["documents"],
        "model": state["model"],
        "decode": decode,
        "prefill": str(state["fingerprint"]["prefill.method"]),
    }


def estimated(state: RunState, duration_s: float, output_tokens: int) -> Estimated | None:
    """The run's own estimate compared with the outcome; None for runs without one and for resumed runs."""
    estimate = state.get("estimate")
    if estimate is None or len(state["sessions"]) > 1:
        return None
    return {
        "seen_rows": estimate["seen_rows"],
        "input_tokens": estimate["input_tokens"],
        "output_tokens": estimate["output_tokens"],
        "duration_s": estimate["duration_s"],
        "cost": estimate["cost"],
        "duration_ratio": estimate["duration_s"] / duration_s,
        "output_tokens_ratio": ratio(estimate["output_tokens"], output_tokens),
    }


def _errors(errors: Errors) -> ErrorCount:
    return {"count": errors.count, "first": errors.first}


def rebuild_report(path: str, price_per_hour: float | None = None) -> tuple[RunFolder, dict[str, object]]:
    """Writes `report.json` and `report.html` of a run folder anew; ConfigError where there is none.

    Of a run that is not finished the figures so far. Only these two files change.
    """
    folder, state = open_run(path)
    report = make_report(folder, state, price_per_hour)
    write_report(folder, report, state)
    return folder, dict(report.figures)


def open_run(path: str) -> tuple[RunFolder, RunState]:
    """A run folder and its `run.json`, where sessions that have no end yet end with their last sign of life."""
    folder = RunFolder.open(path)
    state = folder.read_state()
    if state is None or not _is_run(state):
        raise ConfigError("", f"{path}: no run.json of a run, so not a run folder (-o of jobs.generate)")
    for session in state["sessions"]:
        session["ended_at"] = session["ended_at"] or last_sign_of_life(folder, session)
    if not Clock.of(state["sessions"]).duration_s:
        raise ConfigError("", f"{path}: the run has written nothing yet, so there is nothing to report")
    return folder, state


def _is_run(state: Mapping[str, object]) -> TypeGuard[RunState]:
    """True if `run.json` is one of ours; other programs write files of that name, too."""
    return {"state", "sessions", "books", "config", "decode", "model"} <= state.keys()


def write_report(folder: RunFolder, report: Report, state: RunState, check: Callable[[], None] = lambda: None) -> None:
    folder.write_text("report.html", render_report(report.figures, state, report.lanes), check)
    folder.write_text("report.json", json.dumps(report.figures, indent=2) + "\n", check)


def finish_report(
    folder: RunFolder, state: RunState, log: Log, check: Callable[[], None] = lambda: None
) -> dict[str, object]:
    """The figures of a complete run, written; its counts alone where they fail: the rows are what was asked for.

    `check` is asked before anything is changed.
    """
    try:
        report = make_report(folder, state, log=log)
        write_report(folder, report, state, check)
    except Exception as error:
        check()  # it may be what raised
        return _without_figures(folder, state, error, log)
    return dict(report.figures)


def _without_figures(folder: RunFolder, state: RunState, error: Exception, log: Log) -> dict[str, object]:
    for name in ("report.json", "report.html"):
        folder.remove(name)  # of before a retry: it would contradict the data
    log(
        f"report: could not be made ({type(error).__name__}: {error}); the rows are complete and the run is "
        f"finished, and `python -m jobs.report {folder.shown}` makes it when the reason is gone"
    )
    books = state["books"]
    return {"version": __version__, "completed": books["ok"], "failed": books["failed"], "books": books}


def cost(price_per_hour: float, duration_s: float, output_tokens: int, all_tokens: int) -> Cost:
    """The cost of the run in the currency of the price; figures per token are null if there are no tokens."""
    total = price_per_hour * duration_s / 3600
    return {
        "price_per_hour": price_per_hour,
        "total": total,
        "per_million_output_tokens": ratio(1e6 * total, output_tokens),
        "per_million_tokens": ratio(1e6 * total, all_tokens),
    }


def last_sign_of_life(folder: RunFolder, session: Session) -> float:
    """When a killed session wrote its last file or record (epoch seconds), which stands in for its end."""
    written = [
        info.mtime.timestamp()
        for status in ("ok", "failed")
        for info in folder.filesystem.get_file_info(folder.data_files(status))
        if info.mtime is not None
    ]
    ends = [session["started_at"], *written]
    for path in folder.files("metrics"):
        if f"windows-{session['id']}-" in path:
            with suppress(OSError, pa.ArrowException):  # damaged: the other files say almost as much
                table = pq.read_table(path, columns=["ended_at"], filesystem=folder.filesystem)
                ends.append(pc.max(table["ended_at"]).as_py() or 0.0)
    return float(max(ends))
