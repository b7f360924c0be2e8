"""One pass over one file -> `FileScan`: how many rows, which columns of which types, which ids.

Of Parquet only the footer and the id column are read; of Arrow all of it.
Left out: what the files have in common (`plan`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config import ConfigError, InputConfig
from pipeline.input.arrays import Digests
from pipeline.input.arrow_files import arrow_batches, open_arrow, stored_schema
from pipeline.input.arrow_types import infer_json_type, merge_json_leaf, merge_types
from pipeline.input.csv_rows import read_csv_header
from pipeline.input.files import Listing, SourceFile, blame, is_fsspec, open_stream, read_etag, sniff_batch
from pipeline.input.formats import ARROW, iter_rows
from pipeline.input.ids import DIGEST, digest_id, digest_ids, made_id
from pipeline.input.openai_rows import BATCH_COLUMNS
from pipeline.input.parquet_columns import (
    is_id_type,
    is_text_type,
    parquet_ids,
    plain_type,
    unwritable,
    without_views,
)
from pipeline.input.row import BLOCK_BYTES, Row
from pipeline.schema import RESERVED_COLUMNS

SCANNED_ROWS = 65536  # at a time


@dataclass(frozen=True, eq=False)
class FileScan:
    """What one pass over one file found; of its first `input.limit` rows, if there is a limit."""

    file: SourceFile
    num_rows: int
    num_bytes: int  # of the rows in memory, about
    extra_schema: pa.Schema  # columns but prompt and id; JSONL: see arrow_types.infer_json_type
    json_columns: frozenset[str]  # JSONL columns that no Arrow type fits: string, JSON text
    has_prompt: bool  # the prompt column was there, be it null
    has_id: bool  # likewise
    has_own_ids: bool  # some row has an id that is not made
    is_indexed: bool  # the digests of its ids were taken
    etag: str | None = None  # of the object, where there are etags
    is_batch: bool | None = None  # JSONL with format auto: whether the first object is an OpenAI batch line
    first_error: str | None = None
    id_sum: int | None = None  # `ids.sum_digests` of its rows, where it was asked for


def scan_file(listing: Listing, index: int, config: InputConfig, index_all: bool = False) -> tuple[FileScan, Digests]:
    """One pass over file `index` (Parquet: footer, id column), and the digests of its ids: 'S16' [num_rows].

    No digests where reading them is extra work and no row has an id of its own, unless `index_all`: made ids are
    unique. `ConfigError` for what is no row's fault.
    """
    file = listing.files[index]
    with blame("input.path", file.path, is_fsspec(listing.filesystem)):
        etag = read_etag(listing.filesystem, file)
        if listing.format == "parquet":
            scan, digests = _scan_parquet(listing.filesystem, file, config, index_all)
        elif listing.format == ARROW:
            scan, digests = _scan_arrow(listing.filesystem, file, config, index_all)
        else:
            scan, digests = _scan_rows(listing, file, config, index_all or listing.format != "text")
        return replace(scan, etag=etag), digests


def _scan_rows(listing: Listing, file: SourceFile, config: InputConfig, is_indexed: bool) -> tuple[FileScan, Digests]:
    header: list[str] = []
    if listing.format == "csv":
        with open_stream(listing.filesystem, file) as stream:
            header = read_csv_header(stream, file.path)
        if header and config.prompt_column not in header:
            missing = unknown_columns(config.prompt_column, header)
            raise ConfigError("input.prompt_column", f"{file.path} has {missing}")
    columns = _Columns(listing.format, header, config)
    digests = bytearray()
    num_rows = num_bytes = num_own_ids = 0
    first_error = None
    with open_stream(listing.filesystem, file) as stream:
        for row in islice(iter_rows(stream, file.name, listing.format, config, listing.max_line_bytes), config.limit):
            num_rows += 1
            num_bytes += row.num_bytes
            first_error = first_error or row.error_message or None
            columns.add(row)
            num_own_ids += row.id is not None
            if is_indexed:
                digests += digest_id(row.id or made_id(file, row.number))
    is_json = config.format == "auto" and listing.format in ("jsonl", "openai_batch")
    schema = columns.finish()
    _refuse_reserved(schema.names, file)
    scan = FileScan(
        file,
        num_rows=num_rows,
        num_bytes=num_bytes,
        extra_schema=schema,
        json_columns=frozenset(columns.json_columns),
        has_prompt=config.prompt_column in columns.seen,
        has_id=config.id_column in columns.seen,
        has_own_ids=num_own_ids > 0,
        is_indexed=is_indexed,
        is_batch=sniff_batch(listing.filesystem, file) if is_json else None,
        first_error=first_error,
    )
    return scan, np.frombuffer(bytes(digests), dtype=DIGEST)


class _Columns:
    """The names and types of a file's other columns, chunk by chunk."""

    def __init__(self, format: str, header: Sequence[str], config: InputConfig) -> None:
        self._format = format
        self._own = {config.prompt_column, config.id_column} if format in ("csv", "jsonl") else set()
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


def _refuse_reserved(names: Sequence[str], file: SourceFile) -> None:
    for name in names:
        if name in RESERVED_COLUMNS:
            raise ConfigError(
                "input.path",
                f"{file.path} has a column {name!r}, a name that the output uses; "
                "rename or drop it, or make it input.prompt_column or input.id_column",
            )


