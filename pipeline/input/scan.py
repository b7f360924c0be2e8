"""One pass over one file -> `FileScan`: how many rows it has, which columns of which types, and the digests of its ids.

Of Parquet only the footer and the id column are read; of every other format everything. What the files have in common
is decided in `input_plan`.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.arrow_files import arrow_batches, open_arrow, stored_schema
from pipeline.input.arrow_types import infer_json_type, merge_json_leaf, merge_types
from pipeline.input.columns import (
    check_source,
    is_id_type,
    is_messages_type,
    is_prompt_type,
    own_columns,
    parquet_ids,
    plain_type,
    refuse_reserved,
    unwritable,
    without_views,
)
from pipeline.input.csv_rows import read_csv_header
from pipeline.input.expansion import Expansion
from pipeline.input.files import Listing, SourceFile, blame, is_fsspec, open_stream, read_etag, sniff_batch
from pipeline.input.formats import ARROW, BINARY, iter_rows
from pipeline.input.ids import (
    DIGEST,
    Digests,
    check_indexed,
    digest_id,
    digest_ids,
    digest_made_ids,
    digest_texts,
    made_id,
)
from pipeline.input.line_reader import BLOCK_BYTES, InputRow
from pipeline.input.memory_limits import block_cuts, decoded_bytes, parquet_batches
from pipeline.input.openai_rows import BATCH_COLUMNS, URLS
from pipeline.input.parquet_pages import refuse_large_pages
from pipeline.openai_format.parameters import asks_for_choice

SCANNED_ROWS = 65536  # at a time


@dataclass(frozen=True, eq=False)
class FileScan:
    """What one pass over one file found; with `input.limit`, over as many of its first documents."""

    file: SourceFile
    num_rows: int  # output rows that its documents become (`expansion`)
    num_documents: int
    num_bytes: int  # about what the documents take in memory
    columns: frozenset[str]  # all names found, also those whose values are all null
    extra_schema: pa.Schema  # the columns but prompt and id; for JSONL see arrow_types.infer_json_type
    json_columns: frozenset[str]  # JSONL columns that no Arrow type fits: strings with JSON text
    has_own_ids: bool  # some row has an id that was not made here
    is_indexed: bool  # whether digests of the ids were taken
    etag: str | None = None  # of the object, where the store has them
    is_batch: bool | None = None  # JSONL with format auto: whether the first object is an OpenAI batch line
    first_error: str | None = None
    id_sum: int | None = None  # `ids.sum_digests` of its rows, if it was asked for
    num_chats: int = 0  # OpenAI batch lines that are conversations
    num_requests: int = 0  # OpenAI batch lines with a url that is served here
    unknown_url: str | None = None  # the first of another line
    has_choices: bool = False  # whether a batch line asks for more than text (`schema.CHOICE`)
    counts: NDArray[np.int32] | None = None  # rows per document, if they differ and a limit may cut the file


def scan_file(listing: Listing, index: int, config: InputConfig, index_all: bool = False) -> tuple[FileScan, Digests]:
    """Scans file `index` and returns the digests of its rows' ids, 'S16' [num_rows], too.

    There are no digests where they are extra work and no row has an id of its own (made ids are unique), unless
    `index_all`. ConfigError for what is not the fault of a single row.
    """
    file = listing.files[index]
    with blame("input.path", file.path, is_fsspec(listing.filesystem)):
        etag = read_etag(listing.filesystem, file)
        if listing.format in BINARY:
            scan, digests = _scan_table(listing, file, config, index_all)
        else:
            scan, digests = _scan_rows(listing, file, config, index_all or listing.format != "text")
        return replace(scan, etag=etag), digests


def _scan_rows(listing: Listing, file: SourceFile, config: InputConfig, is_indexed: bool) -> tuple[FileScan, Digests]:
    header: list[str] = []
    if listing.format == "csv":
        with open_stream(listing.filesystem, file) as stream:
            header = read_csv_header(stream, file.path)
        if header:
            check_source(header, file.path, config)
    columns, expansion = _ColumnTypes(listing.format, header, config), listing.expansion
    digests, counts = bytearray(), array("i")
    num_bytes = num_own_ids = num_chats = 0
    num_requests, unknown_url = 0, None
    first_error, has_choices = None, False
    with open_stream(listing.filesystem, file) as stream:
        rows = iter_rows(stream, file.name, listing.format, config, listing.max_line_bytes, expansion)
        for row in islice(rows, config.limit):
            counts.append(expansion.count(row.samples))
            num_bytes += row.num_bytes
            first_error = first_error or row.error_message or None
            columns.add(row)
            num_own_ids += row.id is not None
            num_chats += row.messages is not None
            if listing.format == "openai_batch" and (url := row.fields.get("url")) is not None:
                num_requests += url in URLS
                unknown_url = unknown_url if url in URLS else unknown_url or str(url)
            has_choices = has_choices or asks_for_choice(row.sampling)
            if listing.format != "text":
                check_indexed(len(digests) // DIGEST.itemsize + counts[-1], file.path)
            if is_indexed:
                for id in expansion.ids(row.id or made_id(file.name, row.number), row.samples):
                    digests += digest_id(id)
    if listing.format == "text" and len(counts) == 1 and config.limit is None and "\r" in (row.prompt or ""):
        raise ConfigError(
            "input.path",
            f"{file.path}: a single line, with carriage returns in it; if they end lines, as on old Macs, convert them "
            "(tr '\\r' '\\n'); if they belong to the prompt, write it as JSON Lines",
        )
    per_document = np.frombuffer(counts, np.int32)
    is_even = bool((per_document == expansion.count()).all())
    is_json = config.format == "auto" and listing.format in ("jsonl", "openai_batch")
    schema = columns.finish()
    refuse_reserved(schema.names, file, expansion)
    scan = FileScan(
        file,
        num_rows=int(per_document.sum()),
        num_documents=len(counts),
        num_bytes=num_bytes,
        columns=frozenset(columns.seen),
        extra_schema=schema,
        json_columns=frozenset(columns.json_columns),
        has_own_ids=num_own_ids > 0,
        is_indexed=is_indexed,
        is_batch=sniff_batch(listing.filesystem, file) if is_json else None,
        first_error=first_error,
        num_chats=num_chats,
        num_requests=num_requests,
        unknown_url=unknown_url,
        has_choices=has_choices,
        counts=None if is_even or config.limit is None else per_document,
    )
    return scan, np.frombuffer(digests, dtype=DIGEST)


class _ColumnTypes:
    """The names and types of the columns of a file of lines, inferred from some rows at a time."""

    def __init__(self, format: str, header: Sequence[str], config: InputConfig) -> None:
        self._format = format
        self._own = own_columns(config) if format in ("csv", "jsonl") else frozenset()
        self._rows: list[InputRow] = []
        self._num_bytes = 0
        known = BATCH_COLUMNS if format == "openai_batch" else header
        self.seen: dict[str, None] = dict.fromkeys(known)
        self.types: dict[str, pa.DataType] = {name: pa.string() for name in known if name not in self._own}
        self.json_columns: set[str] = set()

    def add(self, row: InputRow) -> None:
        if self._format != "jsonl":
            return
        self.seen.update(dict.fromkeys(row.fields))
        self._rows.append(row)
        self._num_bytes += row.num_bytes
        if len(self._rows) == 4096 or self._num_bytes >= BLOCK_BYTES:
            self._flush()

    def finish(self) -> pa.Schema:
        self._flush()
        return pa.schema(list(self.types.items()))

    def _flush(self) -> None:
        for name in self.seen:
            if name in self._own or name in self.json_columns:
                continue
            found = infer_json_type([row.fields.get(name) for row in self._rows])
            known = self.types.get(name, pa.null())
            both = None if found is None else merge_types(known, found, merge_json_leaf)
            self.types[name] = pa.string() if both is None else both
            if both is None:
                self.json_columns.add(name)
        self._rows, self._num_bytes = [], 0


class _Table(NamedTuple):
    """A Parquet or Arrow file that is open."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    """Batches of at most SCANNED_ROWS rows; those of Parquet hold the id column alone."""
    num_rows: int | None
    """None: not known before the last batch."""
    num_bytes: int
    """0: to be added up."""


@contextmanager
def _open_table(listing: Listing, file: SourceFile, config: InputConfig) -> Iterator[_Table]:
    if listing.format == ARROW:
        with open_arrow(listing.filesystem, file) as (schema, batches):
            stored = stored_schema(schema, file)
            yield _Table(stored, arrow_batches(batches, stored, SCANNED_ROWS), None, 0)
        return
    source = listing.filesystem.open_input_file(file.path)
    with pq.ParquetFile(source) as parquet:
        is_local = isinstance(listing.filesystem, pafs.LocalFileSystem)
        refuse_large_pages(source, parquet.metadata, file.path, listing.max_line_bytes, is_local=is_local)
        names = [config.id_column] if config.id_column in parquet.schema_arrow.names else []
        num_bytes = sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups))
        batches = parquet_batches(source, parquet, SCANNED_ROWS, names)
        yield _Table(parquet.schema_arrow, batches, parquet.metadata.num_rows, num_bytes)


def _scan_table(listing: Listing, file: SourceFile, config: InputConfig, index_all: bool) -> tuple[FileScan, Digests]:
    expansion, limit = listing.expansion, config.limit
    columns, extra, has_id = frozenset[str](), pa.schema([]), False
    digests, num_documents, num_bytes, num_own = bytearray(), 0, 0, 0
    with _open_table(listing, file, config) as table:
        for batch in table.batches:
            if not num_documents:  # a file without rows may lack columns, or have them with type null: it has no say
                _check_types(table.schema, file, config)
                columns, extra = frozenset(table.schema.names), _extra_schema(table.schema, file, config, expansion)
                has_id = config.id_column in table.schema.names
            left = batch.num_rows if limit is None else limit - num_documents
            batch = batch[:left]
            if has_id:
                total = table.num_rows or num_documents + batch.num_rows
                check_indexed((total if limit is None else min(total, limit)) * expansion.count(), file.path)
                found, own = _digest_ids(batch.column(config.id_column), file, num_documents, expansion)
                digests += found
                num_own += own
            num_documents, num_bytes = num_documents + batch.num_rows, num_bytes + batch.nbytes
            if num_documents == limit:
                break
        if index_all and not has_id:
            digests += b"".join(part.tobytes() for part in digest_made_ids(file.name, num_documents, expansion.all_ids))
        scan = FileScan(
            file,
            num_rows=num_documents * expansion.count(),
            num_documents=num_documents,
            num_bytes=table.num_bytes or num_bytes,
            columns=columns,
            extra_schema=extra,
            json_columns=frozenset(),
            has_own_ids=num_own > 0,
            is_indexed=has_id or index_all,
        )
    return scan, np.frombuffer(digests, dtype=DIGEST)


def _extra_schema(schema: pa.Schema, file: SourceFile, config: InputConfig, expansion: Expansion) -> pa.Schema:
    """The columns but prompt and id, with plain types: no dictionaries, no views."""
    fields, own = [], own_columns(config)
    for field in schema:
        if field.name not in own:
            try:
                fields.append((field.name, plain_type(without_views(field.type))))
            except pa.ArrowNotImplementedError as error:
                raise unwritable(field, file.path) from error
    refuse_reserved([name for name, _ in fields], file, expansion)
    return pa.schema(fields)


def _check_types(schema: pa.Schema, file: SourceFile, config: InputConfig) -> None:
    """ConfigError for a column that is missing, there twice, or of a type that it cannot have."""
    names = schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("input.path", f"{file.path} has more than one column {repeated[0]!r}")
    check_source(names, file.path, config)
    for key, column, is_fit, wanted in (
        ("prompt_column", config.text_column, is_prompt_type, "a prompt must be text: cast it"),
        ("messages_column", config.messages_column, is_messages_type, "a conversation is a list of {role, content}"),
        ("id_column", config.id_column, is_id_type, "an id must be text or a whole number: cast it"),
    ):
        type_ = schema.field(column).type if column in names else pa.string()
        if column in names and not is_fit(type_) and not (key != "prompt_column" and pa.types.is_null(type_)):
            raise ConfigError(f"input.{key}", f"{column!r} in {file.path} has type {type_}; {wanted}")


def _digest_ids(column: pa.Array, file: SourceFile, first: int, expansion: Expansion) -> tuple[bytes, int]:
    """The digests of all output rows of documents with these ids, and how many ids were not made here.

    `first`: the number of the first document in its file. Shared and expanded ids are held a few at a time.
    """
    digests, num_own = bytearray(), 0
    cuts = block_cuts(decoded_bytes(column), BLOCK_BYTES // expansion.count(), max(len(column), 1))
    for start, end in itertools.pairwise(cuts):
        ids, own, _ = parquet_ids(column[start:end], file, first + start)
        num_own += int(own.sum())
        digests += digest_ids(expansion.all_ids(ids.to_pylist())).tobytes() if expansion.is_on else digest_texts(ids)
    return bytes(digests), num_own
