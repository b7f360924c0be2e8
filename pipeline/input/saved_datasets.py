"""Folders saved by Hugging Face `datasets` (`save_to_disk`): which of their files hold the rows.

`state.json` names them; caches (`cache-*.arrow`) that `datasets` keeps beside them are not rows of the data set. A
`DatasetDict` is a folder of such folders, one per split, with `dataset_dict.json`. Types that `dataset_info.json`
knows beyond those of Arrow are ignored.
"""

import json
import posixpath
from collections.abc import Sequence
from typing import Final

import pyarrow.fs as pafs

from pipeline.config.job import ConfigError
from pipeline.formatting import Json

STATE: Final = "state.json"
SPLITS: Final = "dataset_dict.json"
MAX_BYTES: Final = 16 << 20  # a larger file of such a name holds rows


def pick_saved(filesystem: pafs.FileSystem, files: Sequence[pafs.FileInfo]) -> list[pafs.FileInfo]:
    """The `files` that hold rows, out of those found in a folder or by a pattern; all of them if none is a data set.

    ConfigError for several splits of a `DatasetDict`, and for a data set of which files are missing.
    """
    by_folder: dict[str, list[pafs.FileInfo]] = {}
    for file in files:
        by_folder.setdefault(posixpath.dirname(file.path), []).append(file)
    for folder, own in by_folder.items():
        if any(file.base_name == SPLITS for file in own):
            _refuse_splits(filesystem, folder, list(by_folder))
    left = []
    for folder, own in by_folder.items():
        is_saved = any(_is_arrow(file) or file.base_name == STATE for file in own)
        names = _row_files(filesystem, folder) if is_saved else None
        if names is not None:
            _refuse_lost(folder, names, own)
            own = [file for file in own if file.base_name in names]
        left += [file for file in own if file.base_name != SPLITS]
    return left


def _is_arrow(file: pafs.FileInfo) -> bool:
    return bool(file.extension.lower() == "arrow")


def _row_files(filesystem: pafs.FileSystem, folder: str) -> set[str] | None:
    """The names of the files with the rows of the data set saved in `folder`; None if there is none."""
    state = _read_json(filesystem, posixpath.join(folder, STATE))
    named = state.get("_data_files") if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(named, list):
        return None
    if state.get("_indices_data_files"):
        raise ConfigError(
            "input.path",
            f"{folder}: this data set picks its rows by an index; load it with `datasets`, call flatten_indices(), "
            "and save it again",
        )
    return {str(file.get("filename")) for file in named if isinstance(file, dict)}


def _refuse_lost(folder: str, names: set[str], there: Sequence[pafs.FileInfo]) -> None:
    """ConfigError if a folder lacks files that its state names; a pattern may pick some of them."""
    found = {file.base_name for file in there}
    lost = sorted(names - found)
    if lost and STATE in found:
        raise ConfigError("input.path", f"{folder}: {STATE} names {lost[0]!r}, which is not there; copy all its files")


def _refuse_splits(filesystem: pafs.FileSystem, folder: str, folders: Sequence[str]) -> None:
    content = _read_json(filesystem, posixpath.join(folder, SPLITS))
    named = content.get("splits") if isinstance(content, dict) else None
    splits = [str(split) for split in named] if isinstance(named, list) else []
    there = [split for split in splits if posixpath.join(folder, split) in folders]
    if len(there) > 1:
        raise ConfigError(
            "input.path",
            f"{folder} holds the splits {', '.join(there)}; name the one to read: {posixpath.join(folder, there[0])}",
        )


def _read_json(filesystem: pafs.FileSystem, path: str) -> Json:
    """The contents of a small JSON file; None if it is missing, large or not JSON."""
    info = filesystem.get_file_info(path)
    if info.type != pafs.FileType.File or (info.size or 0) > MAX_BYTES:
        return None
    with filesystem.open_input_stream(path) as stream:
        try:
            content: Json = json.loads(stream.readall())
        except ValueError:
            return None
    return content
