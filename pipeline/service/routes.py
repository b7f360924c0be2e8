"""The HTTP of a replica: its routes, who may call them, and errors as answers. ASGI around an `Endpoint`. No Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.serving.engine_thread import EngineDead
from pipeline.openai.parameters import cut
from pipeline.service import errors
from pipeline.service.answers import encode, model_card
from pipeline.service.api_keys import check_key
from pipeline.service.chat import ChatForm
from pipeline.service.completions import CompletionForm, Form, Observer, Watch, continued, streamed, whole
from pipeline.service.endpoint import Endpoint
from pipeline.service.errors import ApiError
from pipeline.service.local_callers import check_local
from pipeline.service.parse import parse_body, parse_chat, parse_completion
from skipdecode.engine.request import Request as EngineRequest

SMALL_BODY_BYTES = 8 << 10  # milliseconds of tokenizing, in the event loop; a larger body is read beside it
PAGE = Path(__file__).with_name("page.html")
CUT_S = 5.0  # beyond limits.request_timeout_s, in which a stream may say that it has taken too long
Read = Callable[[bytes], tuple[Form, list[EngineRequest]]]
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class NoObserver:
    def answered(self, status: int, ttft_s: float | None, total_s: float) -> None:
        """Nobody listens."""


def create_app(
    endpoint: Endpoint, observer: Observer | None = None, metrics: Callable[[], Awaitable[str]] | None = None
) -> FastAPI:
    """`metrics` gives Prometheus text for `GET /metrics`."""
    app = FastAPI(title="skipdecode", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CountResponses, endpoint=endpoint)
    routes = Routes(endpoint, observer or NoObserver(), metrics)
    app.post("/v1/completions")(routes.completions)
    app.post("/v1/chat/completions")(routes.chat)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model)
    app.get("/health")(routes.health)
    app.get("/metrics")(routes.prometheus)
    app.get("/")(routes.page)
    app.exception_handler(ApiError)(on_api_error)
    app.exception_handler(HTTPException)(on_http_error)
    app.exception_handler(Exception)(on_error)
    return app


class Routes:
    """One method per route."""

    def __init__(self, endpoint: Endpoint, observer: Observer, metrics: Callable[[], Awaitable[str]] | None) -> None:
        self._endpoint, self._observer, self._metrics = endpoint, observer, metrics
        self._config = endpoint.config
        positions = endpoint.generator.model.config.max_position_embeddings
        has_chat = endpoint.prompts.chat_template is not None
        self._card = model_card(self._config.served_name, int(time.time()), positions, has_chat)

    async def completions(self, request: Request) -> Response:
        return await self._guarded(request, self._read, SMALL_BODY_BYTES)

    async def chat(self, request: Request) -> Response:
        return await self._guarded(request, self._read_chat, 0)  # a template takes its time

    async def _guarded(self, request: Request, read: Read, small_bytes: int) -> Response:
        """Who may, while there is room, and not for ever. Bodies of up to `small_bytes` are read in the event loop."""
        client = self._check(request)
        watch, limit_s = Watch(self._observer), self._config.limits.request_timeout_s
        ends_at = asyncio.get_running_loop().time() + limit_s
        try:
            self._endpoint.refuse()
            try:
                async with asyncio.timeout_at(ends_at):
                    body = await read_body(request, self._config.limits.max_body_bytes)
                    is_small = len(body) <= small_bytes
                    form, requests = read(body) if is_small else await asyncio.to_thread(read, body)
                    return await self._answer(form, requests, client, watch, ends_at)
            except TimeoutError:
                raise errors.timed_out(limit_s) from None
        except ApiError as error:
            watch.end(error.status)
            raise

    async def models(self, request: Request) -> Response:
        self._check(request)
        return reply({"object": "list", "data": [self._card]})

    async def model(self, request: Request, name: str) -> Response:
        self._check(request)
        if name != self._config.served_name:
            message = f"the model {cut(repr(name))} does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")
        return reply(self._card)

    async def health(self) -> Response:
        thread = self._endpoint.thread
        state = {"model": self._config.served_name, "running": thread.num_running, "waiting": thread.num_waiting}
        try:
            self._endpoint.check()
        except EngineDead as error:
            return reply(state | {"status": "dead", "reason": str(error)}, 503)
        if self._endpoint.is_draining:
            return reply(state | {"status": "draining"}, 503)
        return reply(state | {"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        self._check(request)
        if self._metrics is None:
            raise ApiError(404, "metrics come from Ray, and this server runs without it")
        return Response(await self._metrics(), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    def _check(self, request: Request) -> str:
        """Who asks: a key, or a peer. ApiError for whoever may not."""
        peer = request.client.host if request.client else None
        if digests := self._endpoint.spec.key_digests:
            return check_key(digests, request.headers.get("authorization")).hex()
        check_local(peer, request.headers.items())
        return peer or ""

    def _read(self, body: bytes) -> tuple[Form, list[EngineRequest]]:
        asked = parse_completion(parse_body(body), self._config.limits.max_prompts)
        form = CompletionForm(asked, self._config.served_name, self._endpoint.tokenizer_decode)
        return form, self._endpoint.prompts.of_completion(asked)

    def _read_chat(self, body: bytes) -> tuple[Form, list[EngineRequest]]:
        asked = parse_chat(parse_body(body), self._config.limits.max_prompts)
        form = ChatForm(asked, self._config.served_name, self._endpoint.tokenizer_decode)
        return form, self._endpoint.prompts.of_chat(asked)

    async def _answer(
        self, form: Form, requests: list[EngineRequest], client: str, watch: Watch, ends_at: float
    ) -> Response:
        if not form.asked.stream:
            return reply(await whole(self._endpoint, form, requests, client, watch))
        stream = streamed(self._endpoint, form, requests, client, watch, ends_at)
        # the first event decides the status: an overloaded server says so, it does not stream it
        first = await anext(stream)
        return TimedStream(continued(first, stream), ends_at + CUT_S)


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return reply(error.body, error.status, error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path}: {error.detail}"
    return reply(ApiError(error.status_code, reason, code="not_found").body, error.status_code, error.headers)


async def on_error(_: Request, error: Exception) -> Response:
    return reply(ApiError(500, f"{type(error).__name__}: {error}"[:500], kind="server_error").body, 500)


class TimedStream(StreamingResponse):
    """Events, cut off at `ends_at` of the loop's clock where the client has not taken them: what it holds is freed."""

    def __init__(self, events: AsyncGenerator[bytes, None], ends_at: float) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._events, self._ends_at = events, ends_at

    async def stream_response(self, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._ends_at) as limit:
                await super().stream_response(send)
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            await self._events.aclose()


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


def reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
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
