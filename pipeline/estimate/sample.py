"""A sample of a planned input: rows in a few runs of neighbours, tokenised as a run does it.

Neighbours stay together, since what they share (a document's samples, a template's head) decides what they cost. Left
out: decoding them (`measure`).
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from pipeline.config import InputConfig
from pipeline.input.plan import InputPlan
from pipeline.input.prompting import OutOfTime, Prompter
from pipeline.input.read import read_file
from pipeline.stages.tokens import TokenizeConfig, tokenize
from pipeline.stages.window import Window
from skipdecode.generate import Request
from skipdecode.sampling import Sampling

MAX_FILES: Final = 16
READ_ROWS, READ_BYTES = 4096, 32 << 20  # from the beginning of each of these, about
PROMPTS_S: Final = 5.0  # for all prompts that are made of columns; those of a block are finished
MADE_ROWS: Final = 64  # a block of them
SPOTS: Final = 4
"""Runs of neighbours that a sample is made of."""


@dataclass(frozen=True)
class Sample:
    requests: list[Request]
    """Of the rows that can be decoded, in order."""
    num_rows: int
    """All of the sample."""

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
    if prompter is not None:
        prompter = replace(prompter, ends_at=time.monotonic() + PROMPTS_S)
    requests: list[Request] = []
    num_rows = 0
    for index in (filled[len(filled) * number // count] for number in range(count)):
        for part in _parts(plan, index, config, prompter, quota, spots):
            num_rows += part.num_rows
            requests += Window.of(tokenize(part, config=tokens), sampling).requests
    return Sample(requests, num_rows)


def _parts(
    plan: InputPlan, index: int, config: InputConfig, prompter: Prompter | None, quota: int, spots: int
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
    with suppress(OutOfTime):
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
