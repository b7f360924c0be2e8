"""The scheduler `continuous`: requests with one schedule share a batch that they join and leave at any step.

Requests whose batch has failed get batches of their own, of a limited size. Requests in the background take places that
no other request wants.
"""

from collections import deque
from collections.abc import Callable, Sequence

from actors.generator import Answer, Generator
from actors.serving.scheduler import BACKGROUND_SHARE, EngineConfig, Scheduler, Ticket, group_of
from skipdecode.engine.continuous_batch import ContinuousBatch, check_continuous
from skipdecode.engine.generate import JOIN_AT
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import Schedule


class RunningBatch:
    """A continuous batch and its requests, in the order of their arrival."""

    def __init__(self, batch: ContinuousBatch, kind: "tuple[Schedule, bool, bool]") -> None:
        """`kind`: that of its tickets (`_kind`)."""
        self.batch, self.kind = batch, kind
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

    def remove(self, ticket: Ticket) -> None:
        """Ends the row of a ticket, which then has none."""
        assert ticket.row is not None
        self.batch.remove(ticket.row)
        self.all_tickets.remove(ticket)
        ticket.row = None

    def step(self) -> None:
        self.all_tickets = self.tickets
        self.batch.step()
        self.batch.stats.batch_rows.clear()  # of each step: a batch may run for days


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

    def ticket(self, request: Request, on_answer: Callable[[Answer], None] | None = None) -> Ticket:
        ticket = super().ticket(request, on_answer)
        check_continuous(ticket.schedule)
        return ticket

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        return self._choose(waiting, self.cache_budget)[0]

    def choose_background(self, waiting: deque[Ticket]) -> list[Ticket]:
        budget = int(BACKGROUND_SHARE * self.cache_budget)
        chosen, joined = self._choose(waiting, budget, self.config.background_prefill_tokens)
        free = self.config.batch_size - len(joined)
        if joined and len(chosen) == free < int(JOIN_AT * self.config.batch_size):
            return []  # as in `refill`
        return chosen

    def choose_beside(self, newcomers: Sequence[Ticket], background: deque[Ticket]) -> list[Ticket]:
        """As many as `background_prefill_tokens` for all of these prompts allow. The next request finds a place."""
        if newcomers[0].max_batch_rows is not None:
            return []  # the batch of one of them has failed
        budget = int(BACKGROUND_SHARE * self.cache_budget)
        queue = deque([*newcomers, *background])
        chosen, joined = self._choose(queue, budget, self.config.background_prefill_tokens)
        num_free = self.config.batch_size - len(joined) - len(newcomers)
        return chosen[len(newcomers) :][: max(0, num_free - 1)]

    def make_room(self, waiting: deque[Ticket]) -> list[Ticket]:
        gone: list[Ticket] = []
        if not waiting or not any(ticket.is_background for batch in self._batches for ticket in batch.tickets):
            return gone
        first, most = waiting[0], max(1, self.config.max_prefill_tokens // waiting[0].bucket)
        wanted = min(most, self.config.batch_size, sum(group_of(ticket) == group_of(first) for ticket in waiting))
        while len(self.choose(waiting)) < wanted:
            found = [(ticket, batch) for batch in self._batches for ticket in batch.tickets if ticket.is_background]
            if not found:
                break
            youngest, batch = found[-1]
            batch.remove(youngest)
            gone.append(youngest)
            self.clear_done()
        return gone[::-1]

    def _choose(
        self, waiting: deque[Ticket], budget: int, max_prompt_tokens: int | None = None
    ) -> tuple[list[Ticket], list[Ticket]]:
        """The tickets that start together within `budget` bytes for all caches, and those of the batch that they
        join."""
        if not waiting:
            return [], []
        running = self._batch_for(waiting[0])
        if running is None and len(self._batches) >= self.config.max_cohorts:
            return [], []
        running = running or self._new_batch(waiting[0])
        batch, others = running.batch, sum(other.cache_bytes for other in self._batches if other is not running)

        def fits(num_rows: int, prompt: int, num_new: int) -> bool:
            return others + batch.bytes_with(num_rows, prompt, num_new) <= budget

        joined = running.tickets
        must_fit = len(self._batches) > 0
        return self.select(waiting, joined, fits, must_fit, max_prompt_tokens), joined

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
        return RunningBatch(self.generator.empty_batch(ticket.schedule), _kind(ticket))

    def _batch_for(self, ticket: Ticket) -> RunningBatch | None:
        """The running batch that this request joins, now or, if batches are not limited, when there is memory."""
        for running in self._batches:
            if running.kind != _kind(ticket):
                continue
            limits = [t.max_batch_rows for t in (*running.tickets, ticket) if t.max_batch_rows is not None]
            if not limits or len(running.tickets) < min(limits):
                return running
        return None


def _kind(ticket: Ticket) -> tuple[Schedule, bool, bool]:
    """Tickets of one kind share batches: those with one schedule, and of those whose batch has failed the ones in the
    background on their own, so that their rows hurt no other request again."""
    is_limited = ticket.max_batch_rows is not None
    return ticket.schedule, is_limited, is_limited and ticket.is_background
