"""The parameters of OpenAI's completions and chats, checked by pydantic: HTTP requests and batch lines share them.

A parameter that this program does not have (`unsupported`) is refused, unless its value asks for nothing; null means
absent, as in the API. Prompts and messages are checked elsewhere: `pipeline.service.requests`,
`pipeline.input.openai_rows`.
"""

import difflib
import json
import re
from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, Final, Self, TypeAlias, TypedDict, TypeGuard

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from actors.templates.template_kwargs import check_kwargs
from pipeline.formatting import Json
from pipeline.openai_format.unsupported import BATCH, CHATS, COMMON, COMPLETIONS, WITHOUT_EFFECT, Unsupported
from skipdecode.config.model import MAX_LOGPROBS
from skipdecode.config.sampling import MAX_BIAS, MAX_PENALTY, RepetitionDetection
from skipdecode.config.structured_outputs import StructuredOutputs

MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1000
"""What may become a stop string is held back, and compared with it at each token."""
MAX_BIASED: Final = 1024
"""Tokens with a bias, and tokens that end an answer: each is looked at in every step."""
MAX_TOKEN_ID: Final = 2**31 - 1  # int32
MAX_INT: Final = 2**63 - 1
MAX_TOOLS: Final = 128  # OpenAI
MAX_SHOWN_CHARS: Final = 80  # of a client's own text in an error message


def whole(value: Json) -> Json:
    """A float without a fraction as an integer: JSON does not tell 6.0 from 6, and some clients send the former."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer: TypeAlias = Annotated[int, BeforeValidator(whole)]
PositiveInt: TypeAlias = Annotated[Integer, Field(ge=1, le=MAX_INT)]
TokenId: TypeAlias = Annotated[Integer, Field(ge=0, le=MAX_TOKEN_ID)]
Penalty: TypeAlias = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Bias: TypeAlias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class BadParameter(ValueError):
    """`name` is the parameter at fault, cut short; `reason` says what is wrong, without the name."""

    def __init__(self, name: str, reason: str) -> None:
        name = cut(name)
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


class RequestParameters(BaseModel):
    """What completions and chats have in common."""

    model_config = ConfigDict(strict=True, frozen=True, defer_build=True)
    UNSUPPORTED: ClassVar[Mapping[str, Unsupported]] = COMMON

    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    """Another name of `max_tokens`, and wins over it."""
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_INT)] | None = None
    """-1 and 0: no limit."""
    seed: Annotated[Integer, Field(ge=-(2**63), le=MAX_INT)] | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASED)] | None = None
    """By token id, a string as in OpenAI's API."""
    min_tokens: Annotated[Integer, Field(ge=0, le=MAX_INT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASED, fail_fast=True)] | None = None
    repetition_detection: dict[str, Integer] | None = None
    """vLLM's `max_pattern_size`, `min_pattern_size` and `min_count`; a largest pattern of 0 turns it off."""
    response_format: dict[str, Any] | None = None
    """OpenAI's `text`, `json_object` or `json_schema`; `strict` changes nothing, since every schema is kept."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's `json`, `json_object`, `regex`, `choice` or `grammar`."""

    @field_validator("response_format")
    @classmethod
    def _check_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _structure_of_format(value)
        return value

    @field_validator("structured_outputs")
    @classmethod
    def _check_structure(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            if own := {name: own for name, own in (value or {}).items() if name not in _NO_STRUCTURE}:
                StructuredOutputs.of(own)
        except ValueError as error:
            raise BadParameter("structured_outputs", f"is not valid: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_one_structure(self) -> Self:
        if self.structured_outputs and self.response_format and self.response_format.get("type") != "text":
            raise BadParameter("structured_outputs", "excludes response_format; send one of them")
        return self

    def structure(self) -> dict[str, Any] | None:
        """What the answer must look like, by the keys of `sampling.structured_outputs`."""
        if self.structured_outputs:
            return {name: own for name, own in self.structured_outputs.items() if name not in _NO_STRUCTURE} or None
        return None if self.response_format is None else _structure_of_format(self.response_format)

    @field_validator("logit_bias")
    @classmethod
    def _check_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not re.fullmatch("[0-9]{1,10}", key) or int(key) > MAX_TOKEN_ID:
                raise BadParameter("logit_bias", f"must have token ids as keys, got {shown(key)}")
        return value

    @field_validator("repetition_detection")
    @classmethod
    def _check_detection(cls, value: dict[str, int] | None) -> dict[str, int] | None:
        if not value or not value.get("max_pattern_size"):
            return None
        found = value | {"min_pattern_size": value.get("min_pattern_size") or 1}
        try:
            RepetitionDetection(**found)
        except (TypeError, ValueError) as error:
            raise BadParameter("repetition_detection", f"is not valid: {error}") from error
        return found

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, value: Json) -> Json:
        return [value] if isinstance(value, str) else value

    @classmethod
    def parse(cls, body: Mapping[str, Json], ignored: Set[str] = frozenset()) -> Self:
        """The parameters of a request body, whose `ignored` keys others check; BadParameter names the one at fault."""
        given: dict[str, Json] = {}
        for key, value in body.items():
            if value is None or key in ignored or key in WITHOUT_EFFECT:
                continue
            if key in cls.model_fields:
                given[key] = value
            elif key not in cls.UNSUPPORTED:
                # get_close_matches takes quadratic time, and no long key is a slip of the pen
                close = difflib.get_close_matches(key, cls.model_fields, n=1) if len(key) < 64 else []
                raise BadParameter(key, "is not known; remove it" + (f" (or is it {close[0]}?)" if close else ""))
            elif not (found := cls.UNSUPPORTED[key]).accepts(value):
                wanted = " or ".join(shown(neutral) for neutral in (*found.neutral, None))
                raise BadParameter(key, f"must be {wanted}, got {shown(value)}: {found.why}")
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
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

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
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "min_new_tokens": self.min_tokens,
            "stop_token_ids": self.stop_token_ids,
            "repetition_detection": self.repetition_detection,
            "structured_outputs": self.structure(),
        }
        return {name: value for name, value in own.items() if value is not None}


