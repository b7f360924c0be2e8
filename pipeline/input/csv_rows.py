"""CSV and TSV files with a header line. A row may span lines; every value stays the text it is.

Delimiters, quoting and types are not guessed, so that nothing is lost on the way through (leading zeros, say).
"""

import csv
import io
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import BinaryIO, Final

from pipeline.config.job import MAX_LINE_BYTES, ConfigError, InputConfig
from pipeline.input.encoding import UTF16_LINE, is_utf16
from pipeline.input.line_reader import READ_BYTES, InputRow, is_clean
from pipeline.schema import BAD_LINE

MAX_CSV_FIELD_CHARS: Final = 1 << 28  # the csv module's own is 128 KiB; a prompt may have 30 MB
MAX_COLUMNS: Final = 10_000
FIELD_BYTES: Final = 100  # about what a field takes in memory besides its text


class CsvLines:
    """The lines of a file, one after the other, as `csv` wants them, with a limit in bytes for the row that they make.

    Raises csv.Error where a row has more; the rest of that line is skipped and never in memory.
    """

    def __init__(self, stream: BinaryIO, max_row_bytes: int) -> None:
        # surrogateescape: bytes that are not UTF-8 must fail their row alone, not the file.
        self._text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._max_row_bytes = self._left = max_row_bytes
        self._held = ""  # read already, of the next line
        self.count = 0
        """Lines so far, including those that were skipped."""

    def begin_row(self, max_row_bytes: int) -> None:
        self._max_row_bytes = self._left = max_row_bytes

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        line = self._held or self._text.readline(READ_BYTES)
        num_bytes = _num_bytes(line)
        if line.endswith("\n") and num_bytes <= self._left:  # as nearly all are
            self.count += 1
            self._left, self._held = self._left - num_bytes, ""
            return line
        self._held = line
        piece, is_last = self._read_piece()
        if not piece:
            raise StopIteration
        self.count += 1
        pieces: list[str] | None = []  # None: the row is too long
        while True:
            # the end of the last line is no part of the row
            num_bytes = _num_bytes(piece.rstrip("\r\n") if is_last else piece)
            if pieces is not None and num_bytes <= self._left:
                pieces.append(piece)
            else:
                pieces = None
            self._left -= _num_bytes(piece)
            if is_last:
                break
            piece, is_last = self._read_piece()
        if pieces is None:
            raise csv.Error(f"more bytes than limits.max_line_bytes allows ({self._max_row_bytes})")
        return "".join(pieces)

    def _read_piece(self) -> tuple[str, bool]:
        """Up to READ_BYTES characters of a line, and whether they are its last; "" at the end of the file."""
        piece, self._held = self._held, ""
        if not piece.endswith(("\n", "\r")):
            piece += self._text.readline(READ_BYTES)
        if piece.endswith("\r"):  # as the last character of a piece, half of a line end
            self._held = self._text.read(1)
            if self._held == "\n":
                piece, self._held = piece + "\n", ""
        return piece, piece.endswith(("\n", "\r")) or len(piece) < READ_BYTES


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def read_csv_header(stream: BinaryIO, path: str) -> list[str]:
    """The column names; [] for an empty file. ConfigError for a broken header or a column named twice."""
    try:
        header = next(_csv_reader(CsvLines(stream, MAX_LINE_BYTES), path), [])
        "".join(header).encode()
    except (csv.Error, UnicodeEncodeError) as error:
        raise ConfigError("input.path", f"{path}: the CSV header cannot be read: {error}") from error
    if len(header) > MAX_COLUMNS:
        raise ConfigError("input.path", f"{path}: the CSV header has {len(header)} columns, more than {MAX_COLUMNS}")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ConfigError("input.path", f"{path}: the CSV header names column {repeated[0]!r} more than once")
    return header


def _csv_reader(lines: CsvLines, name: str) -> Iterator[list[str]]:
    csv.field_size_limit(max(MAX_CSV_FIELD_CHARS, csv.field_size_limit()))
    # strict: without it a quote that is never closed swallows the rest of the file as one good row.
    return csv.reader(lines, delimiter="\t" if is_tab_separated(name) else ",", strict=True)


def is_tab_separated(name: str) -> bool:
    return ".tsv" in PurePosixPath(name.lower()).suffixes[-2:]


def csv_rows(
    stream: BinaryIO, name: str, config: InputConfig, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[InputRow]:
    """The rows of a CSV file, without its header and blank lines."""
    lines = CsvLines(stream, MAX_LINE_BYTES)
    reader = _csv_reader(lines, name)
    header = next(reader, [])
    number = 0
    while True:
        where = f"{name} line {lines.count + 1}"
        lines.begin_row(max_line_bytes)
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield InputRow(number, 0, error_code=BAD_LINE, error_message=f"{where}: not valid CSV: {error}")
        else:
            if not values:
                continue  # a blank line, as csv.DictReader has it
            yield _csv_row(values, header, number, where, config)
        number += 1


def _csv_row(values: list[str], header: list[str], number: int, where: str, config: InputConfig) -> InputRow:
    row = InputRow(number, sum(map(len, values)) + FIELD_BYTES * len(values))
    if len(values) != len(header):
        # It is unknown which value belongs to which column, so none is kept.
        row.fail(BAD_LINE, f"{where}: {len(values)} fields, but the header has {len(header)}")
        return row
    fields = dict(zip(header, values, strict=True))
    joined = "".join(values)
    if not is_clean(joined):
        bad = [column for column in header if not is_clean(fields[column])]
        row.fail(BAD_LINE, f"{where}: column {bad[0]!r} is not valid UTF-8")
        fields = {column: value for column, value in fields.items() if column not in bad}
    if is_utf16(joined):
        row.fail(BAD_LINE, f"{where}: {UTF16_LINE}")
    row.fields = fields
    row.id = fields.get(config.id_column) or None
    row.prompt = None if config.text_column is None else fields.get(config.text_column)
    return row
