"""OpenAI batch lines for /v1/completions: prompt or token ids, and sampling parameters of the row's own.

A parameter that this program does not have fails its row, unless its value asks for nothing. Left out: the
answer files (`pipeline.openai_batch`), and chat.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pipeline.config import InputConfig
from pipeline.input.json_rows import json_kind, parse_object, to_json
from pipeline.input.row import Row, RowError
from pipeline.schema import BAD_LINE, BAD_PARAMETERS, PROMPT_MISSING, PROMPT_NOT_TEXT

MAX_TOKEN_ID: Final = 2**31 - 1  # int32
MAX_STOPS: Final = 16
BATCH_URL: Final = "/v1/completions"
BATCH_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_COLUMNS: Final = ("method", "url", "body")


def looks_like_batch(lines: Iterable[bytes]) -> bool | None:
    """Whether the first line that is a JSON object is an OpenAI batch line; None without such a line."""
    for line in lines:
        try:
            return parse_object(line).keys() >= BATCH_KEYS
        except RowError:
            continue
    return None


def batch_row(row: Row, value: dict[str, Any], config: InputConfig) -> None:
    fields = {key: _batch_text(value[key]) for key in ("method", "url") if value.get(key) is not None}
    row.fields = fields
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        row.fail(BAD_LINE, f"custom_id must be a non-empty string, got {_shown(custom_id)}")
    else:
        row.id = custom_id
    body = value.get("body")
    if not isinstance(body, dict):
        raise RowError(BAD_LINE, f"body must be an object, got {json_kind(body)}")
    fields["body"] = _batch_body(body)
    try:
        _check_target(value)
        row.sampling = _sampling(body)
    except RowError as error:
        row.fail(error.code, error.reason)
    row.prompt, row.tokens = _batch_prompt(body.get("prompt"))


def _batch_text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _batch_body(body: dict[str, Any]) -> str:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and Infinity: the answer file would not be JSON
        raise RowError(BAD_LINE, "body holds a number that JSON does not have (NaN or infinite)") from error


def _check_target(value: dict[str, Any]) -> None:
    if value.get("method") != "POST":
        raise RowError(BAD_PARAMETERS, f"method must be 'POST', got {_shown(value.get('method'))}")
    if value.get("url") != BATCH_URL:
        raise RowError(BAD_PARAMETERS, f"url must be {BATCH_URL!r}, got {_shown(value.get('url'))}")


def _batch_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Text or token ids; one of the two is None."""
    if prompt is None:
        raise RowError(PROMPT_MISSING, "body.prompt is missing or null")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RowError(BAD_PARAMETERS, f"body.prompt holds {len(prompt)} prompts; give one prompt per line")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in prompt):
        return None, prompt
    wanted = f"a string or a non-empty list of token ids (integers from 0 to {MAX_TOKEN_ID})"
    raise RowError(PROMPT_NOT_TEXT, f"body.prompt must be {wanted}, got {_shown(prompt)}")


def _is_int(low: int, high: int = 2**63 - 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    return isinstance(stops, list) and len(stops) <= MAX_STOPS and all(isinstance(s, str) and s for s in stops)


# OpenAI name -> (our name, check, what is allowed). The ranges are those of `pipeline.config.SamplingConfig`.
_SAMPLING_KEYS: Final[Mapping[str, tuple[str, Callable[[Any], bool], str]]] = {
    "max_tokens": ("max_new_tokens", _is_int(1), "an integer of at least 1"),
    "temperature": ("temperature", lambda v: _is_number(v) and v >= 0, "a number of at least 0"),
    "top_p": ("top_p", lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and up to 1"),
    "top_k": ("top_k", _is_int(-1), "an integer of at least 1, or -1 or 0 for no limit"),
    "seed": ("seed", _is_int(-(2**63)), "a 64-bit integer"),
    "stop": ("stop", _is_stop, f"a non-empty string or a list of up to {MAX_STOPS} of them"),
    "ignore_eos": ("ignore_eos", lambda v: isinstance(v, bool), "true or false"),
}
# What a completion may ask for and this program does not do: only the value that asks for nothing.
_NEUTRAL_KEYS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "n": (_is_int(1, 1), "1"),
    "best_of": (_is_int(1, 1), "1"),
    "echo": (lambda v: v is False, "false"),
    "stream": (lambda v: v is False, "false"),
    "presence_penalty": (lambda v: _is_number(v) and v == 0, "0"),
    "frequency_penalty": (lambda v: _is_number(v) and v == 0, "0"),
    "logit_bias": (lambda v: v == {}, "empty"),
    "logprobs": (lambda v: False, "null"),
    "suffix": (lambda v: False, "null"),
    "stream_options": (lambda v: False, "null"),
}
_IGNORED_KEYS: Final = frozenset({"prompt", "model", "user"})


def _sampling(body: dict[str, Any]) -> str | None:
    """The row's own sampling parameters under the names of `sampling.*`, as JSON; None if it has none."""
    own: dict[str, Any] = {}
    for key, value in body.items():
        if value is None or key in _IGNORED_KEYS:
            continue  # null is absent, as in the API
        if key in _SAMPLING_KEYS:
            name, check, allowed = _SAMPLING_KEYS[key]
            own[name] = value
        elif key in _NEUTRAL_KEYS:
            check, allowed = _NEUTRAL_KEYS[key]
        else:
            raise RowError(BAD_PARAMETERS, f"body.{key} is not supported; remove it")
        if not check(value):
            raise RowError(BAD_PARAMETERS, f"body.{key} must be {allowed}, got {_shown(value)}")
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    if "top_k" in own:
        own["top_k"] = max(own["top_k"], 0)
    return to_json(own) if own else None


def _shown(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 80 else text[:77] + "..."
