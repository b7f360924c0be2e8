"""The body of `POST /v1/batches` and the ages of files, checked; BadParameter names what is wrong."""

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipeline.batches.config import DAY_S
from pipeline.formatting import Json
from pipeline.input.openai_rows import CHAT_URL, COMPLETION_URL
from pipeline.openai_format.parameters import BadParameter, Integer, shown

WINDOW: Final = re.compile(r"([1-9]\d{0,6})([smhd])")
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
MAX_WINDOW_S: Final = 30 * DAY_S
ENDPOINTS: Final = (COMPLETION_URL, CHAT_URL)
Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]


T = TypeVar("T", bound=BaseModel)


class ExpiresAfter(BaseModel):
    """When a file is deleted, in seconds from its creation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[Integer, Field(ge=3600, le=30 * DAY_S)]


class BatchRequest(BaseModel):
    """`POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value not in ENDPOINTS:
            raise BadParameter("endpoint", f"must be {' or '.join(map(repr, ENDPOINTS))}, got {shown(value)}")
        return value

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, value: str) -> str:
        found = WINDOW.fullmatch(value)
        if not found or int(found[1]) * UNITS[found[2]] > MAX_WINDOW_S:
            wanted = "must be a whole number with s, m, h or d, such as '24h', and at most '30d'"
            raise BadParameter("completion_window", f"{wanted}, got {shown(value)}")
        return value

    @property
    def window_s(self) -> int:
        found = WINDOW.fullmatch(self.completion_window)
        assert found is not None
        return int(found[1]) * UNITS[found[2]]

    @classmethod
    def parse(cls, body: Mapping[str, Json]) -> Self:
        return validated(cls, body)


def validated(cls: type[T], values: Mapping[str, Json]) -> T:
    """The checked values of a request; BadParameter names the first that is wrong."""
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if isinstance(cause := problem.get("ctx", {}).get("error"), BadParameter):
            raise cause from None
        name = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        if problem["type"] == "missing":
            raise BadParameter(name, "is missing") from None
        if problem["type"] == "extra_forbidden":
            raise BadParameter(name, f"is not known; there are {', '.join(cls.model_fields)}") from None
        reason = re.sub(r"^\w+ should ", "must ", problem["msg"])
        raise BadParameter(name, f"{reason}, got {shown(problem['input'])}") from None
