"""What the schedulers of the engine have in common: tickets, and who may start now.

A scheduler says which requests decode together and whose turn it is: `cohort_scheduler` and `continuous_scheduler`.
Nothing here looks at tokens.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from actors.batching.buckets import bucket_of
from actors.generator import Generator
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.request import Request, Row, TokenLogprobs
from skipdecode.schedules.plan import Schedule


@dataclass(frozen=True)
class EngineConfig:
    scheduler: Literal["cohort", "continuous"] = "cohort"
    batch_size: int = 32
    """Rows of a cohort, or of a continuous batch."""
    max_cohorts: int = 8
    """Cohorts, or continuous batches (one per schedule), that take turns."""
    max_prefill_tokens: int = 4096
    """Prompt tokens, padding included, that newcomers may bring in one turn; one row always may."""


@dataclass(eq=False)
class Ticket:
    """A request on its way through the engine."""

    request: Request
    schedule: Schedule
    bucket: int
    row: Row | None = None
    """Once it runs."""
    num_sent: int = 0
    """Tokens that were given out."""
    max_batch_rows: int | None = None
    """Rows, itself included, that it may share a batch with, after a batch with it could not be decoded."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of the prompt's tokens but the first, once they are scored."""

    @property
    def has_ended(self) -> bool:
        return self.row is not None and not self.row.is_running


class Batch(Protocol):
    """Rows that decode together."""

    @property
    def tickets(self) -> list[Ticket]:
        """Those that had not ended before the last step."""

    @property
    def cache_bytes(self) -> int: ...

    def step(self) -> None: ...


class Scheduler(Protocol):
    """Says which waiting requests start together, and which batch steps next."""

    @property
    def running(self) -> Sequence[Batch]: ...

    def ticket(self, request: Request) -> Ticket: ...

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        """Those of `waiting` that are to start in this turn, together; without taking them out."""

    def start(self, tickets: list[Ticket]) -> None:
        """Their prompts, and their first tokens."""

    def next(self) -> Batch | None:
        """The batch whose turn it is."""

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Forgets the batch of these tickets, of which work failed; gives back all that were in it, ended or not.

        Of newcomers that failed before they were in one, themselves.
        """

    def clear_done(self) -> None:
        """Forgets batches without running rows."""


class Admission:
    """What both schedulers ask before they take rows in: rows of a batch, prompt tokens of a turn, memory."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        self.generator, self.config = generator, config
        self.cache_budget = generator.memory.serving_cache_bytes

    def ticket(self, request: Request) -> Ticket:
        schedule = self.generator.schedule(request.sampling.max_new_tokens)
        return Ticket(request, schedule, bucket_of(len(request.prompt_tokens), self.generator.config.length_buckets))

    def row_bytes(self, ticket: Ticket, num_new: int) -> int:
        """Cache of a row in line with `ticket` that may make `num_new` tokens."""
        itemsize = self.generator.dtype.itemsize
        return _row_bytes(self.generator.model.config, ticket.schedule, ticket.bucket, num_new, itemsize)

    def together(
        self, waiting: deque[Ticket], joined: Sequence[Ticket], fits: Callable[[int, int, int], bool], must_fit: bool
    ) -> list[Ticket]:
        """Those in line with the first one (schedule, bucket, and whether their batch is limited) that may start now.

        `joined`: whose batch they join. `fits`: whether there is memory for so many of them, with the longest prompt
        and the most new tokens among them. `must_fit`: the first one too; else it may start at any price.
        """
        chosen: list[Ticket] = []
        most, prompt, num_new = self.config.batch_size, 0, 0
        most = min([most, *(ticket.max_batch_rows for ticket in joined if ticket.max_batch_rows is not None)])
        for ticket in waiting:
            if _line(ticket) != _line(waiting[0]):
                continue
            rows, most = len(chosen) + 1, min(most, ticket.max_batch_rows or most)
            if len(joined) + rows > most or (chosen and rows * ticket.bucket > self.config.max_prefill_tokens):
                break
            prompt = max(prompt, len(ticket.request.prompt_tokens))
            num_new = max(num_new, ticket.request.sampling.max_new_tokens)
            if (chosen or must_fit) and not fits(rows, prompt, num_new):
                break
            chosen.append(ticket)
        return chosen


def _line(ticket: Ticket) -> tuple[int, bool, Schedule]:
    return ticket.bucket, ticket.max_batch_rows is not None, ticket.schedule


@lru_cache(maxsize=4096)
def _row_bytes(config: DecoderConfig, schedule: Schedule, columns: int, num_new: int, itemsize: int) -> int:
    return cache_bytes_per_row(config, schedule, prompt_columns=columns, num_new=num_new, itemsize=itemsize)
