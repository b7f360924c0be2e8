"""Atomic files for each kind of file system: readers see a file whole or not at all. And fsync on local disks.

- A disk: written aside, flushed, renamed.
- S3 and GCS: an object appears when its upload is closed, by whomever and for whatever reason. So an upload begins
  when all that belongs into it is there, and whatever interrupts its sender waits for it.
- Any other (Azure, HDFS, fsspec): a file may be seen while it is written, so it is written aside and renamed there too.
"""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from io import BufferedWriter, BytesIO
from tempfile import SpooledTemporaryFile
from typing import Final, Protocol

import pyarrow.fs as pafs

from pipeline.config.job import ConfigError
from pipeline.fault_injection import fault_point

GATHERED_BYTES: Final = 8 << 20
"""Bytes buffered in memory; what is larger goes through a temporary file of this machine on its way to a store."""
COPIED_BYTES: Final = 8 << 20
"""Bytes per read."""


class Source(Protocol):
    """Anything that can be read from: a file, a buffer."""

    def read(self, size: int, /) -> bytes: ...


def _kind(name: str) -> tuple[type, ...]:
    try:
        return (getattr(pafs, name),)
    except (ImportError, AttributeError):  # this pyarrow was built without
        return ()


UPLOADS = _kind("S3FileSystem") + _kind("GcsFileSystem")
HUB = "py::fsspec+hf"


def is_whole_on_close(filesystem: pafs.FileSystem) -> bool:
    """True if a file appears when its stream is closed, and not before."""
    return isinstance(filesystem, UPLOADS)


def run_uninterrupted(work: Callable[[], None]) -> None:
    """Runs `work` in a thread, where no signal can interrupt it, and waits for its end even if a signal raises here.

    Otherwise a stream that Ctrl-C interrupts would be closed on release, and half an object would appear.
    """
    outcome: Future[None] = Future()

    def run() -> None:
        if outcome.set_running_or_notify_cancel():
            try:
                work()
            except BaseException as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

    try:
        threading.Thread(target=run, name="upload").start()
        outcome.result()
    except BaseException:
        _wait_for(outcome)
        raise


def _wait_for(outcome: "Future[None]") -> None:
    """Waits until the work has ended or will never begin; a second Ctrl-C does not interrupt this."""
    while True:
        try:
            if not outcome.cancel():
                wait([outcome])
            return
        except KeyboardInterrupt:
            continue


def put(
    filesystem: pafs.FileSystem,
    target: str,
    source: Source,
    temporary: str,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes the whole content of `source` to the file `target` on a remote file system. `temporary`: a unique name.
    `check` is called directly before the file appears, or before an upload begins, which cannot be undone."""
    if is_whole_on_close(filesystem):
        check()
        run_uninterrupted(lambda: _write(filesystem, target, source))
        return
    filesystem.create_dir(target.rpartition("/")[0], recursive=True)
    try:
        run_uninterrupted(lambda: _write(filesystem, temporary, source))
        check()
    except BaseException:
        with suppress(Exception):
            filesystem.delete_file(temporary)
        raise
    rename(filesystem, temporary, target)


def _write(filesystem: pafs.FileSystem, path: str, source: Source) -> None:
    with filesystem.open_output_stream(path) as stream:
        while chunk := source.read(COPIED_BYTES):
            stream.write(chunk)


def rename(filesystem: pafs.FileSystem, source: str, target: str) -> None:
    """Gives a file another name, in place of the file that has it; elsewhere than on a disk.

    Where a move replaces nothing (HDFS, SFTP) the target is not there for a moment, and after a kill: `left_aside`.
    """

    def step() -> None:
        try:
            filesystem.move(source, target)
        except OSError:
            if filesystem.get_file_info(target).type != pafs.FileType.File:
                raise
            filesystem.delete_file(target)
            filesystem.move(source, target)

    run_uninterrupted(step)


def may_vanish(filesystem: pafs.FileSystem) -> bool:
    """True if a file that is being replaced may be missing for a moment."""
    return not isinstance(filesystem, pafs.LocalFileSystem) and not is_whole_on_close(filesystem)


def left_aside(filesystem: pafs.FileSystem, target: str) -> list[str]:
    """Temporary files that were about to be renamed to `target`, the newest first; they may be incomplete."""
    if not may_vanish(filesystem):
        return []
    folder = target.rpartition("/")[0]
    infos = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True))
    found = [info for info in infos if info.path.startswith(f"{target}.") and info.path.endswith(".tmp")]
    return [info.path for info in sorted(found, key=lambda info: info.mtime_ns or 0, reverse=True)]


@contextmanager
def upload_on_exit(
    filesystem: pafs.FileSystem, target: str, temporary: str, check: Callable[[], None]
) -> Iterator[SpooledTemporaryFile[bytes]]:
    """Yields a file to write; its content is buffered and uploaded to `target` when the block ends."""
    with SpooledTemporaryFile(GATHERED_BYTES) as file:
        yield file
        file.seek(0)
        put(filesystem, target, file, temporary, check)


@contextmanager
def replace_on_exit(target: str, temporary: str, check: Callable[[], None]) -> Iterator[BufferedWriter]:
    """Yields a file to write on a local disk; it is renamed to `target` when the block ends."""
    name = os.path.basename(target)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fault_point(f"{name} staged")
        check()
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync(os.path.dirname(target))
    fault_point(f"{name} renamed")


def check_writable(filesystem: pafs.FileSystem, root: str, shown: str) -> None:
    """Raises ConfigError if no file can be written in the folder `root`, or, where files are visible before they are
    complete, if they cannot be renamed either."""
    if filesystem.type_name == HUB:
        raise ConfigError(
            "output.path",
            f"{shown}: on a hub each file would be a commit; write elsewhere, jobs.export, and upload that",
        )
    first, second = (f"{root}/run.json.{uuid.uuid4().hex[:8]}.tmp" for _ in range(2))
    is_renamed = not isinstance(filesystem, pafs.LocalFileSystem) and not is_whole_on_close(filesystem)
    try:
        for text in (b"1", b"2") if is_renamed else (b"1",):
            if isinstance(filesystem, pafs.LocalFileSystem):
                _write(filesystem, second, BytesIO(text))
            else:
                put(filesystem, second, BytesIO(text), first)
        if is_renamed:
            with filesystem.open_input_stream(second) as stream:
                assert stream.read() == b"2", "a file that was renamed is another"
    except Exception as error:  # each store has its own kinds
        if not is_renamed:
            raise ConfigError("output.path", f"{shown}: no file can be written there: {error}") from error
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
