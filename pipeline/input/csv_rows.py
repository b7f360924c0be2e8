"""CSV and TSV files with a header line: every value stays the text it is.

A row may span lines. Left out: guessing delimiters, quoting or types.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, Final, Protocol

from pipeline.config import MAX_LINE_BYTES, ConfigError, InputConfig
from pipeline.input.lines import READ_BYTES
from pipeline.input.row import Row, is_clean
from pipeline.schema import BAD_LINE

MAX_CSV_FIELD_CHARS: Final = 1 << 28  # the csv module's own is 128 KiB; a prompt may have 30 MB


class CsvReader(Protocol):
    """What `csv.reader` gives."""

    def __iter__(self) -> Iterator[list[str]]: ...

    def __next__(self) -> list[str]: ...


class CsvLines:
    """The lines of a file, one after the other, as `csv` wants them; the row that they make has a limit in bytes.

    csv.Error in place of more; the rest of that line is left out, and never in memory.
    """

    def __init__(self, stream: BinaryIO, max_bytes: int) -> None:
        # surrogateescape: bytes that are not UTF-8 must fail their row alone, not the file.
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._max_bytes = max_bytes
        self._left = max_bytes
        self.count = 0
        """Lines so far, those that were left out too."""

    def begin_row(self) -> None:
        self._left = self._max_bytes

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        most = max(self._left, 0) + 2  # the end of the last line is no part of the row
        line = self._text.readline(most)
        if not line:
            raise StopIteration
        self.count += 1
        is_whole = line.endswith(("\n", "\r")) or len(line) < most
        num_bytes = len(line) if line.isascii() else len(line.encode("utf-8", "surrogateescape"))
        is_short = num_bytes - (len(line) - len(line.rstrip("\r\n"))) <= self._left
        self._left -= num_bytes
        if is_whole and is_short:
            return line
        while not is_whole and (rest := self._text.readline(READ_BYTES)):
            is_whole = rest.endswith(("\n", "\r"))
        raise csv.Error(f"more bytes than limits.max_line_bytes allows ({self._max_bytes})")


def read_csv_header(stream: BinaryIO, path: str) -> list[str]:
    """The column names; [] for an empty file. `ConfigError` for a broken header or a column named twice."""
    try:
        header = next(_csv_reader(CsvLines(stream, MAX_LINE_BYTES), path), [])
        "".join(header).encode()
    except (csv.Error, UnicodeEncodeError) as error:
        raise ConfigError("input.path", f"{path}: the CSV header cannot be read: {error}") from error
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError("input.path", f"{path}: the CSV header names column {repeated[0]!r} more than once")
    return header


def _csv_reader(lines: CsvLines, name: str) -> CsvReader:
    csv.field_size_limit(max(MAX_CSV_FIELD_CHARS, csv.field_size_limit()))
    # strict: without it a quote that is never closed swallows the rest of the file as one good row.
    return csv.reader(lines, delimiter="\t" if is_tab_separated(name) else ",", strict=True)


def is_tab_separated(name: str) -> bool:
    return ".tsv" in PurePosixPath(name.lower()).suffixes[-2:]


def csv_rows(stream: BinaryIO, name: str, config: InputConfig, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row]:
    lines = CsvLines(stream, max_line_bytes)
    reader = _csv_reader(lines, name)
    header = next(reader, [])
    number = 0
    while True:
        where = f"{name} line {lines.count + 1}"
        lines.begin_row()
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
    row.prompt = None if config.text_column is None else fields.get(config.text_column)
    return row
