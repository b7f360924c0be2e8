"""The door for prompts: `InputConfig` -> files -> a plan -> blocks of rows that all have the same columns.

    list_input -> scan_file per file (anywhere) -> plan_input -> read_file per file (anywhere)

Invariants: a row in the input is a row out, good or failed; scan and read count the same rows and give the
same ids; an id that a row does not bring itself is `file:row`, `file` relative to the folder that was given,
so that moving or mounting the corpus elsewhere changes nothing. What is wrong with the input as a whole (a
path, a format, a column) is a `ConfigError` before anything starts; what is wrong with a row is that row's
`error_code`.

Memory on the driver: 16 bytes per row of every scan that saw ids, and about three times that while duplicates
are looked for. Left out: Ray (`pipeline.source`), tokens and the length of prompts (`pipeline.stages`), and a
single line of 2 GiB or more, which Arrow's `string` cannot hold.
"""

import hashlib
import os
import posixpath
import re
import urllib.parse
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline import formats
from pipeline.config import ConfigError, InputConfig
from pipeline.formats import Row
from pipeline.schema import (
    BAD_LINE,
    DUPLICATE_ID,
    ID,
    PROMPT,
    PROMPT_MISSING,
    PROMPT_TOKENS,
    RESERVED_COLUMNS,
    SAMPLING,
)

ROW_SCHEMA: Final = pa.schema(
    [
        pa.field(ID, pa.string()),
        pa.field(PROMPT, pa.string()),
        pa.field(PROMPT_TOKENS, pa.list_(pa.int32())),
        pa.field(SAMPLING, pa.string()),
        pa.field("error_code", pa.string()),
        pa.field("error_message", pa.string()),
    ]
)
"""The columns of every normalised row, in order; the input's other columns follow."""

BLOCK_BYTES: Final = 32 << 20  # a block ends here even if it has few rows: 1024 prompts of 30 MB are 30 GB
DIGEST: Final = np.dtype("S16")
NDArray = np.ndarray[Any, Any]
Blocks = Generator[pa.Table, None, None]

_SUFFIXES: Final = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
# Beside the data in many a folder. Anything else that is not data is an error, never silently left out.
_PAPERWORK: Final = re.compile(r"(readme|licen[cs]e|notice|changelog|citation)([._-].*)?", re.IGNORECASE)


# --- Files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFile:
    path: str  # inside the filesystem
    size_bytes: int
    mtime_ns: int | None
    name: str  # relative to the common folder of all inputs; unique; the `file` of a made id


@dataclass(frozen=True)
class Listing:
    filesystem: pafs.FileSystem
    files: tuple[SourceFile, ...]  # in the order of `input.path`, sorted within each of its entries
    format: str  # concrete, never "auto"


def list_input(config: InputConfig) -> Listing:
    """Finds the files of `input.path` and their format; `ConfigError` if there is none, or no single one.

    A path is a file, a folder or a pattern of `*`, `?` and `**`; local, or any URI pyarrow knows. A folder is
    read recursively, but without names that start with `_` or `.` (a wildcard does not match these either)
    and without README, LICENSE and the like, with format auto also without *.md. A file that several paths
    lead to is read once.
    """
    if config.prompt_column == config.id_column and config.format not in ("text", "openai_batch"):
        raise ConfigError(f"input.id_column: is the prompt column too ({config.id_column!r}); name another column")
    filesystem: pafs.FileSystem | None = None
    found: dict[str, Any] = {}  # identity -> FileInfo, in order
    bases: list[str] = []
    for given in config.path:
        with _blame(f"input.path: {given}"):
            own, base, pattern = _resolve(given)
            if filesystem is not None and not own.equals(filesystem):
                raise ConfigError(f"input.path: {given}: one run reads from one filesystem; copy, or run twice")
            filesystem = own
            infos, folder = _find(own, base, pattern, given, config)
        bases.append(folder)
        for info in infos:
            found.setdefault(_identity(own, info.path), info)
    root = posixpath.commonpath(bases) if len(set(bases)) > 1 else bases[0]
    files = tuple(
        SourceFile(info.path, info.size or 0, info.mtime_ns, info.path[len(root) :].lstrip("/"))
        for info in found.values()
    )
    return Listing(filesystem, files, _detect_format(filesystem, files, config))


