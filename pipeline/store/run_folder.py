"""The run folder: what lies where, what belongs to us, and how its small files are replaced.

`run.json` is replaced atomically, so it is always one whole state. What is done is read from the data files themselves
(`row_index`). Works on any filesystem pyarrow knows. Left out: the fingerprint (`fingerprint`), data files (`write`).
"""

import json
import os
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config import ConfigError
from pipeline.faults import fault_point
from pipeline.store.run_state import KnownFiles, RunState
from pipeline.units import mask

OURS = (
    "data",
    "checkpoint",
    "metrics",
    "report.json",
    "report.html",
    "batch_output.jsonl",
    "batch_errors.jsonl",
    "run.json",  # last: as long as it is there, the rest is known to be ours
)
LEASE = "lease.json"
PRE_RUN_FILES = (LEASE, f"{LEASE}.tmp", "run.json.tmp")  # all that a run may leave that was killed before it had begun
STATUSES = ("ok", "failed")
SESSION = "[0-9a-f]{12}"
KNOWN_NAMES = re.compile(
    rf"run\.json|report\.json|report\.html|{re.escape(LEASE)}|batch_output\.jsonl|batch_errors\.jsonl"
    rf"|data/status=(ok|failed)/(part-{SESSION}-[0-9a-f]{{6}}|rest-{SESSION})-\d+(-\d+)?\.parquet"
    rf"|metrics/(batches|windows|workers)-{SESSION}-\d+\.parquet"
)
"""What a finished run holds."""

KNOWN = "checkpoint/known.json"
STAGING = "checkpoint/staging"  # a folder per session, for files that are not whole yet


