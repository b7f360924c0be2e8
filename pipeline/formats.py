"""One input file -> rows: text, CSV, JSON Lines, OpenAI batch lines; and column types of JSON and Parquet.

Everything streams, and a row that cannot be used comes out as a failed row with its reason, so that the scan
and the read, which both go through here, count the same rows and give them the same ids. The invariant:
whatever bytes a file holds, no row raises. Left out: which files there are, what their schemas have in common
and which ids occur twice (`pipeline.input`); tokenisation and the length of prompts (`pipeline.stages`).
"""

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import ConfigError, InputConfig
from pipeline.schema import BAD_LINE, BAD_PARAMETERS, PROMPT_MISSING, PROMPT_NOT_TEXT

READ_BYTES: Final = 1 << 20
BOM: Final = b"\xef\xbb\xbf"
MAX_CSV_FIELD_CHARS: Final = 1 << 28  # the csv module's own is 128 KiB; a prompt may have 30 MB
MAX_JSON_DEPTH: Final = 100  # well under Python's recursion limit, for json and for Arrow
MAX_TYPE_DEPTH: Final = 16  # Arrow *reads* up to 100 levels of Parquet, a list being three: deeper is JSON text
MAX_TYPE_LEAVES: Final = 1000  # an object used as a map has new keys in every row: JSON text, not 10^6 columns
EXACT_DOUBLE: Final = 2**53  # integers up to here are exact in float64
MAX_TOKEN_ID: Final = 2**31 - 1  # int32
MAX_STOPS: Final = 16
BATCH_URL: Final = "/v1/completions"
BATCH_KEYS: Final = frozenset({"custom_id", "method", "url", "body"})
BATCH_COLUMNS: Final = ("method", "url", "body")


@dataclass(slots=True)
class Row:
    """One row as its file gives it; a failed row holds what could be read."""

    number: int  # 0-based, counts bad rows too; the one in a made id
    num_bytes: int  # about what it takes in memory
    id: str | None = None  # None: the row has none of its own
    prompt: str | None = None
    tokens: list[int] | None = None
    sampling: str | None = None  # JSON object
    error_code: str = ""
    error_message: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)  # every column the row has, prompt and id included

    def fail(self, code: str, message: str) -> None:
        """Marks the row as failed; the first reason stays."""
        if not self.error_code:
            self.error_code, self.error_message = code, message


class _RowError(Exception):
    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def iter_rows(stream: Any, name: str, format: str, config: InputConfig) -> Iterator[Row]:
    """The rows of one text, CSV, JSONL or OpenAI batch file; `stream` gives its uncompressed bytes."""
    if format == "text":
        return _text_rows(iter_lines(stream), name)
    if format == "csv":
        return _csv_rows(stream, name, config)
    return _json_rows(iter_lines(stream), name, _batch_row if format == "openai_batch" else _jsonl_row, config)


def iter_lines(stream: Any) -> Iterator[bytes]:
    """Lines ended by b"\\n" and nothing else, without byte order mark; a final empty remainder is no line."""
    pending: list[bytes] = []  # pieces of one long line: joining them once keeps a 30 MB line linear
    is_start = True
    while chunk := stream.read(READ_BYTES):
        first, *rest = (chunk.removeprefix(BOM) if is_start else chunk).split(b"\n")
        is_start = False
        pending.append(first)
        if rest:
            yield b"".join(pending)
            yield from rest[:-1]
            pending = [rest[-1]]
    if last := b"".join(pending):
        yield last