@contextmanager
def _blame(what: str) -> Iterator[None]:
    """Turns what the filesystem or Arrow says about unreadable bytes into a `ConfigError` that names them."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: cannot be read: {error}") from error


def _resolve(given: str) -> tuple[pafs.FileSystem, str, list[str]]:
    """Filesystem, path up to the first component with a wildcard, and the components from there."""
    if "://" not in given:
        path = os.path.abspath(os.path.expanduser(given))
        if os.path.exists(path):
            return pafs.LocalFileSystem(), path, []  # a file may have a star in its name
        fixed, pattern = _split_pattern(path)
        return pafs.LocalFileSystem(), fixed, pattern
    # `?key=value` belongs to the URI (s3://bucket/x?region=eu-west-1); any other `?` is a wildcard.
    options = re.search(r"\?\w+=.*$", given)
    fixed, pattern = _split_pattern(given[: options.start()] if options else given)
    filesystem, path = pafs.FileSystem.from_uri(fixed + (options.group() if options else ""))
    return filesystem, path.rstrip("/") or path, [urllib.parse.unquote(part) for part in pattern]


def _split_pattern(path: str) -> tuple[str, list[str]]:
    wildcard = re.search(r"[*?]", path)
    if wildcard is None:
        return path, []
    cut = path.rindex("/", 0, wildcard.start())
    return path[:cut] or "/", [part for part in path[cut + 1 :].split("/") if part]


def _find(
    filesystem: pafs.FileSystem, base: str, pattern: list[str], given: str, config: InputConfig
) -> tuple[list[Any], str]:
    """FileInfos of one entry of `input.path`, sorted, and the folder that their names are relative to."""
    start = filesystem.get_file_info(base)
    if start.type == pafs.FileType.NotFound:
        raise ConfigError(f"input.path: {given}: no such file or folder")
    hits = _expand(filesystem, start, pattern) if pattern else [start]
    infos: dict[str, Any] = {}
    for hit in hits:
        if hit.type == pafs.FileType.Directory:
            infos.update((info.path, info) for info in _walk(filesystem, hit.path) if not _is_paperwork(info, config))
        elif hit.type == pafs.FileType.File:
            if not (pattern and pattern[-1] in ("*", "**") and _is_paperwork(hit, config)):
                infos[hit.path] = hit
        else:
            raise ConfigError(f"input.path: {hit.path}: not a regular file")
    if not infos:
        raise ConfigError(f"input.path: {given}: no file matches")
    is_folder = bool(pattern) or start.type == pafs.FileType.Directory
    return [infos[path] for path in sorted(infos)], base if is_folder else posixpath.dirname(base)


def _is_paperwork(info: Any, config: InputConfig) -> bool:
    if config.format == "auto" and info.base_name.lower().endswith(".md"):
        return True
    return _PAPERWORK.fullmatch(info.base_name) is not None and _suffix(info.path)[0] != "parquet"


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _children(filesystem: pafs.FileSystem, folder: str) -> list[Any]:
    return list(filesystem.get_file_info(pafs.FileSelector(folder)))


def _expand(filesystem: pafs.FileSystem, info: Any, pattern: list[str]) -> list[Any]:
    """Level by level, so that `s3://bucket/a*/x.jsonl` does not list the bucket."""
    if not pattern:
        return [] if info.type == pafs.FileType.NotFound else [info]
    if info.type != pafs.FileType.Directory:
        return []
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        folders = [c for c in _children(filesystem, info.path) if not _is_hidden(c.base_name)]
        hits = _expand(filesystem, info, rest)
        return hits + [hit for folder in folders for hit in _expand(filesystem, folder, pattern)]
    if "*" not in head and "?" not in head:
        return _expand(filesystem, filesystem.get_file_info(posixpath.join(info.path, head)), rest)
    wanted = re.compile(re.escape(head).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
    children = [child for child in _children(filesystem, info.path) if wanted.fullmatch(child.base_name)]
    shown = [child for child in children if not _is_hidden(child.base_name) or _is_hidden(head)]
    return [hit for child in shown for hit in _expand(filesystem, child, rest)]


def _walk(filesystem: pafs.FileSystem, folder: str) -> Iterator[Any]:
    """Every file under `folder`, hidden names left out."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        _refuse_broken_links(folder)
    for info in filesystem.get_file_info(pafs.FileSelector(folder, recursive=True)):
        if info.type == pafs.FileType.Directory:
            continue
        inside = info.path[len(folder) :].strip("/").split("/")
        if any(_is_hidden(part) for part in inside):
            continue
        if info.type != pafs.FileType.File:
            raise ConfigError(f"input.path: {info.path}: not a regular file")
        yield info


