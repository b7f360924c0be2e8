"""Totals over the batch records of a run: times, tokens, layers, speedup over full depth and agreement with it.

A large run has millions of records, so they are summed a slice at a time. Only batches that were decoded both ways
leave two numbers each, from which the confidence interval of the speedup is computed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report.document import Agreement, Speedup
from pipeline.report.drafts import COLUMNS as DRAFT_COLUMNS
from pipeline.report.drafts import DraftTotals

Number = TypeVar("Number", float, np.ndarray)

MIN_PAIRS = 3  # for an interval: two batches that differ a little give one from 0 to infinity (t = 12.7)

# Student's t, 97.5 % quantile for 2..30 degrees of freedom (any table of the distribution); 1.96 beyond.
T_975 = (
    4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

ALL = (
    "rows",
    "input_tokens",
    "prompt_padding",
    "output_tokens",
    "layers_run",
    "ffns_run",
    "prefill_s",
    "decode_s",
    "prefix_tokens_saved",
)
"""Columns that are summed over all batches."""
PAIRED = (
    "rows", "exact_rows", "matched_tokens", "compared_tokens", "full_prefill_s", "full_decode_s",
    "predicted_prefill_s", "predicted_decode_s", "full_predicted_prefill_s", "full_predicted_decode_s",
)  # fmt: skip
"""Columns that are summed over the batches that were decoded at full depth, too."""
BOTH, DECODE = ("prefill_s", "decode_s"), ("decode_s",)
COLUMNS = tuple(
    dict.fromkeys((*ALL, *PAIRED, *DRAFT_COLUMNS, "layers", "full_output_tokens", "full_error", "split_error"))
)


@dataclass
class Errors:
    """The number of errors of one kind, and the message of the first."""

    count: int = 0
    first: str | None = None

    def add(self, column: pa.ChunkedArray) -> None:
        """Counts the values of the column that are not null."""
        found = column.drop_null()
        self.count += len(found)
        if self.first is None and len(found):
            self.first = found[0].as_py()


@dataclass
class BatchTotals:
    """Sums over batches. A sum is None while no record has the column."""

    all: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(ALL))
    paired: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(PAIRED))
    full_layers: float | None = None
    """Layers that full depth would have run for the decode steps."""
    num_pairs: int = 0
    logs: dict[tuple[str, ...], list[np.ndarray]] = field(default_factory=lambda: {BOTH: [], DECODE: []})
    """Logarithms of `per_token_ratio` of each pair, for prefill and decode together and for decode alone."""
    drafts: DraftTotals = field(default_factory=DraftTotals)
    split: Errors = field(default_factory=Errors)
    full: Errors = field(default_factory=Errors)
    """Full-depth passes that failed."""

    @classmethod
    def of(cls, tables: Iterable[pa.Table]) -> "BatchTotals":
        totals = cls()
        for table in tables:
            totals.add(table)
        return totals

    def add(self, table: pa.Table) -> None:
        """`table`: COLUMNS of `metrics_schemas.BATCH_SCHEMA`, and maybe more."""
        for name in ALL:
            self.all[name] = _plus(self.all[name], table[name])
        steps = pc.subtract(table["output_tokens"], table["rows"])
        self.full_layers = _plus(self.full_layers, pc.multiply(table["layers"], steps))
        self.drafts.add(table)
        self.split.add(table["split_error"])
        self.full.add(table["full_error"])
        pairs = table.filter(pc.is_valid(table["full_output_tokens"]))
        self.num_pairs += pairs.num_rows
        for name in PAIRED:
            self.paired[name] = _plus(self.paired[name], pairs[name])
        names = {"output_tokens", "full_output_tokens", *BOTH, *(f"full_{part}" for part in BOTH)}
        pair = {name: pairs[name].to_numpy() for name in names}
        for parts, logs in self.logs.items():
            ours_s, full_s = (sum(pair[f"{depth}{part}"] for part in parts) for depth in ("", "full_"))
            logs.append(np.log(per_token_ratio(ours_s, pair["output_tokens"], full_s, pair["full_output_tokens"])))

    def total(self, *names: str) -> float | None:
        """The sum of these columns over all batches."""
        return _sum([self.all[name] for name in names])

    @property
    def prefix_saved_s(self) -> float:
        """Seconds that the prompt tokens which were not run would have taken, at the pace of those that were."""
        saved, given, took_s = (self.all[name] or 0.0 for name in ("prefix_tokens_saved", "input_tokens", "prefill_s"))
        return took_s * saved / (given - saved) if given > saved else 0.0

    def paired_total(self, *names: str) -> float | None:
        return _sum([self.paired[name] for name in names])

    @property
    def decode_steps(self) -> float | None:
        """Summed over rows: a row's first token comes from its prompt."""
        rows, tokens = self.all["rows"], self.all["output_tokens"]
        return None if rows is None or tokens is None else tokens - rows


def per_token_ratio(ours_s: Number, ours_tokens: Number, full_s: Number, full_tokens: Number) -> Number:
    """Time per output token at full depth divided by that of the run, for one batch or an array of batches."""
    ratio: Number = (full_s / full_tokens) / (ours_s / ours_tokens)
    return ratio


def speedup(totals: BatchTotals) -> Speedup:
    """Time per output token at full depth over time per output token, prefill included.

    `measured`: geometric mean over the batches decoded both ways in the same actor; `ci95`: its t-interval (null below
    MIN_PAIRS such batches). `measured_decode`: the same without prefill. `layers`: layers of the model over layers run
    per decode step. `predicted`: by `skipdecode.cost.roofline` from ceilings measured in the actor.
    """
    measured, ci95 = _geometric(totals.logs[BOTH])
    measured_decode, _ = _geometric(totals.logs[DECODE])
    predicted = [totals.paired_total(f"{p}predicted_prefill_s", f"{p}predicted_decode_s") for p in ("full_", "")]
    return {
        "measured": measured,
        "ci95": ci95,
        "measured_decode": measured_decode,
        "layers": ratio(totals.full_layers, totals.total("layers_run")),
        "predicted": ratio(*predicted),
        "batches": totals.num_pairs,
    }


def agreement(totals: BatchTotals) -> Agreement:
    """Shares of rows and of token positions that equal full depth, on the rows decoded both ways."""
    rows = totals.paired_total("rows")
    return {
        "exact_rows": ratio(totals.paired_total("exact_rows"), rows),
        "token_match": ratio(totals.paired_total("matched_tokens"), totals.paired_total("compared_tokens")),
        "rows": int(rows or 0),
    }


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _plus(total: float | None, column: pa.ChunkedArray) -> float | None:
    """`total` plus the sum of a column; nulls are ignored."""
    more: float | None = pc.sum(column).as_py()
    return total if more is None else (total or 0) + more


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _geometric(slices: Sequence[np.ndarray]) -> tuple[float | None, list[float] | None]:
    """The geometric mean of numbers given by their logarithms, and from MIN_PAIRS of them on its 95 % t-interval."""
    logs = np.concatenate([*slices, np.empty(0)])
    if not len(logs):
        return None, None
    mean = float(logs.mean())
    if len(logs) < MIN_PAIRS:
        return math.exp(mean), None
    index = len(logs) - MIN_PAIRS
    t = T_975[index] if index < len(T_975) else 1.96
    half = t * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return math.exp(mean), [math.exp(mean - half), math.exp(mean + half)]
