"""Rows and batches that could not be decoded, and what to say of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from skipdecode.checkpoint.grammar import GrammarTooComplex
from skipdecode.engine.request import InvalidLogits
from skipdecode.engine.results import BatchResult


@dataclass(frozen=True)
class RowFailure:
    """The answer to a row that could not be decoded."""

    error_code: str
    error_message: str


class Interrupted(Exception):
    """A batch failed after some of its rows had ended; why, is its cause."""

    def __init__(self, ended: Sequence[int], result: BatchResult) -> None:
        """`ended`: the numbers of these rows in the batch, whose completions `result` has."""
        super().__init__(f"after {len(ended)} rows had ended")
        self.ended, self.result = ended, result


def cause_of(error: Exception) -> Exception:
    cause = error.__cause__
    return cause if isinstance(error, Interrupted) and isinstance(cause, Exception) else error


def row_at_fault(error: Exception) -> str | None:
    """The id of the row that has failed a batch, by logits that are no numbers or by its grammar; None for any other
    error."""
    cause = cause_of(error)
    return cause.row if isinstance(cause, InvalidLogits | GrammarTooComplex) else None


def described(error: Exception) -> str:
    """The error as a row's `error_message` has it."""
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}"[:2000]
