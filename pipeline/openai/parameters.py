"""The parameters of OpenAI's completions and chats, checked by pydantic: HTTP requests and batch lines share them.

A parameter that this program does not have is refused, unless its value asks for nothing; null means absent, as in the
API. Prompts and messages are checked elsewhere: `pipeline.service.requests`, `pipeline.input.openai_rows`.
"""

import difflib
import json
import re
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.formatting import Json

MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 5  # OpenAI
MAX_TOKEN_ID: Final = 2**31 - 1  # int32
MAX_INT: Final = 2**63 - 1
MAX_SHOWN_CHARS: Final = 80  # of a client's own text in an error message
PositiveInt: TypeAlias = Annotated[int, Field(ge=1, le=MAX_INT)]


class BadParameter(ValueError):
    """`name` is the parameter at fault, cut short; `reason` says what is wrong, without the name."""

    def __init__(self, name: str, reason: str) -> None:
        name = cut(name)
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


class RequestParameters(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)
    NEUTRAL: ClassVar[dict[str, tuple[Json, str]]] = {
        "presence_penalty": (0, "0"),
        "frequency_penalty": (0, "0"),
        "logit_bias": ({}, "empty"),
    }
    """Parameters that this program does not have: the one value that is accepted, since it asks for nothing."""

    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    """-1 and 0: no limit."""
    seed: Annotated[int, Field(ge=-(2**63), le=MAX_INT)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS, fail_fast=True)] | None = (
        None
    )
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Json) -> Json:
        return [value] if isinstance(value, str) else value

    @classmethod
    def parse(cls, body: Mapping[str, Json], ignored: Set[str] = frozenset()) -> Self:
        """The parameters of a request body, whose `ignored` keys others check; BadParameter names the one at fault."""
        given = {key: value for key, value in body.items() if value is not None and key not in ignored}
        for key, value in given.items():
            if key in cls.NEUTRAL:
                only, wording = cls.NEUTRAL[key]
                if value != only or isinstance(value, bool) != isinstance(only, bool):
                    raise BadParameter(key, f"must be {wording}, got {shown(value)}")
            elif key not in cls.model_fields:
                # get_close_matches takes quadratic time, and no long key is a slip of the pen
                close = difflib.get_close_matches(key, cls.model_fields, n=1) if len(key) < 64 else []
                raise BadParameter(key, "is not supported; remove it" + (f" (or is it {close[0]}?)" if close else ""))
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            if isinstance(cause := problem.get("ctx", {}).get("error"), BadParameter):
                raise cause from None
            # pydantic says "Input should be ..." or "List should have ..."
            reason = re.sub(r"^\w+ should ", "must ", problem["msg"])
            if problem["type"] == "missing":
                raise BadParameter(str(problem["loc"][0]), "is missing") from None
            raise BadParameter(str(problem["loc"][0]), f"{reason}, got {shown(problem['input'])}") from None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets, by the names of `skipdecode.config.sampling.Sampling`."""
        own = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "seed": self.seed,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
        }
        return {name: value for name, value in own.items() if value is not None}


class CompletionParameters(RequestParameters):
    NEUTRAL = RequestParameters.NEUTRAL | {"best_of": (1, "1"), "suffix": (None, "null")}

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    """0: the prompt alone, with `echo`."""
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise BadParameter("max_tokens", "must be at least 1; 0 goes with echo=true only")
        return self


class ChatParameters(RequestParameters):
    NEUTRAL = RequestParameters.NEUTRAL | {
        "tools": ([], "empty: tools are not supported"),
        "tool_choice": ("none", '"none": tools are not supported'),
        "response_format": ({"type": "text"}, '{"type": "text"}: other formats are not supported'),
        "modalities": (["text"], '["text"]'),
        "store": (False, "false"),
    }

    max_completion_tokens: PositiveInt | None = None
    """Another name of `max_tokens`, and wins over it."""
    parallel_tool_calls: bool | None = None
    """Without effect, since there are no tools."""

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


BATCH_NEUTRAL: Final[dict[str, tuple[Json, str]]] = {"stream": (False, "false"), "stream_options": (None, "null")}


class CompletionLine(CompletionParameters):
    """A line of a batch file for completions."""

    NEUTRAL = CompletionParameters.NEUTRAL | BATCH_NEUTRAL

    def row_parameters(self) -> dict[str, Any]:
        """What the line sets, by the keys of `sampling`: for the text, and for scores and the echo beside it."""
        own = self.sampling()
        if self.logprobs is not None:
            own["logprobs"] = self.logprobs
        if self.echo:
            own |= {"echo": True} | ({} if self.logprobs is None else {"prompt_logprobs": True})
        return own


class ChatLine(ChatParameters):
    """A line of a batch file for chats."""

    NEUTRAL = ChatParameters.NEUTRAL | BATCH_NEUTRAL | {"logprobs": (False, "false"), "top_logprobs": (0, "0")}

    def row_parameters(self) -> dict[str, Any]:
        return self.sampling()


def is_token_list(value: object) -> TypeGuard[list[int]]:
    """A non-empty list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in value)


def shown(value: object) -> str:
    """A JSON value in an error message, cut short; no more of it is encoded than is shown."""
    text = ""
    for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += part
        if len(text) > MAX_SHOWN_CHARS:
            break
    return cut(text)


def cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


CHOICE_KEYS = frozenset({"logprobs", "echo"})


def asks_for_choice(own: str | None) -> bool:
    """Whether a row's own parameters (`schema.SAMPLING`) ask for more than text."""
    return own is not None and ('"logprobs"' in own or '"echo"' in own) and bool(json.loads(own).keys() & CHOICE_KEYS)