def _scan_parquet(
    filesystem: pafs.FileSystem, file: SourceFile, config: InputConfig, index_all: bool
) -> tuple[FileScan, Digests]:
    with pq.ParquetFile(filesystem.open_input_file(file.path)) as parquet:
        num_rows = parquet.metadata.num_rows
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
        # A file without rows may come without columns or with columns of type null: it has no say.
        schema = parquet.schema_arrow if num_rows else pa.schema([])
        if num_rows:
            _check_parquet_columns(schema, file, config)
        extra = _extra_schema(schema, file, config)
        num_rows = min(num_rows, config.limit or num_rows)
        has_id = config.id_column in schema.names
        digests, has_own_ids = np.empty(0, DIGEST), False
        if has_id:
            digests, has_own_ids = _parquet_digests(parquet, file, num_rows, config)
        elif index_all:
            digests = digest_ids([made_id(file, row) for row in range(num_rows)])
        scan = FileScan(
            file,
            num_rows=num_rows,
            num_bytes=sum(group.total_byte_size for group in groups),
            extra_schema=extra,
            json_columns=frozenset(),
            has_prompt=num_rows > 0,
            has_id=has_id,
            has_own_ids=has_own_ids,
            is_indexed=has_id or index_all,
        )
        return scan, digests


def _extra_schema(schema: pa.Schema, file: SourceFile, config: InputConfig) -> pa.Schema:
    """The columns but prompt and id, without dictionaries and views."""
    fields = []
    for field in schema:
        if field.name not in (config.prompt_column, config.id_column):
            try:
                fields.append((field.name, plain_type(without_views(field.type))))
            except pa.ArrowNotImplementedError as error:
                raise unwritable(field, file.path) from error
    _refuse_reserved([name for name, _ in fields], file)
    return pa.schema(fields)


def _scan_arrow(
    filesystem: pafs.FileSystem, file: SourceFile, config: InputConfig, index_all: bool
) -> tuple[FileScan, Digests]:
    extra, has_id, is_indexed = pa.schema([]), False, index_all
    digests, num_rows, num_bytes, num_own = bytearray(), 0, 0, 0
    with open_arrow(filesystem, file) as reader:
        stored = stored_schema(reader.schema, file)
        for batch in arrow_batches(reader, stored, SCANNED_ROWS):
            if not num_rows:  # a file without rows has no say
                _check_parquet_columns(stored, file, config)
                extra = _extra_schema(stored, file, config)
                has_id = config.id_column in stored.names
                is_indexed = has_id or index_all
            batch = batch[: (config.limit or num_rows + batch.num_rows) - num_rows]
            if has_id:
                ids, is_own, _ = parquet_ids(batch.column(config.id_column), file, num_rows)
                num_own += int(is_own.sum())
            elif is_indexed:
                ids = [made_id(file, num_rows + row) for row in range(batch.num_rows)]
            if is_indexed:
                digests += b"".join(map(digest_id, ids))
            num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
            if num_rows == config.limit:
                break
    scan = FileScan(
        file,
        num_rows=num_rows,
        num_bytes=num_bytes,
        extra_schema=extra,
        json_columns=frozenset(),
        has_prompt=num_rows > 0,
        has_id=has_id,
        has_own_ids=num_own > 0,
        is_indexed=is_indexed,
    )
    return scan, np.frombuffer(bytes(digests), dtype=DIGEST)


def _check_parquet_columns(schema: pa.Schema, file: SourceFile, config: InputConfig) -> None:
    names = schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError("input.path", f"{file.path} has more than one column {repeated[0]!r}")
    if config.prompt_column not in names:
        missing = unknown_columns(config.prompt_column, names)
        raise ConfigError("input.prompt_column", f"{file.path} has {missing}")
    type_ = schema.field(config.prompt_column).type
    if not is_text_type(type_):
        raise ConfigError(
            "input.prompt_column",
            f"{config.prompt_column!r} in {file.path} has type {type_}; a prompt must be a string",
        )
    type_ = schema.field(config.id_column).type if config.id_column in names else pa.string()
    if not is_id_type(type_) and not pa.types.is_null(type_):
        raise ConfigError(
            "input.id_column",
            f"{config.id_column!r} in {file.path} has type {type_}; an id must be a string or an integer",
        )


def _parquet_digests(
    parquet: pq.ParquetFile, file: SourceFile, num_rows: int, config: InputConfig
) -> tuple[Digests, bool]:
    """Of every row, and whether some row has an id of its own."""
    digests, number, num_own = bytearray(), 0, 0
    for batch in parquet.iter_batches(SCANNED_ROWS, columns=[config.id_column]):
        ids, own, _ = parquet_ids(batch.column(config.id_column)[: num_rows - number], file, number)
        digests += b"".join(map(digest_id, ids))
        number, num_own = number + len(ids), num_own + int(own.sum())
        if number == num_rows:
            break
    return np.frombuffer(bytes(digests), dtype=DIGEST), num_own > 0


def unknown_columns(wanted: str, columns: Collection[str]) -> str:
    """The end of a message about a column that is not there."""
    names = sorted(columns)
    shown = names[:20] + (["..."] if len(names) > 20 else [])
    return f"no column {wanted!r}; there are: {', '.join(shown) or 'none'}"
