"""`input.path` -> `Listing`: the files of the input, each with its name, and the one format they share.

An entry is a file, a folder, a pattern or a URI. What is in the files is not looked at, but for the first JSON object,
which tells OpenAI batch lines from other JSON Lines.
"""

import os
import posixpath
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.config.job import MAX_LINE_BYTES, ConfigError, InputConfig, SamplingConfig
from pipeline.config.uris import refuse_credentials
from pipeline.input.encoding import as_utf8
from pipeline.input.expansion import ONE_ROW, Expansion
from pipeline.input.formats import ARROW, BINARY, parse_suffix
from pipeline.input.line_reader import READ_BYTES, iter_lines
from pipeline.input.openai_rows import looks_like_batch
from pipeline.input.saved_datasets import pick_saved
from skipdecode.checkpoint.hub import pin_path

COMMIT = re.compile(r"@[0-9a-f]{40}/")


@dataclass(frozen=True)
class SourceFile:
    """A file of the input."""

    path: str  # inside the filesystem
    size_bytes: int
    mtime_ns: int | None
    name: str  # relative to the common folder of all inputs; unique; the `file` of a made id


@dataclass(frozen=True)
class Listing:
    """The files of the input and how to read them."""

    filesystem: pafs.FileSystem
    files: tuple[SourceFile, ...]  # in the order of `input.path`, sorted within each of its entries
    format: str  # concrete, never "auto"
    folders: tuple[str, ...] = ()  # those that are read with everything in them
    max_line_bytes: int = MAX_LINE_BYTES
    expansion: Expansion = ONE_ROW


def list_input(
    config: InputConfig, max_line_bytes: int = MAX_LINE_BYTES, expansion: Expansion | None = None
) -> Listing:
    """Finds the files of `input.path` and their format; `ConfigError` if there is none, or no single one.

    A path is a file, a folder or a pattern of `*`, `?` and `**`; local, or any URI pyarrow knows. A folder is
    read recursively, but without names that start with `_` or `.` (a wildcard does not match these either)
    and without README, LICENSE and the like, with format auto also without *.md. A file that several paths
    lead to is read once. `expansion` says which rows a document becomes; None: one for each template.
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
    """The names without the commit of a hub's data set, which says nothing about the rows, unless two commits are
    read."""
    plain = [COMMIT.sub("/", name) for name in names]
    return plain if len(set(plain)) == len(plain) else names


@contextmanager
def blame(key: str, path: str, is_foreign: bool = False) -> Iterator[None]:
    """Turns what the filesystem or Arrow says about unreadable bytes into a `ConfigError` that names key and path.

    `is_foreign`: a file system of fsspec, which raises whatever its client raises.
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


def open_stream(filesystem: pafs.FileSystem, file: SourceFile) -> BinaryIO:
    """The uncompressed bytes of a text file in UTF-8; ConfigError for another encoding (`as_utf8`)."""
    stream = filesystem.open_input_stream(file.path, compression=parse_suffix(file.path)[1], buffer_size=READ_BYTES)
    return as_utf8(stream, file.path)


