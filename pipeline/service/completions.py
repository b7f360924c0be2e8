"""The answer to one request, whole or as a stream of server-sent events, and how long it took. No Ray.

A `Form` says how it is written: completions here, chats in `chat`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

from actors.serving.engine import Progress
from pipeline.openai.logprobs import Decode
from pipeline.service import errors
from pipeline.service.answers import DONE, Choice, ChoiceBody, Envelope, event, is_news, merged, usage
from pipeline.service.endpoint import Answering, Endpoint
from pipeline.service.errors import ApiError
from pipeline.service.parse import AskedRequest, CompletionRequest
from skipdecode.engine.request import Request as EngineRequest


class Observer(Protocol):
    """Hears of every completion; `pipeline.service.metrics` tells Prometheus."""

    def answered(self, status: int, ttft_s: float | None, total_s: float) -> None: ...


class Watch:
    """The times of one request, told once."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self._began = observer, time.monotonic()
        self._first_s: float | None = None
        self._is_over = False

    def token(self) -> None:
        self._first_s = self._first_s or time.monotonic() - self._began

    def end(self, status: int) -> None:
        if not self._is_over:
            self._is_over = True
            self._observer.answered(status, self._first_s, time.monotonic() - self._began)


class Form(Protocol):
    """How an answer is written, and a stream of it."""

    asked: AskedRequest

    def choice(self, index: int, request: EngineRequest) -> Choice:
        """What gathers the progress of one of the rows."""

    def whole(self, entries: Sequence[ChoiceBody], choices: Sequence[Choice]) -> object:
        """The answer in one piece."""

    def chunks(self, entries: Sequence[ChoiceBody]) -> Iterator[object]:
        """The events for what is new."""

    def last(self, choices: Sequence[Choice]) -> object:
        """The event with the usage."""


class CompletionForm:
    def __init__(self, asked: CompletionRequest, model: str, decode: Decode) -> None:
        self.asked: AskedRequest = asked
        self._envelope, self._decode = Envelope(model), decode

    def choice(self, index: int, request: EngineRequest) -> Choice:
        return Choice(index, request, self.asked, self._decode)

    def whole(self, entries: Sequence[ChoiceBody], choices: Sequence[Choice]) -> object:
        return self._envelope.body(entries, usage(choices))

    def chunks(self, entries: Sequence[ChoiceBody]) -> Iterator[object]:
        yield self._envelope.body(entries)

    def last(self, choices: Sequence[Choice]) -> object:
        return self._envelope.body([], usage(choices))


async def whole(endpoint: Endpoint, form: Form, requests: list[EngineRequest], client: str, watch: Watch) -> object:
    """The answer in one piece; ApiError."""
    choices = [form.choice(n, r) for n, r in enumerate(requests)]
    parts: list[list[ChoiceBody]] = [[] for _ in choices]
    async with endpoint.answering(requests, client) as answering:
        async for number, progress in answering:
            watch.token()
            parts[number].append(choices[number].take(progress))
    watch.end(200)
    return form.whole([merged(part) for part in parts], choices)


async def streamed(
    endpoint: Endpoint, form: Form, requests: list[EngineRequest], client: str, watch: Watch, ends_at: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, until `ends_at` of the loop's clock. An ApiError before the first token is raised, a later
    one is the last event."""
    choices = [form.choice(n, r) for n, r in enumerate(requests)]
    limits, has_begun = endpoint.config.limits, False
    try:
        async with endpoint.answering(requests, client) as answering:
            while (made := await _next(answering, ends_at, limits.request_timeout_s)) is not None:
                watch.token()
                entries: dict[int, list[ChoiceBody]] = {}
                while made is not None:  # what has gathered goes in one event
                    number, progress = made
                    entries.setdefault(number, []).append(choices[number].take(progress))
                    made = await anext(answering, None) if answering.has_more else None
                news = [entry for entry in map(merged, entries.values()) if is_news(entry) or not has_begun]
                if news:
                    has_begun = True
                    for chunk in form.chunks(news):
                        yield event(chunk)
                await answering.pause(endpoint.num_answering / limits.stream_events_per_s)
    except ApiError as error:
        watch.end(error.status)
        if not has_begun:
            raise
        yield event(error.body)
        return
    watch.end(200)
    if form.asked.include_usage:
        yield event(form.last(choices))
    yield DONE


async def _next(answering: Answering, ends_at: float, limit_s: float) -> tuple[int, Progress] | None:
    """The next (number, progress), None at the end; ApiError 408 when it does not come in time."""
    try:
        # a timeout around the whole stream would fire in whatever task happens to run it
        async with asyncio.timeout_at(ends_at):
            return await anext(answering, None)
    except TimeoutError:
        raise errors.timed_out(limit_s) from None


async def continued(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The stream with its first event again in front; closed with whoever reads it, which frees the rows."""
    async with aclosing(stream):
        yield first
        async for part in stream:
            yield part
