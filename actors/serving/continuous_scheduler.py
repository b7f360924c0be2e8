"""The scheduler `continuous`: requests with one schedule share a batch that they join and leave at any step.

Those whose batch has failed, and who may share one with so many only, have batches of their own beside it.
"""

from collections import deque
from collections.abc import Sequence

from actors.generator import Generator
from actors.serving.scheduler import Admission, EngineConfig, Ticket
from skipdecode.engine.continuous_batch import ContinuousBatch, check_continuous
from skipdecode.engine.request import Request
from skipdecode.schedules.lossless import Lossless
from skipdecode.speculative.speculative_batch import SpeculativeBatch


class PoolBatch:
    """A continuous batch and its requests, in the order they came."""

    def __init__(self, batch: ContinuousBatch, is_limited: bool) -> None:
        self.batch, self.is_limited = batch, is_limited
        self.all_tickets: list[Ticket] = []
        """Ended ones too, until the next step."""

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket for ticket in self.all_tickets if not ticket.has_ended]

    @property
    def cache_bytes(self) -> int:
        return self.batch.cache_bytes

    def join(self, tickets: list[Ticket], generator: Generator) -> None:
        requests = [ticket.request for ticket in tickets]
        rows = self.batch.join(requests, generator.shared_prefixes(requests, self.batch.schedule))
        for ticket, row in zip(tickets, rows, strict=True):
            ticket.row = row
        self.all_tickets += tickets

    def step(self) -> None:
        self.all_tickets = self.tickets
        self.batch.step()


class ContinuousScheduler(Admission):
    """One continuous batch per schedule; newcomers join at once while it has places and memory."""

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
        pool = self._pool_for(waiting[0])
        if pool is None and len(self._pools) >= self.config.max_cohorts:
            return []
        pool = pool or self._new_pool(waiting[0])
        batch, others = pool.batch, sum(other.cache_bytes for other in self._pools if other is not pool)

        def fits(num_rows: int, prompt: int, num_new: int) -> bool:
            return others + batch.bytes_with(num_rows, prompt, num_new) <= self.cache_budget

        return self.together(waiting, pool.tickets, fits, must_fit=len(self._pools) > 0)

    def start(self, tickets: list[Ticket]) -> None:
        """Prompts that fail leave the batch they were to join as it was."""
        pool = self._pool_for(tickets[0])
        if pool is not None:
            return pool.join(tickets, self.generator)
        pool = self._new_pool(tickets[0])
        pool.join(tickets, self.generator)
        self._pools.append(pool)

    def next(self) -> PoolBatch | None:
        self.clear_done()
        if not self._pools:
            return None
        self._pools.rotate(-1)
        return self._pools[-1]

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        for pool in self._pools:
            if tickets[0] in pool.all_tickets:
                self._pools.remove(pool)
                return pool.all_tickets
        return list(tickets)

    def clear_done(self) -> None:
        for pool in [pool for pool in self._pools if not pool.tickets]:
            self._pools.remove(pool)

    def _new_pool(self, ticket: Ticket) -> PoolBatch:
        model, decode, schedule = self.generator.model, self.generator.tokenizer.decode, ticket.schedule
        if isinstance(schedule, Lossless):
            length = self.generator.draft_length(schedule)
            batch: ContinuousBatch = SpeculativeBatch(model, schedule, decode_text=decode, length=length)
        else:
            batch = ContinuousBatch(model, schedule, decode_text=decode)
        return PoolBatch(batch, ticket.max_batch_rows is not None)

    def _pool_for(self, ticket: Ticket) -> PoolBatch | None:
        """The batch that it joins now or, where its rows are not limited, when it has room."""
        for pool in self._pools:
            if pool.batch.schedule != ticket.schedule or pool.is_limited != (ticket.max_batch_rows is not None):
                continue
            limits = [t.max_batch_rows for t in (*pool.tickets, ticket) if t.max_batch_rows is not None]
            if not limits or len(pool.tickets) < min(limits):
                return pool
        return None
