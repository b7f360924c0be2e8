"""The body of a completion or a chat to checked prompts, messages and parameters. No tokenizer and no model here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from actors.templates.chat_template import Message, MessagesError, check_messages
from pipeline.formatting import Json
from pipeline.json_size import MAX_MARKS, count_marks
from pipeline.openai.parameters import (
    MAX_LOGPROBS,
    BadParameter,
    SamplingParameters,
    chat_sampling_parameters,
    is_int,
    is_token_list,
    sampling_parameters,
    shown,
)
from pipeline.service.errors import ApiError, bad_parameter

MAX_CHAT_LOGPROBS: Final = 20  # OpenAI
MAX_ID_CHARS: Final = 512
_CHAT_FLAGS: Final = ("stream", "return_token_ids", "return_layers")
_FLAGS: Final = ("echo", *_CHAT_FLAGS)
_COMMON_KEYS: Final = frozenset({"model", "user", "n", "logprobs", "stream_options", "row_id", "max_tokens"})
OWN_KEYS: Final = _COMMON_KEYS | {"prompt", *_FLAGS}
CHAT_KEYS: Final = _COMMON_KEYS | {"messages", "top_logprobs", *_CHAT_FLAGS}


@dataclass(frozen=True)
class AskedRequest:
    """What completions and chats have in common."""

    model: str | None
    sampling: SamplingParameters
    """What the request sets."""
    max_tokens: int | None
    """0: the prompt alone, with `echo`."""
    row_id: str
    """Decides the random numbers together with the seed: a row's `id` offline. "" unless given."""
    num_answers: int
    """`n`: to each prompt."""
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool
    """Extension (as in vLLM): token ids beside the text."""
    return_layers: bool
    """Extension: the layers that each token ran."""


@dataclass(frozen=True)
class CompletionRequest(AskedRequest):
    prompts: list[str | list[int]]
    """At least one; text, or token ids."""


@dataclass(frozen=True)
class ChatRequest(AskedRequest):
    messages: list[Message]


def parse_body(body: bytes) -> dict[str, Json]:
    """The JSON object of a request; ApiError 400."""
    if (num_marks := count_marks(body)) > MAX_MARKS:
        message = f"the body has {num_marks} commas and brackets, more than the {MAX_MARKS} that it may have"
        raise ApiError(400, message, code="invalid_json")
    try:
        value = json.loads(body.decode("utf-8-sig"))  # of bytes it would guess UTF-16, whose marks were not counted
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ApiError(400, f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(value)}", code="invalid_json")
    return value


def parse_completion(body: Mapping[str, Json], max_prompts: int) -> CompletionRequest:
    """ApiError 400 names the parameter at fault."""
    try:
        return _parse(body, max_prompts)
    except BadParameter as error:
        raise bad_parameter(error) from error


def parse_chat(body: Mapping[str, Json], max_prompts: int) -> ChatRequest:
    """ApiError 400 names the parameter at fault, or the message and its field."""
    try:
        return _parse_chat(body, max_prompts)
    except BadParameter as error:
        raise bad_parameter(error) from error


