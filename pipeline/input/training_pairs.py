"""(prompt, response) pairs from Parquet, JSONL and CSV files, as text and as tokens: what training and evaluation read.

Files are found and read as those of a run are, but everything is held in memory. The output of a run can be read: a
response that it cut off (`finish_reason` is `length` or `repetition`) does not end with EOS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import NamedTuple

import pyarrow.parquet as pq

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.columns import is_prompt_type, is_text_type, to_text, unknown_columns
from pipeline.input.csv_rows import read_csv_header
from pipeline.input.files import Listing, SourceFile, blame, list_input, open_stream
from pipeline.input.formats import iter_rows
from pipeline.input.json_rows import json_kind
from pipeline.schema import BAD_LINE
from skipdecode.checkpoint.tokenizer import Tokenizer

FINISH, CUT = "finish_reason", ("length", "repetition")
NO_ID = "\0"  # pairs have no ids, and no column has this name

NUM_SHOWN = 5  # bad rows that an error lists


class Keys(NamedTuple):
    """The configuration keys that errors name."""

    path: str = "data.path"
    prompt: str = "data.prompt_column"
    response: str = "data.response_column"


DATA_KEYS = Keys()


@dataclass(frozen=True)
class Pairs:
    """The good rows in file order, and what is wrong with the others."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    """The file and row of each pair, for messages."""
    is_cut: list[bool] = field(default_factory=list)
    """Whether the response of each was cut off."""
    problems: list[str] = field(default_factory=list)
    """One line per bad row: where and why."""


def read_pairs(
    path: str | Sequence[str], prompt_column: str, response_column: str, keys: tuple[str, str, str] = DATA_KEYS
) -> list[tuple[str, str]]:
    """All pairs; ConfigError when files or columns are missing, or a single row is bad."""
    pairs = scan_pairs(path, prompt_column, response_column, keys)
    refuse_problems(pairs.problems, keys[0])
    return pairs.texts


def refuse_problems(problems: Sequence[str], key: str, remedy: str = "repair or remove them") -> None:
    """ConfigError that lists the first bad rows and gives their number."""
    if problems:
        more = [f"... and {len(problems) - NUM_SHOWN} more"] if len(problems) > NUM_SHOWN else []
        raise ConfigError(key, "\n".join([f"{len(problems)} bad rows; {remedy}", *problems[:NUM_SHOWN], *more]))


def scan_pairs(
    path: str | Sequence[str], prompt_column: str, response_column: str, keys: tuple[str, str, str] = DATA_KEYS
) -> Pairs:
    """The good pairs and the problems. ConfigError for what is not a row's fault: files, formats, missing columns.

    An empty prompt is a prompt; an empty response is a problem.
    """
    if prompt_column == response_column:
        raise ConfigError(keys[2], f"is the prompt column too ({prompt_column!r}); name another column")
    paths = (path,) if isinstance(path, str) else tuple(path)
    config = InputConfig(path=paths, prompt_column=prompt_column, id_column=NO_ID)
    pairs = Pairs()
    try:
        listing = _list(config, keys)
        for file in listing.files:
            for where, prompt, response, fault, is_cut in _rows(listing, file, config, response_column, keys):
                reason = fault or _fault(prompt_column, prompt) or _fault(response_column, response, may_be_empty=False)
                if not reason and isinstance(prompt, str) and isinstance(response, str):
                    pairs.texts.append((prompt, response))
                    pairs.where.append(where)
                    pairs.is_cut.append(is_cut)
                else:
                    pairs.problems.append(f"{where}: {reason}")
    except ConfigError as error:  # the readers speak of `input:`
        raise error.renamed("input.path", keys[0]).renamed("input.prompt_column", keys[1]) from error
    if not pairs.texts and not pairs.problems:
        raise ConfigError(keys[0], f"{', '.join(paths)}: no rows")
    return pairs


def _list(config: InputConfig, keys: tuple[str, str, str]) -> Listing:
    try:
        listing = list_input(config)
    except ConfigError as error:
        if error.key == "input.format":  # there is no such key here: the name decides
            raise ConfigError(keys[0], f"give files named .parquet, .jsonl, .csv or .tsv ({error})") from error
        raise
    if listing.format not in ("parquet", "jsonl", "csv"):
        raise ConfigError(keys[0], f"{listing.files[0].path} is {listing.format}; pairs are Parquet, JSONL or CSV")
    return listing


def _fault(column: str, value: object, *, may_be_empty: bool = True) -> str:
    """What is wrong with a value, or an empty string."""
    if value is None:
        return f"column {column!r} is missing or null"
    if not isinstance(value, str):
        return f"column {column!r} must be a string, got {json_kind(value)}"
    return "" if value or may_be_empty else f"column {column!r} is empty"


class PairRow(NamedTuple):
    """A row as its file has it, its values not checked yet."""

    where: str
    prompt: object
    response: object
    fault: str
    """What the reader found wrong, or empty."""
    is_cut: bool


def _rows(
    listing: Listing, file: SourceFile, config: InputConfig, response_column: str, keys: tuple[str, str, str]
) -> Iterator[PairRow]:
    columns = ((keys[1], config.prompt_column), (keys[2], response_column))
    with blame("input.path", file.path):
        if listing.format == "parquet":
            yield from _parquet_rows(listing, file, columns)
            return
        if listing.format == "csv":
            with open_stream(listing.filesystem, file) as stream:
                _check_columns(file, columns, read_csv_header(stream, file.path))
        yield from _text_rows(listing, file, config, columns)


def _text_rows(
    listing: Listing, file: SourceFile, config: InputConfig, columns: Sequence[tuple[str, str]]
) -> Iterator[PairRow]:
    names = [name for _, name in columns]
    # a CSV header was looked at; of JSONL, rows are held until they have shown both columns: else the file lacks one
    seen: dict[str, None] = dict.fromkeys(names if listing.format == "csv" else ())
    held: list[PairRow] = []
    with open_stream(listing.filesystem, file) as stream:
        for row in iter_rows(stream, file.path, listing.format, config):
            fault = row.error_message.removeprefix(f"{file.path} ") if row.error_code == BAD_LINE else ""
            where = f"{file.path} {'line' if listing.format == 'jsonl' else 'row'} {row.number + 1}"
            if fault:  # it begins with its line
                line, _, fault = fault.partition(": ")
                where = f"{file.path} {line}"
            is_cut = row.fields.get(FINISH) in CUT
            held.append(PairRow(where, row.fields.get(names[0]), row.fields.get(names[1]), fault, is_cut))
            if not all(name in seen for name in names):
                seen.update(dict.fromkeys(row.fields))
            if all(name in seen for name in names):
                yield from held
                held = []
    if held and seen:
        _check_columns(file, columns, list(seen))
    yield from held


def _parquet_rows(listing: Listing, file: SourceFile, columns: Sequence[tuple[str, str]]) -> Iterator[PairRow]:
    names = [name for _, name in columns]
    with pq.ParquetFile(listing.filesystem.open_input_file(file.path)) as parquet:
        schema = parquet.schema_arrow
        _check_columns(file, columns, schema.names)
        for key, name in columns:
            if not is_prompt_type(schema.field(name).type):
                type_ = schema.field(name).type
                raise ConfigError(key, f"{name!r} in {file.path} has type {type_}; it must be a string")
        number, is_of_run = 0, FINISH in schema.names and is_text_type(schema.field(FINISH).type)
        for batch in parquet.iter_batches(columns=[*names, FINISH] if is_of_run else names):
            (prompts, bad_prompts), (responses, bad_responses) = (to_text(batch.column(name)) for name in names)
            ends = to_text(batch.column(FINISH))[0].to_pylist() if is_of_run else [None] * len(prompts)
            values = zip(prompts.to_pylist(), responses.to_pylist(), ends, bad_prompts, bad_responses, strict=True)
            for prompt, response, end, *bad in values:
                number += 1
                faults = [name for name, is_bad in zip(names, bad, strict=True) if is_bad]
                fault = f"column {faults[0]!r} is not valid UTF-8" if faults else ""
                yield PairRow(f"{file.path} row {number}", prompt, response, fault, end in CUT)


def _check_columns(file: SourceFile, columns: Sequence[tuple[str, str]], found: Sequence[str]) -> None:
    for key, name in columns:
        if name not in found:
            raise ConfigError(key, f"{file.path} has {unknown_columns(name, found)}")


def encode_pairs(
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    is_cut: Sequence[bool] | None = None,
    *,
    is_rendered: bool = False,
) -> list[tuple[list[int], list[int]]]:
    """For each pair the prompt's tokens, with BOS where the model has one, and the response's, with EOS where there is
    one, unless cut off.

    `is_rendered`: all prompts come from a chat template and have their special tokens. Otherwise a prompt that brings
    its own BOS gets no second one.
    """
    end = [] if tokenizer.end is None else [tokenizer.end]
    ends = [end if is_whole else [] for is_whole in map(not_, is_cut or [False] * len(pairs))]
    bos_tokens = [] if is_rendered else list(tokenizer.bos_tokens)
    encode = tokenizer.encode_rendered if is_rendered else tokenizer.encode
    prompts = [
        tokens[len(bos_tokens) :] if bos_tokens and tokens[: 2 * len(bos_tokens)] == 2 * bos_tokens else tokens
        for tokens in encode([prompt for prompt, _ in pairs])
    ]
    responses = tokenizer.encode_rendered([response for _, response in pairs])
    return [(p, [*r, *end]) for p, r, end in zip(prompts, responses, ends, strict=True)]
