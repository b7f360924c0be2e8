"""The scheduler `continuous`: requests with one schedule share a batch that they join and leave at any step."""

from collections import deque
from collections.abc import Sequence

from actors.batches import Admission, EngineConfig, Ticket
from actors.generator import Generator
from skipdecode.continuous import ContinuousBatch, check_continuous
from skipdecode.request import Request


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