def _parse(body: Mapping[str, Json], max_prompts: int) -> CompletionRequest:
    sampling = sampling_parameters(body, OWN_KEYS)
    flags = {name: _flag(body, name) for name in _FLAGS}
    max_tokens = _int(body, "max_tokens", 0)
    if max_tokens == 0 and not flags["echo"]:
        raise BadParameter("max_tokens", "must be at least 1; 0 goes with echo=true only")
    prompts = _prompts(body.get("prompt"), max_prompts)
    return CompletionRequest(
        prompts=prompts,
        num_answers=_num_answers(body, max_prompts // len(prompts) if max_tokens != 0 else 1),
        model=_text(body, "model"),
        sampling=_checked(sampling),
        max_tokens=max_tokens,
        row_id=_row_id(body),
        logprobs=_int(body, "logprobs", 0, MAX_LOGPROBS),
        include_usage=_include_usage(body, flags["stream"]),
        **flags,
    )


def _parse_chat(body: Mapping[str, Json], max_prompts: int) -> ChatRequest:
    max_tokens = _int(body, "max_tokens", 1)
    sampling = chat_sampling_parameters(body, CHAT_KEYS)
    flags = {name: _flag(body, name) for name in _CHAT_FLAGS}
    return ChatRequest(
        messages=_messages(body.get("messages")),
        num_answers=_num_answers(body, max_prompts),
        model=_text(body, "model"),
        sampling=_checked(sampling),
        max_tokens=sampling.get("max_new_tokens", max_tokens),  # max_completion_tokens, where there is one
        row_id=_row_id(body),
        logprobs=_chat_logprobs(body),
        echo=False,
        include_usage=_include_usage(body, flags["stream"]),
        **flags,
    )


def _num_answers(body: Mapping[str, Json], most: int) -> int:
    return _int(body, "n", 1, most) or 1


def _checked(sampling: SamplingParameters) -> SamplingParameters:
    for text in sampling.get("stop", []):
        _check_text("stop", text)
    return sampling


def _row_id(body: Mapping[str, Json]) -> str:
    row_id = _text(body, "row_id") or ""
    if len(row_id) > MAX_ID_CHARS:
        raise BadParameter("row_id", f"must have at most {MAX_ID_CHARS} characters, got {len(row_id)}")
    return row_id


def _messages(value: Json) -> list[Message]:
    try:
        messages = check_messages(value)
    except MessagesError as error:
        raise BadParameter(error.field, error.reason) from error
    for number, message in enumerate(messages):
        for key, text in message.items():
            _check_text(f"messages[{number}].{key}", text)
    return messages


def _chat_logprobs(body: Mapping[str, Json]) -> int | None:
    """How many of the likeliest tokens; None: no log-probabilities at all."""
    is_asked, num_top = _flag(body, "logprobs"), _int(body, "top_logprobs", 0, MAX_CHAT_LOGPROBS)
    if num_top is not None and not is_asked:
        raise BadParameter("top_logprobs", "goes with logprobs=true only")
    return (num_top or 0) if is_asked else None


def _prompts(value: Json, max_prompts: int) -> list[str | list[int]]:
    wanted = "must be a string, a list of strings, a list of token ids or a list of such lists"
    if value is None:
        raise BadParameter("prompt", f"is missing; it {wanted}")
    given = [value] if isinstance(value, str) or is_token_list(value) else value
    if not isinstance(given, list) or not given:
        raise BadParameter("prompt", f"{wanted}, got {shown(given)}")
    if len(given) > max_prompts:
        raise BadParameter("prompt", f"holds {len(given)} prompts, at most {max_prompts} may come in one request")
    prompts: list[str | list[int]] = []
    for prompt in given:
        if isinstance(prompt, str):
            _check_text("prompt", prompt)
        elif not is_token_list(prompt):
            raise BadParameter("prompt", f"{wanted}, got {shown(given)}")
        prompts.append(prompt)
    if len({type(prompt) for prompt in prompts}) > 1:
        raise BadParameter("prompt", "mixes texts and token ids; send them in two requests")
    return prompts


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadParameter(name, f"holds half of a surrogate pair at character {error.start}") from error


def _flag(body: Mapping[str, Json], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadParameter(name, f"must be true or false, got {shown(value)}")
    return bool(value)


def _int(body: Mapping[str, Json], name: str, low: int, high: int = 2**63 - 1) -> int | None:
    value = body.get(name)
    if value is None or is_int(low, high)(value):
        return value
    allowed = f"an integer from {low} to {high}" if high < 2**63 - 1 else f"an integer of at least {low}"
    raise BadParameter(name, f"must be {allowed}, got {shown(value)}")


def _text(body: Mapping[str, Json], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise BadParameter(name, f"must be a string, got {shown(value)}")
    return value


def _include_usage(body: Mapping[str, Json], is_stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not is_stream:
        raise BadParameter("stream_options", "goes with stream=true only")
    allowed = {"include_usage", "include_obfuscation"}
    if not isinstance(options, dict) or options.keys() - allowed or not all(type(v) is bool for v in options.values()):
        raise BadParameter("stream_options", f'must be {{"include_usage": true or false}}, got {shown(options)}')
    return bool(options.get("include_usage"))
