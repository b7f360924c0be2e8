"""The folder of a checkpoint that a verb makes, written whole or not at all; and the tokenizer's files."""

import os
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from pipeline.config.job import ConfigError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
Files = dict[str, bytes]
"""Name -> contents."""


def tokenizer_files(source: Path) -> Files:
    """Tokenizer files of a model folder; for a GGUF file those that a folder would have."""
    if source.is_dir():
        return {path.name: path.read_bytes() for path in own_files(source, TOKENIZER_FILES)}
    from skipdecode.checkpoint import gguf_tokenizer  # only a GGUF file needs them
    from skipdecode.checkpoint.gguf_file import chat_template

    files, template = {"tokenizer.json": gguf_tokenizer.tokenizer(source).to_str().encode()}, chat_template(source)
    return files if template is None else files | {"chat_template.jinja": template.encode()}


def own_files(folder: Path, patterns: Collection[str]) -> list[Path]:
    """The regular files in a model folder whose names match one of the patterns, as what may be copied out of it.

    ConfigError for a link that leads out of the folder: a checkpoint from a stranger would take along what it names. In
    the hub's cache links to its blobs are how files are kept.
    """
    root = folder.resolve()
    roots = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    found = []
    for path in sorted(folder.iterdir()):
        if not any(fnmatch(path.name, pattern) for pattern in patterns) or not path.is_file():
            continue
        if not any(path.resolve().is_relative_to(one) for one in roots):
            raise ConfigError(
                "model.source", f"{path} is a link to {path.resolve()}, out of the folder; put a copy in its place"
            )
        found.append(path)
    return found


def new_folder(path: str) -> Path:
    """The folder for a new checkpoint; ConfigError if it exists already, or cannot be created."""
    target = Path(path).expanduser().resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ConfigError("output", f"{target} exists already; choose another output, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("output", f"{target} cannot be created: {error}") from error
    if not os.access(target.parent, os.W_OK):
        raise ConfigError("output", f"{target} cannot be created: {target.parent} is no folder that we may write to")
    return target


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """An empty folder of our own beside `target` (from `new_folder`), which becomes it when the block ends well."""
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    staging.mkdir()
    try:
        yield staging
        if target.is_dir():
            target.rmdir()  # empty, as was checked
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