@dataclass(frozen=True)
class RunFolder:
    filesystem: pafs.FileSystem
    root: str
    """Inside the filesystem, without a trailing slash."""
    shown: str
    """As the user gave it, without credentials."""

    @classmethod
    def open(cls, path: str) -> "RunFolder":
        """A local path or a URI; nothing is created."""
        try:
            if "://" in path:
                filesystem, root = pafs.FileSystem.from_uri(path)
            else:
                filesystem, root = pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
        except (ValueError, OSError) as error:
            raise ConfigError("output.path", f"{mask(path)}: {mask(str(error))}") from error
        return cls(filesystem, root.rstrip("/"), mask(path))

    @property
    def is_local(self) -> bool:
        """Files are renamed into place; elsewhere they are uploaded whole."""
        return isinstance(self.filesystem, pafs.LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def exists(self) -> bool:
        """Whether there is anything at the place: a file, or a folder that is not empty."""
        kind = self.filesystem.get_file_info(self.root).type
        if kind == pafs.FileType.Directory:
            infos = self.filesystem.get_file_info(pafs.FileSelector(self.root))
            return any(info.base_name not in PRE_RUN_FILES for info in infos)
        return bool(kind != pafs.FileType.NotFound)

    def read_state(self) -> RunState | None:
        """`run.json`, or None."""
        text = self.read_text("run.json")
        if text is None:
            return None
        try:
            state: RunState = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                "output.path",
                f"{self.path('run.json')} is not JSON ({error}), so the run cannot go on. The rows "
                "in data/ may be whole: copy what you need, then delete the folder, or choose another output.path",
            ) from error
        return state

    def write_state(self, state: RunState) -> None:
        self.write_text("run.json", json.dumps(state, indent=2, default=str) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replaces a small file atomically."""
        target = self.path(name)
        self.filesystem.create_dir(target.rpartition("/")[0], recursive=True)
        if not self.is_local:  # an object appears, or is replaced, when its upload is closed
            with self.filesystem.open_output_stream(target) as stream:
                stream.write(text.encode())
            return
        with open(f"{target}.tmp", "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        fault_point(f"{name} staged")
        os.replace(f"{target}.tmp", target)
        sync(os.path.dirname(target))
        fault_point(f"{name} renamed")

    def read_text(self, name: str) -> str | None:
        """A small file, or None."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.readall()).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def foreign_files(self) -> list[str]:
        """What `clear` would delete although no run wrote it: all of it without a run.json of ours."""
        infos = {name: self.filesystem.get_file_info(self.path(name)) for name in OURS}
        there = [name for name, info in infos.items() if info.type != pafs.FileType.NotFound]
        state = self.read_state() if "run.json" in there else None
        if state is None or not {"fingerprint", "books"} <= state.keys():
            return there
        return [name for name in self.unexpected_files() if name.startswith(("data/", "metrics/"))]

    def unexpected_files(self) -> list[str]:
        """Files in the folder that no run of ours leaves there, sorted."""
        infos = self.filesystem.get_file_info(pafs.FileSelector(self.root, recursive=True))
        names = (info.path.removeprefix(f"{self.root}/") for info in infos if info.type != pafs.FileType.Directory)
        return sorted(name for name in names if not KNOWN_NAMES.fullmatch(name))

    def clear(self) -> None:
        """Removes what a run writes, and nothing else that may lie there."""
        for name in OURS:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a file or folder if it is there."""
        info = self.filesystem.get_file_info(self.path(name))
        if info.type == pafs.FileType.Directory:
            self.filesystem.delete_dir(info.path)
        elif info.type == pafs.FileType.File:
            self.filesystem.delete_file(info.path)

    def move(self, source: str, target: str) -> None:
        """Moves a file within the folder, in place of the target if there is one."""
        self.filesystem.create_dir(self.path(target).rpartition("/")[0], recursive=True)
        if self.is_local:
            os.replace(self.path(source), self.path(target))
            sync(os.path.dirname(self.path(target)))
        else:
            self.filesystem.move(self.path(source), self.path(target))  # a copy, which is seen when whole, and a delete

    def fence(self, session: str) -> None:
        """From here on no writer of an earlier session can add a data file on a disk: what it would rename is gone.

        On an object store a late upload still can; `remove_late` takes it away.
        """
        if self.is_local and os.path.isdir(self.path(STAGING)):
            os.rename(self.path(STAGING), self.path(f"checkpoint/gone-{session}"))  # at once, unlike deleting
        self.remove("checkpoint")
        if self.is_local:
            self.filesystem.create_dir(self.path(f"{STAGING}/{session}"), recursive=True)

    def write_known(self, session: str, paths: Sequence[str]) -> None:
        """Writes down, after `fence`, which data files there are as the session begins."""
        names = [path.removeprefix(f"{self.root}/") for path in paths]  # the folder may be moved before it is resumed
        known: KnownFiles = {"session": session, "names": names}
        self.write_text(KNOWN, json.dumps(known))

    def read_known(self) -> tuple[str, list[str]] | None:
        """The last session that was not finished, and the data files that it found; before `fence`."""
        text = self.read_text(KNOWN)
        known: KnownFiles | None = json.loads(text) if text else None
        return (known["session"], [self.path(name) for name in known["names"]]) if known else None

    def remove_late(self, session: str, known: Collection[str]) -> list[str]:
        """Deletes data files that neither were `known` when `session` began nor are its own; returns their paths."""
        paths = [path for status in STATUSES for path in self.data_files(status)]
        late = [path for path in paths if path not in known and f"-{session}-" not in path.rpartition("/")[2]]
        for path in late:
            self.filesystem.delete_file(path)
        return late

    def data_files(self, status: str, place: str = "data") -> list[str]:
        """Paths of the finished files of one status, sorted."""
        return self.files(f"{place}/status={status}")

    def files(self, folder: str) -> list[str]:
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)
        return sorted(i.path for i in self.filesystem.get_file_info(selector) if i.path.endswith(".parquet"))

    def count_rows(self, status: str, place: str = "data") -> int:
        """Rows of one status, from the file footers."""
        with ThreadPoolExecutor(16) as pool:
            return sum(pool.map(self._num_rows, self.data_files(status, place)))

    def _num_rows(self, path: str) -> int:
        return int(pq.read_metadata(path, filesystem=self.filesystem).num_rows)


def sync(path: str) -> None:
    """Puts a file of this machine, or what was renamed in a folder, on its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