def _refuse_broken_links(folder: str) -> None:
    # pyarrow leaves them out without a word: a corpus in links to a disk that is not mounted would be empty.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in names:
            path = os.path.join(parent, name)
            if not _is_hidden(name) and not os.path.exists(path):
                raise ConfigError(f"input.path: {path}: a link to nowhere ({os.readlink(path)})")


def _identity(filesystem: pafs.FileSystem, path: str) -> str:
    return os.path.realpath(path) if isinstance(filesystem, pafs.LocalFileSystem) else path


def _suffix(path: str) -> tuple[str | None, str | None]:
    """Format and compression that the name stands for; None: unknown, none."""
    stem, suffix = posixpath.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix)
    known = _SUFFIXES.get(posixpath.splitext(stem)[1] if compression else suffix)
    return (None if known == "parquet" and compression else known), compression


def _detect_format(filesystem: pafs.FileSystem, files: Sequence[SourceFile], config: InputConfig) -> str:
    if config.format != "auto":
        for file in files:
            known = _suffix(file.path)[0]
            if known and "parquet" in (known, config.format) and known != config.format:
                raise ConfigError(f"input.format: {config.format}, but {file.path} is a {known} file")
        return config.format
    first: tuple[str, SourceFile] | None = None
    for file in files:
        known = _suffix(file.path)[0]
        if known is None:
            raise ConfigError(
                f"input.format: cannot tell the format of {file.path} from its name; set input.format to "
                "parquet, jsonl, csv, text or openai_batch, or give a pattern that leaves the file out"
            )
        first = first or (known, file)
        if known != first[0]:
            raise ConfigError(
                f"input.path: {first[1].path} is {first[0]} and {file.path} is {known}; "
                "one run reads one format. Give a pattern that picks one of them"
            )
    assert first is not None
    if first[0] != "jsonl":
        return first[0]
    sniffed = (_sniff_batch(filesystem, file) for file in files)
    return "openai_batch" if next((s for s in sniffed if s is not None), False) else "jsonl"


def _sniff_batch(filesystem: pafs.FileSystem, file: SourceFile) -> bool | None:
    with _blame(f"input.path: {file.path}"), _open(filesystem, file) as stream:
        return formats.looks_like_batch(formats.iter_lines(stream))


def _open(filesystem: pafs.FileSystem, file: SourceFile) -> Any:
    return filesystem.open_input_stream(file.path, compression=_suffix(file.path)[1], buffer_size=formats.READ_BYTES)


# --- Ids --------------------------------------------------------------------------------------------------


def digest_id(id: str) -> bytes:
    """16 bytes that stand for an id (blake2b): two of 10^12 ids collide with a probability of 10^-15."""
    return hashlib.blake2b(id.encode(), digest_size=16).digest()


def row_digests(table: pa.Table) -> NDArray:
    """'S16' [rows] of a block or of an output file (`id`, `error_code`, `error_message`): for resume.

    The digest of the id; but a `duplicate_id` row shares its id with the good row, so its digest is of id and
    message (which names its file and row): else a run killed between the two would take the second for done.
    """
    ids = table[ID].to_pylist()
    for index in pc.indices_nonzero(pc.equal(table["error_code"], DUPLICATE_ID)).to_pylist():
        ids[index] = f"{ids[index]}\0{table['error_message'][index].as_py()}"
    return _digests(ids)


def _digests(ids: Sequence[str]) -> NDArray:
    return np.frombuffer(b"".join(map(digest_id, ids)), dtype=DIGEST)


