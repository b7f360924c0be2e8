"""OpenAI batch lines for /v1/completions: prompt or token ids, and sampling parameters of the row's own.

A parameter that this program does not have fails its row, unless its value asks for nothing. Left out: the
answer files (`pipeline.generate.openai_batch`), and chat.
"""

import json
from collections.abc import Iterable
from typing import Final

from pipeline.config import InputConfig
from pipeline.input.json_rows import json_kind, parse_object, to_json
from pipeline.input.row import JsonObject, Row, RowError
from pipeline.json_size import count_marks
from pipeline.openai_params import MAX_TOKEN_ID, BadParameter, is_token_list, sampling_parameters, shown
from pipeline.schema import BAD_LINE, BAD_PARAMETERS, PROMPT_MISSING, PROMPT_NOT_TEXT
from pipeline.units import Json

BATCH_URL: Final = "/v1/completions"
BATCH_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_COLUMNS: Final = ("method", "url", "body")
_IGNORED_KEYS: Final = frozenset({"prompt", "model", "user"})


def looks_like_batch(lines: Iterable[bytes]) -> bool | None:
    """Whether the first line that is a JSON object is an OpenAI batch line; None without such a line."""
    for line in lines:
        try:
            return parse_object(line, count_marks(line)).keys() >= BATCH_KEYS
        except RowError:
            continue
    return None


def batch_row(row: Row, value: JsonObject, config: InputConfig) -> None:
    fields = {key: _batch_text(value[key]) for key in ("method", "url") if value.get(key) is not None}
    row.fields = fields
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        row.fail(BAD_LINE, f"custom_id must be a non-empty string, got {shown(custom_id)}")
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


def _batch_text(value: Json) -> str:
    return value if isinstance(value, str) else to_json(value)


def _batch_body(body: JsonObject) -> str:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and Infinity: the answer file would not be JSON
        raise RowError(BAD_LINE, "body holds a number that JSON does not have (NaN or infinite)") from error


def _check_target(value: JsonObject) -> None:
    if value.get("method") != "POST":
        raise RowError(BAD_PARAMETERS, f"method must be 'POST', got {shown(value.get('method'))}")
    if value.get("url") != BATCH_URL:
        raise RowError(BAD_PARAMETERS, f"url must be {BATCH_URL!r}, got {shown(value.get('url'))}")


def _batch_prompt(prompt: Json) -> tuple[str | None, list[int] | None]:
    """Text or token ids; one of the two is None."""
    if prompt is None:
        raise RowError(PROMPT_MISSING, "body.prompt is missing or null")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RowError(BAD_PARAMETERS, f"body.prompt holds {len(prompt)} prompts; give one prompt per line")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if is_token_list(prompt):
        return None, prompt
    wanted = f"a string or a non-empty list of token ids (integers from 0 to {MAX_TOKEN_ID})"
    raise RowError(PROMPT_NOT_TEXT, f"body.prompt must be {wanted}, got {shown(prompt)}")


def _sampling(body: JsonObject) -> str | None:
    """The row's own sampling parameters under the names of `sampling.*`, as JSON; None if it has none."""
    try:
        own = sampling_parameters(body, _IGNORED_KEYS)
    except BadParameter as error:
        raise RowError(BAD_PARAMETERS, f"body.{error}") from error
    return to_json(own) if own else None
