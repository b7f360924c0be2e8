"""A window, the rows that one actor takes per call: from an Arrow table to requests, and from answers to the table."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from actors.failures import RowFailure
from actors.generator import Answer
from pipeline.openai_format.parameters import asks_for_choice
from pipeline.schema import (
    ID,
    IS_VALID,
    LOGPROBS,
    PROMPT_LOGPROBS,
    PROMPT_TOKENS,
    PROMPT_TOP_LOGPROBS,
    SAMPLING,
    TOP_LOGPROBS,
    Asked,
    score_schema,
)
from pipeline.stages.openai_choices import with_findings
from pipeline.stages.tokenize import TOKENS, row_sampling, with_columns
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion, TokenLogprobs


@dataclass(frozen=True)
class Window:
    """The rows that one actor takes per call."""

    table: pa.Table
    name: str
    """Unchanged when Ray repeats the window."""
    rows: list[int]
    """Indices in the table of the rows that can be decoded; the others failed in an earlier stage."""
    requests: list[Request]
    """One for each of `rows`."""
    sampling: Sampling
    """The run's own, which a row may override."""

    @classmethod
    def of(cls, table: pa.Table, sampling: Sampling) -> "Window":
        """The window of a table that `tokenize` returned."""
        ids, tokens, own = (table[name].to_pylist() for name in (ID, PROMPT_TOKENS, SAMPLING))
        codes, messages = table["error_code"].to_pylist(), table["error_message"].to_pylist()
        rows = [row for row, code in enumerate(codes) if not code]
        requests = [make_request(ids[row], tokens[row], row_sampling(sampling, own[row])) for row in rows]
        # the key under which the attempt tracker counts failures once; rows with one id differ by their messages
        return cls(table, f"{ids[0]} {messages[0]}", rows, requests, sampling)

    @property
    def ids(self) -> list[str]:
        """Ids of the rows that can be decoded."""
        return [request.id for request in self.requests]

    @property
    def num_failed(self) -> int:
        """Rows that failed in an earlier stage."""
        return int(self.table.num_rows) - len(self.rows)

    def with_answers(self, answers: Sequence[Answer]) -> tuple[pa.Table, int]:
        """The table with what was generated, and how many of its rows have failed in all. One answer per request."""
        count = self.table.num_rows
        codes, messages = self.table["error_code"].to_pylist(), self.table["error_message"].to_pylist()
        tokens: list[list[int]] = [[] for _ in range(count)]
        reasons, layers, ffns = ["error"] * count, [0] * count, [0] * count
        completions: list[Completion | None] = [None] * count
        for row, answer in zip(self.rows, answers, strict=True):
            if isinstance(answer, RowFailure):
                codes[row], messages[row] = answer.error_code, answer.error_message
            else:
                tokens[row], reasons[row] = answer.tokens, answer.finish_reason
                layers[row], ffns[row] = answer.layers_run, answer.ffns_run
                completions[row] = answer
        columns = {
            "generated_tokens": pa.array(tokens, TOKENS),
            "num_generated_tokens": pa.array([len(made) for made in tokens], pa.int32()),
            "finish_reason": pa.array(reasons, pa.string()),
            "layers_run": pa.array(layers, pa.int32()),
            "ffns_run": pa.array(ffns, pa.int32()),
            "error_code": pa.array(codes, pa.string()),
            "error_message": pa.array(messages, pa.string()),
        }
        columns |= score_columns(self.sampling, completions)
        if self.table[SAMPLING].null_count < count:  # some rows have parameters of their own
            own = self.table[SAMPLING].to_pylist()
            for row, completion in enumerate(completions):
                if completion is not None and asks_for_choice(own[row]):
                    own[row] = with_findings(own[row], completion)
            columns[SAMPLING] = pa.array(own, pa.string())
        return with_columns(self.table, columns), sum(bool(code) for code in codes)


def make_request(id: str, tokens: list[int], sampling: Sampling) -> Request:
    """A request with the log-probabilities that `sampling` asks for."""
    return Request(id, tokens, sampling, sampling.logprobs, sampling.prompt_logprobs)


def score_columns(asked: Asked, answers: Sequence[Completion | None]) -> dict[str, pa.Array]:
    """The columns that a run asks for (`schema.score_schema`), null where an answer is None."""
    made = {field: [answer and VALUES[field.name](answer) for answer in answers] for field in score_schema(asked)}
    return {field.name: pa.array(values, field.type) for field, values in made.items()}


def _own(scored: Sequence[TokenLogprobs]) -> list[float]:
    return [one.logprob for one in scored]


def _top(scored: Sequence[TokenLogprobs]) -> list[list[dict[str, float]]]:
    return [[{"token": token, "logprob": logprob} for token, logprob in one.top] for one in scored]


def _prompt(values: Sequence[object]) -> list[object]:
    """The values, after a null for the first token, which has no log-probability."""
    return [None, *values]


VALUES: Final[dict[str, "Callable[[Completion], object]"]] = {
    LOGPROBS: lambda answer: _own(answer.logprobs),
    TOP_LOGPROBS: lambda answer: _top(answer.logprobs),
    PROMPT_LOGPROBS: lambda answer: _prompt(_own(answer.prompt_logprobs or [])),
    PROMPT_TOP_LOGPROBS: lambda answer: _prompt(_top(answer.prompt_logprobs or [])),
    IS_VALID: lambda answer: answer.is_valid,
}
"""Column -> its value for an answer."""
