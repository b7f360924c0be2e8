"""The scheduler `cohort`: requests that wait together form a static batch, a cohort, and cohorts take turns.

The requests of a cohort have one schedule and one length bucket, and share positions. Up to `max_cohorts` run at once.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from actors.generator import Answer, Generator
from actors.serving.scheduler import EngineConfig, Scheduler, Ticket
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.prefill import has_room, rounded_columns
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.schedules.lossless import Lossless

LIFETIME_WEIGHT = 0.2  # of the newest cohort in the moving average of lifetimes


class CohortBatch:
    def __init__(self, cohort: StaticBatch | ContinuousBatch, tickets: list[Ticket]) -> None:
        self.cohort, self.all_tickets = cohort, tickets
        self.started_at = time.monotonic()

    @property
    def tickets(self) -> list[Ticket]:
        return [ticket for ticket in self.all_tickets if not ticket.has_ended]

    @property
    def cache_bytes(self) -> int:
        return self.cohort.cache_bytes

    def step(self) -> None:
        self.cohort.step()


class CohortScheduler(Scheduler):
    def __init__(self, generator: Generator, config: EngineConfig) -> None:
        super().__init__(generator, config)
        self._running: deque[CohortBatch] = deque()
        self._mean_lifetime_s = 0.0
        self._last_start = float("-inf")

    @property
    def running(self) -> Sequence[CohortBatch]:
        return self._running

    def ticket(self, request: Request, on_answer: Callable[[Answer], None] | None = None) -> Ticket:
        if on_answer is not None:
            raise ValueError("engine.scheduler: cohort has no places for the background; use continuous")
        return super().ticket(request)

    def choose(self, waiting: deque[Ticket]) -> list[Ticket]:
        num_running, num_max = len(self._running), self.config.max_cohorts
        if not waiting or num_running >= num_max:
            return []
        # The second half of the cohorts starts at even intervals. Otherwise a burst of small ones takes up all of them,
        # and the next request waits for the whole lifetime of a cohort.
        since = time.monotonic() - self._last_start
        if num_running >= num_max / 2 and since < self._mean_lifetime_s / num_max:
            return []
        used, first = sum(batch.cache_bytes for batch in self._running), waiting[0]

        def fits(num_rows: int, prompt: int, num_new: int) -> bool:
            if self.generator.graphs is None:
                return used + num_rows * self.row_bytes(first, num_new) <= self.cache_budget
            return self._has_room(first, num_rows, prompt, num_new)

        return self.select(waiting, [], fits, must_fit=num_running > 0)

    def _shape(self, first: Ticket, prompt: int, num_new: int) -> tuple[int | None, int]:
        """Rows of a cohort (None: as many as it has), and the padded length of prompts of up to `prompt` tokens."""
        if self.generator.config.deterministic:
            return self.generator.batch_size(first.bucket, num_new), first.bucket
        return None, min(first.bucket, rounded_columns(prompt))

    def _has_room(self, first: Ticket, num_rows: int, prompt: int, num_new: int) -> bool:
        """True if the memory of the graphs has a gap for that cohort now, with rows padded as they will be."""
        graphs, (rows, columns) = self.generator.graphs, self._shape(first, prompt, num_new)
        return graphs is not None and has_room(graphs, first.schedule, rows or num_rows, columns, num_new)

    def start(self, tickets: list[Ticket]) -> None:
        generator, is_fixed, first = self.generator, self.generator.config.deterministic, tickets[0]
        if isinstance(first.schedule, Lossless):
            return self._start_lossless(tickets, first.schedule)
        num_new = max(ticket.request.sampling.max_new_tokens for ticket in tickets)
        requests = [ticket.request for ticket in tickets]
        prompt = max(len(request.prompt_tokens) for request in requests)
        rows, width = self._shape(first, prompt, num_new)
        # A row that is too large for the memory of the graphs decodes without graphs.
        graphs = generator.graphs if self._has_room(first, len(tickets), prompt, num_new) else None
        cohort = StaticBatch(
            generator.model,
            requests,
            first.schedule,
            decode_text=generator.tokenizer.decode,
            prompt_columns=width,
            batch_rows=rows,
            compact_at=0.0 if is_fixed else 1.0,
            check_every=1,
            graphs=graphs,
            sharing=generator.shared_prefixes(requests, first.schedule),
        )
        for ticket, row in zip(tickets, cohort.rows, strict=True):
            ticket.row = row
        self._running.append(CohortBatch(cohort, tickets))
        self._last_start = time.monotonic()
        cohort.prefill()

    def _start_lossless(self, tickets: list[Ticket], schedule: Lossless) -> None:
        """Starts a cohort whose rows advance as their drafts are accepted."""
        batch = self.generator.empty_batch(schedule)
        self._running.append(CohortBatch(batch, tickets))
        self._last_start = time.monotonic()
        requests = [ticket.request for ticket in tickets]
        sharing = self.generator.shared_prefixes(requests, schedule)
        batch.reserve(len(requests), requests, sharing)
        rows = batch.join(requests, sharing)
        for ticket, row in zip(tickets, rows, strict=True):
            ticket.row = row

    def next(self) -> CohortBatch | None:
        self.clear_done()  # a cohort may end with its first tokens, or be cancelled
        if not self._running:
            return None
        self._running.rotate(-1)
        return self._running[-1]

    def drop(self, tickets: Sequence[Ticket]) -> list[Ticket]:
        for batch in self._running:
            if tickets[0] in batch.all_tickets:
                self._running.remove(batch)
                return batch.all_tickets
        return list(tickets)

    def clear_done(self) -> None:
        for batch in [batch for batch in self._running if batch.cohort.is_done]:
            self._running.remove(batch)
            lifetime_s = time.monotonic() - batch.started_at
            self._mean_lifetime_s += (LIFETIME_WEIGHT if self._mean_lifetime_s else 1.0) * (
                lifetime_s - self._mean_lifetime_s
            )
