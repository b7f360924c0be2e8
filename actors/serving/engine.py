"""The engine of a server: requests arrive at any time, each step decodes one token of one batch, tokens go out at once.

One thread owns it (`engine_thread`); it knows nothing of Ray, HTTP or text. Which rows decode together is the
scheduler's choice. A batch that cannot be decoded is tried again in halves until the request at fault is alone, so that
no request can hurt another, and no token is given out twice.

Requests in the background (`Ticket.on_answer`) have a queue of their own, and join while no other request waits, or in
one pass with the prompts of those that start, where a few more tokens cost little. A request that finds no place or
memory takes those of the youngest rows in the background. These are decoded again later, with the same tokens, since
random numbers depend on a row's id and step alone.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from actors.batching.prompt_scoring import is_scored_alone
from actors.failures import RowFailure
from actors.generator import Answer, Generator
from actors.memory import is_device_lost
from actors.serving.cohort_scheduler import CohortScheduler
from actors.serving.continuous_scheduler import ContinuousScheduler
from actors.serving.scheduler import EngineConfig, Scheduler, Ticket
from skipdecode.engine.logprobs import score_prompt
from skipdecode.engine.request import Request, completions_of, refuse_too_long
from skipdecode.engine.results import Completion, TokenLogprobs


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
    """Counts since the start, for metrics; of requests in the background only where it says so."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    layers_run: int = 0
    """Summed over the decode steps of rows that were not cancelled."""
    steps: int = 0
    row_steps: int = 0
    """Rows in the background included."""
    background_finished: int = 0
    background_failed: int = 0
    background_output_tokens: int = 0
    gave_way: int = 0
    """Times that a row in the background gave its place to another request."""


