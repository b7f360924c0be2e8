"""A sample of a planned input: rows in a few runs of neighbours, tokenised as a run does it.

Neighbours stay together, since what they share (a document's samples, a template's head) decides what they cost. Left
out: decoding them (`measure`).
"""

from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pipeline.config import InputConfig
from pipeline.input.plan import InputPlan
from pipeline.input.prompting import Prompter
from pipeline.input.read import read_file
from pipeline.stages.tokens import TokenizeConfig, tokenize
from pipeline.stages.window import Window
from skipdecode.generate import Request
from skipdecode.sampling import Sampling

MAX_FILES: Final = 16
READ_ROWS, READ_BYTES = 4096, 32 << 20  # from the beginning of each of these, about
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
    """At most `max_rows` rows, of files that lie evenly over the input, from their beginnings."""
    filled = [index for index, rows in enumerate(plan.num_rows_per_file) if rows]
    count = min(max_files, len(filled))
    quota = max(1, max_rows // count)
    requests: list[Request] = []
    num_rows = 0
    for index in (filled[len(filled) * number // count] for number in range(count)):
        head = _head(plan, index, config, prompter)
        spots = max(1, SPOTS // count) if head.num_rows > quota else 1
        for spot in range(spots):
            part = head.slice(head.num_rows * spot // spots, max(1, quota // spots))
            num_rows += part.num_rows
            requests += Window.of(tokenize(part, config=tokens), sampling).requests
    return Sample(requests, num_rows)


def _head(plan: InputPlan, index: int, config: InputConfig, prompter: Prompter | None) -> pa.Table:
    blocks, rows, num_bytes = [], 0, 0
    for block in read_file(plan, index, config, prompter=prompter):
        blocks.append(block)
        rows, num_bytes = rows + block.num_rows, num_bytes + block.nbytes
        if rows >= READ_ROWS or num_bytes >= READ_BYTES:
            break
    return pa.concat_tables(blocks)
