"""Errors as OpenAI has them: a status, and a body with message, type, param and code."""

from typing import Self

from pipeline.openai_format.parameters import BadParameter


class ApiError(Exception):
    """Ends a request with `status`; the class methods make the usual ones."""

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
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def bad_parameter(cls, error: BadParameter) -> Self:
        return cls(400, str(error), param=error.name, code="invalid_value")

    @classmethod
    def overloaded(cls, message: str, retry_after_s: int) -> Self:
        return cls(429, message, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)

    @classmethod
    def timed_out(cls, limit_s: float) -> Self:
        message = f"the answer took longer than {limit_s:g} s (limits.request_timeout_s)"
        return cls(408, message, kind="timeout_error", code="timeout")

    @classmethod
    def unavailable(cls, message: str, code: str) -> Self:
        """The server has a problem that may be over in a moment."""
        return cls(503, message, kind="server_error", code=code, retry_after_s=1)

    @classmethod
    def engine_error(cls, message: str) -> Self:
        """This request could not be decoded; others can."""
        return cls(500, message, kind="server_error", code="engine_error")