def _made_id(file: SourceFile, number: int) -> str:
    return f"{file.name}:{number}"  # a number has no colon: no two files can make the same id


# --- Scan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FileScan:
    """What one pass over one file found; of its first `input.limit` rows, if there is a limit."""

    file: SourceFile
    num_rows: int
    num_bytes: int  # of the rows in memory, about
    id_digests: NDArray | None  # 'S16' [num_rows]; None if no row has an id of its own
    row_numbers: NDArray | None  # int64 [num_rows], as in made ids; None: 0, 1, 2, ... (no blank lines)
    extra_schema: pa.Schema  # columns but prompt and id; JSONL: see formats.infer_json_type
    json_columns: frozenset[str]  # JSONL columns that no Arrow type fits: string, JSON text
    has_prompt: bool  # the prompt column was there, be it null
    has_id: bool  # likewise
    is_batch: bool | None = None  # JSONL with format auto: whether the first object is an OpenAI batch line
    first_error: str | None = None


def scan_file(listing: Listing, index: int, config: InputConfig) -> FileScan:
    """One pass over file `index` (Parquet: footer, id column); `ConfigError` for what is no row's fault."""
    file = listing.files[index]
    with _blame(f"input.path: {file.path}"):
        if listing.format == "parquet":
            return _scan_parquet(listing.filesystem, file, config)
        return _scan_rows(listing, file, config)


def _scan_rows(listing: Listing, file: SourceFile, config: InputConfig) -> FileScan:
    header: list[str] = []
    if listing.format == "csv":
        with _open(listing.filesystem, file) as stream:
            header = formats.read_csv_header(stream, file.path)
        if header and config.prompt_column not in header:
            missing = formats.unknown_columns(config.prompt_column, header)
            raise ConfigError(f"input.prompt_column: {file.path} has {missing}")
    columns = _Columns(listing.format, header, config)
    numbers, digests = array("q"), bytearray()
    num_bytes = num_own_ids = 0
    first_error = None
    with _open(listing.filesystem, file) as stream:
        for row in islice(formats.iter_rows(stream, file.name, listing.format, config), config.limit):
            numbers.append(row.number)
            num_bytes += row.num_bytes
            first_error = first_error or row.error_message or None
            columns.add(row)
            if listing.format != "text":
                num_own_ids += row.id is not None
                digests += digest_id(row.id or _made_id(file, row.number))
    is_json = config.format == "auto" and listing.format in ("jsonl", "openai_batch")
    row_numbers = np.frombuffer(numbers, dtype=np.int64)
    schema = columns.finish()
    _refuse_reserved(schema.names, file)
    return FileScan(
        file,
        num_rows=len(numbers),
        num_bytes=num_bytes,
        id_digests=np.frombuffer(bytes(digests), dtype=DIGEST) if num_own_ids else None,
        row_numbers=None if np.array_equal(row_numbers, np.arange(len(numbers))) else row_numbers,
        extra_schema=schema,
        json_columns=frozenset(columns.json_columns),
        has_prompt=config.prompt_column in columns.seen,
        has_id=config.id_column in columns.seen,
        is_batch=_sniff_batch(listing.filesystem, file) if is_json else None,
        first_error=first_error,
    )


class _Columns:
    """The names and types of a file's other columns, chunk by chunk."""

    def __init__(self, format: str, header: Sequence[str], config: InputConfig) -> None:
        self._format = format
        self._own = {config.prompt_column, config.id_column} if format in ("csv", "jsonl") else set()
        self._rows: list[Row] = []
        self._num_bytes = 0
        known = formats.BATCH_COLUMNS if format == "openai_batch" else header
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
            found = formats.infer_json_type([row.fields.get(name) for row in self._rows])
            known = self.types.get(name, pa.null())
            both = None if found is None else formats.merge_types(known, found, formats.merge_json_leaf)
            self.types[name] = pa.string() if both is None else both
            if both is None:
                self.json_columns.add(name)
        self._rows, self._num_bytes = [], 0