def _text_rows(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    for number, line in enumerate(lines):
        row = Row(number, len(line))
        try:
            row.prompt = line.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            row.fail(BAD_LINE, f"{name} line {number + 1}: {_describe_utf8(error)}")
        yield row


def _describe_utf8(error: UnicodeDecodeError) -> str:
    return f"not valid UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start})"


# --- CSV --------------------------------------------------------------------------------------------------


def read_csv_header(stream: Any, path: str) -> list[str]:
    """The column names; [] for an empty file. `ConfigError` for a broken header or a column named twice."""
    try:
        header: list[str] = next(_csv_reader(stream, path), [])
        "".join(header).encode()
    except (csv.Error, UnicodeEncodeError) as error:
        raise ConfigError(f"input.path: {path}: the CSV header cannot be read: {error}") from error
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError(f"input.path: {path}: the CSV header names column {repeated[0]!r} more than once")
    return header


def _csv_reader(stream: Any, name: str) -> Any:
    # surrogateescape: bytes that are not UTF-8 must fail their row alone, not the file.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(max(MAX_CSV_FIELD_CHARS, csv.field_size_limit()))
    # strict: without it a quote that is never closed swallows the rest of the file as one good row.
    return csv.reader(text, delimiter="\t" if is_tab_separated(name) else ",", strict=True)


def is_tab_separated(name: str) -> bool:
    return ".tsv" in PurePosixPath(name.lower()).suffixes[-2:]


def _csv_rows(stream: Any, name: str, config: InputConfig) -> Iterator[Row]:
    reader = _csv_reader(stream, name)
    header: list[str] = next(reader, [])
    number = 0
    while True:
        where = f"{name} line {reader.line_num + 1}"
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Row(number, 0, error_code=BAD_LINE, error_message=f"{where}: not valid CSV: {error}")
        else:
            if not values:
                continue  # a blank line, as csv.DictReader has it
            yield _csv_row(values, header, number, where, config)
        number += 1


def _csv_row(values: list[str], header: list[str], number: int, where: str, config: InputConfig) -> Row:
    row = Row(number, sum(map(len, values)))
    if len(values) != len(header):
        # Which value belongs to which column is anyone's guess, so none is kept.
        row.fail(BAD_LINE, f"{where}: {len(values)} fields, but the header has {len(header)}")
        return row
    fields = dict(zip(header, values, strict=True))
    if not is_clean("".join(values)):
        bad = [column for column in header if not is_clean(fields[column])]
        row.fail(BAD_LINE, f"{where}: column {bad[0]!r} is not valid UTF-8")
        fields = {column: value for column, value in fields.items() if column not in bad}
    row.fields = fields
    row.id = fields.get(config.id_column) or None
    row.prompt = fields.get(config.prompt_column)
    return row


def is_clean(text: str) -> bool:
    """Whether `text` can be written as UTF-8, that is, has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- JSON Lines -------------------------------------------------------------------------------------------


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line; a `_RowError` says why there is none."""
    try:
        # Decoded here: json.loads(bytes) would guess UTF-16 and let encoded surrogates pass.
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _RowError(BAD_LINE, _describe_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise _RowError(BAD_LINE, f"not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # an integer of more than 4300 digits
        raise _RowError(BAD_LINE, f"not readable JSON: {error}") from error
    except RecursionError as error:
        raise _RowError(BAD_LINE, f"JSON nested deeper than {MAX_JSON_DEPTH} levels") from error
    if not isinstance(value, dict):
        raise _RowError(BAD_LINE, f"expected a JSON object, got {_json_kind(value)}")
    if line.count(b"[") + line.count(b"{") > MAX_JSON_DEPTH and _depth(value) > MAX_JSON_DEPTH:
        raise _RowError(BAD_LINE, f"JSON nested deeper than {MAX_JSON_DEPTH} levels")
    return value


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return depth


def _json_kind(value: Any) -> str:
    kinds = {bool: "true/false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_rows(
    lines: Iterable[bytes],
    name: str,
    make_row: Callable[[Row, dict[str, Any], InputConfig], None],
    config: InputConfig,
) -> Iterator[Row]:
    for number, line in enumerate(lines):
        if not line or line.isspace():
            continue  # not a row, but its number is used up: made ids bear line numbers
        row = Row(number, len(line))
        try:
            value = parse_object(line)
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
        except _RowError as error:
            row.fail(error.code, error.reason)
        if row.error_code:
            row.error_message = f"{name} line {number + 1}: {row.error_message}"
        yield row


def _dirty_keys(value: dict[str, Any]) -> list[str]:
    return [key for key, item in value.items() if not (is_clean(key) and is_clean(to_json(item)))]


def _jsonl_row(row: Row, value: dict[str, Any], config: InputConfig) -> None:
    row.fields = value
    prompt = value.get(config.prompt_column)
    if isinstance(prompt, str):
        row.prompt = prompt
    given = value.get(config.id_column)
    if isinstance(given, str):
        row.id = given or None
    elif type(given) is int:
        row.id = str(given)
    elif given is not None:
        kind = _json_kind(given)
        row.fail(BAD_LINE, f"id column {config.id_column!r} must be a string or an integer, got {kind}")
    if prompt is None:
        state = "is null" if config.prompt_column in value else "is missing"
        row.fail(PROMPT_MISSING, f"column {config.prompt_column!r} {state}")
    elif row.prompt is None:
        row.fail(PROMPT_NOT_TEXT, f"column {config.prompt_column!r} must be a string, got {_json_kind(prompt)}")


# --- OpenAI batch lines -----------------------------------------------------------------------------------


def looks_like_batch(lines: Iterable[bytes]) -> bool | None:
    """Whether the first line that is a JSON object is an OpenAI batch line; None without such a line."""
    for line in lines:
        try:
            return parse_object(line).keys() >= BATCH_KEYS
        except _RowError:
            continue
    return None


def _batch_row(row: Row, value: dict[str, Any], config: InputConfig) -> None:
    fields = {key: _batch_text(value[key]) for key in ("method", "url") if value.get(key) is not None}
    row.fields = fields
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        row.fail(BAD_LINE, f"custom_id must be a non-empty string, got {_shown(custom_id)}")
    else:
        row.id = custom_id
    body = value.get("body")
    if not isinstance(body, dict):
        raise _RowError(BAD_LINE, f"body must be an object, got {_json_kind(body)}")
    fields["body"] = _batch_body(body)
    try:
        _check_target(value)
        row.sampling = _sampling(body)
    except _RowError as error:
        row.fail(error.code, error.reason)
    row.prompt, row.tokens = _batch_prompt(body.get("prompt"))


def _batch_text(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


def _batch_body(body: dict[str, Any]) -> str:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # NaN and Infinity: the answer file would not be JSON
        raise _RowError(BAD_LINE, "body holds a number that JSON does not have (NaN or infinite)") from error


def _check_target(value: dict[str, Any]) -> None:
    if value.get("method") != "POST":
        raise _RowError(BAD_PARAMETERS, f"method must be 'POST', got {_shown(value.get('method'))}")
    if value.get("url") != BATCH_URL:
        raise _RowError(BAD_PARAMETERS, f"url must be {BATCH_URL!r}, got {_shown(value.get('url'))}")


def _batch_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Text or token ids; one of the two is None."""
    if prompt is None:
        raise _RowError(PROMPT_MISSING, "body.prompt is missing or null")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise _RowError(BAD_PARAMETERS, f"body.prompt holds {len(prompt)} prompts; give one prompt per line")
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in prompt):
        return None, prompt
    wanted = f"a string or a non-empty list of token ids (integers from 0 to {MAX_TOKEN_ID})"
    raise _RowError(PROMPT_NOT_TEXT, f"body.prompt must be {wanted}, got {_shown(prompt)}")


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
            raise _RowError(BAD_PARAMETERS, f"body.{key} is not supported; remove it")
        if not check(value):
            raise _RowError(BAD_PARAMETERS, f"body.{key} must be {allowed}, got {_shown(value)}")
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    if "top_k" in own:
        own["top_k"] = max(own["top_k"], 0)
    return to_json(own) if own else None


def _shown(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- Arrow types of JSON values ---------------------------------------------------------------------------


def infer_json_type(values: list[Any]) -> pa.DataType | None:
    """The Arrow type that holds every value exactly, or None: then the column has to be JSON text.

    An int32 leaf stands for integers that a double can hold too, an int64 leaf for those that it cannot; so
    that a chunk of integers and a chunk of doubles merge only where nothing is lost. `final_json_type` drops
    the difference.
    """
    try:
        return _exact_type(pa.array(values))
    except (pa.ArrowException, OverflowError):
        return None


def _exact_type(array: Any) -> pa.DataType:
    if pa.types.is_int64(array.type):
        ends = pc.min_max(array).as_py()
        small = ends["min"] is None or (ends["min"] >= -EXACT_DOUBLE and ends["max"] <= EXACT_DOUBLE)
        return pa.int32() if small else pa.int64()
    if pa.types.is_list(array.type):
        return pa.list_(_exact_type(array.flatten()))
    if pa.types.is_struct(array.type):
        children = zip(array.type, array.flatten(), strict=True)
        return pa.struct([pa.field(child.name, _exact_type(values)) for child, values in children])
    return array.type


Merge = Callable[[pa.DataType, pa.DataType], pa.DataType | None]


def merge_types(a: pa.DataType, b: pa.DataType, leaf: Merge) -> pa.DataType | None:
    """A type that holds all values of both, `leaf` deciding for types that are not nested, or None."""
    if a.equals(b) or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    if pa.types.is_list(a) and pa.types.is_list(b):
        value = merge_types(a.value_type, b.value_type, leaf)
        return None if value is None else pa.list_(value)
    if pa.types.is_struct(a) and pa.types.is_struct(b):
        merged = {child.name: child.type for child in a}
        for child in b:
            both = merge_types(merged.get(child.name, pa.null()), child.type, leaf)
            if both is None:
                return None
            merged[child.name] = both
        return pa.struct(list(merged.items())) if len(merged) <= MAX_TYPE_LEAVES else None
    return leaf(a, b)


def merge_json_leaf(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    kinds = {str(a), str(b)}
    if kinds == {"int32", "int64"}:
        return pa.int64()
    return pa.float64() if kinds == {"int32", "double"} else None


def merge_parquet_leaf(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    """Wider numbers, decimals, strings and binaries; nothing that could overflow or round in mid-run."""
    numbers = all(pa.types.is_integer(t) or pa.types.is_floating(t) for t in (a, b))
    strings = all(pa.types.is_string(t) or pa.types.is_large_string(t) for t in (a, b))
    binaries = all(pa.types.is_binary(t) or pa.types.is_large_binary(t) for t in (a, b))
    decimals = all(pa.types.is_decimal(t) for t in (a, b))
    if not (numbers or strings or binaries or decimals):
        return None
    try:
        both = pa.unify_schemas([pa.schema([("x", a)]), pa.schema([("x", b)])], promote_options="permissive")
    except pa.ArrowException:
        return None
    wide = both.field("x").type
    if numbers and not all(_can_hold(wide, t) for t in (a, b)):
        return None
    return wide


def _can_hold(wide: pa.DataType, narrow: pa.DataType) -> bool:
    if pa.types.is_floating(wide) and pa.types.is_integer(narrow) and narrow.bit_width == 64:
        return False  # numpy calls int64 -> float64 safe; above 2^53 it rounds
    return bool(np.can_cast(narrow.to_pandas_dtype(), wide.to_pandas_dtype(), "safe"))


def final_json_type(type_: pa.DataType) -> pa.DataType | None:
    """The type a column is written with, never null or an empty struct; None: it has to be JSON text."""
    return None if _leaves(type_, 1) > MAX_TYPE_LEAVES else _finished(type_)


def _finished(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_null(type_):
        return pa.string()
    if pa.types.is_int32(type_):
        return pa.int64()
    if pa.types.is_list(type_):
        return pa.list_(_finished(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(child.name, _finished(child.type)) for child in type_])
    return type_


def _leaves(type_: pa.DataType, depth: int) -> int:
    """Number of leaves; more than the limit for a type that Parquet cannot hold."""
    if depth > MAX_TYPE_DEPTH or (pa.types.is_struct(type_) and type_.num_fields == 0):
        return MAX_TYPE_LEAVES + 1
    if pa.types.is_list(type_):
        return _leaves(type_.value_type, depth + 1)
    if pa.types.is_struct(type_):
        return sum(_leaves(child.type, depth + 1) for child in type_)
    return 1


# --- Parquet columns --------------------------------------------------------------------------------------


def is_text_type(type_: pa.DataType) -> bool:
    """string, large_string, string_view, or a dictionary of one of them."""
    type_ = type_.value_type if pa.types.is_dictionary(type_) else type_
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(type_) for check in checks)


def is_id_type(type_: pa.DataType) -> bool:
    return is_text_type(type_) or pa.types.is_integer(type_.value_type if pa.types.is_dictionary(type_) else type_)


def plain_type(type_: pa.DataType) -> pa.DataType:
    """`type_` with the type of the values for dictionaries, which differ from file to file."""
    if pa.types.is_dictionary(type_):
        return plain_type(type_.value_type)
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(plain_type(type_.value_type)))
    if pa.types.is_struct(type_):
        return pa.struct([child.with_type(plain_type(child.type)) for child in type_])
    return type_


def to_text(column: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """A string or integer column as `string`, and which values are not valid UTF-8: those become null."""
    return without_invalid_utf8(column.cast(plain_type(column.type)).cast(pa.string()))


def without_invalid_utf8(column: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """The column with nulls for text that is not UTF-8, and where: bool [rows]. Nested text is not looked at.

    Parquet marks bytes as text without looking at them, and the first .as_py() would raise in mid-run.
    """
    bad = np.zeros(len(column), dtype=bool)
    if not is_text_type(column.type):
        return column, bad
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        for index, value in enumerate(column.cast(pa.large_string()).cast(pa.large_binary()).to_pylist()):
            bad[index] = value is not None and not _decodes(value)
        column = column.take(pa.array(np.arange(len(column)), mask=bad))  # a null index gives a null
    return column, bad


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def unknown_columns(wanted: str, columns: Collection[str]) -> str:
    """The end of a message about a column that is not there."""
    names = sorted(columns)
    shown = names[:20] + (["..."] if len(names) > 20 else [])
    return f"no column {wanted!r}; there are: {', '.join(shown) or 'none'}"
