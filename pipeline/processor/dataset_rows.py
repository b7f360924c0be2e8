"""Converts rows of a dataset to the tables that the stages take, and their results back to rows of a dataset.

Ids are the dataset's own, or derived from what the prompt is made of, so they are the same in every run, and equal for
equal prompts.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from pipeline.config.job import ConfigError, InputConfig, JobConfig
from pipeline.formatting import Json
from pipeline.input.columns import (
    bad_text,
    check_chosen_id,
    check_source,
    is_id_type,
    is_prompt_type,
    own_columns,
    python_values,
    to_python,
    to_text,
)
from pipeline.input.expansion import Documents, Expansion, expand
from pipeline.input.input_plan import ROW_SCHEMA
from pipeline.input.line_reader import RowError
from pipeline.input.prompt_templates import Prompter, check_templates, prompt_columns
from pipeline.input.row_parameters import arrow_parameters, check_sampling_column
from pipeline.schema import (
    BAD_LINE,
    BAD_PARAMETERS,
    PROMPT,
    PROMPT_MISSING,
    PROMPT_NOT_TEXT,
    PROMPT_TOKENS,
    RESERVED_COLUMNS,
    SAMPLING,
    SOURCE_SCHEMA,
    STATUS,
    asked_schema,
)
from pipeline.stages.detokenize import detokenize
from pipeline.stages.packed_window import unpack
from pipeline.stages.tokenize import TOKENS, TokenizeConfig, tokenize

Value: TypeAlias = Json | bytes | np.ndarray
"""A value of a row, as Ray Data passes it to a function."""
MADE_ROWS = 1024  # a block of rows with prompts
FINISHED_AT_ONCE = 4096  # rows: as Python objects they take many times the memory of their table


def merged(row: dict[str, Value], function: Callable[[dict[str, Value]], dict[str, Value]]) -> dict[str, Value]:
    """The row, updated with what `function` returns for it."""
    return {**row, **function(dict(row))}


def prepare(
    table: pa.Table, *, config: JobConfig, tokens: TokenizeConfig, prompter: Prompter | None
) -> Iterator[pa.Table]:
    """Rows of a dataset, with the prompts that are made of them, tokenised; bad ones with an error code."""
    for rows in to_rows(table, config, prompter):
        yield tokenize(rows, config=tokens)


def check_columns(names: Collection[str], config: JobConfig) -> None:
    """ConfigError where a dataset has nothing to make prompts of, or a column that bears one of our names."""
    expansion = Expansion.of(config.input, config.sampling)
    has_own = config.input.sampling_column is not None
    asked = asked_schema(config.sampling, config.output.reasoning_parser, has_row_parameters=has_own)
    reserved = RESERVED_COLUMNS | set(asked.names)
    reserved |= set(SOURCE_SCHEMA.names) if expansion.is_on else set()
    if taken := sorted(set(names) & reserved - own_columns(config.input)):
        raise ConfigError(
            "",
            f"the dataset has a column {taken[0]!r}, which is a name of the output's; rename it "
            f"(dataset.rename_columns) or leave it out (dataset.drop_columns)",
        )
    check_templates(config.input, names)
    check_sampling_column(names, config.input)
    try:
        check_source(names, "the dataset", config.input)
        check_chosen_id(names, "the dataset", config.input)
    except ConfigError as error:
        raise ConfigError(error.key, f"{error.message}; name another, or make it with preprocess") from error


def to_rows(table: pa.Table, config: JobConfig, prompter: Prompter | None = None) -> Iterator[pa.Table]:
    """The columns of a normalised input row, and the others as they are; several rows of one where the run says so."""
    check_columns(table.column_names, config)
    count, source = table.num_rows, config.input
    prompts: list[str | None] = [None] * count
    codes, messages = [""] * count, [""] * count
    if source.text_column is not None:
        prompts, codes, messages = _texts(table[source.text_column], source.text_column)
    elif source.messages_column is not None:
        for row in map(int, np.flatnonzero(np.asarray(table[source.messages_column].is_null()))):
            codes[row], messages[row] = PROMPT_MISSING, f"column {source.messages_column!r} is null"
    fields = _fields(table, source, codes, messages)
    ids = _own_ids(table, source.id_column, codes, messages)
    for row, id in enumerate(ids):
        ids[row] = id or made_id(prompts[row] if source.text_column is not None else repr(fields[row]))
    kept = [name for name in table.column_names if name not in own_columns(source)]
    columns = {
        "id": pa.array(ids, pa.string()),
        PROMPT: pa.array(prompts, pa.string()),
        PROMPT_TOKENS: pa.nulls(count, TOKENS),
        SAMPLING: pa.array(_parameters(table, config, codes, messages), pa.string()),
        "error_code": pa.array(codes, pa.string()),
        "error_message": pa.array(messages, pa.string()),
    }
    rows = pa.table(columns | {name: table[name] for name in kept})
    expansion = Expansion.of(source, config.sampling)
    added = [*(SOURCE_SCHEMA if expansion.is_on else ())]
    schema = pa.schema([*ROW_SCHEMA, *added, *(rows.schema.field(name) for name in kept)])
    locations = [f"row {id!r}" for id in ids]
    documents = Documents(rows, [rows.nbytes // max(count, 1)] * count, locations, fields, ())
    yield from expand(documents, expansion, schema, prompter, None, MADE_ROWS)


def _parameters(table: pa.Table, config: JobConfig, codes: list[str], messages: list[str]) -> list[str | None]:
    """The rows' own sampling parameters as JSON; a row whose parameters cannot be used is marked as failed."""
    own: list[str | None] = [None] * table.num_rows
    if (column := config.input.sampling_column) is None:
        return own
    expansion, first = Expansion.of(config.input, config.sampling), 0
    for batch in table.select([column]).to_batches():
        values, bad = python_values(batch)
        for row, value in enumerate(values, first):
            try:
                if row - first in bad:
                    raise RowError(BAD_PARAMETERS, f"cannot be read: {bad[row - first]}")
                own[row] = arrow_parameters(value.get(column), expansion)
            except RowError as error:
                codes[row] = codes[row] or error.code
                messages[row] = messages[row] or f"column {column!r} {error.reason}"
        first += batch.num_rows
    return own