def read_etag(filesystem: pafs.FileSystem, file: SourceFile) -> str | None:
    """The etag that an object store or a hub has for the contents; None on a disk."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        return None
    if is_fsspec(filesystem):
        info = filesystem.handler.fs.info(file.path)
        found = next((info[key] for key in ("ETag", "etag", "blob_id") if info.get(key)), None)
        return None if found is None else str(found).strip('"')
    with filesystem.open_input_file(file.path) as stream:
        etag = (stream.metadata() or {}).get("ETag")
    return etag.decode().strip('"') if etag else None


# Often found beside the data. Any other file that is no data is an error, never silently left out.
_NON_DATA_FILES: Final = re.compile(
    r"(readme|licen[cs]e|notice|changelog|citation)([._-].*)?|dataset_infos?\.json", re.IGNORECASE
)
FSSPEC: Final = ("hf://", "fsspec+")
"""Prefixes of URIs that pyarrow passes to a Python file system of fsspec."""


def resolve_path(given: str) -> tuple[pafs.FileSystem, str, list[str]]:
    """Filesystem, path up to the first component with a wildcard, and the components from there."""
    refuse_credentials("input.path", given)
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
    if given.startswith("hf://"):  # a branch may move while workers read
        path = pin_path(filesystem.handler.fs, path)
    if not given.startswith(FSSPEC):  # those take a path as it is
        pattern = [urllib.parse.unquote(part) for part in pattern]
    return filesystem, path.rstrip("/") or path, pattern


def _split_pattern(path: str) -> tuple[str, list[str]]:
    wildcard = re.search(r"[*?]", path)
    if wildcard is None:
        return path, []
    cut = path.rindex("/", 0, wildcard.start())
    return path[:cut] or "/", [part for part in path[cut + 1 :].split("/") if part]


def find_files(
    filesystem: pafs.FileSystem, base: str, pattern: list[str], given: str, config: InputConfig
) -> tuple[list[pafs.FileInfo], str]:
    """The files of one entry of `input.path`, sorted, and the folder that their names are relative to."""
    start = filesystem.get_file_info(base)
    if start.type == pafs.FileType.NotFound:
        hint = "" if "path" in config.model_fields_set else "; -i names where the prompts are"
        raise ConfigError("input.path", f"{given}: no such file or folder{hint}")
    hits = _glob(filesystem, start, pattern) if pattern else [start]
    infos: dict[str, pafs.FileInfo] = {}
    for hit in hits:
        if hit.type == pafs.FileType.Directory:
            infos.update((info.path, info) for info in _walk(filesystem, hit.path) if not _is_no_data(info, config))
        elif hit.type == pafs.FileType.File:
            if not (pattern and pattern[-1] in ("*", "**") and _is_no_data(hit, config)):
                infos[hit.path] = hit
        else:
            raise ConfigError("input.path", f"{hit.path}: not a regular file")
    is_folder = bool(pattern) or start.type == pafs.FileType.Directory
    found = [infos[path] for path in sorted(infos)]
    if is_folder and config.format in ("auto", ARROW):
        found = pick_saved(filesystem, found)
    if not found:
        raise ConfigError("input.path", f"{given}: no file matches")
    return found, base if is_folder else posixpath.dirname(base)


def _is_no_data(info: pafs.FileInfo, config: InputConfig) -> bool:
    if config.format == "auto" and info.base_name.lower().endswith(".md"):
        return True
    return _NON_DATA_FILES.fullmatch(info.base_name) is not None and parse_suffix(info.path)[0] not in BINARY


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", "."))


def _children(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    return list(filesystem.get_file_info(pafs.FileSelector(folder)))


def _glob(filesystem: pafs.FileSystem, info: pafs.FileInfo, pattern: list[str]) -> list[pafs.FileInfo]:
    """What matches a pattern below `info`, level by level, so that `s3://bucket/a*/x.jsonl` does not list the
    bucket."""
    if not pattern:
        return [] if info.type == pafs.FileType.NotFound else [info]
    if info.type != pafs.FileType.Directory:
        return []
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        folders = [c for c in _children(filesystem, info.path) if not _is_hidden(c.base_name)]
        hits = _glob(filesystem, info, rest)
        return hits + [hit for folder in folders for hit in _glob(filesystem, folder, pattern)]
    if "*" not in head and "?" not in head:
        return _glob(filesystem, filesystem.get_file_info(posixpath.join(info.path, head)), rest)
    wanted = re.compile(re.escape(head).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
    children = [child for child in _children(filesystem, info.path) if wanted.fullmatch(child.base_name)]
    shown = [child for child in children if not _is_hidden(child.base_name) or _is_hidden(head)]
    return [hit for child in shown for hit in _glob(filesystem, child, rest)]


def _walk(filesystem: pafs.FileSystem, folder: str) -> Iterator[pafs.FileInfo]:
    """Every file below `folder`, except those with hidden names."""
    if isinstance(filesystem, pafs.LocalFileSystem):
        _refuse_broken_links(folder)
    for info in filesystem.get_file_info(pafs.FileSelector(folder, recursive=True)):
        if info.type == pafs.FileType.Directory:
            continue
        inside = info.path[len(folder) :].strip("/").split("/")
        if any(_is_hidden(part) for part in inside):
            continue
        if info.type != pafs.FileType.File:
            raise ConfigError("input.path", f"{info.path}: not a regular file")
        yield info


def _refuse_broken_links(folder: str) -> None:
    # pyarrow leaves them out without a word: a corpus in links to a disk that is not mounted would be empty.
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        for name in names:
            path = os.path.join(parent, name)
            if not _is_hidden(name) and not os.path.exists(path):
                raise ConfigError("input.path", f"{path}: a link to nowhere ({os.readlink(path)})")


def file_identity(filesystem: pafs.FileSystem, path: str) -> str:
    return os.path.realpath(path) if isinstance(filesystem, pafs.LocalFileSystem) else path
