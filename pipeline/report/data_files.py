"""Counts from the data files of a run: rows, tokens, lengths, errors with examples, layers per position.

One pass, one file in memory at a time; lengths are counted by value, so their number and not the rows' decides on the
memory. Times are `timeline`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.text.reasoning import is_unfinished, text_opens_block
from pipeline.formatting import Json
from pipeline.report.document import Example, Histogram, LayerPiece, LayersByStep
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from skipdecode.schedules.from_config import make_schedule

NUM_EXAMPLES = 3  # failed rows shown of each code
MAX_MESSAGE_CHARS = 500
SAMPLED_ROWS = 1000
MAX_BARS, MOST = 40, 0.995  # of a histogram; the share of rows that it shows at least


@dataclass
class DataTotals:
    """Counted over all data files."""

    ok: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    input_lengths: Counter[int] = field(default_factory=Counter)
    """Good rows by `num_input_tokens`."""
    output_lengths: Counter[int] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Good rows by `finish_reason`."""
    reasoning_tokens: int | None = None
    """None without `output.reasoning_parser`."""
    unfinished_reasoning: float = 0.0
    """The share of good rows whose text is reasoning alone, which did not end, of the first SAMPLED_ROWS of a file."""
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """The first failed rows of each error code: `id`, `message`."""
    layers_by_length: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Fewest and most `layers_run` of rows with so many generated tokens."""


def count_data(folder: RunFolder, state: RunState) -> DataTotals:
    """Counts over the data files of the run of `state`."""
    totals = DataTotals()
    columns = ["num_input_tokens", "num_generated_tokens", "finish_reason", "layers_run"]
    if has_reasoning := state["config"].get("output", {}).get("reasoning_parser") is not None:
        totals.reasoning_tokens = 0
        columns.append("num_reasoning_tokens")
    good = folder.run_files(state, ["ok"])
    for path in good:
        _count_good(_read(folder, path, columns), totals)
    if good:
        totals.unfinished_reasoning = _unfinished_reasoning(folder, good[0], has_reasoning)
    for path in folder.run_files(state, ["failed"]):
        _count_failed(_read(folder, path, ["id", "error_code", "error_message"]), totals)
    return totals


def _read(folder: RunFolder, path: str, columns: list[str]) -> pa.Table:
    return pq.read_table(path, columns=columns, filesystem=folder.filesystem, partitioning=None)


def _count_good(table: pa.Table, totals: DataTotals) -> None:
    totals.ok += table.num_rows
    totals.input_tokens += pc.sum(table["num_input_tokens"]).as_py() or 0
    totals.output_tokens += pc.sum(table["num_generated_tokens"]).as_py() or 0
    totals.input_lengths.update(_counts(table["num_input_tokens"]))
    totals.output_lengths.update(_counts(table["num_generated_tokens"]))
    totals.finish_reasons.update(_counts(table["finish_reason"]))
    if totals.reasoning_tokens is not None:
        totals.reasoning_tokens += pc.sum(table["num_reasoning_tokens"]).as_py() or 0
    by_length = table.group_by("num_generated_tokens").aggregate([("layers_run", "min"), ("layers_run", "max")])
    for row in by_length.to_pylist():
        low, high = row["layers_run_min"], row["layers_run_max"]
        before = totals.layers_by_length.get(row["num_generated_tokens"], (low, high))
        totals.layers_by_length[row["num_generated_tokens"]] = (min(low, before[0]), max(high, before[1]))


def _unfinished_reasoning(folder: RunFolder, path: str, has_reasoning: bool) -> float:
    """The share of the first rows of a file whose text is reasoning alone, cut off before its end."""
    columns = ["finish_reason", "generated_text", "reasoning" if has_reasoning else "prompt"]
    with pq.ParquetFile(path, filesystem=folder.filesystem) as file:
        batch = next(file.iter_batches(SAMPLED_ROWS, columns=columns), None)
    rows = [] if batch is None else batch.to_pylist()
    found = [
        row["finish_reason"] != "stop"
        and (
            row["reasoning"] is not None and not row["generated_text"]
            if has_reasoning
            else is_unfinished(row["generated_text"], is_open=text_opens_block(row["prompt"] or ""))
        )
        for row in rows
    ]
    return sum(found) / len(found) if found else 0.0


def _counts(column: pa.ChunkedArray) -> dict[Any, int]:
    return {item["values"]: item["counts"] for item in column.value_counts().to_pylist()}


def _count_failed(table: pa.Table, totals: DataTotals) -> None:
    totals.failed += table.num_rows
    for code, count in _counts(table["error_code"]).items():
        totals.errors[code] = totals.errors.get(code, 0) + count
        shown = totals.examples.setdefault(code, [])
        if missing := NUM_EXAMPLES - len(shown):
            rows = table.filter(pc.equal(table["error_code"], code)).slice(0, missing).to_pylist()
            shown += [{"id": row["id"], "message": row["error_message"][:MAX_MESSAGE_CHARS]} for row in rows]


def lengths(counts: Counter[int]) -> Histogram | None:
    """Mean, quantiles and a histogram of at most MAX_BARS bars of equal width; `edges` are whole, the last excluded.

    A few rows many times as long as the others would leave one bar of all of these: those are `beyond` the bars.
    """
    if not counts:
        return None
    total, low, most = counts.total(), min(counts), quantile(counts, MOST)
    high = max(counts) if max(counts) - low <= 3 * (most - low + 1) else most
    width = -(-(high - low + 1) // MAX_BARS)
    bars = [0] * (-(-(high - low + 1) // width))
    for length, rows in counts.items():
        if length < low + width * len(bars):
            bars[(length - low) // width] += rows
    return {
        "mean": sum(length * rows for length, rows in counts.items()) / total,
        "min": low,
        "p50": quantile(counts, 0.5),
        "p95": quantile(counts, 0.95),
        "max": max(counts),
        "edges": [low + width * i for i in range(len(bars) + 1)],
        "rows": bars,
        "beyond": total - sum(bars),
    }


def quantile(counts: Counter[int], share: float) -> int:
    """The smallest length that at least `share` of the rows do not exceed."""
    left = share * counts.total()
    for length in sorted(counts):
        left -= counts[length]
        if left <= 1e-9:
            return length
    return max(counts)


def layers_by_step(totals: DataTotals, decode: dict[str, Json], num_layers: int, max_new_tokens: int) -> LayersByStep:
    """Layers per decode step: `planned` by the schedule, and `run`, as the rows' own counts tell.

    Rows that ended later ran the steps in between, so what they ran more is what those steps ran: pieces of
    (`first`, `last`, `layers`), each the mean over its steps. That holds for rows of one schedule only: `run` is None,
    and `reason` says why, when rows ran other layers in all than this schedule plans for their length.
    """
    schedule = make_schedule(decode, num_layers=num_layers, max_new_tokens=max_new_tokens)
    planned = [schedule.step(k).num_layers_run for k in range(max_new_tokens - 1)]
    by_length = sorted(totals.layers_by_length.items())
    sums = [0, *accumulate(planned)]
    others = [
        length
        for length, (low, high) in by_length
        if length > max_new_tokens or not low == high == sums[max(length - 1, 0)]
    ]
    if decode.get("lossless"):
        reason = "drafts that were refused cost layers too, so rows of one length ran different ones (decode.lossless)"
        return {"planned": planned, "run": None, "reason": reason}
    if others:
        reason = (
            f"rows of {others[0]} tokens ran other layers in all than the schedule for {max_new_tokens} plans, so they "
            "had another one (max_tokens of their own, or a retry with another sampling.max_new_tokens)"
        )
        return {"planned": planned, "run": None, "reason": reason}
    return {"planned": planned, "run": _layers_run(by_length), "reason": None}


def _layers_run(by_length: Sequence[tuple[int, tuple[int, int]]]) -> list[LayerPiece]:
    pieces: list[LayerPiece] = []
    steps = layers = 0
    for length, (total, _) in by_length:
        if length - 1 > steps:
            mean = (total - layers) / (length - 1 - steps)
            pieces.append({"first": steps, "last": length - 2, "layers": mean})
            steps, layers = length - 1, total
    return pieces
