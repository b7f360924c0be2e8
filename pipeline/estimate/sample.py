"""A sample of a planned input: rows in a few runs of neighbours, tokenised as a run does it.

Neighbours stay together, since their shared prefixes (a document's samples, a template's beginning) affect their cost.
They are decoded in `measure`.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.config.job import InputConfig
from pipeline.input.input_plan import InputPlan
from pipeline.input.prompt_templates import Made, Prompter
from pipeline.input.read import read_file
from pipeline.stages.tokenize import TokenizeConfig, tokenize
from pipeline.stages.window import Window
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request

MAX_FILES: Final = 16
READ_ROWS, READ_BYTES = 4096, 32 << 20  # from the beginning of each of these, about
PROMPTS_S: Final = 5.0  # of making prompts, for all of them; those of a block are finished
MADE_ROWS: Final = 64  # a block of them
SPOTS: Final = 4
"""Runs of neighbours that a sample is made of."""


@dataclass(frozen=True)
class Sample:
    requests: list[Request]
    """Requests of the rows that can be decoded, in order."""
    num_rows: int
    """The number of rows in the sample."""
    problem: str = ""
    """Why the first row that cannot be decoded fails."""

    @property
    def good_share(self) -> float:
        return len(self.requests) / max(self.num_rows, 1)

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(len(request.prompt_tokens) for request in self.requests) / max(len(self.requests), 1)


def sample_rows(
    plan: InputPlan,
    config: InputConfig,
    prompter: Prompter | None,
    tokens: TokenizeConfig,
    sampling: Sampling,
    max_rows: int,
    max_files: int = MAX_FILES,
) -> Sample:
    """At most `max_rows` rows, of files that lie evenly over the input, from their beginnings; fewer where templates
    are slow."""
    filled = [index for index, rows in enumerate(plan.num_rows_per_file) if rows]
    count = min(max_files, len(filled))
    quota, spots = max(1, max_rows // count), max(1, SPOTS // count)
    making = None if prompter is None else TimeLimitedPrompter(prompter)
    requests: list[Request] = []
    num_rows, problem = 0, ""
    for number in range(count):
        if making is not None:
            making.allow(PROMPTS_S * (number + 1) / count)
        for part in _parts(plan, filled[len(filled) * number // count], config, making, quota, spots):
            window = Window.of(tokenize(part, config=tokens), sampling)
            num_rows += part.num_rows
            requests += window.requests
            problem = problem or next(filter(None, window.table["error_message"].to_pylist()), "")
    return Sample(requests, num_rows, problem)


class _OutOfTime(Exception):
    """The time limit for making prompts has been reached."""


class TimeLimitedPrompter:
    """A prompter that stops once it has taken the time that it may. Only its own time counts: a file may be slow to
    read."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter, self._taken_s, self._allowed_s = prompter, 0.0, 0.0

    def allow(self, seconds: float) -> None:
        """Raises once the time limit is exceeded, but never within a block or before the first one is done."""
        self._allowed_s = seconds

    def make(self, name: str, fields: Sequence[Mapping[str, object]], prompts: Sequence[str | None]) -> list[Made]:
        if self._taken_s > self._allowed_s:
            raise _OutOfTime
        begun = time.monotonic()
        try:
            return self._prompter.make(name, fields, prompts)
        finally:
            self._taken_s += time.monotonic() - begun


def _parts(
    plan: InputPlan, index: int, config: InputConfig, prompter: TimeLimitedPrompter | None, quota: int, spots: int
) -> list[pa.Table]:
    """Runs of neighbours, with their prompts; fewer where making these takes too long."""
    head = _head(read_file(plan, index, config))
    spots = spots if head.num_rows > quota else 1
    starts = [head.num_rows * spot // spots for spot in range(spots)]
    length = max(1, quota // spots)
    if prompter is not None:  # a template may be slow: nothing is made that is not looked at
        is_skipped = np.ones(head.num_rows, bool)
        for start in starts:
            is_skipped[start : start + length] = False
        made = read_file(plan, index, config, MADE_ROWS, prompter, is_skipped)
        head = _head(_in_time(made), head.num_rows)
    return [head.slice(start, length) for start in starts if start < head.num_rows]


def _in_time(blocks: Iterable[pa.Table]) -> Iterator[pa.Table]:
    with suppress(_OutOfTime):
        yield from blocks


def _head(blocks: Iterable[pa.Table], max_rows: int | None = None) -> pa.Table:
    """READ_ROWS or READ_BYTES of them, about, or what `max_rows` says."""
    found, rows, num_bytes = [], 0, 0
    for block in blocks:
        found.append(block)
        rows, num_bytes = rows + block.num_rows, num_bytes + block.nbytes
        if rows >= (max_rows or READ_ROWS) or (num_bytes >= READ_BYTES and max_rows is None):
            break
    return pa.concat_tables(found) if found else pa.table({})
