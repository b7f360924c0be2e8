"""`InputConfig` -> `Listing`: the files of the input, each with its name, and the one format they share.

Left out: how one path leads to files (`paths`), and what is in the files, but for the first JSON object that
tells OpenAI batch lines from other JSON Lines.
"""

import posixpath
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config.job import MAX_LINE_BYTES, ConfigError, InputConfig, SamplingConfig
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.formats import BINARY, parse_suffix
from pipeline.input.lines import READ_BYTES, iter_lines
from pipeline.input.openai_rows import looks_like_batch
from pipeline.input.paths import FSSPEC, file_identity, find_files, resolve_path

COMMIT = re.compile(r"@[0-9a-f]{40}/")


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
    folders: tuple[str, ...] = ()  # that are read with everything in them
    max_line_bytes: int = MAX_LINE_BYTES
    expansion: Expansion = ONE_ROW


def list_input(
    config: InputConfig, max_line_bytes: int = MAX_LINE_BYTES, expansion: Expansion | None = None
) -> Listing:
    """Finds the files of `input.path` and their format; `ConfigError` if there is none, or no single one.

    A path is a file, a folder or a pattern of `*`, `?` and `**`; local, or any URI pyarrow knows. A folder is
    read recursively, but without names that start with `_` or `.` (a wildcard does not match these either)
    and without README, LICENSE and the like, with format auto also without *.md. A file that several paths
    lead to is read once. `expansion`: of its documents; None: by their templates alone.
    """
    if config.text_column == config.id_column and config.format not in ("text", "openai_batch"):
        raise ConfigError("input.id_column", f"is the prompt column too ({config.id_column!r}); name another column")
    filesystem: pafs.FileSystem | None = None
    found: dict[str, pafs.FileInfo] = {}  # by identity, in order
    bases: list[str] = []
    folders: list[str] = []
    for given in config.path:
        with blame("input.path", given, is_foreign=given.startswith(FSSPEC)):
            own, base, pattern = resolve_path(given)
            if filesystem is not None and not own.equals(filesystem):
                raise ConfigError("input.path", f"{given}: one run reads from one filesystem; copy, or run twice")
            filesystem = own
            infos, folder = find_files(own, base, pattern, given, config)
        bases.append(folder)
        if base == folder and (not pattern or "**" in pattern):
            folders.append(folder)
        for info in infos:
            found.setdefault(file_identity(own, info.path), info)
    root = posixpath.commonpath(bases) if len(set(bases)) > 1 else bases[0]
    names = [info.path[len(root) :].lstrip("/") for info in found.values()]
    names = _without_commits(names) if is_fsspec(filesystem) else names
    files = tuple(
        SourceFile(info.path, info.size or 0, info.mtime_ns, name)
        for info, name in zip(found.values(), names, strict=True)
    )
    format = _detect_format(filesystem, files, config)
    return Listing(
        filesystem, files, format, tuple(folders), max_line_bytes, expansion or Expansion.of(config, SamplingConfig())
    )


def _without_commits(names: list[str]) -> list[str]:
    """The commit of a hub's data set says nothing about a file's rows; unless two of them are read."""
    plain = [COMMIT.sub("/", name) for name in names]
    return plain if len(set(plain)) == len(plain) else names


@contextmanager
def blame(key: str, path: str, is_foreign: bool = False) -> Iterator[None]:
    """Turns what the filesystem or Arrow says about unreadable bytes into a `ConfigError` that names key and path.

    `is_foreign`: a file system of fsspec's, which raises what its client raises.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_foreign or isinstance(error, OSError | pa.ArrowException | UnicodeDecodeError):
            raise ConfigError(key, f"{path}: cannot be read: {error}") from error
        raise


def is_fsspec(filesystem: pafs.FileSystem) -> bool:
    return isinstance(filesystem, pafs.PyFileSystem) and isinstance(filesystem.handler, pafs.FSSpecHandler)


def _detect_format(filesystem: pafs.FileSystem, files: Sequence[SourceFile], config: InputConfig) -> str:
    if config.format != "auto":
        for file in files:
            known = parse_suffix(file.path)[0]
            if known and known != config.format and {known, config.format} & {*BINARY}:
                raise ConfigError("input.format", f"{config.format}, but {file.path} is {known}")
        return config.format
    first: tuple[str, SourceFile] | None = None
    for file in files:
        known = parse_suffix(file.path)[0]
        if known is None:
            raise ConfigError(
                "input.format",
                f"cannot tell the format of {file.path} from its name; set input.format to "
                "parquet, arrow, jsonl, csv, text or openai_batch, or give a pattern that leaves the file out",
            )
        first = first or (known, file)
        if known != first[0]:
            raise ConfigError(
                "input.path",
                f"{first[1].path} is {first[0]} and {file.path} is {known}; "
                "one run reads one format. Give a pattern that picks one of them",
            )
    assert first is not None
    if first[0] != "jsonl":
        return first[0]
    sniffed = (sniff_batch(filesystem, file) for file in files)
    return "openai_batch" if next((s for s in sniffed if s is not None), False) else "jsonl"


def sniff_batch(filesystem: pafs.FileSystem, file: SourceFile) -> bool | None:
    with blame("input.path", file.path, is_fsspec(filesystem)), open_stream(filesystem, file) as stream:
        return looks_like_batch(iter_lines(stream))


def open_stream(filesystem: pafs.FileSystem, file: SourceFile) -> pa.NativeFile:
    return filesystem.open_input_stream(file.path, compression=parse_suffix(file.path)[1], buffer_size=READ_BYTES)


def read_etag(filesystem: pafs.FileSystem, file: SourceFile) -> str | None:
    """What an object store says of the contents, or a hub; None on a disk."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        return None
    if is_fsspec(filesystem):
        info = filesystem.handler.fs.info(file.path)
        found = next((info[key] for key in ("ETag", "etag", "blob_id") if info.get(key)), None)
        return None if found is None else str(found).strip('"')
    with filesystem.open_input_file(file.path) as stream:
        etag = (stream.metadata() or {}).get("ETag")
    return etag.decode().strip('"') if etag else None
