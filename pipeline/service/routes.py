"""The HTTP of a replica: routes, bodies in, answers and streams out. ASGI around an `Endpoint`. No Ray."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.engine_thread import EngineDead
from pipeline.openai_params import cut
from pipeline.service import errors
from pipeline.service.answers import DONE, Choice, Envelope, encode, event, merged, model_card, usage
from pipeline.service.endpoint import Answering, Endpoint
from pipeline.service.errors import ApiError
from pipeline.service.keys import check_caller
from pipeline.service.parse import CompletionRequest, parse_body, parse_completion
from skipdecode.request import Request as EngineRequest

SMALL_BODY_BYTES = 8 << 10  # milliseconds of tokenizing, in the event loop; a larger body is read beside it
PAGE = Path(__file__).with_name("page.html")


class Observer(Protocol):
    """Hears of every completion; `pipeline.service.metrics` tells Prometheus."""

    def answered(self, status: int, ttft_s: float | None, total_s: float) -> None: ...


class NoObserver:
    def answered(self, status: int, ttft_s: float | None, total_s: float) -> None:
        """Nobody listens."""


def create_app(
    endpoint: Endpoint, observer: Observer | None = None, metrics: Callable[[], Awaitable[str]] | None = None
) -> FastAPI:
    """`metrics` gives Prometheus text for `GET /metrics`."""
    app = FastAPI(title="skipdecode", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CountResponses, endpoint=endpoint)
    started_at, heard = int(time.time()), observer or NoObserver()
    config = endpoint.config
    card = model_card(config.served_name, started_at, endpoint.generator.model.config.max_position_embeddings)

    def check(request: Request) -> None:
        host = request.client.host if request.client else None
        check_caller(endpoint.spec.key_digests, host, request.headers.get("authorization"))

    def read(body: bytes) -> tuple[CompletionRequest, list[EngineRequest]]:
        asked = parse_completion(parse_body(body), config.limits.max_prompts)
        return asked, endpoint.requests(asked)

    async def answer(request: Request, watch: Watch, ends_at: float) -> Response:
        body = await read_body(request, config.limits.max_body_bytes)
        asked, requests = await asyncio.to_thread(read, body) if len(body) > SMALL_BODY_BYTES else read(body)
        if not asked.stream:
            return reply(await whole(endpoint, asked, requests, watch))
        stream = streamed(endpoint, asked, requests, watch, ends_at)
        # the first event decides the status: an overloaded server says so, it does not stream it
        first = await anext(stream)
        return StreamingResponse(continued(first, stream), media_type="text/event-stream", headers=STREAM_HEADERS)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        check(request)
        watch, limit_s = Watch(heard), config.limits.request_timeout_s
        ends_at = asyncio.get_running_loop().time() + limit_s
        try:
            endpoint.refuse()
            try:
                async with asyncio.timeout_at(ends_at):
                    return await answer(request, watch, ends_at)
            except TimeoutError:
                raise errors.timed_out(limit_s) from None
        except ApiError as error:
            watch.end(error.status)
            raise

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check(request)
        return reply({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        check(request)
        if name != config.served_name:
            message = f"the model {cut(repr(name))} does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")
        return reply(card)

    @app.get("/health")
    async def health() -> Response:
        state = {"model": config.served_name, "running": endpoint.thread.num_running}
        state |= {"waiting": endpoint.thread.num_waiting}
        try:
            endpoint.check()
        except EngineDead as error:
            return reply(state | {"status": "dead", "reason": str(error)}, 503)
        if endpoint.is_draining:
            return reply(state | {"status": "draining"}, 503)
        return reply(state | {"status": "ok"})

    @app.get("/metrics")
    async def prometheus(request: Request) -> Response:
        check(request)
        if metrics is None:
            raise ApiError(404, "metrics come from Ray, and this server runs without it")
        return Response(await metrics(), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return reply(error.body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        reason = f"{request.method} {request.url.path}: {error.detail}"
        return reply(ApiError(error.status_code, reason, code="not_found").body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return reply(ApiError(500, f"{type(error).__name__}: {error}"[:500], kind="server_error").body, 500)

    return app


class CountResponses:
    """ASGI around all routes: a drain waits until what has arrived before it is answered to the last byte."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app, self._endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # what comes later is refused, and clients that try again and again must not keep the drain waiting
        if scope["type"] != "http" or self._endpoint.is_draining:
            await self._app(scope, receive, send)
            return
        self._endpoint.num_responses += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._endpoint.num_responses -= 1


STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


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


def reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(body), status, dict(headers or {}), "application/json")


async def read_body(request: Request, limit: int) -> bytes:
    """ApiError 413 for more than `limit` bytes, before they are all here."""
    too_large = ApiError(413, f"the body has more than {limit} bytes (limits.max_body_bytes)", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def whole(
    endpoint: Endpoint, asked: CompletionRequest, requests: list[EngineRequest], watch: Watch
) -> dict[str, Any]:
    """The answer in one piece; ApiError."""
    choices = [Choice(n, r, asked, endpoint.tokenizer_decode) for n, r in enumerate(requests)]
    parts: list[list[dict[str, Any]]] = [[] for _ in choices]
    async with endpoint.answering(requests) as answering:
        async for number, progress in answering:
            watch.token()
            parts[number].append(choices[number].take(progress))
    watch.end(200)
    return Envelope(endpoint.config.served_name).body([merged(part) for part in parts], usage(choices))


async def streamed(
    endpoint: Endpoint, asked: CompletionRequest, requests: list[EngineRequest], watch: Watch, ends_at: float
) -> AsyncIterator[bytes]:
    """Server-sent events, until `ends_at` of the loop's clock. An ApiError before the first token is raised, a later
    one is the last event."""
    choices = [Choice(n, r, asked, endpoint.tokenizer_decode) for n, r in enumerate(requests)]
    config = endpoint.config
    envelope = Envelope(config.served_name)
    limit_s, has_begun = config.limits.request_timeout_s, False
    try:
        async with endpoint.answering(requests) as answering:
            while (made := await _next(answering, ends_at, limit_s)) is not None:
                watch.token()
                entries: dict[int, list[dict[str, Any]]] = {}
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


def is_news(entry: dict[str, Any]) -> bool:
    """Whether a stream should show it: half a character is none, but what is asked about its tokens is."""
    about_tokens = entry.get("token_ids") or entry.get("layers") or (entry["logprobs"] and entry["logprobs"]["tokens"])
    return bool(entry["text"] or entry["finish_reason"] or about_tokens)


async def _next(answering: Answering, ends_at: float, limit_s: float) -> Any:
    """The next (number, progress), None at the end; ApiError 408 when it does not come in time."""
    try:
        # a timeout around the whole stream would fire in whatever task happens to run it
        async with asyncio.timeout_at(ends_at):
            return await anext(answering, None)
    except TimeoutError:
        raise errors.timed_out(limit_s) from None


async def continued(first: bytes, stream: Any) -> AsyncIterator[bytes]:
    """The stream with its first event again in front; closed with whoever reads it, which frees the rows."""
    async with aclosing(stream):
        yield first
        async for part in stream:
            yield part
