"""An entry of `input.path` (a file, a folder, a pattern, a URI) -> the files it leads to.

Left out: formats, beyond telling data from a README beside it, and joining several entries (`files`).
"""

import os
import posixpath
import re
import urllib.parse
from collections.abc import Iterator
from typing import Final

import pyarrow.fs as pafs

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.formats import ARROW, BINARY, parse_suffix
from pipeline.input.saved_datasets import pick_saved
from skipdecode.checkpoint.hub import pin_path

# Beside the data in many a folder. Anything else that is not data is an error, never silently left out.
_NON_DATA_FILES: Final = re.compile(
    r"(readme|licen[cs]e|notice|changelog|citation)([._-].*)?|dataset_infos?\.json", re.IGNORECASE
)
FSSPEC: Final = ("hf://", "fsspec+")
"""What URIs begin with that pyarrow hands to a Python file system of fsspec's."""


def resolve_path(given: str) -> tuple[pafs.FileSystem, str, list[str]]:
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
    """FileInfos of one entry of `input.path`, sorted, and the folder that their names are relative to."""
    start = filesystem.get_file_info(base)
    if start.type == pafs.FileType.NotFound:
        hint = "" if "path" in config.model_fields_set else "; -i names where the prompts are"
        raise ConfigError("input.path", f"{given}: no such file or folder{hint}")
    hits = _expand(filesystem, start, pattern) if pattern else [start]
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


def _expand(filesystem: pafs.FileSystem, info: pafs.FileInfo, pattern: list[str]) -> list[pafs.FileInfo]:
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


def _walk(filesystem: pafs.FileSystem, folder: str) -> Iterator[pafs.FileInfo]:
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
