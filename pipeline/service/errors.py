"""Errors as OpenAI has them: a status, and a body with message, type, param and code."""

from typing import TypedDict

from pipeline.openai.parameters import BadParameter


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorFields


class ApiError(Exception):
    """Ends a request with `status`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}

    @property
    def body(self) -> ErrorBody:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_parameter(error: BadParameter) -> ApiError:
    return ApiError(400, str(error), param=error.name, code="invalid_value")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def timed_out(limit_s: float) -> ApiError:
    return ApiError(
        408,
        f"the answer took longer than {limit_s:g} s (limits.request_timeout_s)",
        kind="timeout_error",
        code="timeout",
    )


def unavailable(message: str, code: str) -> ApiError:
    """The server's own trouble, which may be over in a moment."""
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=1)


def engine_error(message: str) -> ApiError:
    """This request could not be decoded; others could."""
    return ApiError(500, message, kind="server_error", code="engine_error")
