"""What comes back of a window: an answer per row, and a record per batch with its numbers and its agreement with full
depth."""

from dataclasses import dataclass, field
from typing import Any

from skipdecode.engine.generate import BatchResult, Completion


@dataclass(frozen=True)
class RowFailure:
    """What comes back for a row that could not be decoded."""

    error_code: str
    error_message: str


Answer = Completion | RowFailure


@dataclass
class WindowResult:
    answers: list[Answer]
    batches: list[dict[str, Any]] = field(default_factory=list)
    """One record per decoded batch: shape, tokens, layers, times, and the full-depth pass where there was one."""


def figures(result: BatchResult) -> dict[str, Any]:
    """The numbers of a batch that go into its record."""
    return {name: value for name, value in vars(result.stats).items() if name not in result.stats.unrecorded}


def agreement(result: BatchResult, full: BatchResult) -> dict[str, int]:
    """How far the tokens are those of full depth: equal rows, and equal tokens position by position."""
    exact = matched = compared = 0
    for ours, theirs in zip(result.completions, full.completions, strict=True):
        exact += ours.tokens == theirs.tokens
        matched += sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=False))
        compared += max(len(ours.tokens), len(theirs.tokens))
    return {"exact_rows": exact, "matched_tokens": matched, "compared_tokens": compared}
