"""A replica without its HTTP: takes engine requests, hands back their progress, and knows limits and health.

One engine thread decodes; everything else runs in the event loop. Each HTTP request has an `Answering` that collects
the progress of its prompts; leaving it, for whatever reason, removes its rows from the engine. No Ray.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.serving.engine import Engine, Progress
from actors.serving.engine_thread import EngineDead, EngineThread, Overloaded
from actors.serving.scheduler import EngineConfig, Ticket
from pipeline.service.api_error import ApiError
from pipeline.service.config import ServeConfig
from pipeline.service.engine_requests import Prompts
from pipeline.service.shares import Shares
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import check_continuous
from skipdecode.engine.request import Request

TRIED_TOKENS = 256  # length of the prompt that is timed
STALL_MARGIN = 6  # a step may also score its prompts, next to other work
SWITCH_S = 0.0005  # the engine thread reacquires the GIL after every operator; at the default 5 ms, steps are slow


@dataclass(frozen=True)
class EndpointSpec:
    """The settings of a replica: a checked configuration, and what was resolved where the application was built."""

    config: ServeConfig
    generator: GeneratorConfig
    key_digests: tuple[bytes, ...]
    """SHA-256 of the API keys; without any, only loopback is answered."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """The configuration of batches (`pipeline.batches.run_config.job_settings`)."""
    model_digest: str = ""
    """`pipeline.generate.sharing.model_digest`, where batches share the replicas."""


def resolve_stall_s(generator: Generator, config: ServeConfig) -> float:
    """`limits.stall_s`, or the time of the longest legitimate step if that is more, estimated by timing a prompt.

    Otherwise a slow model would be restarted for ever by a request with `engine.max_prefill_tokens`.
    """
    positions = generator.model.config.max_position_embeddings
    count = min(TRIED_TOKENS, positions - 1)
    request = Request("stall", [generator.model.config.filler_token_id] * count, Sampling(max_new_tokens=1))
    for _ in range(2):  # the first one warms up
        began = time.monotonic()
        generator([request], may_measure=False)
        token_s = (time.monotonic() - began) / count
    most = max(config.engine.max_prefill_tokens, positions)
    return max(config.limits.stall_s, STALL_MARGIN * most * token_s)


def choose_scheduler(config: ServeConfig, generator: Generator) -> Literal["cohort", "continuous"]:
    """`engine.scheduler`, with `auto` resolved for the device and the schedule of this replica."""
    if config.engine.scheduler != "auto":
        return config.engine.scheduler
    if config.sampling.deterministic:
        return "cohort"
    if config.batches.workers == "shared":
        return "continuous"
    try:
        check_continuous(generator.schedule(config.sampling.max_new_tokens))
    except ValueError:
        return "cohort"
    return "continuous" if generator.device.type == "cpu" else "cohort"


class Answering:
    """The progress of one HTTP request: `async for` gives (prompt number, progress) until every prompt has ended."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.tickets: list[Ticket] = []
        self._arrived: asyncio.Queue[Progress] = asyncio.Queue()
        self._numbers: dict[Ticket, int] = {}
        self._num_open = len(requests)
        self._num_running = len(requests)
        self._all_ended = asyncio.Event()

    def begin(self, tickets: list[Ticket]) -> None:
        self.tickets = tickets
        self._numbers = {ticket: number for number, ticket in enumerate(tickets)}

    def put(self, progress: Progress) -> None:
        self._arrived.put_nowait(progress)
        self._num_running -= progress.finish_reason is not None
        if self._num_running == 0 or progress.error is not None:
            self._all_ended.set()

    async def pause(self, seconds: float) -> None:
        """Waits for more progress to gather, but not beyond the end."""
        if not self._all_ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._all_ended.wait()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Progress]:
        """ApiError if a prompt could not be decoded, or the engine has ended."""
        if self._num_open == 0:
            raise StopAsyncIteration
        progress = await self._arrived.get()
        if progress.is_dead:
            raise ApiError.unavailable(f"the engine has ended: {progress.error}", "engine_dead")
        if progress.error is not None:
            raise ApiError.engine_error(f"the request could not be decoded: {progress.error}")
        self._num_open -= progress.finish_reason is not None
        return self._numbers[progress.ticket], progress

    @property
    def has_more(self) -> bool:
        """Whether more progress has arrived."""
        return not self._arrived.empty()


