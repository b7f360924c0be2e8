"""OpenAI batch lines, for completions and for chats: prompt, token ids or messages, and sampling parameters of its own.

A parameter that this program does not have fails its row, unless its value asks for nothing. Left out: the answer files
(`pipeline.generate.openai_batch`), and what becomes of messages (`prompting`).
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.config.job import MAX_SAMPLES, InputConfig
from pipeline.formatting import Json
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.json_rows import json_kind, parse_object, to_json
from pipeline.input.rows import JsonObject, Row, RowError
from pipeline.json_size import count_marks
from pipeline.openai.parameters import (
    MAX_TOKEN_ID,
    BadParameter,
    ChatLine,
    CompletionLine,
    is_token_list,
    shown,
)
from pipeline.schema import BAD_LINE, BAD_MESSAGES, BAD_PARAMETERS, PROMPT_MISSING, PROMPT_NOT_TEXT

BATCH_URL: Final = "/v1/completions"
CHAT_URL: Final = "/v1/chat/completions"
BATCH_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_COLUMNS: Final = ("method", "url", "body")
_IGNORED_KEYS: Final = frozenset({"model", "user", "n"})


def looks_like_batch(lines: Iterable[bytes]) -> bool | None:
    """Whether the first line that is a JSON object is an OpenAI batch line; None without such a line."""
    for line in lines:
        try:
            return parse_object(line, count_marks(line)).keys() >= BATCH_KEYS
        except RowError:
            continue
    return None


def batch_row(row: Row, value: JsonObject, config: InputConfig, expansion: Expansion = ONE_ROW) -> None:
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
    is_chat = value.get("url") == CHAT_URL
    try:
        check_target(value, is_chat)
        row.samples = line_samples(body)
        row.sampling = _sampling(body, is_chat, expansion)
    except RowError as error:
        row.fail(error.code, error.reason)
    if is_chat:
        row.messages = _batch_messages(body.get("messages"))
    else:
        row.prompt, row.tokens = _batch_prompt(body.get("prompt"))


def line_samples(body: JsonObject) -> int | None:
    """The answers that a line asks for; None: it does not say. RowError where that is no number of answers."""
    n = body.get("n")
    if n is None:
        return None
    if type(n) is not int or not 1 <= n <= MAX_SAMPLES:
        raise RowError(BAD_PARAMETERS, f"body.n must be an integer from 1 to {MAX_SAMPLES}, got {shown(n)}")
    return n


def _batch_text(value: Json) -> str:
    return value if isinstance(value, str) else to_json(value)


def _batch_body(body: JsonObject) -> str:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and Infinity: the answer file would not be JSON
        raise RowError(BAD_LINE, "body holds a number that JSON does not have (NaN or infinite)") from error


def check_target(value: Mapping[str, Json], is_chat: bool) -> None:
    """RowError where a line is sent to where no answers are; what else it says is not looked at then."""
    if value.get("method") != "POST":
        raise RowError(BAD_PARAMETERS, f"method must be 'POST', got {shown(value.get('method'))}")
    if not is_chat and value.get("url") != BATCH_URL:
        raise RowError(BAD_PARAMETERS, f"url must be {BATCH_URL!r} or {CHAT_URL!r}, got {shown(value.get('url'))}")


def _batch_messages(messages: Json) -> list[Json]:
    """What is in them is looked at where a prompt is made of them."""
    if messages is None:
        raise RowError(PROMPT_MISSING, "body.messages is missing or null")
    if not isinstance(messages, list):
        raise RowError(BAD_MESSAGES, f"body.messages must be a list of messages, got {json_kind(messages)}")
    return messages


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


def _sampling(body: JsonObject, is_chat: bool, expansion: Expansion) -> str | None:
    """The row's own sampling parameters under the names of `sampling.*`, as JSON; None if it has none."""
    line = ChatLine if is_chat else CompletionLine
    try:
        own = line.parse(body, ignored=_IGNORED_KEYS | {"messages" if is_chat else "prompt"}).row_parameters()
    except BadParameter as error:
        raise RowError(BAD_PARAMETERS, f"body.{error}") from error
    samples = line_samples(body) or expansion.samples
    if samples > 1 and not own.get("temperature", expansion.temperature):
        raise RowError(BAD_PARAMETERS, f"{samples} answers at temperature 0 are the same; give body.temperature")
    return to_json(own) if own else None
