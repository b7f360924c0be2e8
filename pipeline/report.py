"""The figures of a run, computed from its files alone, so that a report can be rebuilt at any time.

Row and token totals come from the data files, times and layers from `metrics/`. Names follow vLLM's benchmarks where
they exist.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.metrics import SCHEMAS
from pipeline.run_folder import RunFolder

# Student's t, 97.5 % quantile for 1..30 degrees of freedom (any table of the distribution); 1.96 beyond.
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def make_report(folder: RunFolder, state: dict[str, Any]) -> dict[str, Any]:
    """`report.json`; `state` is `run.json`."""
    totals = data_totals(folder)
    batches = read_metrics(folder, "batches").to_pylist()
    sessions = state["sessions"]
    duration_s = sum(s["ended_at"] - s["started_at"] for s in sessions)
    split = [b["split_error"] for b in batches if b["split_error"] is not None]
    decoded = {
        "rows": sum(b["rows"] for b in batches),
        "input": sum(b["input_tokens"] for b in batches),
        "output": sum(b["output_tokens"] for b in batches),
    }
    return {
        "duration_s": duration_s,
        "completed": totals["ok"],
        "failed": totals["failed"],
        "total_input_tokens": totals["input_tokens"],
        "total_output_tokens": totals["output_tokens"],
        "request_throughput": totals["ok"] / duration_s,
        "output_throughput": totals["output_tokens"] / duration_s,
        "total_token_throughput": (totals["input_tokens"] + totals["output_tokens"]) / duration_s,
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
        "actors": actors(folder, sessions),
        "errors": totals["errors"],
        "split_batches": {"count": len(split), "first": split[0] if split else None},
        "books": state["books"],
        "model": state["model"],
        "decode": state["decode"],
        "prefill": state["config"]["prefill"]["method"],
    }


def data_totals(folder: RunFolder) -> dict[str, Any]:
    """Rows, tokens and errors, counted in the data files."""
    totals: dict[str, Any] = {"ok": 0, "failed": 0, "input_tokens": 0, "output_tokens": 0, "errors": {}}
    columns = ["num_input_tokens", "num_generated_tokens", "error_code"]
    for status in ("ok", "failed"):
        for path in folder.data_files(status):
            table = pq.read_table(path, columns=columns, filesystem=folder.filesystem, partitioning=None)
            totals[status] += table.num_rows
            if status == "ok":
                totals["input_tokens"] += pc.sum(table["num_input_tokens"]).as_py() or 0
                totals["output_tokens"] += pc.sum(table["num_generated_tokens"]).as_py() or 0
            else:
                for item in table["error_code"].value_counts().to_pylist():
                    totals["errors"][item["values"]] = totals["errors"].get(item["values"], 0) + item["counts"]
    return totals


def read_metrics(folder: RunFolder, kind: str) -> pa.Table:
    """All records of one kind (`batches`, `windows`, `workers`)."""
    paths = [path for path in folder.files("metrics") if path.rpartition("/")[2].startswith(f"{kind}-")]
    tables = [pq.read_table(path, filesystem=folder.filesystem, partitioning=None) for path in paths]
    return pa.concat_tables(tables) if tables else SCHEMAS[kind].empty_table()


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


def actors(folder: RunFolder, sessions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per worker: load, busy and idle seconds, rows, restarts. Idle: from ready to the end of its session, not busy."""
    starts: dict[str, list[dict[str, Any]]] = {}
    for start in read_metrics(folder, "workers").sort_by("ready_at").to_pylist():
        starts.setdefault(start["worker"], []).append(start)
    windows = read_metrics(folder, "windows").to_pylist()
    result = []
    for worker, own in sorted(starts.items()):
        mine = [w for w in windows if w["worker"] == worker]
        busy_s = sum(w["ended_at"] - w["started_at"] for w in mine)
        session_end = min((s["ended_at"] for s in sessions if s["ended_at"] >= own[0]["ready_at"]), default=0.0)
        result.append(
            {
                "worker": worker,
                "host": own[-1]["host"],
                "device": own[0]["device"],
                "dtype": own[0]["dtype"],
                "load_s": sum(start["load_s"] for start in own),
                "busy_s": busy_s,
                "idle_s": max(0.0, session_end - own[0]["ready_at"] - busy_s),
                "restarts": len(own) - 1,
                "rows": sum(w["rows"] for w in mine),
            }
        )
    return result


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
