"""CSV and TSV files with a header line: every value stays the text it is.

A row may span lines. Left out: guessing delimiters, quoting or types.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, Final, Protocol

from pipeline.config import ConfigError, InputConfig
from pipeline.input.row import Row, is_clean
from pipeline.schema import BAD_LINE

MAX_CSV_FIELD_CHARS: Final = 1 << 28  # the csv module's own is 128 KiB; a prompt may have 30 MB


class CsvReader(Protocol):
    """What `csv.reader` gives."""

    @property
    def line_num(self) -> int: ...

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


def read_csv_header(stream: BinaryIO, path: str) -> list[str]:
    """The column names; [] for an empty file. `ConfigError` for a broken header or a column named twice."""
    try:
        header = next(_csv_reader(stream, path), [])
        "".join(header).encode()
    except (csv.Error, UnicodeEncodeError) as error:
        raise ConfigError("input.path", f"{path}: the CSV header cannot be read: {error}") from error
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError("input.path", f"{path}: the CSV header names column {repeated[0]!r} more than once")
    return header


def _csv_reader(stream: BinaryIO, name: str) -> CsvReader:
    # surrogateescape: bytes that are not UTF-8 must fail their row alone, not the file.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    csv.field_size_limit(max(MAX_CSV_FIELD_CHARS, csv.field_size_limit()))
    # strict: without it a quote that is never closed swallows the rest of the file as one good row.
    return csv.reader(text, delimiter="\t" if is_tab_separated(name) else ",", strict=True)


def is_tab_separated(name: str) -> bool:
    return ".tsv" in PurePosixPath(name.lower()).suffixes[-2:]


def csv_rows(stream: BinaryIO, name: str, config: InputConfig) -> Iterator[Row]:
    reader = _csv_reader(stream, name)
    header = next(reader, [])
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
