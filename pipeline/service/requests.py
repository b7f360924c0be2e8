"""The bodies of HTTP requests: JSON to checked parameters, prompts and messages. No tokenizer and no model here."""

import json
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from actors.templates.chat_template import Message, MessagesError, check_continues, check_messages
from pipeline.formatting import Json
from pipeline.json_size import MAX_MARKS, count_marks
from pipeline.openai_format.parameters import (
    BadParameter,
    ChatParameters,
    CompletionParameters,
    Integer,
    PositiveInt,
    RequestParameters,
    is_token_list,
    shown,
)
from pipeline.service.api_error import ApiError

MAX_CHAT_LOGPROBS: Final = 20  # OpenAI
MAX_ID_CHARS: Final = 512
Prompt: TypeAlias = str | list[int]
"""A text, or its token ids."""
StreamOption: TypeAlias = Literal["include_usage", "include_obfuscation", "continuous_usage_stats"]


def parse_body(body: bytes) -> dict[str, Json]:
    """The JSON object of a request; ApiError 400."""
    if (num_marks := count_marks(body)) > MAX_MARKS:
        message = f"the body has {num_marks} commas and brackets, more than the allowed {MAX_MARKS}"
        raise ApiError(400, message, code="invalid_json")
    try:
        value = json.loads(body.decode("utf-8-sig"))  # from bytes it would guess UTF-16, whose marks were not counted
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(value)}", code="invalid_json")
    return value


def check_text(name: str, text: str) -> None:
    """BadParameter for a text that has no encoding in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameter(name, f"holds half of a surrogate pair at character {error.start}") from error


class HttpParameters(RequestParameters):
    """What HTTP requests have beside the parameters of batch lines."""

    model: str | None = None
    n: PositiveInt | None = None
    """Answers to each prompt; null: 1."""
    stream: bool | None = None
    stream_options: Annotated[dict[StreamOption, bool | None], Field(max_length=3, fail_fast=True)] | None = None
    row_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] = ""
    """Extension: decides the random numbers together with the seed, as a row's `id` does offline."""
    return_token_ids: bool | None = None
    """Extension, as in vLLM: token ids beside the text."""
    return_layers: bool | None = None
    """Extension: the layers that each token ran."""

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if any((self.stream_options or {}).values()) and not self.stream:
            raise BadParameter("stream_options", "goes with stream=true only")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream has the usage."""
        return bool(self.stream_options and self.stream_options.get("include_usage"))

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every event of a stream has the usage so far, as in vLLM."""
        return self.include_usage and bool(self.stream_options and self.stream_options.get("continuous_usage_stats"))


class CompletionRequest(CompletionParameters, HttpParameters):
    prompt: list[Prompt]
    """At least one; in the request a single prompt need not be in a list."""

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, value: Any) -> list[Prompt]:
        wanted = "must be a string, a list of strings, a list of token ids or a list of such lists"
        prompts = [value] if isinstance(value, str) or is_token_list(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise BadParameter("prompt", f"{wanted}, got {shown(value)}")
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text("prompt", prompt)
            elif not is_token_list(prompt):
                raise BadParameter("prompt", f"{wanted}, got {shown(value)}")
        if len({type(prompt) for prompt in prompts}) > 1:
            raise BadParameter("prompt", "mixes texts and token ids; send them in two requests")
        return prompts


class ChatRequest(ChatParameters, HttpParameters):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_CHAT_LOGPROBS)] | None = None

    @field_validator("messages", mode="plain")
    @classmethod
    def _check_messages(cls, value: Any) -> list[Message]:
        try:
            messages = check_messages(value)
        except MessagesError as error:
            raise BadParameter(error.field, error.reason) from error
        for number, message in enumerate(messages):
            for key, value in message.items():
                parts = {"": value} if isinstance(value, str) else {}
                if key == "content" and not parts:
                    parts = {f"[{part}].text": one["text"] for part, one in enumerate(value)}
                for where, text in parts.items():  # a call of a tool is looked at when it is rendered
                    check_text(f"messages[{number}].{key}{where}", text)
        return messages

    @model_validator(mode="after")
    def _check_continues(self) -> Self:
        try:
            if self.continue_final_message:
                check_continues(self.messages)
        except MessagesError as error:
            raise BadParameter(error.field, error.reason) from error
        return self

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise BadParameter("top_logprobs", "goes with logprobs=true only")
        return self
