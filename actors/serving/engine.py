"""The engine of a server: requests arrive at any time, each step decodes one token of one batch, tokens go out at once.

One thread owns it (`engine_thread`); it knows nothing of Ray, HTTP or text. Which rows decode together is the
scheduler's choice. A batch that cannot be decoded is tried again in halves until the request at fault is alone, so that
no request can hurt another, and no token is given out twice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.generator import Generator
from actors.memory import is_device_lost
from actors.serving.cohort_scheduler import CohortScheduler
from actors.serving.continuous_scheduler import ContinuousScheduler
from actors.serving.scheduler import EngineConfig, Scheduler, Ticket
from skipdecode.engine.logprobs import score_prompt
from skipdecode.engine.request import Request, refuse_too_long
from skipdecode.engine.results import TokenLogprobs


@dataclass(frozen=True)
class Progress:
    """What one step produced for one request."""

    ticket: Ticket
    tokens: list[int]
    layers: list[int]
    """Number of layers that each of `tokens` ran; all layers for the first one, which comes from the prompt."""
    logprobs: list[TokenLogprobs]
    finish_reason: str | None = None
    """`stop` or `length`, with the last tokens."""
    error: str | None = None
    """Why there will be no more tokens."""
    is_dead: bool = False
    """The error ended the engine, not only this request."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Scores of the prompt's tokens except the first, if asked for; they come with the first new tokens."""
    is_valid: bool | None = None
    """With the end of an answer that has a grammar: whether it is all that the grammar asks for."""


@dataclass
class EngineCounts:
    """Counts since the start, for metrics."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    layers_run: int = 0
    """Summed over the decode steps of rows that were not cancelled."""
    steps: int = 0
    row_steps: int = 0


@dataclass
class Engine:
    """Call `add` and `cancel` at any time between steps, and `step` while it is not idle."""

    generator: Generator
    config: EngineConfig
    counts: EngineCounts = field(default_factory=EngineCounts)

    def __post_init__(self) -> None:
        self.waiting: deque[Ticket] = deque()
        self.open: dict[Ticket, None] = {}
        """Requests that were neither cancelled nor told their end, in the order of their arrival."""
        kind = ContinuousScheduler if self.config.scheduler == "continuous" else CohortScheduler
        self._scheduler: Scheduler = kind(self.generator, self.config)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self._scheduler.running

    @property
    def num_running(self) -> int:
        return sum(len(batch.tickets) for batch in self._scheduler.running)

    @property
    def cache_bytes(self) -> int:
        return sum(batch.cache_bytes for batch in self._scheduler.running)

    def add(self, request: Request) -> Ticket:
        """Queues a request; raises ValueError if it can never run."""
        ticket = self.ticket(request)
        self.enqueue(ticket)
        return ticket

    def ticket(self, request: Request) -> Ticket:
        """The ticket of a request; raises ValueError if it can never run. Safe to call from any thread."""
        refuse_too_long([request], self.generator.model.config.max_position_embeddings)
        return self._scheduler.ticket(self.generator.compiled(request))

    def enqueue(self, ticket: Ticket) -> None:
        """Queues what `ticket` returned."""
        self.open[ticket] = None
        self.waiting.append(ticket)

    def cancel(self, ticket: Ticket) -> None:
        """Drops a request: it leaves the queue now, or its batch at the next step."""
        if ticket not in self.open:
            return
        del self.open[ticket]
        self.counts.cancelled += 1
        if ticket.row is None:
            self.waiting.remove(ticket)
        else:
            ticket.row.cancel()

    def step(self) -> list[Progress]:
        """Starts at most one group of waiting requests, then lets the next batch do a step.

        If it raises, the engine has ended, and no request that is `open` will be answered.
        """
        made: list[Progress] = []
        try:
            self._step(made)
        except BaseException:
            self.open |= dict.fromkeys((progress.ticket for progress in made), None)  # what they made is lost
            raise
        return made

    def _step(self, made: list[Progress]) -> None:
        newcomers = self._scheduler.choose(self.waiting)
        if newcomers:
            for ticket in newcomers:
                self.waiting.remove(ticket)
                self.counts.input_tokens += len(ticket.request.prompt_tokens)
            made += self._guarded(newcomers, lambda: self._start(newcomers))
        batch = self._scheduler.next()
        if batch is not None:
            tickets = batch.tickets
            self.counts.steps += 1
            self.counts.row_steps += len(tickets)
            made += self._guarded(tickets, batch.step)
        self._scheduler.clear_done()

    def _start(self, newcomers: list[Ticket]) -> None:
        for ticket in newcomers:  # before they join a batch, which must not suffer if this fails
            if ticket.request.score_prompt and ticket.prompt_logprobs is None:
                top = ticket.request.top_logprobs or 0
                ticket.prompt_logprobs = score_prompt(self.generator.model, ticket.request.prompt_tokens, top)
        self._scheduler.start(newcomers)

    def _guarded(self, tickets: Sequence[Ticket], work: Callable[[], None]) -> list[Progress]:
        """Does the work for these tickets. If it fails, they are queued again to be decoded in halves."""
        try:
            work()
        except Exception as error:  # whatever the cause, it must not take the neighbours along
            if is_device_lost(error, self.generator.devices):
                raise  # every later batch would fail too; a new process may not
            reason = f"{type(error).__name__}: {error}"[:2000]
        else:
            return self._progress(tickets)
        # Outside `except`: the traceback holds the failed batch's cache.
        select = [ticket for ticket in self._scheduler.drop(tickets) if ticket in self.open]
        made = self._progress([ticket for ticket in select if ticket.has_ended])  # these are complete
        left = [ticket for ticket in select if not ticket.has_ended]
        if len(select) == 1 and left:
            self.counts.failed += 1
            del self.open[left[0]]
            return [Progress(left[0], [], [], [], error=reason)]
        for ticket in reversed(left):
            ticket.row, ticket.max_batch_rows = None, max(1, len(select) // 2)
            self.waiting.appendleft(ticket)
        return made

    def _progress(self, tickets: Sequence[Ticket]) -> list[Progress]:
        """What is new for these tickets. A row that was started again may end before it has anything new."""
        made = []
        for ticket in tickets:
            row = ticket.row
            assert row is not None
            new = row.tokens[ticket.num_sent :]
            if ticket not in self.open or (not new and row.is_running):
                continue
            layers = [self._layers(ticket, n) for n in range(ticket.num_sent, len(row.tokens))]
            logprobs = row.logprobs[ticket.num_sent : len(row.tokens)]
            self.counts.output_tokens += len(new)
            self.counts.layers_run += sum(layers) - (layers[0] if ticket.num_sent == 0 else 0)
            scored = ticket.prompt_logprobs if ticket.num_sent == 0 else None
            ticket.num_sent += len(new)
            is_valid = None
            if not row.is_running:
                self.counts.finished += 1
                del self.open[ticket]
                is_valid = row.is_valid
            made.append(
                Progress(
                    ticket,
                    new,
                    layers,
                    logprobs,
                    row.finish_reason,
                    prompt_logprobs=scored or (),
                    is_valid=is_valid,
                )
            )
        return made

    def _layers(self, ticket: Ticket, n: int) -> int:
        """Number of layers that token y_n ran."""
        schedule, row = ticket.schedule, ticket.row
        if n and row is not None and row.layers:
            return row.layers[n - 1]
        return schedule.num_layers if n == 0 else schedule.step(n - 1).num_layers_run
