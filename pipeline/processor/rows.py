"""Rows of a dataset as the stages take them, and what they leave as rows of a dataset again. Tables in, tables out.

Ids are the dataset's own, or made of what the prompt is made of: the same in every run, and for equal prompts the same.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from pipeline.config import ConfigError, JobConfig
from pipeline.input.parquet_columns import is_id_type, is_text_type, to_text
from pipeline.input.scan import unknown_columns
from pipeline.schema import (
    BAD_LINE,
    PROMPT,
    PROMPT_MISSING,
    PROMPT_NOT_TEXT,
    PROMPT_TOKENS,
    RESERVED_COLUMNS,
    SAMPLING,
    STATUS,
    score_schema,
)
from pipeline.stages.packed import unpack
from pipeline.stages.tokens import TOKENS, TokenizeConfig, finish, tokenize
from pipeline.units import Json

Value: TypeAlias = Json | bytes | np.ndarray
"""Of a row, as Ray Data hands it to a function."""
FINISHED_AT_ONCE = 4096  # rows: as Python objects they take many times the memory of their table


def merged(row: dict[str, Value], function: Callable[[dict[str, Value]], dict[str, Value]]) -> dict[str, Value]:
    """The row with what `function` makes of it over its own columns."""
    return {**row, **function(dict(row))}


def prepare(table: pa.Table, *, config: JobConfig, tokens: TokenizeConfig) -> pa.Table:
    """Rows of a dataset, tokenised; one out for each one in, bad ones with an error code."""
    return tokenize(to_rows(table, config), config=tokens)


def check_columns(names: Collection[str], config: JobConfig) -> None:
    """ConfigError where a dataset has no prompts, or a column that bears one of our names."""
    mine = {config.input.prompt_column, config.input.id_column}
    if taken := sorted(set(names) & (RESERVED_COLUMNS | set(score_schema(config.sampling).names)) - mine):
        raise ConfigError(
            "",
            f"the dataset has a column {taken[0]!r}, which is a name of the output's; rename it "
            f"(dataset.rename_columns) or leave it out (dataset.drop_columns)",
        )
    if config.input.prompt_column not in names:
        missing = unknown_columns(config.input.prompt_column, names)
        raise ConfigError("input.prompt_column", f"the dataset has {missing}; name another, or make it with preprocess")


def to_rows(table: pa.Table, config: JobConfig) -> pa.Table:
    """The columns of a normalised input row, and the others as they are."""
    check_columns(table.column_names, config)
    prompts, codes, messages = _texts(table[config.input.prompt_column], config.input.prompt_column)
    ids = _own_ids(table, config.input.id_column)
    for row, id in enumerate(ids):
        ids[row] = id or made_id(prompts[row])
    others = [name for name in table.column_names if name not in (config.input.prompt_column, config.input.id_column)]
    columns = {
        "id": pa.array(ids, pa.string()),
        PROMPT: pa.array(prompts, pa.string()),
        PROMPT_TOKENS: pa.nulls(len(ids), TOKENS),
        SAMPLING: pa.nulls(len(ids), pa.string()),
        "error_code": pa.array(codes, pa.string()),
        "error_message": pa.array(messages, pa.string()),
    }
    return pa.table(columns | {name: table[name] for name in others})


def _texts(column: pa.ChunkedArray, name: str) -> tuple[list[str | None], list[str], list[str]]:
    """Of each row its text or None, and error code and message."""
    values = column.to_pylist() if not is_text_type(column.type) else []
    bad = np.zeros(len(column), bool)
    if is_text_type(column.type):
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


def _own_ids(table: pa.Table, name: str) -> list[str | None]:
    """None where a row has none of its own."""
    if name not in table.column_names or pa.types.is_null(table[name].type):
        return [None] * table.num_rows
    column = table[name]
    if not is_id_type(column.type):
        raise ConfigError("input.id_column", f"column {name!r} is {column.type}; ids are texts or whole numbers")
    return [id for chunk in column.chunks for id in to_text(chunk)[0].to_pylist()]


def made_id(*parts: str | None) -> str:
    """An id that says nothing but what a prompt is made of."""
    return "row-" + hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def finish_windows(packed: pa.Table, *, tokens: TokenizeConfig) -> Iterator[pa.Table]:
    """Decoded windows, packed as the workers give them, as rows of the output."""
    table = unpack(packed)
    ours = RESERVED_COLUMNS | set(score_schema(tokens.sampling).names)
    extra_names = tuple(name for name in table.column_names if name not in ours)
    for start in range(0, table.num_rows, FINISHED_AT_ONCE):
        part = table.slice(start, FINISHED_AT_ONCE)
        yield finish(part, config=tokens, extra_names=extra_names).drop_columns([STATUS])