def _fields(table: pa.Table, source: InputConfig, codes: list[str], messages: list[str]) -> list[dict[str, object]]:
    """The columns that prompts are made of, row by row; a row where they cannot be read is marked as failed."""
    part = table.select(prompt_columns(source, table.column_names))
    if not part.num_columns:
        return [{} for _ in codes]
    found: list[dict[str, object]] = []
    for row in range(table.num_rows):
        try:
            found += to_python(part[row : row + 1].combine_chunks().to_batches()[0])
        except ValueError as error:  # text in it that is no UTF-8, or a time that Python cannot say
            found.append({})
            codes[row], messages[row] = codes[row] or BAD_LINE, messages[row] or f"it cannot be read: {error}"
    return found


def _texts(column: pa.ChunkedArray, name: str) -> tuple[list[str | None], list[str], list[str]]:
    """The text of each row or None, and its error code and message."""
    values = column.to_pylist() if not is_prompt_type(column.type) else []
    bad = np.zeros(len(column), bool)
    if is_prompt_type(column.type):
        parts = [to_text(chunk) for chunk in column.chunks]
        values = [value for texts, _ in parts for value in texts.to_pylist()]
        bad = np.concatenate([bad[:0], *(mask for _, mask in parts)])
    texts: list[str | None] = [value if isinstance(value, str) else None for value in values]
    codes, messages = [""] * len(values), [""] * len(values)
    for row, value in enumerate(values):
        if bad[row]:
            codes[row], messages[row] = BAD_LINE, f"column {name!r} is not valid UTF-8"
        elif value is None:
            codes[row], messages[row] = PROMPT_MISSING, f"column {name!r} is null"
        elif not isinstance(value, str):
            codes[row], messages[row] = PROMPT_NOT_TEXT, f"column {name!r} is of type {column.type}, not text"
    return texts, codes, messages


def _own_ids(table: pa.Table, name: str, codes: list[str], messages: list[str]) -> list[str | None]:
    """The rows' own ids; None where a row has none. A row where it cannot be read is marked as failed."""
    if name not in table.column_names or pa.types.is_null(table[name].type):
        return [None] * table.num_rows
    column = table[name]
    if not is_id_type(column.type):
        raise ConfigError("input.id_column", f"column {name!r} is {column.type}; ids are texts or whole numbers")
    parts = [to_text(chunk) for chunk in column.chunks]
    for row in map(int, np.flatnonzero(np.concatenate([np.zeros(0, bool), *(bad for _, bad in parts)]))):
        codes[row] = codes[row] or BAD_LINE
        messages[row] = messages[row] or f"column {name!r} {bad_text(column.type)}"
    return [id for texts, _ in parts for id in texts.to_pylist()]


def made_id(*parts: str | None) -> str:
    """An id that says nothing but what a prompt is made of."""
    return "row-" + hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def finish_windows(packed: pa.Table, *, tokens: TokenizeConfig) -> Iterator[pa.Table]:
    """Decoded windows, packed as the workers give them, as rows of the output."""
    ours = RESERVED_COLUMNS | set(tokens.asked_schema.names)
    for row in range(packed.num_rows):  # one by one: a column may be of another type in each
        table = unpack(packed.slice(row, 1))
        extra_names = tuple(name for name in table.column_names if name not in ours)
        for start in range(0, table.num_rows, FINISHED_AT_ONCE):
            part = table.slice(start, FINISHED_AT_ONCE)
            yield detokenize(part, config=tokens, extra_names=extra_names).drop_columns([STATUS])
