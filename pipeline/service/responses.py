"""The response to one request, whole or as a stream of server-sent events, and how long it took. No Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from actors.serving.engine import Progress
from pipeline.service.answers import DONE, Body, CompletionAnswer, event, is_news, merged
from pipeline.service.endpoint import Answering, Endpoint
from pipeline.service.errors import ApiError

Observer: TypeAlias = Callable[[int, float | None, float], None]
"""Called once per completion or chat: status, seconds to the first token (None: there was none), seconds in all."""


class Watch:
    """Measures one request, and tells its observer once."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self._began = observer, time.monotonic()
        self._first_s: float | None = None
        self._is_over = False

    def token(self) -> None:
        self._first_s = self._first_s or time.monotonic() - self._began

    def end(self, status: int) -> None:
        if not self._is_over:
            self._is_over = True
            self._observer(status, self._first_s, time.monotonic() - self._began)


async def whole(endpoint: Endpoint, answer: CompletionAnswer, client: str, watch: Watch) -> Body:
    """The answer in one piece; ApiError."""
    parts: list[list[Body]] = [[] for _ in answer.choices]
    async with endpoint.answering([choice.request for choice in answer.choices], client) as answering:
        async for number, progress in answering:
            watch.token()
            parts[number].append(answer.choices[number].take(progress))
    watch.end(200)
    return answer.whole([merged(part) for part in parts])


async def streamed(
    endpoint: Endpoint, answer: CompletionAnswer, client: str, watch: Watch, ends_at: float
) -> AsyncGenerator[bytes, None]:
    """Server-sent events until `ends_at` of the loop's clock. An ApiError before the first token is raised, a later one
    is the last event."""
    limits, has_begun = endpoint.config.limits, False
    try:
        async with endpoint.answering([choice.request for choice in answer.choices], client) as answering:
            while (made := await _next(answering, ends_at, limits.request_timeout_s)) is not None:
                watch.token()
                entries: dict[int, list[Body]] = {}
                while made is not None:  # whatever has gathered goes into one event
                    number, progress = made
                    entries.setdefault(number, []).append(answer.choices[number].take(progress))
                    made = await anext(answering, None) if answering.has_more else None
                news = [entry for entry in map(merged, entries.values()) if is_news(entry) or not has_begun]
                if news:
                    has_begun = True
                    for chunk in answer.chunks(news):
                        yield event(chunk)
                await answering.pause(endpoint.num_answering / limits.stream_events_per_s)
    except ApiError as error:
        watch.end(error.status)
        if not has_begun:
            raise
        yield event(error.body)
        return
    watch.end(200)
    if answer.asked.include_usage:
        yield event(answer.usage_chunk())
    yield DONE


async def _next(answering: Answering, ends_at: float, limit_s: float) -> tuple[int, Progress] | None:
    """The next (number, progress), None at the end; ApiError 408 when it does not come in time."""
    try:
        # a timeout around the whole stream would fire in whatever task happens to run it
        async with asyncio.timeout_at(ends_at):
            return await anext(answering, None)
    except TimeoutError:
        raise ApiError.timed_out(limit_s) from None


async def continued(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The stream with its first event put back; closing it closes `stream`, which frees the rows."""
    async with aclosing(stream):
        yield first
        async for part in stream:
            yield part
