"""Files that are seen whole or not at all, by the kind of file system; and files and names on the disk itself.

- A disk: written aside, flushed, renamed.
- S3 and GCS: an object appears when its upload is closed.
- Any other (Azure, HDFS, fsspec): a file may be seen while it is written, so it is written aside and renamed there too.
"""

import os
import uuid
from contextlib import suppress

import pyarrow.fs as pafs

from pipeline.config import ConfigError


def _kind(name: str) -> tuple[type, ...]:
    try:
        return (getattr(pafs, name),)
    except (ImportError, AttributeError):  # this pyarrow was built without
        return ()


UPLOADS = _kind("S3FileSystem") + _kind("GcsFileSystem")
HUB = "py::fsspec+hf"


def is_whole_on_close(filesystem: pafs.FileSystem) -> bool:
    """Whether a file appears when its stream is closed, and not before."""
    return isinstance(filesystem, UPLOADS)


def put(filesystem: pafs.FileSystem, target: str, data: bytes, aside: str) -> None:
    """Makes the file `target` of `data`, elsewhere than on a disk. `aside`: a name that nobody else uses."""
    if is_whole_on_close(filesystem):
        aside = target
    else:
        filesystem.create_dir(target.rpartition("/")[0], recursive=True)
    with filesystem.open_output_stream(aside) as stream:
        stream.write(data)
    if aside != target:
        rename(filesystem, aside, target)


def rename(filesystem: pafs.FileSystem, source: str, target: str) -> None:
    """Gives a file another name, in place of the file that has it; elsewhere than on a disk."""
    try:
        filesystem.move(source, target)
    except OSError:  # HDFS has no such step
        if filesystem.get_file_info(target).type != pafs.FileType.File:
            raise
        filesystem.delete_file(target)
        filesystem.move(source, target)


def check_renames(filesystem: pafs.FileSystem, root: str, shown: str) -> None:
    """ConfigError where files are seen before they are whole, and cannot be renamed either."""
    if isinstance(filesystem, pafs.LocalFileSystem) or is_whole_on_close(filesystem):
        return
    if filesystem.type_name == HUB:
        raise ConfigError(
            "output.path",
            f"{shown}: on a hub each file would be a commit; write elsewhere, jobs.export, and upload that",
        )
    first, second = (f"{root}/run.json.{uuid.uuid4().hex[:8]}.tmp" for _ in range(2))
    try:
        for text in (b"1", b"2"):
            put(filesystem, second, text, first)
        with filesystem.open_input_stream(second) as stream:
            assert stream.read() == b"2", "a file that was renamed is another"
    except Exception as error:  # each store has its own kinds
        raise ConfigError(
            "output.path",
            f"{shown}: a file system ({filesystem.type_name}) on which files are seen before they are whole, and "
            f"which does not rename them ({error}); choose a disk, S3 or GCS",
        ) from error
    finally:
        for path in (first, second):
            with suppress(OSError):
                filesystem.delete_file(path)


def make_folder(path: str) -> None:
    """A folder of this machine, with those above it, on its disk."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        os.makedirs(name, exist_ok=True)
        sync(os.path.dirname(name))


def sync(path: str) -> None:
    """Puts a file of this machine, or what was renamed in a folder, on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