@dataclass
class Engine:
    """Call `add` and `cancel` at any time between steps, and `step` while it is not idle."""

    generator: Generator
    config: EngineConfig
    counts: EngineCounts = field(default_factory=EngineCounts)

    def __post_init__(self) -> None:
        self.waiting: deque[Ticket] = deque()
        self.background: deque[Ticket] = deque()
        """Waiting requests in the background."""
        self.open: dict[Ticket, None] = {}
        """Requests that were neither cancelled nor told their end, in the order of their arrival."""
        kind = ContinuousScheduler if self.config.scheduler == "continuous" else CohortScheduler
        self._scheduler: Scheduler = kind(self.generator, self.config)
        self._began: Literal["requests", "background"] | None = None  # all that the last step did

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.background and not self._scheduler.running

    @property
    def num_running(self) -> int:
        """Requests in batches, without those in the background."""
        return sum(not ticket.is_background for batch in self._scheduler.running for ticket in batch.tickets)

    @property
    def num_background(self) -> int:
        """Requests in the background that are in batches."""
        return sum(ticket.is_background for batch in self._scheduler.running for ticket in batch.tickets)

    @property
    def cache_bytes(self) -> int:
        return sum(batch.cache_bytes for batch in self._scheduler.running)

    def add(self, request: Request) -> Ticket:
        """Queues a request; raises ValueError if it can never run."""
        ticket = self.ticket(request)
        self.enqueue(ticket)
        return ticket

    def ticket(self, request: Request, on_answer: Callable[[Answer], None] | None = None) -> Ticket:
        """The ticket of a request; raises ValueError if it can never run. Safe to call from any thread. `on_answer` as
        in `Ticket`."""
        if on_answer is not None and is_scored_alone(request):
            request, on_answer = _with_a_token(request), partial(_answer_without_tokens, on_answer)
        refuse_too_long([request], self.generator.model.config.max_position_embeddings)
        return self._scheduler.ticket(self.generator.compiled(request), on_answer)

    def enqueue(self, ticket: Ticket) -> None:
        """Queues what `ticket` returned."""
        self.open[ticket] = None
        self._queue_of(ticket).append(ticket)

    def _queue_of(self, ticket: Ticket) -> deque[Ticket]:
        return self.background if ticket.is_background else self.waiting

    def cancel(self, ticket: Ticket) -> None:
        """Drops a request: it leaves the queue now, or its batch at the next step."""
        if ticket not in self.open:
            return
        del self.open[ticket]
        self.counts.cancelled += not ticket.is_background
        if ticket.row is None:
            self._queue_of(ticket).remove(ticket)
        else:
            ticket.row.cancel()

    def step(self) -> list[Progress]:
        """Starts at most one group of waiting requests, then lets the next batch do a step.

        While rows are in the background, it does one of the two: what starts has its first tokens without a step of
        theirs, and a request that arrives while prompts of the background run starts before the next step. If it
        raises, the engine has ended, and no request that is `open` will be answered.
        """
        made: list[Progress] = []
        try:
            self._step(made)
        except BaseException:
            self.open |= dict.fromkeys((progress.ticket for progress in made), None)  # what they made is lost
            raise
        return made

    def _step(self, made: list[Progress]) -> None:
        began, self._began = self._began, None
        if began != "requests":
            self._give_way()
            if newcomers := self._scheduler.choose(self.waiting):
                if len(newcomers) == len(self.waiting):
                    newcomers += self._scheduler.choose_beside(newcomers, self.background)
                made += self._guarded(newcomers, lambda: self._start(newcomers))
                self._began = "requests" if self.num_background else None
            elif began is None and not self.waiting and (rows := self._scheduler.choose_background(self.background)):
                made += self._guarded(rows, lambda: self._start(rows))
                self._began = "background"
        if self._began is None:
            self._decode(made)
        self._scheduler.clear_done()

    def _give_way(self) -> None:
        """Makes room for the waiting requests."""
        gone = self._scheduler.make_room(self.waiting)
        self.background.extendleft(reversed(gone))
        self.counts.gave_way += len(gone)

    def _decode(self, made: list[Progress]) -> None:
        batch = self._scheduler.next()
        if batch is not None:
            tickets = batch.tickets
            self.counts.steps += 1
            self.counts.row_steps += len(tickets)
            made += self._guarded(tickets, batch.step)

    def _start(self, newcomers: list[Ticket]) -> None:
        for ticket in newcomers:
            self._queue_of(ticket).remove(ticket)
            self.counts.input_tokens += 0 if ticket.is_background else len(ticket.request.prompt_tokens)
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
            (failed,) = left
            del self.open[failed]
            if failed.on_answer is not None:
                self.counts.background_failed += 1
                failed.on_answer(RowFailure("engine_error", reason))
                return []
            self.counts.failed += 1
            return [Progress(failed, [], [], [], error=reason)]
        for ticket in reversed(left):
            ticket.row, ticket.max_batch_rows = None, max(1, len(select) // 2)
            self._queue_of(ticket).appendleft(ticket)
        return made

    def _progress(self, tickets: Sequence[Ticket]) -> list[Progress]:
        """What is new for these tickets. A row that was started again may end before it has anything new."""
        made = []
        for ticket in tickets:
            row = ticket.row
            assert row is not None
            if ticket.is_background:
                self._answer(ticket)
                continue
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

    def _answer(self, ticket: Ticket) -> None:
        """Answers a request in the background if its row has ended."""
        row = ticket.row
        if ticket not in self.open or ticket.on_answer is None or row is None or row.is_running:
            return
        del self.open[ticket]
        (completion,) = completions_of([row], ticket.schedule)
        if ticket.prompt_logprobs is not None:
            completion = replace(completion, prompt_logprobs=ticket.prompt_logprobs)
        self.counts.background_finished += 1
        self.counts.background_output_tokens += len(completion.tokens)
        ticket.on_answer(completion)

    def _layers(self, ticket: Ticket, n: int) -> int:
        """Number of layers that token y_n ran."""
        schedule, row = ticket.schedule, ticket.row
        if row is not None and 0 < n <= len(row.layers):
            return row.layers[n - 1]
        return schedule.num_layers if n == 0 else schedule.step(n - 1).num_layers_run


def _with_a_token(request: Request) -> Request:
    """A request that only scores its prompt, as one that the engine takes."""
    return replace(request, sampling=replace(request.sampling, max_new_tokens=1))


def _answer_without_tokens(on_answer: Callable[[Answer], None], answer: Answer) -> None:
    if isinstance(answer, Completion):
        answer = Completion([], "length", 0, 0, prompt_logprobs=answer.prompt_logprobs)
    on_answer(answer)
