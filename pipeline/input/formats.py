"""File formats: detection by suffix, and the reader of the rows. Everything streams.

Parquet and Arrow are read in record batches instead, by `scan` and `read`.
"""

import posixpath
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO, Final

from pipeline.config.job import MAX_LINE_BYTES, InputConfig
from pipeline.input.csv_rows import csv_rows
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.json_rows import json_rows, jsonl_row
from pipeline.input.line_reader import InputRow, iter_lines, text_rows
from pipeline.input.openai_rows import batch_row

ARROW: Final = "arrow"
BINARY: Final = ("parquet", ARROW)
"""Formats with typed columns and compression of their own."""
_SUFFIXES: Final = {
    ".parquet": "parquet",
    ".arrow": ARROW,
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def parse_suffix(path: str) -> tuple[str | None, str | None]:
    """The format and the compression that a name stands for, None where unknown or absent."""
    stem, suffix = posixpath.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix)
    known = _SUFFIXES.get(posixpath.splitext(stem)[1] if compression else suffix)
    return (None if known in BINARY and compression else known), compression


def iter_rows(
    stream: BinaryIO,
    name: str,
    format: str,
    config: InputConfig,
    max_line_bytes: int = MAX_LINE_BYTES,
    expansion: Expansion = ONE_ROW,
) -> Iterator[InputRow]:
    """The rows of a text, CSV, JSONL or OpenAI batch file; `stream` gives its uncompressed bytes."""
    if format == "text":
        return text_rows(iter_lines(stream, max_line_bytes), name)
    if format == "csv":
        return csv_rows(stream, name, config, max_line_bytes)
    make_row = partial(batch_row, expansion=expansion) if format == "openai_batch" else jsonl_row
    return json_rows(iter_lines(stream, max_line_bytes), name, make_row, config)
