"""Sampling parameters of OpenAI requests, translated to our names; for batch lines and for the endpoint.

An unsupported parameter is refused unless its value asks for nothing; null means absent, as in the API. The ranges are
those of `pipeline.config.job.SamplingConfig`.
"""

import difflib
import json
import sys
from collections.abc import Callable, Mapping, Set
from typing import Final, TypeAlias, TypedDict, TypeGuard, cast

from pipeline.formatting import Json

Neutral: TypeAlias = Mapping[str, tuple[Callable[[object], bool], str]]
"""Name -> check, and what is allowed."""

MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 5  # OpenAI
MAX_TOKEN_ID: Final = 2**31 - 1  # int32
MAX_SHOWN_CHARS: Final = 80  # of a client's own text in an error message


class BadParameter(ValueError):
    """`name` is the parameter at fault, shortened; `reason` says what is wrong, without the name."""

    def __init__(self, name: str, reason: str) -> None:
        name = cut(name)
        super().__init__(f"{name} {reason}")
        self.name, self.reason = name, reason


class SamplingParameters(TypedDict, total=False):
    """What a request says about sampling, by the names of `skipdecode.config.sampling.Sampling`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: list[str]
    ignore_eos: bool


def is_int(low: int, high: int = 2**63 - 1) -> Callable[[object], TypeGuard[int]]:
    def check(value: object) -> TypeGuard[int]:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    return check


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that is finite as a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_stop(value: object) -> bool:
    stops = [value] if isinstance(value, str) else value
    return isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops)


# OpenAI name -> (our name, check, what is allowed)
_SAMPLING_KEYS: Final[Mapping[str, tuple[str, Callable[[object], bool], str]]] = {
    "max_tokens": ("max_new_tokens", is_int(1), "an integer of at least 1"),
    "temperature": ("temperature", lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "top_p": ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and up to 1"),
    "top_k": ("top_k", is_int(-1), "an integer of at least 1, or -1 or 0 for no limit"),
    "seed": ("seed", is_int(-(2**63)), "a 64-bit integer"),
    "stop": ("stop", _is_stop, f"a non-empty string or a list of up to {MAX_STOPS} of them"),
    "ignore_eos": ("ignore_eos", lambda v: isinstance(v, bool), "true or false"),
}
# Unsupported parameters of completions, which may only have the value that asks for nothing.
_NEUTRAL_KEYS: Final[Neutral] = {
    "n": (is_int(1, 1), "1"),
    "best_of": (is_int(1, 1), "1"),
    "echo": (lambda v: v is False, "false"),
    "stream": (lambda v: v is False, "false"),
    "presence_penalty": (lambda v: _is_number(v) and v == 0, "0"),
    "frequency_penalty": (lambda v: _is_number(v) and v == 0, "0"),
    "logit_bias": (lambda v: v == {}, "empty"),
    "logprobs": (lambda v: False, "null"),
    "suffix": (lambda v: False, "null"),
    "stream_options": (lambda v: False, "null"),
}


# The same for chats, where some keys mean something else.
_NEUTRAL_CHAT_KEYS: Final[Neutral] = {
    **{key: value for key, value in _NEUTRAL_KEYS.items() if key not in ("best_of", "echo", "suffix")},
    "logprobs": (lambda v: v is False, "false"),
    "top_logprobs": (is_int(0, 0), "0"),
    "tools": (lambda v: v == [], "empty: tools are not supported"),
    "tool_choice": (lambda v: v == "none", '"none": tools are not supported'),
    "parallel_tool_calls": (lambda v: isinstance(v, bool), "true or false"),
    "response_format": (lambda v: v == {"type": "text"}, '{"type": "text"}: other formats are not supported'),
    "modalities": (lambda v: v == ["text"], '["text"]'),
    "store": (lambda v: v is False, "false"),
}


def chat_sampling_parameters(body: Mapping[str, Json], others: Set[str]) -> SamplingParameters:
    """`sampling_parameters` of a chat, where `max_completion_tokens` is another name for `max_tokens` and wins over
    it."""
    most = body.get("max_completion_tokens")
    if most is not None and not is_int(1)(most):
        raise BadParameter("max_completion_tokens", f"must be an integer of at least 1, got {shown(most)}")
    own = sampling_parameters(body, others | {"max_completion_tokens"}, _NEUTRAL_CHAT_KEYS)
    return own if most is None else {**own, "max_new_tokens": most}


def sampling_parameters(
    body: Mapping[str, Json],
    others: Set[str],
    neutral: Mapping[str, tuple[Callable[[object], bool], str]] = _NEUTRAL_KEYS,
) -> SamplingParameters:
    """What `body` says about sampling, as keys of `Sampling`; BadParameter for anything else.

    `others` are keys that the caller handles, `neutral` those that may only have a value that asks for nothing.
    """
    own: dict[str, Json] = {}
    for key, value in body.items():
        if value is None or key in others:
            continue
        if key in _SAMPLING_KEYS:
            name, check, allowed = _SAMPLING_KEYS[key]
            own[name] = value
        elif key in neutral:
            check, allowed = neutral[key]
        else:
            # quadratic in the length of the key, and a long one is no misspelling
            close = difflib.get_close_matches(key, [*_SAMPLING_KEYS, *others], n=1) if len(key) < 64 else []
            raise BadParameter(key, "is not supported; remove it" + (f" (or is it {close[0]}?)" if close else ""))
        if not check(value):
            raise BadParameter(key, f"must be {allowed}, got {shown(value)}")
    if isinstance(stop := own.get("stop"), str):
        own["stop"] = [stop]
    for name in ("temperature", "top_p"):
        if isinstance(number := own.get(name), int):
            own[name] = float(number)  # an integer of more than 64 bits would fit no tensor
    if isinstance(top_k := own.get("top_k"), int):
        own["top_k"] = max(top_k, 0)
    return cast(SamplingParameters, own)  # the table has checked every value


def choice_parameters(body: Mapping[str, Json]) -> dict[str, Json]:
    """What a completions line asks for besides text (`logprobs`, `echo`), as keys of `Sampling`.

    With `echo`, `max_tokens` may be 0, which returns the prompt alone.
    """
    logprobs, echo, most = (body.get(name) for name in ("logprobs", "echo", "max_tokens"))
    if logprobs is not None and not is_int(0, MAX_LOGPROBS)(logprobs):
        raise BadParameter("logprobs", f"must be an integer from 0 to {MAX_LOGPROBS}, got {shown(logprobs)}")
    if echo is not None and not isinstance(echo, bool):
        raise BadParameter("echo", f"must be true or false, got {shown(echo)}")
    own: dict[str, Json] = {} if logprobs is None else {"logprobs": logprobs}
    if echo:
        own["echo"] = True
        own |= {} if logprobs is None else {"prompt_logprobs": True}
    if type(most) is int and most == 0:
        if not echo:
            raise BadParameter("max_tokens", "must be at least 1; 0 goes with echo=true only")
        own["max_new_tokens"] = 0
    return own


def is_token_list(value: object) -> TypeGuard[list[int]]:
    """A non-empty list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in value)


def shown(value: object) -> str:
    """A JSON value for an error message, shortened; only as much of it is serialised as is shown."""
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
