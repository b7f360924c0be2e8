"""OpenAI batch lines, for completions and chats: a prompt, token ids or messages, with sampling parameters of their
own.

An unsupported parameter fails its row, unless its value asks for nothing. The answer files are written by
`pipeline.generate.openai_batch`; messages are checked and rendered in `prompt_templates`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from pipeline.config.job import MAX_SAMPLES, InputConfig
from pipeline.formatting import Json
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.json_rows import json_kind, parse_object, to_json
from pipeline.input.line_reader import InputRow, JsonObject, RowError
from pipeline.json_size import count_marks
from pipeline.openai_format.parameters import (
    MAX_TOKEN_ID,
    BadParameter,
    ChatLine,
    CompletionLine,
    is_token_list,
    shown,
    whole,
)
from pipeline.schema import BAD_LINE, BAD_MESSAGES, BAD_PARAMETERS, PROMPT_MISSING, PROMPT_NOT_TEXT

COMPLETION_URL: Final = "/v1/completions"
CHAT_URL: Final = "/v1/chat/completions"
CHAT_URLS: Final = frozenset({CHAT_URL, "/chat/completions"})
"""In the lines of Azure's batches urls begin without the version."""
URLS: Final = frozenset({COMPLETION_URL, "/completions"}) | CHAT_URLS
WANTED_URL: Final = f"url must be {COMPLETION_URL!r} or {CHAT_URL!r}, or the same without '/v1'"
BATCH_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_COLUMNS: Final = ("method", "url", "body")
_IGNORED_KEYS: Final = frozenset({"model", "n"})


def looks_like_batch(lines: Iterable[bytes]) -> bool | None:
    """Whether the first line that is a JSON object is an OpenAI batch line; None without such a line."""
    for line in lines:
        try:
            return parse_object(line, count_marks(line)).keys() >= BATCH_KEYS
        except RowError:
            continue
    return None


def batch_row(row: InputRow, value: JsonObject, config: InputConfig, expansion: Expansion = ONE_ROW) -> None:
    """Fills `row` from the object of a line; marks it as failed, or raises RowError, for what is wrong with it."""
    row.fields = fields = {
        key: text if isinstance(text := value[key], str) else to_json(text)
        for key in ("method", "url")
        if value.get(key) is not None
    }
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        row.fail(BAD_LINE, f"custom_id must be a non-empty string, got {shown(custom_id)}")
    else:
        row.id = custom_id
    body = value.get("body")
    if not isinstance(body, dict):
        raise RowError(BAD_LINE, f"body must be an object, got {json_kind(body)}")
    try:
        fields["body"] = json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and Infinity: the answer file would not be JSON
        raise RowError(BAD_LINE, "body holds a number that JSON does not have (NaN or infinite)") from error
    is_chat = fields.get("url") in CHAT_URLS
    try:
        row.samples = requested_samples(value, body)
        line = _parse(body, is_chat)
        row.sampling = _sampling(line, row.samples or expansion.samples, expansion.temperature)
        if isinstance(line, ChatLine):
            row.continues, row.chat_template_kwargs = bool(line.continue_final_message), line.chat_template_kwargs
            row.tools = line.shown_tools
    except RowError as error:
        row.fail(error.code, error.reason)
    except BadParameter as error:
        row.fail(BAD_PARAMETERS, f"body.{error}")
    if not is_chat:
        row.prompt, row.tokens = _batch_prompt(body.get("prompt"))
    elif (messages := body.get("messages")) is None:
        row.fail(PROMPT_MISSING, "body.messages is missing or null")
    elif not isinstance(messages, list):
        row.fail(BAD_MESSAGES, f"body.messages must be a list of messages, got {json_kind(messages)}")
    else:
        row.messages = messages  # what is in them is checked where they are rendered


def requested_samples(value: Mapping[str, Json], body: JsonObject) -> int | None:
    """How many answers a line asks for, None if it does not say; RowError for another method or URL, or a bad `n`."""
    if value.get("method") != "POST":
        raise RowError(BAD_PARAMETERS, f"method must be 'POST', got {shown(value.get('method'))}")
    if not isinstance(url := value.get("url"), str) or url not in URLS:
        raise RowError(BAD_PARAMETERS, f"{WANTED_URL}, got {shown(url)}")
    n = whole(body.get("n"))
    if n is None or (type(n) is int and 1 <= n <= MAX_SAMPLES):
        return n
    raise RowError(BAD_PARAMETERS, f"body.n must be an integer from 1 to {MAX_SAMPLES}, got {shown(n)}")


def _batch_prompt(prompt: Json) -> tuple[str | None, list[int] | None]:
    """The prompt as text or as token ids; the other one is None."""
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


def _parse(body: JsonObject, is_chat: bool) -> CompletionLine | ChatLine:
    if not isinstance(model := body.get("model"), str | None):  # its name is ignored: a run has one model
        raise BadParameter("model", f"must be a string or null, got {shown(model)}")
    if is_chat:
        return ChatLine.parse(body, ignored=_IGNORED_KEYS | {"messages"})
    return CompletionLine.parse(body, ignored=_IGNORED_KEYS | {"prompt"})


def _sampling(line: CompletionLine | ChatLine, samples: int, temperature: float) -> str | None:
    """A line's own sampling parameters by the names of `sampling.*`, as JSON; None if it has none.

    `samples` is the number of its answers, `temperature` the one that holds if it gives none.
    """
    own = line.row_parameters()
    if samples > 1 and not own.get("temperature", temperature):
        raise BadParameter("temperature", f"must be above 0: {samples} answers at temperature 0 are the same")
    return to_json(own) if own else None