class Endpoint:
    def __init__(self, spec: EndpointSpec, *, generator: Generator | None = None) -> None:
        """Loads the model unless `generator` is given."""
        sys.setswitchinterval(SWITCH_S)
        config = spec.config
        self.spec, self.config = spec, config
        stall_s = config.limits.stall_s
        if generator is None:
            # in a thread that ends: this thread's OpenMP pool would stay and slow down that of the engine thread
            with ThreadPoolExecutor(1, "load") as loader:
                generator = loader.submit(Generator, spec.generator).result()
                stall_s = loader.submit(resolve_stall_s, generator, config).result()
        self.generator = generator
        engine = EngineConfig(
            scheduler=choose_scheduler(config, generator),
            batch_size=config.engine.batch_size,
            max_cohorts=config.engine.max_cohorts,
            max_prefill_tokens=config.engine.max_prefill_tokens,
            background_prefill_tokens=config.batches.max_prefill_tokens,
        )
        self.engine = Engine(self.generator, engine)
        self.prompts = Prompts(generator, config)
        self.shares = Shares(config.limits)
        limits = config.limits
        self.thread = EngineThread(self.engine, self._deliver, max_waiting=limits.max_waiting, stall_s=stall_s)
        self.is_draining = False
        self.num_answering = 0
        """Requests that have been queued and are being answered."""
        self.num_responses = 0
        """HTTP requests that arrived before the drain and whose last byte has not been sent."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[Ticket, Answering] = {}

    def check(self) -> None:
        """Raises EngineDead if the replica cannot answer any more."""
        self.thread.check()

    def close(self) -> None:
        self.thread.stop()
        self.shares.close()

    def refuse_when_draining(self) -> None:
        """ApiError if the server is about to stop."""
        if self.is_draining:
            raise ApiError.unavailable("the server is shutting down", "draining")

    def refuse(self) -> None:
        """ApiError if no request is accepted now. Called before a body is read, so that an overload costs nothing."""
        self.refuse_when_draining()
        try:
            self.check()
        except EngineDead as error:
            raise ApiError.unavailable(f"the engine has ended: {error}", "engine_dead") from error
        if (waiting := self.thread.num_waiting) >= self.config.limits.max_waiting:
            full = Overloaded(waiting, self.thread.retry_after_s())
            raise ApiError.overloaded(str(full), full.retry_after_s)

    @asynccontextmanager
    async def answering(self, requests: Sequence[Request], client: str = "") -> AsyncIterator[Answering]:
        """Queues the requests, and cancels on leaving what still runs. ApiError if the queue is full or the client has
        too many prompts in progress."""
        with self.shares.prompts(client, len(requests), self.thread.retry_after_s(len(requests))):
            async with self._answering(requests) as answering:
                yield answering

    @asynccontextmanager
    async def _answering(self, requests: Sequence[Request]) -> AsyncIterator[Answering]:
        self._loop = asyncio.get_running_loop()
        answering = Answering(requests)

        def begin(tickets: list[Ticket]) -> None:
            answering.begin(tickets)
            self._waiting |= dict.fromkeys(tickets, answering)

        try:
            self.thread.submit(requests, begin)
        except Overloaded as error:
            raise ApiError.overloaded(str(error), error.retry_after_s) from error
        except EngineDead as error:
            raise ApiError.unavailable(f"the engine has ended: {error}", "engine_dead") from error
        except ValueError as error:  # what only the schedule knows, e.g. too few max_tokens
            raise ApiError(400, str(error), code="invalid_value") from error
        self.num_answering += 1
        try:
            yield answering
        finally:
            self.num_answering -= 1
            left = [ticket for ticket in answering.tickets if self._waiting.pop(ticket, None) is not None]
            if left:
                self.thread.cancel(left)

    def _deliver(self, made: Sequence[Progress]) -> None:
        """In the engine's thread: hands a turn's progress to the event loop, once for all."""
        loop = self._loop
        if loop is not None and not loop.is_closed() and made:
            loop.call_soon_threadsafe(self._hand_out, made)

    def _hand_out(self, made: Sequence[Progress]) -> None:
        for progress in made:
            is_over = progress.finish_reason is not None or progress.error is not None
            answering = self._waiting.get(progress.ticket)
            if is_over:
                self._waiting.pop(progress.ticket, None)
            if answering is not None:
                answering.put(progress)
