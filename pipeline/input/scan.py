"""One pass over one file -> `FileScan`: how many rows, which columns of which types, which ids.

Of Parquet only the footer and the id column are read; of Arrow all of it.
Left out: what the files have in common (`plan`).
"""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.arrow_files import arrow_batches, open_arrow, stored_schema
from pipeline.input.arrow_types import infer_json_type, merge_json_leaf, merge_types
from pipeline.input.columns import (
    check_source,
    is_id_type,
    is_messages_type,
    is_text_type,
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
from pipeline.input.formats import ARROW, iter_rows
from pipeline.input.ids import DIGEST, Digests, check_indexed, digest_id, digest_made_ids, digest_texts, made_id
from pipeline.input.memory_limits import block_cuts, decoded_bytes, parquet_batches, row_sizes
from pipeline.input.openai_rows import BATCH_COLUMNS
from pipeline.input.rows import BLOCK_BYTES, Row
from pipeline.openai.parameters import asks_for_choice

SCANNED_ROWS = 65536  # at a time


@dataclass(frozen=True, eq=False)
class FileScan:
    """What one pass over one file found; of its first `input.limit` documents, if there is a limit."""

    file: SourceFile
    num_rows: int  # that its documents become (`expansion`)
    num_documents: int
    num_bytes: int  # of the documents in memory, about
    columns: frozenset[str]  # every name that was there, be its values null
    extra_schema: pa.Schema  # columns but prompt and id; JSONL: see arrow_types.infer_json_type
    json_columns: frozenset[str]  # JSONL columns that no Arrow type fits: string, JSON text
    has_own_ids: bool  # some row has an id that is not made
    is_indexed: bool  # the digests of its ids were taken
    etag: str | None = None  # of the object, where there are etags
    is_batch: bool | None = None  # JSONL with format auto: whether the first object is an OpenAI batch line
    first_error: str | None = None
    id_sum: int | None = None  # `ids.sum_digests` of its rows, where it was asked for
    num_chats: int = 0  # OpenAI batch lines that are conversations
    has_choices: bool = False  # some of them ask for more than text (`schema.CHOICE`)
    counts: NDArray[np.int32] | None = None  # rows of each document, where these differ and a limit may cut the file


def scan_file(listing: Listing, index: int, config: InputConfig, index_all: bool = False) -> tuple[FileScan, Digests]:
    """One pass over file `index` (Parquet: footer, id column), and the digests of its ids: 'S16' [num_rows].

    No digests where reading them is extra work and no row has an id of its own, unless `index_all`: made ids are
    unique. `ConfigError` for what is no row's fault.
    """
    file = listing.files[index]
    with blame("input.path", file.path, is_fsspec(listing.filesystem)):
        etag = read_etag(listing.filesystem, file)
        if listing.format == "parquet":
            scan, digests = _scan_parquet(listing, file, config, index_all)
        elif listing.format == ARROW:
            scan, digests = _scan_arrow(listing, file, config, index_all)
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
    columns, expansion = _Columns(listing.format, header, config), listing.expansion
    digests, counts = bytearray(), array("i")
    num_bytes = num_own_ids = num_chats = 0
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
            has_choices = has_choices or asks_for_choice(row.sampling)
            if listing.format != "text":
                check_indexed(len(digests) // DIGEST.itemsize + counts[-1], file.path)
            if is_indexed:
                for id in expansion.ids(row.id or made_id(file.name, row.number), row.samples):
                    digests += digest_id(id)
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
        has_choices=has_choices,
        counts=None if is_even or config.limit is None else per_document,
    )
    return scan, np.frombuffer(digests, dtype=DIGEST)


class _Columns:
    """The names and types of a file's other columns, chunk by chunk."""

    def __init__(self, format: str, header: Sequence[str], config: InputConfig) -> None:
        self._format = format
        self._own = own_columns(config) if format in ("csv", "jsonl") else frozenset()
        self._rows: list[Row] = []
        self._num_bytes = 0
        known = BATCH_COLUMNS if format == "openai_batch" else header
        self.seen: dict[str, None] = dict.fromkeys(known)
        self.types: dict[str, pa.DataType] = {name: pa.string() for name in known if name not in self._own}
        self.json_columns: set[str] = set()

    def add(self, row: Row) -> None:
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


def _scan_parquet(listing: Listing, file: SourceFile, config: InputConfig, index_all: bool) -> tuple[FileScan, Digests]:
    expansion = listing.expansion
    source = listing.filesystem.open_input_file(file.path)
    with pq.ParquetFile(source) as parquet:
        num_rows = parquet.metadata.num_rows
        # A file without rows may come without columns or with columns of type null: it has no say.
        schema = parquet.schema_arrow if num_rows else pa.schema([])
        if num_rows:
            _check_parquet_columns(schema, file, config)
        extra = _extra_schema(schema, file, config, expansion)
        num_rows = min(num_rows, config.limit or num_rows)
        has_id = config.id_column in schema.names
        digests, has_own_ids = np.empty(0, DIGEST), False
        if has_id:
            check_indexed(num_rows * expansion.count(), file.path)
            digests, has_own_ids = _parquet_digests(source, parquet, file, num_rows, config, expansion)
        elif index_all:
            parts = [part.tobytes() for part in digest_made_ids(file.name, num_rows, expansion.all_ids)]
            digests = np.frombuffer(b"".join(parts), dtype=DIGEST)
        scan = FileScan(
            file,
            num_rows=num_rows * expansion.count(),
            num_documents=num_rows,
            num_bytes=sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)),
            columns=frozenset(schema.names),
            extra_schema=extra,
            json_columns=frozenset(),
            has_own_ids=has_own_ids,
            is_indexed=has_id or index_all,
        )
        return scan, digests


