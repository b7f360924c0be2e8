"""What the two schedulers of the engine have in common: the requests that they schedule, and who may start now.

A scheduler says which requests decode together and which batch steps next. Nothing here looks at tokens.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from actors.batching.buckets import bucket_of
from actors.generator import Answer, Generator
from skipdecode.config.model import DecoderConfig
from skipdecode.cost.roofline import cache_bytes_per_row
from skipdecode.engine.request import Request, Row
from skipdecode.engine.results import TokenLogprobs
from skipdecode.schedules.schedule import Schedule

BACKGROUND_SHARE = 0.5  # of the memory for caches, for batches that rows in the background join


@dataclass(frozen=True)
class EngineConfig:
    scheduler: Literal["cohort", "continuous"] = "cohort"
    batch_size: int = 32
    """Rows of a cohort, or of a continuous batch."""
    max_cohorts: int = 8
    """Cohorts, or continuous batches (one per schedule), that take turns."""
    max_prefill_tokens: int = 4096
    """Prompt tokens, padding included, that may be prefilled in one step; a single row always may."""
    background_prefill_tokens: int = 128
    """The same for prompts of the background, for which a request that arrives meanwhile has to wait."""


@dataclass(eq=False)
class Ticket:
    """A request on its way through the engine."""

    request: Request
    schedule: Schedule
    bucket: int
    row: Row | None = None
    """Set once it runs."""
    num_sent: int = 0
    """Tokens that were given out."""
    max_batch_rows: int | None = None
    """Limits the rows of its batch, itself included, after a batch with it could not be decoded."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Scores of the prompt's tokens except the first, once they are there."""
    on_answer: Callable[[Answer], None] | None = None
    """Makes it a request in the background; called in the engine's thread with the whole answer."""

    @property
    def is_background(self) -> bool:
        """True if it runs in places that no other request wants, and gives its place to one that comes."""
        return self.on_answer is not None

    @property
    def has_ended(self) -> bool:
        return self.row is not None and not self.row.is_running


class ScheduledBatch(Protocol):
    """Rows that decode together, of which the scheduler steps one batch at a time."""

    @property
    def tickets(self) -> list[Ticket]:
        """The tickets that had not ended before the last step."""

    @property
    def cache_bytes(self) -> int: ...

    def step(self) -> None: ...


class Scheduler(ABC):
    """Says which waiting requests start together, within limits of rows, prompt tokens and memory, and which batch
    steps next."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        self.generator, self.config = generator, config
        self.cache_budget = generator.memory.serving_cache_bytes

    def ticket(self, request: Request, on_answer: Callable[[Answer], None] | None = None) -> Ticket:
        """`on_answer`: of a request in the background. ValueError if the request can never run: its own keys and values
        exceed the memory for those of all."""
        num_prompt, num_new = len(request.prompt_tokens), request.sampling.max_new_tokens
        schedule = self.generator.schedule(num_new)
        config, itemsize = self.generator.model.config, self.generator.model.kv_itemsize
        budget = self.cache_budget if on_answer is None else int(BACKGROUND_SHARE * self.cache_budget)
        needed = 2 * config.num_hidden_layers * config.kv_dim * itemsize * (num_prompt + num_new)  # at full depth
        if needed > budget:  # only now, since to count what a schedule needs takes milliseconds
            needed = _row_bytes(config, schedule, num_prompt, num_new, itemsize)
        if needed > budget:
            raise ValueError(
                f"a prompt of {num_prompt} tokens and {num_new} new ones need {needed} bytes of memory for keys and "
                f"values, and the server has {budget}; shorten the prompt or max_tokens"
            )
        bucket = bucket_of(num_prompt, self.generator.config.length_buckets)
        return Ticket(request, schedule, bucket, on_answer=on_answer)

    @property
    @abstractmethod
    def running(self) -> Sequence[ScheduledBatch]: ...

    @abstractmethod
    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        """The waiting tickets that start together in this step; they stay in `waiting`."""

    def choose_background(self, waiting: deque[Ticket]) -> list[Ticket]:
        """The same for tickets in the background; called while no other ticket waits. Only `continuous` has places for
        them."""
        return []

    def choose_beside(self, newcomers: Sequence[Ticket], background: deque[Ticket]) -> list[Ticket]:
        """Tickets in the background whose prompts run in one pass with those of `newcomers`, which start now."""
        return []

    def make_room(self, waiting: deque[Ticket]) -> list[Ticket]:
        """Takes rows in the background out of their batches, the youngest first, until those of `waiting` that could
        start together find places and memory. Returns their tickets, the oldest first."""
        return []

    @abstractmethod
    def start(self, tickets: list[Ticket]) -> None:
        """Runs their prompts, and samples their first tokens."""

    @abstractmethod
    def next(self) -> ScheduledBatch | None:
        """The batch that steps next."""

    @abstractmethod
    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """Forgets the batch of these tickets after an error; returns all tickets that were in it, ended or not.

        Newcomers that failed before they were in a batch are returned themselves.
        """

    @abstractmethod
    def clear_done(self) -> None:
        """Forgets batches without running rows."""

    def row_bytes(self, ticket: Ticket, num_new: int) -> int:
        """Cache of a row like that of `ticket` with up to `num_new` new tokens."""
        itemsize = self.generator.model.kv_itemsize
        return _row_bytes(self.generator.model.config, ticket.schedule, ticket.bucket, num_new, itemsize)

    def select(
        self,
        waiting: deque[Ticket],
        joined: Sequence[Ticket],
        fits: Callable[[int, int, int], bool],
        must_fit: bool,
        max_prompt_tokens: int | None = None,
    ) -> list[Ticket]:
        """The tickets that may start now together with the first one, whose schedule and bucket they have.

        `joined` are the tickets of the batch that they join. `fits(rows, longest_prompt, most_new_tokens)` says whether
        there is memory for so many of them. Unless `must_fit`, the first one starts in any case. `max_prompt_tokens`:
        None for `config.max_prefill_tokens`.
        """
        max_prompt_tokens = max_prompt_tokens or self.config.max_prefill_tokens
        chosen: list[Ticket] = []
        most, prompt, num_new = self.config.batch_size, 0, 0
        most = min([most, *(ticket.max_batch_rows for ticket in joined if ticket.max_batch_rows is not None)])
        for ticket in waiting:
            if group_of(ticket) != group_of(waiting[0]):
                continue
            rows, most = len(chosen) + 1, min(most, ticket.max_batch_rows or most)
            if len(joined) + rows > most or (chosen and rows * ticket.bucket > max_prompt_tokens):
                break
            prompt = max(prompt, len(ticket.request.prompt_tokens))
            num_new = max(num_new, ticket.request.sampling.max_new_tokens)
            if (chosen or must_fit) and not fits(rows, prompt, num_new):
                break
            chosen.append(ticket)
        return chosen


def group_of(ticket: Ticket) -> tuple[int, bool, Schedule]:
    """Waiting tickets of one group may start together."""
    return ticket.bucket, ticket.max_batch_rows is not None, ticket.schedule


@lru_cache(maxsize=4096)
def _row_bytes(config: DecoderConfig, schedule: Schedule, columns: int, num_new: int, itemsize: int) -> int:
    return cache_bytes_per_row(config, schedule, prompt_columns=columns, num_new=num_new, itemsize=itemsize)
