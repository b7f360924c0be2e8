"""JSON Lines: one object per line; blank lines are no rows. A file that is one JSON array is not supported.

`json_rows` serves both formats of JSON lines; `jsonl_row` is the plain one, with a prompt, an id and any other columns,
whose types are inferred in `scan`.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from pipeline.config.job import InputConfig
from pipeline.formatting import Json
from pipeline.input.arrow_types import whole_number
from pipeline.input.line_reader import InputRow, JsonObject, LongLine, RowError, describe_utf8, is_clean
from pipeline.json_size import FEW_MARKS, MARK_BYTES, MAX_MARKS, count_marks
from pipeline.schema import BAD_LINE, PROMPT_MISSING, PROMPT_NOT_TEXT

MAX_JSON_DEPTH: Final = 100  # well under Python's recursion limit, for json and for Arrow
MAX_JSON_KEYS: Final = 10_000  # of the line's own object: each is a column


def parse_object(line: bytes, num_marks: int) -> JsonObject:
    """The JSON object of a line; RowError where there is none. `num_marks` is what `count_marks` says of the line."""
    if num_marks > MAX_MARKS:
        raise RowError(BAD_LINE, f"{num_marks} commas and brackets, more than the {MAX_MARKS} that JSON may have here")
    try:
        # Decoded here: json.loads(bytes) would guess UTF-16 and let encoded surrogates pass.
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RowError(BAD_LINE, describe_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise RowError(BAD_LINE, f"not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # an integer of more than 4300 digits
        raise RowError(BAD_LINE, f"not readable JSON: {error}") from error
    except RecursionError as error:
        raise RowError(BAD_LINE, f"JSON nested deeper than {MAX_JSON_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise RowError(BAD_LINE, f"expected a JSON object, got {json_kind(value)}")
    if len(value) > MAX_JSON_KEYS:
        raise RowError(BAD_LINE, f"an object of {len(value)} keys, more than {MAX_JSON_KEYS}")
    if line.count(b"[") + line.count(b"{") > MAX_JSON_DEPTH and _depth(value) > MAX_JSON_DEPTH:
        raise RowError(BAD_LINE, f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def _depth(value: Json) -> int:
    level, depth = [value], 0
    while nested := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in nested for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def json_kind(value: object) -> str:
    kinds = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def json_rows(
    lines: Iterable[bytes],
    name: str,
    make_row: Callable[[InputRow, JsonObject, InputConfig], None],
    config: InputConfig,
) -> Iterator[InputRow]:
    for number, line in enumerate(lines):
        if isinstance(line, LongLine):
            yield InputRow(number, 0, error_code=BAD_LINE, error_message=f"{name} line {number + 1}: {line.reason}")
            continue
        if not line or line.isspace():
            continue  # not a row, but its number is used up: made ids bear line numbers
        num_marks = count_marks(line)
        row = InputRow(number, len(line) + (MARK_BYTES * num_marks if num_marks > FEW_MARKS else 0))
        try:
            value = parse_object(line, num_marks)
            # A lone surrogate can only come from an escape: cheaper to look for that than to encode all.
            dirty = _dirty_keys(value) if b"\\ud" in line or b"\\uD" in line else []
            value = {key: item for key, item in value.items() if key not in dirty}
            if dirty:
                shown = ", ".join(ascii(key) for key in dirty)
                row.error_code, row.error_message = (
                    BAD_LINE,
                    f"a lone surrogate (\\ud800 to \\udfff) in {shown}",
                )
            make_row(row, value, config)
        except RowError as error:
            row.fail(error.code, error.reason)
        if row.error_code:
            row.error_message = f"{name} line {number + 1}: {row.error_message}"
        yield row


def _dirty_keys(value: JsonObject) -> list[str]:
    return [key for key, item in value.items() if not (is_clean(key) and is_clean(to_json(item)))]


def jsonl_row(row: InputRow, value: JsonObject, config: InputConfig) -> None:
    row.fields = value
    given = value.get(config.id_column)
    if isinstance(given, str):
        row.id = given or None
    elif type(given) is int:
        row.id = str(given)
    elif isinstance(given, float) and (digits := whole_number(given)) is not None:
        row.id = digits
    elif given is not None:
        kind = json_kind(given)
        row.fail(BAD_LINE, f"id column {config.id_column!r} must be a string or a whole number, got {kind}")
    column = config.text_column or config.messages_column
    if column is None:
        return
    prompt = value.get(column)
    if prompt is None:
        row.fail(PROMPT_MISSING, f"column {column!r} {'is null' if column in value else 'is missing'}")
    elif column != config.text_column:
        return
    elif isinstance(prompt, str):
        row.prompt = prompt
    else:
        row.fail(PROMPT_NOT_TEXT, f"column {column!r} must be a string, got {json_kind(prompt)}")