def _refuse_reserved(names: Sequence[str], file: SourceFile) -> None:
    for name in names:
        if name in RESERVED_COLUMNS:
            raise ConfigError(
                f"input.path: {file.path} has a column {name!r}, a name that the output uses; "
                "rename or drop it, or make it input.prompt_column or input.id_column"
            )


def _scan_parquet(filesystem: pafs.FileSystem, file: SourceFile, config: InputConfig) -> FileScan:
    with pq.ParquetFile(filesystem.open_input_file(file.path)) as parquet:
        num_rows = parquet.metadata.num_rows
        groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
        # A file without rows may come without columns or with columns of type null: it has no say.
        schema = parquet.schema_arrow if num_rows else pa.schema([])
        if num_rows:
            _check_parquet_columns(schema, file, config)
        own = (config.prompt_column, config.id_column)
        extra = pa.schema([(f.name, formats.plain_type(f.type)) for f in schema if f.name not in own])
        _refuse_reserved(extra.names, file)
        num_rows = min(num_rows, config.limit or num_rows)
        has_id = config.id_column in schema.names
        return FileScan(
            file,
            num_rows=num_rows,
            num_bytes=sum(group.total_byte_size for group in groups),
            id_digests=_parquet_digests(parquet, file, num_rows, config) if has_id else None,
            row_numbers=None,
            extra_schema=extra,
            json_columns=frozenset(),
            has_prompt=num_rows > 0,
            has_id=has_id,
        )


def _check_parquet_columns(schema: pa.Schema, file: SourceFile, config: InputConfig) -> None:
    names = schema.names
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"input.path: {file.path} has more than one column {repeated[0]!r}")
    if config.prompt_column not in names:
        missing = formats.unknown_columns(config.prompt_column, names)
        raise ConfigError(f"input.prompt_column: {file.path} has {missing}")
    type_ = schema.field(config.prompt_column).type
    if not formats.is_text_type(type_):
        raise ConfigError(
            f"input.prompt_column: {config.prompt_column!r} in {file.path} has type {type_}; a prompt must be a string"
        )
    type_ = schema.field(config.id_column).type if config.id_column in names else pa.string()
    if not formats.is_id_type(type_) and not pa.types.is_null(type_):
        raise ConfigError(
            f"input.id_column: {config.id_column!r} in {file.path} has type {type_}; "
            "an id must be a string or an integer"
        )


def _parquet_digests(parquet: pq.ParquetFile, file: SourceFile, num_rows: int, config: InputConfig) -> NDArray | None:
    digests, number, num_own = bytearray(), 0, 0
    for batch in parquet.iter_batches(65536, columns=[config.id_column]):
        ids, own, _ = _parquet_ids(batch.column(config.id_column)[: num_rows - number], file, number)
        digests += b"".join(map(digest_id, ids))
        number, num_own = number + len(ids), num_own + int(own.sum())
        if number == num_rows:
            break
    return np.frombuffer(bytes(digests), dtype=DIGEST) if num_own else None


def _parquet_ids(column: Any, file: SourceFile, first: int) -> tuple[list[str], NDArray, NDArray]:
    """Every row's id, made where it has none; which are its own; which were there but are not valid UTF-8."""
    text, bad = formats.to_text(column)
    given = text.to_pylist()
    ids = [id or _made_id(file, first + offset) for offset, id in enumerate(given)]
    return ids, np.fromiter(map(bool, given), bool, len(given)), bad


# --- Plan -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InputPlan:
    """Everything a reader of any file has to know; the same input and config give the same plan."""

    listing: Listing
    num_rows_per_file: tuple[int, ...]  # after `input.limit`
    num_bytes_per_file: tuple[int, ...]  # of the rows in memory, about
    extra_schema: pa.Schema
    json_columns: frozenset[str]
    duplicates: tuple[NDArray, ...]  # per file: int64, rows (0-based, blank lines not counted), sorted
    duplicate_of: tuple[NDArray, ...]  # per file: int64, the first row with that id, counted over all files

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_file)

    @property
    def num_duplicates(self) -> int:
        return sum(map(len, self.duplicates))

    @property
    def schema(self) -> pa.Schema:
        """Of every block that `read_file` yields."""
        return pa.schema([*ROW_SCHEMA, *self.extra_schema])