def _extra_schema(schema: pa.Schema, file: SourceFile, config: InputConfig, expansion: Expansion) -> pa.Schema:
    """The columns but prompt and id, without dictionaries and views."""
    fields, own = [], own_columns(config)
    for field in schema:
        if field.name not in own:
            try:
                fields.append((field.name, plain_type(without_views(field.type))))
            except pa.ArrowNotImplementedError as error:
                raise unwritable(field, file.path) from error
    refuse_reserved([name for name, _ in fields], file, expansion)
    return pa.schema(fields)


def _scan_arrow(listing: Listing, file: SourceFile, config: InputConfig, index_all: bool) -> tuple[FileScan, Digests]:
    extra, has_id, is_indexed, expansion = pa.schema([]), False, index_all, listing.expansion
    digests, num_rows, num_bytes, num_own = bytearray(), 0, 0, 0
    with open_arrow(listing.filesystem, file) as (schema, batches):
        stored = stored_schema(schema, file)
        for batch in arrow_batches(batches, stored, SCANNED_ROWS):
            if not num_rows:  # a file without rows has no say
                _check_parquet_columns(stored, file, config)
                extra = _extra_schema(stored, file, config, expansion)
                has_id = config.id_column in stored.names
                is_indexed = has_id or index_all
            batch = batch[: (config.limit or num_rows + batch.num_rows) - num_rows]
            if has_id:
                ids, is_own, _ = parquet_ids(batch.column(config.id_column), file, num_rows)
                num_own += int(is_own.sum())
                check_indexed((num_rows + batch.num_rows) * expansion.count(), file.path)
            elif is_indexed:
                ids = pa.array([made_id(file.name, num_rows + row) for row in range(batch.num_rows)], pa.string())
            if is_indexed:
                digests += _digest(ids, expansion)
            num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
            if num_rows == config.limit:
                break
    scan = FileScan(
        file,
        num_rows=num_rows * expansion.count(),
        num_documents=num_rows,
        num_bytes=num_bytes,
        columns=frozenset(stored.names if num_rows else ()),
        extra_schema=extra,
        json_columns=frozenset(),
        has_own_ids=num_own > 0,
        is_indexed=is_indexed,
    )
    return scan, np.frombuffer(digests, dtype=DIGEST)


def _check_parquet_columns(schema: pa.Schema, file: SourceFile, config: InputConfig) -> None:
    names = schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("input.path", f"{file.path} has more than one column {repeated[0]!r}")
    check_source(names, file.path, config)
    for key, column, is_fit, wanted in (
        ("prompt_column", config.text_column, is_text_type, "a prompt must be a string"),
        ("messages_column", config.messages_column, is_messages_type, "a conversation is a list of {role, content}"),
        ("id_column", config.id_column, is_id_type, "an id must be a string or an integer"),
    ):
        type_ = schema.field(column).type if column in names else pa.string()
        if column in names and not is_fit(type_) and not (key != "prompt_column" and pa.types.is_null(type_)):
            raise ConfigError(f"input.{key}", f"{column!r} in {file.path} has type {type_}; {wanted}")


def _digest(ids: pa.Array, expansion: Expansion) -> bytes:
    """Of all rows of documents with these ids, string without nulls."""
    if not expansion.is_on:
        return digest_texts(ids)
    digests = bytearray()
    for start, end in itertools.pairwise(block_cuts(decoded_bytes(ids), BLOCK_BYTES // expansion.count(), len(ids))):
        digests += b"".join(map(digest_id, expansion.all_ids(ids[start:end].to_pylist())))
    return bytes(digests)


def _parquet_digests(
    source: pa.NativeFile,
    parquet: pq.ParquetFile,
    file: SourceFile,
    num_rows: int,
    config: InputConfig,
    expansion: Expansion,
) -> tuple[Digests, bool]:
    """Of every row, and whether some document has an id of its own."""
    digests, number, num_own = bytearray(), 0, 0
    for batch in parquet_batches(source, parquet, SCANNED_ROWS, [config.id_column]):
        batch = batch[: num_rows - number]
        for start, end in itertools.pairwise(block_cuts(row_sizes(batch), BLOCK_BYTES, SCANNED_ROWS)):
            ids, own, _ = parquet_ids(batch.column(config.id_column)[start:end], file, number)
            digests += _digest(ids, expansion)
            number, num_own = number + len(ids), num_own + int(own.sum())
        if number == num_rows:
            break
    return np.frombuffer(digests, dtype=DIGEST), num_own > 0
