"""The answer to one completion request, whole or as a stream of server-sent events, and how long it took. No Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from actors.engine import Progress
from pipeline.service import errors
from pipeline.service.answers import DONE, Choice, ChoiceBody, CompletionBody, Envelope, event, merged, usage
from pipeline.service.endpoint import Answering, Endpoint
from pipeline.service.errors import ApiError
from pipeline.service.parse import CompletionRequest
from skipdecode.request import Request as EngineRequest


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


async def whole(
    endpoint: Endpoint, asked: CompletionRequest, requests: list[EngineRequest], client: str, watch: Watch
) -> CompletionBody:
    """The answer in one piece; ApiError."""
    choices = [Choice(n, r, asked, endpoint.tokenizer_decode) for n, r in enumerate(requests)]
    parts: list[list[ChoiceBody]] = [[] for _ in choices]
    async with endpoint.answering(requests, client) as answering:
        async for number, progress in answering:
            watch.token()
            parts[number].append(choices[number].take(progress))
    watch.end(200)
    return Envelope(endpoint.config.served_name).body([merged(part) for part in parts], usage(choices))


async def streamed(
    endpoint: Endpoint,
    asked: CompletionRequest,
    requests: list[EngineRequest],
    client: str,
    watch: Watch,
    ends_at: float,
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, until `ends_at` of the loop's clock. An ApiError before the first token is raised, a later
    one is the last event."""
    choices = [Choice(n, r, asked, endpoint.tokenizer_decode) for n, r in enumerate(requests)]
    config = endpoint.config
    envelope = Envelope(config.served_name)
    limit_s, has_begun = config.limits.request_timeout_s, False
    try:
        async with endpoint.answering(requests, client) as answering:
            while (made := await _next(answering, ends_at, limit_s)) is not None:
                watch.token()
                entries: dict[int, list[ChoiceBody]] = {}
                while made is not None:  # what has gathered goes in one event
                    number, progress = made
                    entries.setdefault(number, []).append(choices[number].take(progress))
                    made = await anext(answering, None) if answering.has_more else None
                news = [entry for entry in map(merged, entries.values()) if is_news(entry) or not has_begun]
                if news:
                    has_begun = True
                    yield event(envelope.body(news))
                await answering.pause(endpoint.num_answering / config.limits.stream_events_per_s)
    except ApiError as error:
        watch.end(error.status)
        if not has_begun:
            raise
        yield event(error.body)
        return
    watch.end(200)
    if asked.include_usage:
        yield event(envelope.body([], usage(choices)))
    yield DONE


def is_news(entry: ChoiceBody) -> bool:
    """Whether a stream should show it: half a character is none, but what is asked about its tokens is."""
    about_tokens = entry.get("token_ids") or entry.get("layers") or (entry["logprobs"] and entry["logprobs"]["tokens"])
    return bool(entry["text"] or entry["finish_reason"] or about_tokens)


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
