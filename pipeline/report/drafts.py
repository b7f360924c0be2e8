"""Figures of the drafts in a lossless run (`decode.lossless`): how many were accepted, which rounds had any
and why others had none, and where the time went."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.report.document import Drafts
from skipdecode.engine.results import DRAFT_KINDS

ROUNDS = ("drafted", "timing_plain", "slower", "no_gain")
SUMMED = ("rows", "output_tokens", "row_steps", "draft_s", "verify_s", *(f"{name}_rounds" for name in ROUNDS))
COLUMNS = (*SUMMED, "drafted_at", "accepted_at", "drafted_by", "accepted_by")


@dataclass
class DraftTotals:
    """Sums over the batches that were decoded losslessly."""

    num_batches: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0.0))
    drafted_at: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """By position in a draft."""
    accepted_at: np.ndarray = field(default_factory=lambda: np.zeros(0))
    drafted_by: np.ndarray = field(default_factory=lambda: np.zeros(len(DRAFT_KINDS)))
    """By what drafted them (DRAFT_KINDS)."""
    accepted_by: np.ndarray = field(default_factory=lambda: np.zeros(len(DRAFT_KINDS)))

    def add(self, table: pa.Table) -> None:
        """`table`: COLUMNS of `metrics_schemas.BATCH_SCHEMA`, and possibly more."""
        own = table.filter(pc.is_valid(table["drafted_at"]))
        self.num_batches += own.num_rows
        for name in self.sums:
            self.sums[name] += pc.sum(own[name]).as_py() or 0.0
        self.drafted_at = _plus(self.drafted_at, _by_position(own["drafted_at"]))
        self.accepted_at = _plus(self.accepted_at, _by_position(own["accepted_at"]))
        self.drafted_by = _plus(self.drafted_by, _by_position(own["drafted_by"]))
        self.accepted_by = _plus(self.accepted_by, _by_position(own["accepted_by"]))

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted, with all tokens before them."""
        return _ratio(self.accepted_at.sum(), self.drafted_at.sum())

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that a row got from a pass at full depth, in the mean."""
        return _ratio(self.sums["output_tokens"] - self.sums["rows"], self.sums["row_steps"])

    def figures(self) -> Drafts | None:
        if not self.num_batches:
            return None
        return {
            "drafted": int(self.drafted_at.sum()),
            "accepted": int(self.accepted_at.sum()),
            "acceptance_by_position": [float(a / d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)],
            "drafted_by": {kind: int(n) for kind, n in zip(DRAFT_KINDS, self.drafted_by, strict=True)},
            "acceptance_by": {
                kind: _ratio(accepted, drafted)
                for kind, accepted, drafted in zip(DRAFT_KINDS, self.accepted_by, self.drafted_by, strict=True)
            },
            "rounds": {name: int(self.sums[f"{name}_rounds"]) for name in ROUNDS},
            "draft_s": self.sums["draft_s"],
            "verify_s": self.sums["verify_s"],
        }


def _by_position(lists: pa.ChunkedArray) -> np.ndarray:
    """Sums lists element by element."""
    total = np.zeros(0)
    for chunk in lists.chunks:
        values = pc.list_flatten(chunk).to_numpy()
        lengths = pc.list_value_length(chunk).to_numpy()
        positions = np.arange(len(values)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        total = _plus(total, np.bincount(positions, weights=values))
    return total


def _plus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of arrays of any lengths."""
    size = max(len(a), len(b))
    total: np.ndarray = np.pad(a, (0, size - len(a))) + np.pad(b, (0, size - len(b)))
    return total


def _ratio(a: float, b: float) -> float | None:
    return float(a / b) if b else None
