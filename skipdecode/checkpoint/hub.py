"""Finds the files of a model: a local folder, a GGUF file, or a hub id, which is downloaded. No torch."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import HfFileSystem

DEMO = "models/opt-e2e"  # in this repository, and on no hub
PINNED = re.compile(r"([^/@]+/[^/@]+)@([0-9a-f]{40})")
"""A hub id with a revision. Without one, every node would take whatever the hub has at that moment."""
HUB_FILES = [
    "config.json",
    "generation_config.json",  # which tokens end a text
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",  # tokenizer.json, tokenizer_config.json, tokenizer.model
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "*.jinja",  # chat templates
]
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
HUB_FALLBACK = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def resolve_source(source: str, key: str = "model.source") -> Path:
    """The local folder (or `.gguf` file) of a model: `source` itself, or the snapshot of that hub id.

    A snapshot is downloaded once, and of the revision if the id is `pin`ned. ValueError blames `key`.
    """
    if not source:
        raise ValueError(f"{key}: must be a folder, a hub id or a .gguf file, got ''")
    folder = Path(source).expanduser()
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    if source == DEMO:
        raise ValueError(
            f"{key}: the demo model {source} is not here; run in the project's folder, or set {key} to a folder, a hub "
            "id or a .gguf file"
        )
    if folder.is_absolute() or source.startswith(".") or source.count("/") != 1:
        raise ValueError(f"{key}: {source!r} is not a folder, nor a .gguf file")
    if folder.parent.is_dir():  # most likely a path with a typing error, which must not be sent to the hub
        raise ValueError(
            f"{key}: {source!r} is not a folder, nor a .gguf file; if it is meant as a hub id, the folder "
            f"{folder.parent.resolve()} hides it: run in another folder, or rename that one"
        )
    from huggingface_hub import snapshot_download  # only a hub id needs it

    pinned = PINNED.fullmatch(source)
    name, revision = pinned.groups() if pinned else (source, None)
    try:
        snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
        if not list(snapshot.glob("*.safetensors")):
            snapshot = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES + HUB_FALLBACK))
    except Exception as error:  # the hub client raises many kinds; the user needs one sentence
        raise ValueError(
            f"{key}: {source!r} is no folder here and could not be fetched from the hub: {error}"
        ) from error
    return snapshot


def pin(source: str, folder: Path) -> str:
    """The hub id `source` with the revision of its snapshot `folder`; unchanged if `folder` is no snapshot."""
    pinned = f"{source}@{folder.name}"
    return pinned if folder.parent.name == "snapshots" and PINNED.fullmatch(pinned) else source


def pin_path(hub: "HfFileSystem", path: str) -> str:
    """A path in the hub's file system (`datasets/name/corpus@branch/data`) with its current commit as the revision."""
    from huggingface_hub import HfApi, constants

    path_info = hub.resolve_path(path)
    name, kind, revision = (getattr(path_info, key, None) for key in ("repo_id", "repo_type", "revision"))
    if name is None:  # a bucket, which has no commits
        return path
    found = HfApi(hub.endpoint, hub.token).repo_info(name, revision=revision, repo_type=kind)
    prefix = constants.REPO_TYPES_URL_PREFIXES.get(kind or "", "")
    return f"{prefix}{name}@{found.sha}/{path_info.path}".rstrip("/")


def why_unreadable(path: Path, error: object) -> str:
    """What to say of a file of a model that cannot be read: git may have left a pointer in its place."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                return "it is a pointer of git LFS, and not the file; git lfs install, then git lfs pull in its folder"
    return str(error)
