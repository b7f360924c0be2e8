"""Log-probabilities of answers as columns of the output (`schema.score_schema`), null for rows that failed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from pipeline.schema import LOGPROBS, PROMPT_LOGPROBS, PROMPT_TOP_LOGPROBS, TOP_LOGPROBS, Asked, score_schema

if TYPE_CHECKING:  # of tasks that need no torch
    from skipdecode.request import Completion, TokenLogprobs


def score_columns(asked: Asked, answers: "Sequence[Completion | None]") -> dict[str, pa.Array]:
    """The columns that a run asks for, of its rows in order; None is a row that failed."""
    values = {
        LOGPROBS: [answer and _own(answer.logprobs) for answer in answers],
        TOP_LOGPROBS: [answer and _top(answer.logprobs) for answer in answers],
        PROMPT_LOGPROBS: [answer and _prompt(_own(answer.prompt_logprobs or [])) for answer in answers],
        PROMPT_TOP_LOGPROBS: [answer and _prompt(_top(answer.prompt_logprobs or [])) for answer in answers],
    }
    return {field.name: pa.array(values[field.name], field.type) for field in score_schema(asked)}


def _own(scored: "Sequence[TokenLogprobs]") -> list[float]:
    return [one.logprob for one in scored]


def _top(scored: "Sequence[TokenLogprobs]") -> list[list[dict[str, float]]]:
    return [[{"token": token, "logprob": logprob} for token, logprob in one.top] for one in scored]


def _prompt(values: Sequence[object]) -> list[object]:
    """Nothing comes before the first token."""
    return [None, *values]