def plan_input(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> InputPlan:
    """Puts the scans together, one per file in the order of the listing: columns, limit, duplicate ids.

    A JSONL column whose values fit no single Arrow type becomes a string column with JSON text for every
    value. Parquet columns may differ in width between files, or be missing (null); anything else is a
    `ConfigError`.
    """
    assert tuple(scan.file for scan in scans) == listing.files, "scans and listing are not of the same files"
    if not any(scan.num_rows for scan in scans):
        raise ConfigError(f"input.path: no rows in {', '.join(config.path)}")
    _check_columns(listing, scans, config)
    schema, json_columns = _unify(listing.format, scans)
    left, num_rows = config.limit or sum(scan.num_rows for scan in scans), []
    for scan in scans:
        num_rows.append(min(scan.num_rows, left))
        left -= num_rows[-1]
    duplicates, duplicate_of = _find_duplicates(scans, num_rows)
    return InputPlan(
        listing,
        num_rows_per_file=tuple(num_rows),
        num_bytes_per_file=tuple(scan.num_bytes for scan in scans),
        extra_schema=schema,
        json_columns=json_columns,
        duplicates=duplicates,
        duplicate_of=duplicate_of,
    )


def _check_columns(listing: Listing, scans: Sequence[FileScan], config: InputConfig) -> None:
    kinds = {scan.is_batch: scan.file.path for scan in reversed(scans) if scan.is_batch is not None}
    if len(kinds) == 2:
        raise ConfigError(
            f"input.path: {kinds[True]} holds OpenAI batch lines and {kinds[False]} does not; one run reads one format"
        )
    if listing.format in ("text", "openai_batch"):
        return
    names = {name for scan in scans for name in scan.extra_schema.names}
    if not any(scan.has_prompt for scan in scans):
        if not names and not any(scan.has_id for scan in scans):
            error = next(scan.first_error for scan in scans if scan.num_rows)
            raise ConfigError(
                f"input.path: no line is a JSON object; the first: {error}. "
                "JSON Lines needs one object per line (a JSON array: jq -c '.[]')"
            )
        names |= {config.id_column} if any(scan.has_id for scan in scans) else set()
        missing = formats.unknown_columns(config.prompt_column, names)
        raise ConfigError(f"input.prompt_column: the input has {missing}")
    # "id" is only the default, and an input without ids is fine; a name that somebody chose is meant.
    is_chosen = config.id_column != InputConfig.model_fields["id_column"].default
    if is_chosen and not any(scan.has_id for scan in scans):
        missing = formats.unknown_columns(config.id_column, names | {config.prompt_column})
        raise ConfigError(f"input.id_column: the input has {missing}")


def _unify(format: str, scans: Sequence[FileScan]) -> tuple[pa.Schema, frozenset[str]]:
    """One type per column, and which columns are JSON text."""
    leaf: formats.Merge = formats.merge_json_leaf if format == "jsonl" else formats.merge_parquet_leaf
    json_columns = {name for scan in scans for name in scan.json_columns}
    types: dict[str, pa.DataType] = {}
    seen_in: dict[str, str] = {}
    for scan in scans:
        for field in scan.extra_schema:
            both = formats.merge_types(types.get(field.name, pa.null()), field.type, leaf)
            if both is None and format != "jsonl":
                raise ConfigError(
                    f"input.path: column {field.name!r} is {types[field.name]} in {seen_in[field.name]} "
                    f"and {field.type} in {scan.file.path}; give it one type, or run the files apart"
                )
            if both is None:
                json_columns.add(field.name)
            types[field.name] = pa.string() if both is None else both
            seen_in.setdefault(field.name, scan.file.path)
    if format == "jsonl":
        final = {name: formats.final_json_type(type_) for name, type_ in types.items()}
        json_columns |= {name for name, type_ in final.items() if type_ is None}
        types = {name: pa.string() if name in json_columns else final[name] for name in types}
    return pa.schema(list(types.items())), frozenset(json_columns)


def _find_duplicates(
    scans: Sequence[FileScan], num_rows: Sequence[int]
) -> tuple[tuple[NDArray, ...], tuple[NDArray, ...]]:
    """Per file: rows whose id an earlier row has, and which row that is. Peak memory: 48 bytes per row."""
    none = tuple(np.empty(0, dtype=np.int64) for _ in scans)
    if all(scan.id_digests is None for scan in scans):
        return none, none  # made ids only: unique by construction
    digests = np.concatenate([_all_digests(scan)[:count] for scan, count in zip(scans, num_rows, strict=True)])
    order = np.argsort(digests, kind="stable")  # stable: of equal ids the earliest row comes first
    ranked = digests[order]
    is_first = np.ones(len(ranked), dtype=bool)
    is_first[1:] = ranked[1:] != ranked[:-1]
    if is_first.all():
        return none, none
    group_start = np.maximum.accumulate(np.where(is_first, np.arange(len(ranked)), 0))
    rows, first_rows = order[~is_first], order[group_start[~is_first]]
    by_row = np.argsort(rows)
    rows, first_rows = rows[by_row], first_rows[by_row]
    ends = np.cumsum(num_rows)
    cuts = np.searchsorted(rows, ends)[:-1]
    starts = ends - np.asarray(num_rows)
    local = tuple(part - start for part, start in zip(np.split(rows, cuts), starts, strict=True))
    return local, tuple(np.split(first_rows, cuts))


def _all_digests(scan: FileScan) -> NDArray:
    """With those of made ids: the user's own id in another file may look like one."""
    if scan.id_digests is not None:
        return scan.id_digests
    numbers = range(scan.num_rows) if scan.row_numbers is None else scan.row_numbers
    return _digests([_made_id(scan.file, int(number)) for number in numbers])


# --- Read -------------------------------------------------------------------------------------------------


def read_file(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int = 1024) -> Iterator[pa.Table]:
    """The rows of file `index` as blocks of `plan.schema`, of up to `rows_per_block` rows and about 32 MiB.

    Raises `RuntimeError` if the file is not the one that was scanned: with other rows the books cannot close.
    """
    file = plan.listing.files[index]
    wanted = plan.num_rows_per_file[index]
    _check_unchanged(plan.listing.filesystem, file)
    reader = _read_parquet if plan.listing.format == "parquet" else _read_rows
    done = 0
    try:
        with closing(reader(plan, index, config, rows_per_block)) as blocks:
            while done < wanted and (block := next(blocks, None)) is not None:
                block = _mark_duplicates(block[: wanted - done], done, plan, index)
                done += len(block)
                yield block
    except (OSError, pa.ArrowException) as error:
        raise RuntimeError(f"input file {file.path}: cannot be read after row {done}: {error}") from error
    if done != wanted:
        raise RuntimeError(f"input file {file.path}: {done} rows now, {wanted} when it was scanned")


def _check_unchanged(filesystem: pafs.FileSystem, file: SourceFile) -> None:
    info = filesystem.get_file_info(file.path)
    if (info.size, info.mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise RuntimeError(f"input file {file.path}: changed or removed since it was scanned; start again")


def _read_rows(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file, wanted = plan.listing.files[index], plan.num_rows_per_file[index]
    with _open(plan.listing.filesystem, file) as stream:
        block: list[Row] = []
        num_bytes = 0
        for row in islice(formats.iter_rows(stream, file.name, plan.listing.format, config), wanted):
            block.append(row)
            num_bytes += row.num_bytes
            if len(block) == rows_per_block or num_bytes >= BLOCK_BYTES:
                yield _to_table(block, file, plan)
                block, num_bytes = [], 0
        if block:
            yield _to_table(block, file, plan)


def _to_table(rows: Sequence[Row], file: SourceFile, plan: InputPlan) -> pa.Table:
    columns = [
        [row.id or _made_id(file, row.number) for row in rows],
        [row.prompt for row in rows],
        [row.tokens for row in rows],
        [row.sampling for row in rows],
        [row.error_code for row in rows],
        [row.error_message for row in rows],
    ]
    for name in plan.extra_schema.names:
        values = [row.fields.get(name) for row in rows]
        if name in plan.json_columns:
            values = [None if value is None else formats.to_json(value) for value in values]
        columns.append(values)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, plan.schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=plan.schema)


def _read_parquet(plan: InputPlan, index: int, config: InputConfig, rows_per_block: int) -> Blocks:
    file = plan.listing.files[index]
    source = plan.listing.filesystem.open_input_file(file.path)
    with pq.ParquetFile(source, page_checksum_verification=True) as parquet:
        row_bytes = plan.num_bytes_per_file[index] // max(parquet.metadata.num_rows, 1)
        batch_rows = max(1, min(rows_per_block, BLOCK_BYTES // max(row_bytes, 1)))
        first = 0
        for batch in parquet.iter_batches(batch_rows):
            yield _from_batch(batch, file, first, plan, config)
            first += batch.num_rows


def _from_batch(batch: Any, file: SourceFile, first: int, plan: InputPlan, config: InputConfig) -> pa.Table:
    count = batch.num_rows
    errors = _Errors(count, lambda row: f"{file.name} row {first + row + 1}")
    if config.id_column in batch.schema.names:
        ids, _, bad_ids = _parquet_ids(batch.column(config.id_column), file, first)
        errors.set(bad_ids, BAD_LINE, f"column {config.id_column!r} is not valid UTF-8")
    else:
        ids = [_made_id(file, first + row) for row in range(count)]
    prompts, bad_prompts = formats.to_text(batch.column(config.prompt_column))
    errors.set(bad_prompts, BAD_LINE, f"column {config.prompt_column!r} is not valid UTF-8")
    extras = []
    for field in plan.extra_schema:
        if field.name not in batch.schema.names:
            extras.append(pa.nulls(count, field.type))
            continue
        column, bad = formats.without_invalid_utf8(batch.column(field.name).cast(field.type))
        errors.set(bad, BAD_LINE, f"column {field.name!r} is not valid UTF-8")
        extras.append(column)
    missing = np.asarray(prompts.is_null()) & ~bad_prompts
    errors.set(missing, PROMPT_MISSING, f"column {config.prompt_column!r} is null")
    nothing = [pa.nulls(count, ROW_SCHEMA.field(name).type) for name in (PROMPT_TOKENS, SAMPLING)]
    return pa.Table.from_arrays(
        [pa.array(ids, pa.string()), prompts, *nothing, *errors.columns(), *extras], schema=plan.schema
    )


class _Errors:
    """`error_code` and `error_message` of a block; the first reason stays."""

    def __init__(self, count: int, where: Callable[[int], str]) -> None:
        self._codes, self._messages, self._where = [""] * count, [""] * count, where

    def set(self, mask: NDArray, code: str, reason: str) -> None:
        for row in np.flatnonzero(mask):
            if not self._codes[row]:
                self._codes[row], self._messages[row] = code, f"{self._where(int(row))}: {reason}"

    def columns(self) -> list[Any]:
        return [pa.array(self._codes, pa.string()), pa.array(self._messages, pa.string())]


def _mark_duplicates(block: pa.Table, first: int, plan: InputPlan, index: int) -> pa.Table:
    rows = plan.duplicates[index]
    low, high = np.searchsorted(rows, [first, first + len(block)])
    if low == high:
        return block
    codes, messages = block["error_code"].to_pylist(), block["error_message"].to_pylist()
    name = plan.listing.files[index].name
    for row, origin in zip(rows[low:high], plan.duplicate_of[index][low:high], strict=True):
        at = int(row) - first
        if codes[at]:
            continue  # it failed already; its reason stays
        codes[at] = DUPLICATE_ID
        used = f"id {block[ID][at].as_py()!r} was already used by {_describe_row(plan, int(origin))}"
        messages[at] = f"{name} row {int(row) + 1}: {used}"
    for column, values in (("error_code", codes), ("error_message", messages)):
        position = block.schema.get_field_index(column)
        block = block.set_column(position, ROW_SCHEMA.field(column), pa.array(values, pa.string()))
    return block


def _describe_row(plan: InputPlan, row: int) -> str:
    ends = np.cumsum(plan.num_rows_per_file)
    index = int(np.searchsorted(ends, row, side="right"))
    start = int(ends[index]) - plan.num_rows_per_file[index]
    return f"{plan.listing.files[index].name} row {row - start + 1}"
