"""A hub id with the revision that the driver found: `org/name@revision`, so that every node reads the same files.

A hub id alone is what the hub says today, on each node by itself. Left out: finding a model (`skipdecode.hub`).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skipdecode.hub import HUB_FALLBACK, HUB_FILES

if TYPE_CHECKING:  # tasks that tokenize need no torch
    from actors.generator import GeneratorConfig

PINNED: Final = re.compile(r"([^/@]+/[^/@]+)@([0-9a-f]{40})")


def pin(source: str, folder: Path) -> str:
    """`source` with the revision of its snapshot `folder`; as it is where that is no snapshot of the hub's cache."""
    is_snapshot = folder.parent.name == "snapshots"
    pinned = f"{source}@{folder.name}"
    return pinned if is_snapshot and PINNED.fullmatch(pinned) else source


def locate(source: str) -> str:
    """The folder of a pinned source, fetched once and then cached; any other source as it is. ValueError without it."""
    found = PINNED.fullmatch(source)
    if found is None or Path(source).is_dir():
        return source
    from huggingface_hub import snapshot_download  # only a hub id needs it

    name, revision = found.groups()
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=HUB_FILES + HUB_FALLBACK))
    except Exception as error:  # the hub client raises many kinds; the user needs one sentence
        raise ValueError(f"{name!r} at revision {revision} could not be fetched from the hub: {error}") from error
    return str(folder)


def located(config: "GeneratorConfig") -> "GeneratorConfig":
    """With folders in place of pinned sources."""
    return replace(config, source=locate(config.source), tokenizer=config.tokenizer and locate(config.tokenizer))
