"""The run folder: its layout, which files are ours, and how small files are replaced atomically.

`run.json` always holds one complete state. Which rows are done is not recorded there, but read from the data files
themselves (`generate.row_index`). Works on any filesystem of pyarrow. Data files are written by `row_writer`.
"""

import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config.job import ConfigError
from pipeline.config.uris import refuse_credentials
from pipeline.formatting import Log, mask
from pipeline.store.atomic_files import (
    is_whole_on_close,
    left_aside,
    make_folder,
    rename,
    replace_on_exit,
    sync,
    upload_on_exit,
)
from pipeline.store.run_state import IS_RUN, FileRecord, RunState, check_version

BATCH_FILES = "batch_output.jsonl", "batch_errors.jsonl"
OURS = ("data", "checkpoint", "metrics", "report.json", "report.html", *BATCH_FILES, "run.json")
LEASE = "lease.json"
STATUSES = ("ok", "failed")
SESSION = "[0-9a-f]{12}"
QUARANTINE = "quarantine-{}.json"
"""A file of each session that found rows which kill workers (`quarantine`)."""
IS_QUARANTINE = re.compile(rf"quarantine-{SESSION}\.json")
TEMPORARY = re.compile(
    r"(run\.json|lease\.json|report\.json|report\.html|batch_output\.jsonl|batch_errors\.jsonl"
    rf"|{IS_QUARANTINE.pattern})(\.\w+)?\.(tmp|gone)"
)
"""Temporary files that a process leaves behind when it is killed while replacing a file."""
KNOWN_NAMES = re.compile(
    rf"run\.json|report\.json|report\.html|{re.escape(LEASE)}|batch_output\.jsonl|batch_errors\.jsonl"
    rf"|data/status=(ok|failed)/(part-{SESSION}-[0-9a-f]{{6}}(-\d+){{1,3}}(-[0-9a-f]{{8}})?|rest-{SESSION}-\d+)\.parquet"
    rf"|metrics/(batches|windows|workers)-{SESSION}-\d+\.parquet|{IS_QUARANTINE.pattern}|{TEMPORARY.pattern}"
)
"""The files of a finished run."""
ATTEMPT = re.compile(r"(part-[^-]+-[^-]+-\d+)-\d+-([^-.]+)\.parquet")
"""The name of a data file: the task that wrote it, and its attempt at that task."""
IDS = b"skipdecode.ids"
"""The key of the sum of the digests of the rows' ids, modulo 2^128, in hex."""
STAGING = "checkpoint/staging"  # a folder per session, for files that are not whole yet


