"""The HTTP routes of a replica, its access checks and error responses: ASGI around an `Endpoint`. No Ray."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.serving.engine_thread import EngineDead
from pipeline.openai_format.parameters import BadParameter, cut
from pipeline.service.answers import ChatAnswer, CompletionAnswer, Parsers, model_card
from pipeline.service.api_error import ApiError
from pipeline.service.auth import check_key, check_local
from pipeline.service.batch_routes import BatchRoutes
from pipeline.service.endpoint import Endpoint
from pipeline.service.error_responses import add_error_handlers, json_response, reply
from pipeline.service.requests import ChatRequest, CompletionRequest, parse_body
from pipeline.service.responses import Observer, Watch, continued, streamed, whole

SMALL_BODY_BYTES = 8 << 10  # takes milliseconds to tokenize
PAGE = Path(__file__).with_name("page.html")
CUT_S = 5.0  # after limits.request_timeout_s, for a stream to send its last event
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def create_app(
    endpoint: Endpoint, observer: Observer | None = None, metrics: Callable[[], Awaitable[str]] | None = None
) -> FastAPI:
    """The application; `metrics` returns the Prometheus text of `GET /metrics`."""
    app = FastAPI(title="skipdecode", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(CountResponses, endpoint=endpoint)
    routes = Routes(endpoint, observer or (lambda *_: None), metrics)
    app.post("/v1/completions")(routes.completions)
    app.post("/v1/chat/completions")(routes.chat)
    app.get("/v1/models")(routes.models)
    app.get("/v1/models/{name:path}")(routes.model)
    app.api_route("/health", methods=["GET", "HEAD"])(routes.health)
    app.get("/metrics")(routes.prometheus)
    app.get("/")(routes.page)
    BatchRoutes(endpoint.config, endpoint.spec.job, routes.check_caller, endpoint.refuse_when_draining).add_to(app)
    add_error_handlers(app)
    return app


class Routes:
    """One method per route."""

    def __init__(self, endpoint: Endpoint, observer: Observer, metrics: Callable[[], Awaitable[str]] | None) -> None:
        self._endpoint, self._observer, self._metrics = endpoint, observer, metrics
        self._config = endpoint.config
        positions = endpoint.generator.model.config.max_position_embeddings
        has_chat = endpoint.prompts.chat_template is not None
        has_batches = self._config.storage.path is not None
        self._card = model_card(self._config.served_name, int(time.time()), positions, has_chat, has_batches)

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, self._read_completion, SMALL_BODY_BYTES)

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, self._read_chat, 0)  # rendering a template takes time

    async def _respond(self, request: Request, read: Callable[[bytes], CompletionAnswer], small_bytes: int) -> Response:
        """Checks the caller, the queue and the clock around one request. Bodies of up to `small_bytes` are read in the
        event loop, larger ones in a thread."""
        client = self.check_caller(request)
        watch, limit_s = Watch(self._observer), self._config.limits.request_timeout_s
        ends_at = asyncio.get_running_loop().time() + limit_s
        try:
            self._endpoint.refuse()
            async with asyncio.timeout_at(ends_at):
                answer = await self._read(request, client, read, small_bytes)
                if not answer.asked.stream:
                    return json_response(await whole(self._endpoint, answer, client, watch))
                stream = streamed(self._endpoint, answer, client, watch, ends_at)
                # the first event decides the status: an overloaded server answers 429 and does not stream it
                first = await anext(stream)
                return TimedStream(continued(first, stream), ends_at + CUT_S)
        except TimeoutError:
            watch.end(408)
            raise ApiError.timed_out(limit_s) from None
        except BadParameter as error:
            watch.end(400)
            raise ApiError.bad_parameter(error) from error
        except ApiError as error:
            watch.end(error.status)
            raise

    async def _read(
        self, request: Request, client: str, read: Callable[[bytes], CompletionAnswer], small_bytes: int
    ) -> CompletionAnswer:
        """Reads the body within the client's share, which is taken before any of it has arrived."""
        shares = self._endpoint.shares
        with shares.prompts(client, 1), shares.body(client) as arrived:
            body = await read_body(request, self._config.limits.max_body_bytes, arrived)
            return read(body) if len(body) <= small_bytes else await shares.in_thread(client, read, body)

    def _read_completion(self, body: bytes) -> CompletionAnswer:
        asked = CompletionRequest.parse(parse_body(body))
        requests = self._endpoint.prompts.of_completion(asked)
        return CompletionAnswer(asked, requests, self._config.served_name, self._endpoint.generator.tokenizer.decode)

    def _read_chat(self, body: bytes) -> CompletionAnswer:
        asked = ChatRequest.parse(parse_body(body))
        requests = self._endpoint.prompts.of_chat(asked)
        parsers = Parsers(self._config.output.reasoning_parser, self._endpoint.prompts.tool_form or "hermes")
        decode = self._endpoint.generator.tokenizer.decode
        return ChatAnswer(asked, requests, self._config.served_name, decode, parsers)

    async def models(self, request: Request) -> Response:
        self.check_caller(request)
        return reply({"object": "list", "data": [self._card]})

    async def model(self, request: Request, name: str) -> Response:
        self.check_caller(request)
        if name != self._config.served_name:
            message = f"the model {cut(repr(name))} does not exist here"
            raise ApiError(404, message, param="model", code="model_not_found")
        return reply(self._card)

    async def health(self, request: Request) -> Response:
        """Open to everybody, since a balancer knows no key; but only those who may ask are told why the engine died."""
        thread = self._endpoint.thread
        state = {"model": self._config.served_name, "running": thread.num_running, "waiting": thread.num_waiting}
        if self._config.batches.workers == "shared":
            state["background"] = thread.num_background
        try:
            self._endpoint.check()
        except EngineDead as error:
            reason = {"reason": str(error)} if self._may_ask(request) else {}
            return reply(state | {"status": "dead"} | reason, 503)
        if self._endpoint.is_draining:
            return reply(state | {"status": "draining"}, 503)
        return reply(state | {"status": "ok"})

    async def prometheus(self, request: Request) -> Response:
        self.check_caller(request)
        if self._metrics is None:
            raise ApiError(404, "metrics come from Ray, and this server runs without it")
        return Response(await self._metrics(), media_type="text/plain; version=0.0.4")

    async def page(self) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    def _may_ask(self, request: Request) -> bool:
        try:
            self.check_caller(request)
        except ApiError:
            return False
        return True

    def check_caller(self, request: Request) -> str:
        """The client that asks: its key's digest, without keys its address; ApiError 401 or 403 if it may not."""
        peer = request.client.host if request.client else None
        if digests := self._endpoint.spec.key_digests:
            return check_key(digests, request.headers.get("authorization")).hex()
        check_local(peer, request.headers.items())
        return peer or ""


class TimedStream(StreamingResponse):
    """A stream of events that is cut off at `ends_at` of the loop's clock if the client has not read it by then."""

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
    """ASGI middleware that counts open responses: a drain waits until all of them are sent to the last byte."""

    def __init__(self, app: ASGIApp, endpoint: Endpoint) -> None:
        self._app, self._endpoint = app, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # not while draining: requests are refused then, and clients that keep retrying must not hold up the drain
        if scope["type"] != "http" or self._endpoint.is_draining:
            await self._app(scope, receive, send)
            return
        self._endpoint.num_responses += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._endpoint.num_responses -= 1


async def read_body(request: Request, limit: int, arrived: Callable[[int], None]) -> bytes:
    """The body of a request; ApiError 413 as soon as it exceeds `limit` bytes. `arrived` is told of each part."""
    too_large = ApiError(413, f"the body has more than {limit} bytes (limits.max_body_bytes)", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise too_large
        arrived(len(part))
    return bytes(body)
