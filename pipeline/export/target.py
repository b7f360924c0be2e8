"""Where an export goes: a folder that is seen whole or not at all.

On a disk it is made beside its place and renamed. Elsewhere each file is made here first, and is seen whole or not at
all; what an error leaves there is deleted, and after a kill the names of the files (`-of-00012`) say what is missing.
"""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Protocol

import pyarrow.fs as pafs

from pipeline.store.atomic_files import make_folder, put, sync
from pipeline.store.run_folder import RunFolder


class Place(Protocol):
    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """To write `name`, which may lie in a folder."""


@contextmanager
def open_place(target: RunFolder) -> Iterator[Place]:
    """The place is there once this ends, and not at all if it ends with an exception."""
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
        os.rename(aside, root)  # in place of an empty folder, too; of another, an error
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
