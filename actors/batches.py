"""Which requests decode together, and whose turn it is: the schedulers of the engine.

`CohortBatches`: requests that wait together, with one schedule and one length bucket, form a cohort that shares
positions; up to `max_cohorts` take turns step by step. `ContinuousBatches`: requests with one schedule share a batch
that they join and leave at any step (`skipdecode.continuous`). Nothing here looks at tokens.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

from actors.batching import bucket_of
from actors.generator import Generator, free_bytes
from skipdecode.cohort import Cohort
from skipdecode.config import OPTConfig
from skipdecode.continuous import ContinuousBatch, check_continuous
from skipdecode.cost import cache_bytes_per_row
from skipdecode.plan import Schedule
from skipdecode.request import Request, Row

CACHE_SHARE = 0.5  # of the memory that is free at the start, for the caches of all batches
LIFE_WEIGHT = 0.2  # of the newest cohort in the mean life of cohorts


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
    arrived_at: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    row: Row | None = None
    """Once it runs."""
    num_sent: int = 0
    """Tokens that were given out."""
    max_company: int | None = None
    """Rows, itself included, that it may share a batch with, after a batch with it could not be decoded."""

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


class Batches(Protocol):
    """A scheduler."""

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
        """Forgets the batch of these tickets, of which work failed; gives back all that run in it."""

    def clear_done(self) -> None:
        """Forgets batches without running rows."""


def make_batches(generator: Generator, config: EngineConfig) -> Batches:
    return (
        ContinuousBatches(generator, config) if config.scheduler == "continuous" else CohortBatches(generator, config)
    )


class Admission:
    """What both schedulers ask before they take rows in: company, prompt tokens of a turn, memory."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        self.generator, self.config = generator, config
        self.cache_budget = CACHE_SHARE * free_bytes(generator.device)

    def ticket(self, request: Request) -> Ticket:
        schedule = self.generator.schedule(request.sampling.max_new_tokens)
        return Ticket(request, schedule, bucket_of(len(request.prompt_tokens), self.generator.config.length_buckets))

    def row_bytes(self, ticket: Ticket) -> int:
        num_new, itemsize = ticket.request.sampling.max_new_tokens, self.generator.dtype.itemsize
        return _row_bytes(self.generator.model.config, ticket.schedule, ticket.bucket, num_new, itemsize)

    def together(self, waiting: deque[Ticket], room: int, used_bytes: int) -> list[Ticket]:
        """Of those in line with the first one (schedule and bucket), as many as may start now; at most `room`."""
        if room < 1 or not waiting:
            return []
        first = waiting[0]
        chosen: list[Ticket] = []
        for ticket in waiting:
            if ticket.bucket != first.bucket or ticket.schedule != first.schedule:
                continue
            used_bytes += self.row_bytes(ticket)
            company = min(t.max_company or room for t in (*chosen, ticket))
            columns = (len(chosen) + 1) * ticket.bucket
            is_full = columns > self.config.max_prefill_tokens or used_bytes > self.cache_budget
            if len(chosen) >= min(room, company) or (chosen and is_full):
                break
            chosen.append(ticket)
        return chosen


@lru_cache(maxsize=4096)
def _row_bytes(config: OPTConfig, schedule: Schedule, columns: int, num_new: int, itemsize: int) -> int:
    return cache_bytes_per_row(config, schedule, prompt_columns=columns, num_new=num_new, itemsize=itemsize)


class CohortBatch:
    def __init__(self, cohort: Cohort, tickets: list[Ticket]) -> None:
        self.cohort, self.all_tickets = cohort, tickets
        self.started_at = time.monotonic()

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket for ticket in self.all_tickets if not ticket.has_ended]

    @property
    def cache_bytes(self) -> int:
        return self.cohort.stats.cache_bytes

    def step(self) -> None:
        self.cohort.step()


