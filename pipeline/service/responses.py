"""The response to one request, whole or as a stream of server-sent events, and how long it took. No Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from actors.serving.engine import Progress
from pipeline.service.answers import DONE, Body, CompletionAnswer, encode, encode_in_pieces, event, is_news
from pipeline.service.api_error import ApiError
from pipeline.service.endpoint import Answering, Endpoint

Observer: TypeAlias = Callable[[int, float | None, float], None]
"""Called once per completion or chat: status, seconds to the first token (None: there was none), seconds in all."""


Made: TypeAlias = dict[int, list[Progress]]
"""Progress by the number of the choice."""
SMALL_ENTRIES = 1000
"""Tokens with what is said of them; an answer with more is made in a thread. A token with five alternatives takes some
50 microseconds."""


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


async def whole(endpoint: Endpoint, answer: CompletionAnswer, client: str, watch: Watch) -> bytes:
    """The JSON of the answer in one piece; ApiError."""
    made: Made = {number: [] for number in range(len(answer.choices))}
    async with endpoint.answering([choice.request for choice in answer.choices], client) as answering:
        async for number, progress in answering:
            watch.token()
            made[number].append(progress)
    if _is_small(made):
        body = _body(answer, made, encode)
    else:
        body = await endpoint.shares.in_thread(client, _body, answer, made, encode_in_pieces)
    watch.end(200)
    return body


def _body(answer: CompletionAnswer, made: Made, encode: Callable[[Body], bytes]) -> bytes:
    return encode(answer.whole(answer.entries(made)))


def _is_small(made: Made) -> bool:
    """Whether what is sent for it takes milliseconds to make."""
    num_entries = sum(len(one.tokens) + len(one.prompt_logprobs) for parts in made.values() for one in parts)
    return num_entries <= SMALL_ENTRIES


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
                gathered: Made = {}
                while made is not None:  # whatever has gathered goes into one event
                    number, progress = made
                    gathered.setdefault(number, []).append(progress)
                    made = await anext(answering, None) if answering.has_more else None
                if _is_small(gathered):
                    events = _events(answer, gathered, not has_begun, encode)
                else:
                    is_first, encoder = not has_begun, encode_in_pieces
                    events = await endpoint.shares.in_thread(client, _events, answer, gathered, is_first, encoder)
                for part in events:
                    has_begun = True
                    yield part
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


def _events(answer: CompletionAnswer, made: Made, is_first: bool, encode: Callable[[Body], bytes]) -> list[bytes]:
    """The events for the progress, if any of it is worth one; the first always is."""
    news = [entry for entry in answer.entries(made) if is_news(entry) or is_first]
    return [event(chunk, encode) for chunk in answer.chunks(news)] if news else []


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