@dataclass(frozen=True)
class RunFolder:
    filesystem: pafs.FileSystem
    root: str
    """Inside the filesystem, without a trailing slash."""
    shown: str
    """The path as the user gave it, without credentials."""

    @classmethod
    def open(cls, path: str) -> "RunFolder":
        """A local path or a URI; nothing is created. ConfigError if the URI holds credentials, or names no place."""
        refuse_credentials("output.path", path)
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
        """True if there is a file at the path, or a folder that is not empty."""
        kind = self.filesystem.get_file_info(self.root).type
        if kind == pafs.FileType.Directory:
            return any(name != LEASE and not TEMPORARY.fullmatch(name) for name in self._names())
        return bool(kind != pafs.FileType.NotFound)

    def read_state(self) -> RunState | None:
        """`run.json`, or None; raises ConfigError if a version before 1.0 wrote it."""
        state = self.read_any_state()
        if state is not None and state.keys() >= IS_RUN:
            check_version(state, self.shown)
        return state

    def read_any_state(self) -> RunState | None:
        """`run.json` of any version, or None. If its replacement was interrupted, returns the new content."""
        try:
            text = self.read_text("run.json")
            if text is None:
                if self.exists() and (left := self._cut_off()) is not None:
                    return left[1]
                text = self.read_text("run.json")  # a replacement may have been completed meanwhile
            return None if text is None else _parse(text)
        except ValueError as error:
            raise ConfigError(
                "output.path",
                f"{self.path('run.json')} is not JSON ({error}), so the run cannot go on. The rows "
                "in data/ may be whole: copy what you need, then delete the folder, or choose another output.path",
            ) from error

    def _cut_off(self) -> tuple[str, RunState] | None:
        """Path and content of the new `run.json` that a killed process left under a temporary name, if there is one."""
        for path in left_aside(self.filesystem, self.path("run.json")):
            with suppress(ValueError):  # incomplete
                text = self.read_text(self.name(path))
                if text and "state" in (state := _parse(text)):
                    return path, state
        return None

    def write_state(self, state: RunState, check: Callable[[], None] = lambda: None) -> None:
        self.write_text("run.json", json.dumps(state, indent=2, default=str) + "\n", check)

    def write_text(self, name: str, text: str, check: Callable[[], None] = lambda: None) -> None:
        """Replaces a small file atomically; `check` is called directly before it appears."""
        with self.replacing(name, check) as file:
            file.write(text.encode())

    @contextmanager
    def replacing(self, name: str, check: Callable[[], None] = lambda: None) -> Iterator[BinaryIO]:
        """A file to write to, which becomes `name` once it is complete; `check` is called directly before that."""
        target = self.path(name)
        own = f"{target}.{uuid.uuid4().hex[:8]}.tmp"  # unique, since two sessions may overlap for a moment
        if not self.is_local:
            with upload_on_exit(self.filesystem, target, own, check) as gathered:
                yield cast(BinaryIO, gathered)
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with replace_on_exit(target, own, check) as file:
            yield file

    def read_text(self, name: str) -> str | None:
        """The content of a small file; None if it does not exist."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.readall()).decode()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def foreign_files(self) -> list[str]:
        """Files that `clear` would delete although no run wrote them; all of them if there is no `run.json` of ours."""
        infos = {name: self.filesystem.get_file_info(self.path(name)) for name in OURS}
        there = [name for name, info in infos.items() if info.type != pafs.FileType.NotFound]
        state = self.read_any_state() if there else None
        if state is None or not state.keys() >= IS_RUN:
            return there
        return [name for name in self.unexpected_files() if name.startswith(("data/", "metrics/"))]

    def unexpected_files(self, subfolder: str = "") -> list[str]:
        """Files in the folder, or a `subfolder` of it, that no finished run leaves there, sorted."""
        selector = pafs.FileSelector(self.path(subfolder).rstrip("/"), allow_not_found=True, recursive=True)
        infos = self.filesystem.get_file_info(selector)
        names = (self.name(info.path) for info in infos if info.type != pafs.FileType.Directory)
        return sorted(name for name in names if not KNOWN_NAMES.fullmatch(name))

    def clear(self, session: str, check: Callable[[], None]) -> None:
        """Removes everything that runs before `session` wrote, except `run.json`, which is the new run's by now and
        names the sessions whose files may still arrive late. `check` is called before each step.

        If this process is suspended here and continues when another session is at work, it must not delete that
        session's files. On a disk, files are first moved to a folder that the next `fence` removes as well; elsewhere
        they are listed before the check, and only those are deleted.
        """
        names = [*(name for name in OURS if name not in ("checkpoint", "run.json")), *self.quarantine_files()]
        if not self.is_local:
            for name in names:
                self._remove_listed(name, check)
            return
        gone = f"checkpoint/gone-{session}"
        os.makedirs(self.path(gone), exist_ok=True)
        for name in names:
            check()
            if os.path.lexists(self.path(name)):
                try:
                    os.rename(self.path(name), self.path(f"{gone}/{name}"))
                except FileNotFoundError:
                    check()  # raises the reason if another session has taken over
                    raise
        self.remove(gone)

    def _remove_listed(self, name: str, check: Callable[[], None]) -> None:
        """Removes a file, or all files of a folder, elsewhere than on a disk; none that appears after `check`."""
        infos = [self.filesystem.get_file_info(self.path(name))]
        if infos[0].type == pafs.FileType.Directory:
            infos = self.filesystem.get_file_info(pafs.FileSelector(self.path(name), recursive=True))
        paths = [info.path for info in infos if info.type == pafs.FileType.File]
        check()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self._delete_file, paths))

    def _delete_file(self, path: str) -> None:
        with suppress(FileNotFoundError):  # another session was faster
            self.filesystem.delete_file(path)

    def remove(self, name: str) -> None:
        """Removes a file or folder if it is there."""
        info = self.filesystem.get_file_info(self.path(name))
        if info.type == pafs.FileType.Directory:
            self.filesystem.delete_dir(info.path)
        elif info.type == pafs.FileType.File:
            self.filesystem.delete_file(info.path)
            if self.is_local:
                sync(os.path.dirname(info.path))  # the next step relies on it

    def move(self, source: str, target: str) -> None:
        """Moves a file within the folder, and replaces the target if it exists."""
        folder = self.path(target).rpartition("/")[0]
        if self.is_local:
            make_folder(folder)
            os.replace(self.path(source), self.path(target))
            sync(folder)
            return
        self.filesystem.create_dir(folder, recursive=True)
        rename(self.filesystem, self.path(source), self.path(target))  # on a store a copy and a delete

    def fence(self, session: str, check: Callable[[], None] = lambda: None) -> None:
        """Prevents writers of earlier sessions from adding data files on a disk, by removing their staging folders.

        On an object store a late upload is still possible; `late_files` finds it. `check` is called after the folder is
        listed, so that nothing of a later session is removed.
        """
        gone = f"checkpoint/gone-{session}"
        if self.is_local:
            names = (*self._names(STAGING), *self._names("checkpoint"))
            there = [name for name in names if name not in (STAGING, gone)]
            left = [name for name in self._names() if TEMPORARY.fullmatch(name)]
            check()
            os.makedirs(self.path(gone), exist_ok=True)
            for name in there:
                with suppress(FileNotFoundError):
                    os.rename(self.path(name), self.path(f"{gone}/{name.replace('/', '_')}"))  # atomically
            self.remove(gone)
        else:
            if is_whole_on_close(self.filesystem):
                self._remove_listed("checkpoint", check)
                return
            check()
            if self.filesystem.get_file_info(self.path(STAGING)).type == pafs.FileType.Directory:
                self.filesystem.move(self.path(STAGING), self.path(gone))
            self.remove("checkpoint")
            if self.read_text("run.json") is None and (whole := self._cut_off()) is not None:
                rename(self.filesystem, whole[0], self.path("run.json"))
            left = [name for name in self._names() if TEMPORARY.fullmatch(name)]
        for name in left:
            self.remove(name)
        self.filesystem.create_dir(self.path(f"{STAGING}/{session}"), recursive=True)

    def _names(self, subfolder: str = "") -> list[str]:
        """Names in a subfolder, relative to this folder."""
        selector = pafs.FileSelector(self.path(subfolder).rstrip("/"), allow_not_found=True)
        return [self.name(info.path) for info in self.filesystem.get_file_info(selector)]

    def release(self, session: str) -> None:
        """Removes what the session has in `checkpoint/`; what another may have begun there stays."""
        for name in (f"{STAGING}/{session}", f"checkpoint/retry-{session}", f"checkpoint/gone-{session}"):
            self.remove(name)
        if self.is_local:
            for name in (STAGING, "checkpoint"):
                with suppress(OSError):  # not there, or not empty
                    os.rmdir(self.path(name))
            return
        if is_whole_on_close(self.filesystem):  # has no empty folders, and the next session may have begun to write
            return
        selector = pafs.FileSelector(self.path("checkpoint"), allow_not_found=True, recursive=True)
        if all(self.name(info.path) == STAGING for info in self.filesystem.get_file_info(selector)):
            self.remove("checkpoint")

    def quarantine_files(self) -> list[str]:
        return [name for name in self._names() if IS_QUARANTINE.fullmatch(name)]

    def remove_empty(self, check: Callable[[], None], log: Log = lambda _: None) -> list[str]:
        """Removes data files of zero bytes, which an interrupted upload may leave, and returns their paths. `check` is
        called before each step."""
        selector = pafs.FileSelector(self.path("data"), allow_not_found=True, recursive=True)
        files = [info.path for info in self.filesystem.get_file_info(selector) if info.is_file and info.size == 0]
        empty = [path for path in files if KNOWN_NAMES.fullmatch(self.name(path)) and self._is_empty(path)]
        for path in empty:
            check()
            self.remove(self.name(path))
            log(f"{path}: removed; it is empty, as an upload that was cut off leaves it, and its rows are made again")
        return empty

    def _is_empty(self, path: str) -> bool:
        with self.filesystem.open_input_stream(path) as stream:
            return not stream.read(1)

    def name(self, path: str) -> str:
        """A path relative to the folder."""
        return path.removeprefix(f"{self.root}/")

    def data_files(self, status: str, subfolder: str = "data") -> list[str]:
        """Paths of the finished files of one status, sorted."""
        return self.files(f"{subfolder}/status={status}")

    def all_data_files(self) -> list[str]:
        """Paths of the finished files, status by status."""
        return [path for status in STATUSES for path in self.data_files(status)]

    def run_files(self, state: RunState, statuses: Sequence[str] = STATUSES) -> list[str]:
        """Paths of the data files that belong to the run of `state` (`counts_file`), of one attempt at each task."""
        counts = counts_file(state)
        own = self.one_attempt_each([path for path in self.all_data_files() if counts(self.name(path))])
        return [path for status in statuses for path in own if f"/status={status}/" in path]

    def late_files(self, state: RunState) -> list[str]:
        """Paths of data files of known sessions that do not belong to the run: an earlier session wrote them late, or
        another attempt at the same task has the rows."""
        own, sessions = set(self.run_files(state)), _sessions(state)
        return [path for path in self.all_data_files() if writer_of(path) in sessions and path not in own]

    def one_attempt_each(self, paths: Sequence[str]) -> list[str]:
        """Leaves out the files of a task that was repeated, except for those of the attempt with the most rows.

        Ray repeats a task whose worker it believes dead; that one may have written some of its files, or all, or may
        still write them. The attempt that came to its end has all rows of the task.
        """
        attempts: dict[str, dict[str, list[str]]] = {}
        for path in paths:
            if found := ATTEMPT.search(path):
                attempts.setdefault(found[1], {}).setdefault(found[2], []).append(path)
        gone: set[str] = set()
        for files in (files for files in attempts.values() if len(files) > 1):
            rows = {attempt: sum(map(self._num_rows, its)) for attempt, its in files.items()}
            kept = max(rows, key=lambda attempt: (rows[attempt], attempt))
            gone.update(path for attempt, its in files.items() if attempt != kept for path in its)
        return [path for path in paths if path not in gone]

    def _num_rows(self, path: str) -> int:
        """The rows of a data file; 0 where it is no whole Parquet file."""
        try:
            return int(read_footer(self.filesystem, path)[0])
        except pa.ArrowInvalid:
            return 0

    def unattributed_files(self, state: RunState) -> list[str]:
        """Paths of data files that do not belong to the run and were written by a session that `state` does not know,
        or by no session."""
        counts, sessions = counts_file(state), _sessions(state)
        return [p for p in self.all_data_files() if writer_of(p) not in sessions and not counts(self.name(p))]

    def files(self, folder: str) -> list[str]:
        """Paths of the Parquet files of a subfolder, sorted."""
        return sorted(self.path(name) for name in self._names(folder) if name.endswith(".parquet"))

    def count_rows(self, status: str, subfolder: str = "data") -> int:
        """Rows of one status, from the file footers."""
        return sum(int(rows) for rows, _ in self._footers(self.data_files(status, subfolder)))

    def read_files(self, paths: Sequence[str]) -> dict[str, FileRecord]:
        """By the name of each data file: its rows, and the sum of their ids in hex, from the footers."""
        return {self.name(path): footer for path, footer in zip(paths, self._footers(paths), strict=True)}

    def _footers(self, paths: Sequence[str]) -> list[FileRecord]:
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(partial(read_footer, self.filesystem), paths))


def _parse(text: str) -> RunState:
    """ValueError where it is no JSON object."""
    state: RunState = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError("no object")
    return state


def counts_file(state: RunState) -> Callable[[str], bool]:
    """Tells of the name of a data file whether it belongs to the run of `state`.

    What counts is who wrote a file and when, not that it is there: an upload of a session that is over may still
    arrive. To a finished run belong the files that its books were closed with; to any other those that its last session
    found at its start (`known`; a new run finds none) and those that it has written itself.
    """
    if state["state"] == "finished":
        return frozenset(state["files"]).__contains__
    known, session = frozenset(state.get("known", ())), state["sessions"][-1]["id"]
    return lambda name: name in known or writer_of(name) == session


def _sessions(state: RunState) -> frozenset[str]:
    """All sessions that may have written data files into the folder."""
    return frozenset([*state["former"], *(session["id"] for session in state["sessions"])])


def writer_of(path: str) -> str:
    """The session that wrote a data file, by its name; "" where it says none."""
    found = re.match(r"(?:part|rest)-([^-]+)-", path.rpartition("/")[2])
    return found.group(1) if found else ""


def id_metadata(id_sum: int) -> dict[bytes, bytes]:
    """The entry in a data file's footer for the ids of its rows."""
    return {IDS: f"{id_sum % (1 << 128):032x}".encode()}


def read_footer(filesystem: pafs.FileSystem, path: str) -> FileRecord:
    """Rows, and the sum of their ids in hex; "" where the footer does not say it, as in a file that no run wrote."""
    footer = pq.read_metadata(path, filesystem=filesystem)
    return [int(footer.num_rows), (footer.metadata or {}).get(IDS, b"").decode()]