class CohortBatches(Admission):
    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        super().__init__(generator, config)
        self._running: deque[CohortBatch] = deque()
        self._mean_life_s = 0.0
        self._last_start = float("-inf")

    @property
    def running(self) -> Sequence[CohortBatch]:
        return self._running

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        num_running, num_max = len(self._running), self.config.max_cohorts
        if not waiting or num_running >= num_max:
            return []
        # The second half of the places is given out at even intervals: else a burst of small cohorts takes them all,
        # and whoever comes next waits for a whole life of a cohort.
        since = time.monotonic() - self._last_start
        if num_running >= num_max / 2 and since < self._mean_life_s / num_max:
            return []
        used = sum(batch.cache_bytes for batch in self._running)
        if self._running and used + self.row_bytes(waiting[0]) > self.cache_budget:
            return []
        return self.together(waiting, self.config.batch_size, used)

    def start(self, tickets: list[Ticket]) -> None:
        generator, is_fixed, bucket = self.generator, self.generator.config.deterministic, tickets[0].bucket
        longest = max(ticket.request.sampling.max_new_tokens for ticket in tickets)
        cohort = Cohort(
            generator.model,
            [ticket.request for ticket in tickets],
            tickets[0].schedule,
            decode_text=generator.tokenizer.decode,
            prompt_columns=bucket if is_fixed else None,
            batch_rows=generator.batch_size(bucket, longest) if is_fixed else None,
            compact_at=0.0 if is_fixed else 1.0,
            check_every=1,
        )
        for ticket, row in zip(tickets, cohort.rows, strict=True):
            ticket.row = row
        self._running.append(CohortBatch(cohort, tickets))
        self._last_start = time.monotonic()
        cohort.prefill()

    def next(self) -> CohortBatch | None:
        self.clear_done()  # a cohort may end with its first tokens, or be cancelled
        if not self._running:
            return None
        self._running.rotate(-1)
        return self._running[-1]

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        for batch in self._running:
            if batch.all_tickets[0] is tickets[0] or tickets[0] in batch.all_tickets:
                self._running.remove(batch)
                break
        return [ticket for ticket in tickets if not ticket.has_ended]

    def clear_done(self) -> None:
        for batch in [batch for batch in self._running if batch.cohort.is_done]:
            self._running.remove(batch)
            life = time.monotonic() - batch.started_at
            self._mean_life_s += (LIFE_WEIGHT if self._mean_life_s else 1.0) * (life - self._mean_life_s)


class PoolBatch:
    """A continuous batch and its requests, in the order they came."""

    def __init__(self, batch: ContinuousBatch) -> None:
        self.batch = batch
        self._tickets: list[Ticket] = []

    @property
    def tickets(self) -> list[Ticket]:
        self._tickets = [ticket for ticket in self._tickets if not ticket.has_ended]
        return list(self._tickets)

    @property
    def cache_bytes(self) -> int:
        return self.batch.cache_bytes

    def join(self, tickets: list[Ticket]) -> None:
        rows = self.batch.join([ticket.request for ticket in tickets])
        for ticket, row in zip(tickets, rows, strict=True):
            ticket.row = row
        self._tickets += tickets

    def step(self) -> None:
        self.batch.step()


class ContinuousBatches(Admission):
    """One continuous batch per schedule; newcomers join at once while it has places."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        super().__init__(generator, config)
        if generator.config.deterministic:
            raise ValueError(
                "sampling.deterministic: needs fixed batch shapes, which the continuous scheduler does not have; use "
                "engine.scheduler: cohort"
            )
        self._pools: deque[PoolBatch] = deque()

    @property
    def running(self) -> Sequence[PoolBatch]:
        return self._pools

    def ticket(self, request: Request) -> Ticket:
        ticket = super().ticket(request)
        check_continuous(ticket.schedule)
        return ticket

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        if not waiting:
            return []
        pool = self._pool_of(waiting[0])
        if pool is None and len(self._pools) >= self.config.max_cohorts:
            return []
        used, company = sum(pool.cache_bytes for pool in self._pools), pool.tickets if pool else []
        if self._pools and used + self.row_bytes(waiting[0]) > self.cache_budget:
            return []
        limits = [ticket.max_company for ticket in (*company, waiting[0]) if ticket.max_company is not None]
        return self.together(waiting, min([self.config.batch_size, *limits]) - len(company), used)

    def start(self, tickets: list[Ticket]) -> None:
        pool = self._pool_of(tickets[0])
        if pool is None:
            generator, schedule = self.generator, tickets[0].schedule
            pool = PoolBatch(ContinuousBatch(generator.model, schedule, decode_text=generator.tokenizer.decode))
            self._pools.append(pool)
        pool.join(tickets)

    def next(self) -> PoolBatch | None:
        self.clear_done()
        if not self._pools:
            return None
        self._pools.rotate(-1)
        return self._pools[-1]

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        """A prompt that fails leaves the batch it was to join as it was."""
        for pool in list(self._pools):
            if tickets[0] in pool.tickets:
                self._pools.remove(pool)
        return [ticket for ticket in tickets if not ticket.has_ended]

    def clear_done(self) -> None:
        for pool in [pool for pool in self._pools if not pool.tickets]:
            self._pools.remove(pool)

    def _pool_of(self, ticket: Ticket) -> PoolBatch | None:
        return next((pool for pool in self._pools if pool.batch.schedule == ticket.schedule), None)
