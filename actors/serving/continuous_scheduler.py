"""The scheduler `continuous`: requests with one schedule share a batch that they join and leave at any step.

Requests whose batch has failed get batches of their own, of a limited size.
"""

from collections import deque
from collections.abc import Sequence

from actors.generator import Generator
from actors.serving.scheduler import EngineConfig, Scheduler, Ticket
from skipdecode.engine.continuous_batch import ContinuousBatch, check_continuous
from skipdecode.engine.request import Request


class RunningBatch:
    """A continuous batch and its requests, in the order of their arrival."""

    def __init__(self, batch: ContinuousBatch, is_limited: bool) -> None:
        self.batch, self.is_limited = batch, is_limited
        self.all_tickets: list[Ticket] = []
        """Ended ones included, until the next step."""

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


class ContinuousScheduler(Scheduler):
    """One continuous batch per schedule, which newcomers join at once as long as it has rows and memory left."""

    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        super().__init__(generator, config)
        if generator.config.deterministic:
            raise ValueError(
                "sampling.deterministic: needs fixed batch shapes, which the continuous scheduler does not have; use "
                "engine.scheduler: cohort"
            )
        self._batches: deque[RunningBatch] = deque()

    @property
    def running(self) -> Sequence[RunningBatch]:
        return self._batches

    def ticket(self, request: Request) -> Ticket:
        ticket = super().ticket(request)
        check_continuous(ticket.schedule)
        return ticket

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        if not waiting:
            return []
        running = self._batch_for(waiting[0])
        if running is None and len(self._batches) >= self.config.max_cohorts:
            return []
        running = running or self._new_batch(waiting[0])
        batch, others = running.batch, sum(other.cache_bytes for other in self._batches if other is not running)

        def fits(num_rows: int, prompt: int, num_new: int) -> bool:
            return others + batch.bytes_with(num_rows, prompt, num_new) <= self.cache_budget

        return self.select(waiting, running.tickets, fits, must_fit=len(self._batches) > 0)

    def start(self, tickets: list[Ticket]) -> None:
        """If their prompts fail, the batch that they were to join is as before."""
        running = self._batch_for(tickets[0])
        if running is not None:
            return running.join(tickets, self.generator)
        running = self._new_batch(tickets[0])
        running.join(tickets, self.generator)
        self._batches.append(running)

    def next(self) -> RunningBatch | None:
        self.clear_done()
        if not self._batches:
            return None
        self._batches.rotate(-1)
        return self._batches[-1]

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        for running in self._batches:
            if tickets[0] in running.all_tickets:
                self._batches.remove(running)
                return running.all_tickets
        return list(tickets)

    def clear_done(self) -> None:
        for running in [running for running in self._batches if not running.tickets]:
            self._batches.remove(running)

    def _new_batch(self, ticket: Ticket) -> RunningBatch:
        return RunningBatch(self.generator.empty_batch(ticket.schedule), ticket.max_batch_rows is not None)

    def _batch_for(self, ticket: Ticket) -> RunningBatch | None:
        """The running batch that this request joins, now or, if batches are not limited, when there is memory."""
        for running in self._batches:
            if running.batch.schedule != ticket.schedule or running.is_limited != (ticket.max_batch_rows is not None):
                continue
            limits = [t.max_batch_rows for t in (*running.tickets, ticket) if t.max_batch_rows is not None]
            if not limits or len(running.tickets) < min(limits):
                return running
        return None
