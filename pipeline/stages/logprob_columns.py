"""Log-probabilities of answers as columns of the output (`schema.score_schema`), null for rows that failed."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from pipeline.schema import LOGPROBS, PROMPT_LOGPROBS, PROMPT_TOP_LOGPROBS, TOP_LOGPROBS, Asked, score_schema

if TYPE_CHECKING:  # of tasks that need no torch
    from skipdecode.engine.results import Completion, TokenLogprobs


def score_columns(asked: Asked, answers: "Sequence[Completion | None]") -> dict[str, pa.Array]:
    """The columns that a run asks for, of its rows in order; None is a row that failed."""
    made = {field: [answer and VALUES[field.name](answer) for answer in answers] for field in score_schema(asked)}
    return {field.name: pa.array(values, field.type) for field, values in made.items()}


def _own(scored: "Sequence[TokenLogprobs]") -> list[float]:
    return [one.logprob for one in scored]


def _top(scored: "Sequence[TokenLogprobs]") -> list[list[dict[str, float]]]:
    return [[{"token": token, "logprob": logprob} for token, logprob in one.top] for one in scored]


def _prompt(values: Sequence[object]) -> list[object]:
    """Nothing comes before the first token."""
    return [None, *values]


VALUES: Final[dict[str, "Callable[[Completion], Sequence[object]]"]] = {
    LOGPROBS: lambda answer: _own(answer.logprobs),
    TOP_LOGPROBS: lambda answer: _top(answer.logprobs),
    PROMPT_LOGPROBS: lambda answer: _prompt(_own(answer.prompt_logprobs or [])),
    PROMPT_TOP_LOGPROBS: lambda answer: _prompt(_top(answer.prompt_logprobs or [])),
}
"""What of an answer each column holds."""
