"""The target of an export: a folder that appears complete or not at all.

A local folder is written beside its final path and renamed. On an object store each file is written locally and then
uploaded; after an error the uploaded files are deleted, and after a kill the file names (`-of-00012`) show what is
missing. On the Hugging Face Hub all files are one commit.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Protocol

import pyarrow.fs as pafs

from pipeline.export.hub import HubTarget, upload_at_end
from pipeline.store.atomic_files import make_folder, put, sync
from pipeline.store.run_folder import RunFolder


class Destination(Protocol):
    """Where an export writes its files."""

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Opens the file `name`, a path relative to the target, for writing."""


@contextmanager
def open_destination(target: RunFolder | HubTarget) -> Iterator[Destination]:
    """Yields the destination; the target appears when the block ends, and not at all if it raises."""
    if isinstance(target, HubTarget):
        with upload_at_end(target) as folder:
            yield _Disk(folder)
        return
    if isinstance(target.filesystem, pafs.LocalFileSystem):
        with _on_disk(target.root) as disk:
            yield disk
        return
    store = _Store(target)
    try:
        yield store
    except BaseException:
        store.remove()
        raise


@contextmanager
def _on_disk(root: str) -> Iterator["_Disk"]:
    root = os.path.realpath(root)  # a link cannot be replaced by a folder
    above, name = os.path.split(root)
    make_folder(above)
    aside = os.path.join(above, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
    os.mkdir(aside)
    try:
        yield _Disk(aside)
        sync(aside)
        os.rename(aside, root)  # replaces an empty folder, and fails on any other
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync(above)


class _Disk:
    def __init__(self, root: str) -> None:
        self._root = root

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        path = os.path.join(self._root, name)
        make_folder(os.path.dirname(path))
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        sync(os.path.dirname(path))


class _Store:
    def __init__(self, target: RunFolder) -> None:
        self._target = target
        self._begun: list[str] = []

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            self._upload(file, self._target.path(name))

    def _upload(self, file: BinaryIO, path: str) -> None:
        aside = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        self._begun += [path, aside]
        put(self._target.filesystem, path, file, aside)

    def remove(self) -> None:
        for path in self._begun:
            with suppress(OSError):
                self._target.filesystem.delete_file(path)