_NO_STRUCTURE: Final = frozenset({"disable_any_whitespace", "disable_fallback"})
"""Keys of vLLM's `structured_outputs` that change nothing here: there is hardly any whitespace, and one back end."""


def _structure_of_format(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """A `response_format` by the keys of `sampling.structured_outputs`; BadParameter."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise BadParameter(
            "response_format", f"must have the type text, json_object or json_schema, got {shown(value)}"
        )
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise BadParameter("response_format", 'must have {"json_schema": {"name": ..., "schema": {...}}}')
    structure = {"json": dict(inner["schema"])}
    try:
        StructuredOutputs.of(structure)
    except ValueError as error:
        raise BadParameter("response_format", f"is not valid: {error}") from error
    return structure


class ToolCalls(TypedDict):
    """What calls an answer may have."""

    names: list[str]
    """Of the tools."""
    is_single: bool
    """Whether at most one is wanted."""
    schemas: dict[str, dict[str, Any] | None] | None
    """The parameters of each tool where the answer must be calls; None where the model decides."""


def _tool_name(field: str, tool: Mapping[str, Any]) -> str:
    """The name of a tool; BadParameter for a tool that is no function, or not as OpenAI has them."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        reason = f'must be {{"type": "function", "function": {{"name": ...}}}}, got {shown(tool)}'
        raise BadParameter("tools", f"are wrong: {field} {reason}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.:/-]{1,256}", name):
        reason = "name must have 1 to 256 letters, digits and _ - . : /"
        raise BadParameter("tools", f"are wrong: {field}.function.{reason}, got {shown(name)}")
    if not isinstance(parameters, Mapping | None):
        reason = "parameters must be a JSON schema, an object"
        raise BadParameter("tools", f"are wrong: {field}.function.{reason}, got {shown(parameters)}")
    return name


class CompletionParameters(RequestParameters):
    UNSUPPORTED = COMPLETIONS

    max_tokens: Annotated[Integer, Field(ge=0, le=MAX_INT)] | None = None
    """0: the prompt alone, with `echo`."""
    echo: bool | None = None
    logprobs: Annotated[Integer, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """As many as vLLM allows; OpenAI allows 5."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise BadParameter("max_tokens", "must be at least 1; 0 goes with echo=true only")
        return self


class ChatParameters(RequestParameters):
    UNSUPPORTED = CHATS

    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    """What the model may call, as in OpenAI's API; the chat template tells the model."""
    tool_choice: str | dict[str, Any] | None = None
    """none, auto (null), required, or `{"type": "function", "function": {"name": ...}}`."""
    parallel_tool_calls: bool | None = None
    """false: at most one call."""

    continue_final_message: bool | None = None
    """Whether the answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite of `continue_final_message`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as `enable_thinking`."""

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, value: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        names = [_tool_name(f"tools[{number}]", tool) for number, tool in enumerate(value or ())]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise BadParameter("tools", f"have two functions of the name {shown(doubled[0])}")
        return value

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        choice, names = self.tool_choice, self._tool_schemas()
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
            if not isinstance(name, str) or name not in names:
                wanted = '{"type": "function", "function": {"name": one of tools}}'
                raise BadParameter("tool_choice", f"must be none, auto, required or {wanted}, got {shown(choice)}")
        elif choice not in (None, "none", "auto", "required"):
            raise BadParameter("tool_choice", f"must be none, auto, required or name a function, got {shown(choice)}")
        if choice in ("auto", "required") and not names:
            raise BadParameter("tool_choice", f"is {choice}, and there are no tools")
        if self.calls() is not None and self.structure() is not None:
            name = "structured_outputs" if self.structured_outputs else "response_format"
            raise BadParameter(name, "excludes tools, since an answer is either; or set tool_choice to none")
        return self

    def _tool_schemas(self) -> dict[str, dict[str, Any] | None]:
        """The parameters of each tool, by name."""
        return {tool["function"]["name"]: tool["function"].get("parameters") for tool in self.tools or ()}

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the template is given: none where the model may call none."""
        return self.tools if self.tools and self.tool_choice != "none" else None

    def calls(self) -> "ToolCalls | None":
        """What calls the answer may have; None: no calls."""
        if self.shown_tools is None:
            return None
        schemas = self._tool_schemas()
        if isinstance(self.tool_choice, dict):
            schemas = {name: schemas[name] for name in [self.tool_choice["function"]["name"]]}
        is_single = self.parallel_tool_calls is False or isinstance(self.tool_choice, dict)
        is_forced = self.tool_choice not in (None, "auto")
        return {
            "names": list(schemas),
            "is_single": is_single,
            "schemas": dict(schemas) if is_forced else None,
        }

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            check_kwargs(value or {})
        except ValueError as error:
            raise BadParameter("chat_template_kwargs", f"is not valid: {error}") from error
        return value

    @model_validator(mode="after")
    def _check_generation_prompt(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise BadParameter("add_generation_prompt", "must be false where continue_final_message is true")
        if self.add_generation_prompt is False and not self.continue_final_message:
            raise BadParameter("add_generation_prompt", "may be false with continue_final_message=true only")
        return self


class CompletionLine(CompletionParameters):
    """A line of a batch file for completions."""

    UNSUPPORTED = COMPLETIONS | BATCH

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

    UNSUPPORTED = (
        CHATS
        | BATCH
        | {
            "logprobs": Unsupported("chats of a batch have no log-probabilities", (False,)),
            "top_logprobs": Unsupported("chats of a batch have no log-probabilities", (0,)),
        }
    )

    def row_parameters(self) -> dict[str, Any]:
        """What the line sets, by the keys of `sampling`, and the calls that it may have."""
        calls = self.calls()
        return self.sampling() | ({} if calls is None else {TOOLS: calls})


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


TOOLS: Final = "tools"
"""The key of a row's own parameters that says what it may call: `ToolCalls`."""
CHOICE_KEYS: Final = frozenset({"logprobs", "echo", "structured_outputs", TOOLS})


def asks_for_choice(own: str | None) -> bool:
    """Whether a row's own parameters (`schema.SAMPLING`) ask for more than text."""
    if own is None or not any(f'"{key}"' in own for key in CHOICE_KEYS):
        return False
    return bool(json.loads(own).keys() & CHOICE_KEYS)
