"""Exceptions of the routes as OpenAI's error responses. No engine here."""

import json
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from pipeline.openai_format.parameters import BadParameter
from pipeline.service.api_error import ApiError

ROUTES_THERE_ARE = (
    "this server has /v1/completions, /v1/chat/completions, /v1/models, /v1/files, /v1/batches, /health and /metrics, "
    "and a client's base URL ends in /v1, without a slash behind it"
)


def add_error_handlers(app: FastAPI) -> None:
    """Every exception becomes a response with an error object."""
    app.exception_handler(ApiError)(on_api_error)
    app.exception_handler(BadParameter)(on_bad_parameter)
    app.exception_handler(HTTPException)(on_http_error)
    app.exception_handler(Exception)(on_error)


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return reply(error.body, error.status, error.headers)


async def on_bad_parameter(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadParameter)
    return reply(ApiError.bad_parameter(error).body, 400)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        reason += f"; {ROUTES_THERE_ARE}"
    code = "method_not_supported" if error.status_code == 405 else "not_found"
    return reply(ApiError(error.status_code, reason, code=code).body, error.status_code, error.headers)


async def on_error(_: Request, error: Exception) -> Response:
    return reply(ApiError(500, f"{type(error).__name__}: {error}"[:500], kind="server_error").body, 500)


def reply(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response; half a surrogate pair, which a client may have sent, stays an escape."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
    return json_response(text, status, headers)


def json_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, dict(headers or {}), "application/json")
