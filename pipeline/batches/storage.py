"""Where files and batches are kept: names and records in a folder per client. No HTTP and no decoding.

    <storage.path>/<client>/files/file-ID.json     what was uploaded (FileRecord), written last: without it, no file
    <storage.path>/<client>/files/file-ID.jsonl    its content
    <storage.path>/<client>/batches/batch_ID.json  what was asked for (StoredBatch), never changed: without it, no batch
    <storage.path>/<client>/batches/batch_ID.jsonl the input: a link to the file's content, elsewhere than on a disk a
                                                   copy, so that a file may be deleted while its batch runs
    <storage.path>/<client>/batches/batch_ID.cancel.json   when its cancellation was asked for
    <storage.path>/<client>/batches/batch_ID.ended.json    how it ended (Ending), unless its run was finished
    <storage.path>/<client>/batches/batch_ID/      the run folder, as of any run

What a batch has done is read from its run folder (`status`) and stored nowhere else. A client is an API key; its folder
is named by the key's digest. Names come from ids of a fixed form, so no request reaches a path outside.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Final, Literal, NotRequired, TypedDict

import pyarrow.fs as pafs

from pipeline.config.job import ConfigError
from pipeline.formatting import Json
from pipeline.store.atomic_files import check_writable, make_folder, sync
from pipeline.store.lease import exclusively
from pipeline.store.run_folder import BATCH_FILES, RunFolder

HEX: Final = "[0-9a-f]{24}"
FILE_ID: Final = re.compile(f"file-{HEX}")
BATCH_ID: Final = re.compile(f"batch_{HEX}")
RESULT_ID: Final = re.compile(f"file-({HEX})-(output|errors)")
"""A file that a batch makes; its id is the batch's."""
RESULTS: Final = dict(zip(("output", "errors"), BATCH_FILES, strict=True))
NO_LINKS: Final = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Of a file system without links, or with as many of a file as it can have."""
CLIENT: Final = re.compile("[0-9a-f]{32}|local")
LOCAL: Final = "local"
"""The client of a server without keys: all programs on its machine."""
LEFT_FILE: Final = re.compile(rf"(file-{HEX})\.jsonl?(\.[0-9a-f]{{8}}\.tmp)?")
LEFT_BATCH: Final = re.compile(rf"(batch_{HEX})((\.(cancel|ended))?\.json|\.jsonl)?(\.[0-9a-f]{{8}}\.tmp)?")
"""What may lie beside the records, with the id that it belongs to."""
BESIDE: Final = (".cancel.json", ".ended.json", ".jsonl")
"""What a batch has beside its record and its run folder."""
COPIED_BYTES: Final = 1 << 20
CHANGE_S: Final = 60.0
KEY_DIGITS: Final = 16
"""Of the 24 hex digits of an id that belongs to an `Idempotency-Key`: these are the key's, the others the request's."""
LEFT_S: Final = 3600
"""Age at which what a store has of a batch without a record is nobody's; younger, another process may be adding it."""


class FileRecord(TypedDict):
    id: str
    filename: str
    bytes: int
    lines: int
    created_at: int
    """Seconds since 1970, as all times here."""
    expires_at: int
    request: NotRequired[str]
    """Digest of the request that an `Idempotency-Key` came with."""


class StoredBatch(TypedDict):
    id: str
    created_at: int
    expires_at: int
    """When its completion window ends."""
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_after_s: int
    """Age of the result files at which they are deleted."""
    model: str
    """The name that clients use."""
    model_names: list[str]
    """All names by which lines may call it."""
    job: dict[str, Any]
    """The run's configuration (`JobConfig`) without paths, so that another configuration of the server does not stop a
    batch in the middle."""
    request: NotRequired[str]


class BatchError(TypedDict):
    """OpenAI's entry of `errors.data`."""

    code: str
    message: str
    param: str | None
    line: int | None


class Ending(TypedDict):
    """How a batch ended whose run is not finished. Written once."""

    status: Literal["failed", "expired", "cancelled"]
    at: int
    errors: list[BatchError]
    lines: dict[str, int]
    """Lines of the input and of the result files: total, completed, failed."""


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def keyed_id(prefix: str, client: str, idempotency_key: str, request: str) -> str:
    """The id that belongs to this client's `Idempotency-Key` and to `request`, the digest of what came with it.

    So whoever takes the same request names the same object: two replicas that do so at the same moment, on a store
    without locks, make the same object twice, which is making it once.
    """
    text = f"{prefix}\0{client}\0{idempotency_key}"
    own = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return prefix + own[:KEY_DIGITS] + request[: 24 - KEY_DIGITS]


def result_id(batch_id: str, kind: str) -> str:
    return f"file-{batch_id.removeprefix('batch_')}-{kind}"


class Storage:
    """All clients' files and batches."""

    def __init__(self, path: str) -> None:
        """ConfigError if it names no place."""
        try:
            self._root = RunFolder.open(path)
        except ConfigError as error:
            raise error.renamed("output.path", "storage.path") from error

    def check(self) -> None:
        """ConfigError if no file can be written there. Creates the folder."""
        folder = self._root
        try:
            folder.filesystem.create_dir(folder.root, recursive=True)
            check_writable(folder.filesystem, folder.root, folder.shown)
        except OSError as error:
            raise ConfigError("storage.path", f"{folder.shown} cannot be created: {error}") from error
        except ConfigError as error:
            raise error.renamed("output.path", "storage.path") from error

    def of(self, client: str) -> "ClientStorage":
        """The part of one client: the digest of its key in hex, cut to 128 bits; any other text is `LOCAL`."""
        name = client[:32] if re.fullmatch("[0-9a-f]{64}", client) else LOCAL
        return self._part(name)

    def client(self, name: str) -> "ClientStorage":
        """The part of the client whose folder has this name."""
        assert CLIENT.fullmatch(name), name
        return self._part(name)

    def clients(self) -> list["ClientStorage"]:
        """Those that have stored something."""
        selector = pafs.FileSelector(self._root.root, allow_not_found=True)
        names = (info.base_name for info in self._root.filesystem.get_file_info(selector))
        return [self._part(name) for name in sorted(names) if CLIENT.fullmatch(name)]

    def _part(self, name: str) -> "ClientStorage":
        root = self._root
        return ClientStorage(name, RunFolder(root.filesystem, f"{root.root}/{name}", f"{root.shown}/{name}"))


@dataclass(frozen=True)
class ClientStorage:
    """One client's files and batches. Methods block; ids that are none of ours are unknown."""

    name: str
    _folder: RunFolder

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Only one process of this machine at a time adds something here, so that a key is taken once and the limits of
        a client hold. A store has no locks: there two processes may exceed a limit at the same moment, and take two
        different requests with one `Idempotency-Key`."""
        if not self._folder.is_local:
            yield
            return
        make_folder(self._folder.root)
        with exclusively(self._folder.root, CHANGE_S):
            yield

    # Files

    def file(self, file_id: str) -> FileRecord | None:
        return self._read(f"files/{file_id}.json") if FILE_ID.fullmatch(file_id) else None

    def files(self) -> list[FileRecord]:
        """The newest first."""
        return _newest(self.file(name) for name in self._names("files") if FILE_ID.fullmatch(name))

    def files_of_key(self, file_id: str) -> list[FileRecord]:
        """Those that came with the same `Idempotency-Key` as a file of this id (`keyed_id`)."""
        found = (self.file(name) for name in self._same_key("files", file_id))
        return [record for record in found if record is not None and "request" in record]

    def add_file(self, record: FileRecord, content: IO[bytes]) -> None:
        """Stores both or nothing."""
        name = f"files/{record['id']}"
        with self._folder.replacing(f"{name}.jsonl") as target:
            _copy(content, target)
        try:
            self._write(f"{name}.json", record)
        except BaseException:  # a disk that is full: without a record nobody could delete the content
            self._remove_left(f"{name}.jsonl", record)
            raise

    def delete_file(self, file_id: str) -> None:
        assert FILE_ID.fullmatch(file_id)
        for suffix in ("json", "jsonl"):  # in this order: without its record it is no file
            self._folder.remove(f"files/{file_id}.{suffix}")

    def content(self, file_id: str) -> Iterator[bytes]:
        """FileNotFoundError before the first part if there is none."""
        return self._parts(self._folder, f"files/{file_id}.jsonl")

    # Batches

    def batch(self, batch_id: str) -> StoredBatch | None:
        return self._read(f"batches/{batch_id}.json") if BATCH_ID.fullmatch(batch_id) else None

    def batches(self) -> list[StoredBatch]:
        """The newest first."""
        return _newest(self.batch(name) for name in self.batch_ids())

    def batch_ids(self) -> list[str]:
        return [name for name in self._names("batches") if BATCH_ID.fullmatch(name)]

    def batches_of_key(self, batch_id: str) -> list[StoredBatch]:
        """Those that came with the same `Idempotency-Key` as a batch of this id (`keyed_id`)."""
        found = (self.batch(name) for name in self._same_key("batches", batch_id))
        return [record for record in found if record is not None and "request" in record]

    def add_batch(self, record: StoredBatch) -> StoredBatch:
        """Returns the batch that is there then: on a store another process may have taken the same request meanwhile.
        FileNotFoundError if the input file is gone.

        What a request or a deletion that was cut off has left under this id goes.
        """
        batch_id = record["id"]
        if self._folder.is_local:
            self.delete_batch(batch_id)
        else:
            self._delete_left(batch_id, record["created_at"] - LEFT_S)
        target = f"batches/{batch_id}.jsonl"
        try:
            self._add_input(f"files/{record['input_file_id']}.jsonl", target)
            if (there := self.batch(batch_id)) is not None:
                return there
            self._write(f"batches/{batch_id}.json", record)
        except BaseException:
            self._remove_left(target, record)
            raise
        return record

    def _delete_left(self, batch_id: str, before: float) -> None:
        """Deletes what is older of a batch that has no record: another process may be adding it at this moment, and its
        run may have begun."""
        selector = pafs.FileSelector(self._folder.path(f"batches/{batch_id}"), allow_not_found=True, recursive=True)
        beside = [self._folder.path(f"batches/{batch_id}{suffix}") for suffix in BESIDE]
        infos = [*self._folder.filesystem.get_file_info(beside), *self._folder.filesystem.get_file_info(selector)]
        for info in infos:
            is_old = info.mtime is None or info.mtime.timestamp() < before
            if info.type == pafs.FileType.File and is_old:
                self._folder.remove(self._folder.name(info.path))

    def _add_input(self, source: str, target: str) -> None:
        folder = self._folder
        if not folder.is_local:
            self._copy_input(source, target)
            return
        os.makedirs(folder.path("batches"), exist_ok=True)
        try:
            os.link(folder.path(source), folder.path(target))
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._copy_input(source, target)
        else:
            sync(folder.path("batches"))

    def _copy_input(self, source: str, target: str) -> None:
        folder = self._folder
        old, new = folder.filesystem.get_file_info([folder.path(source), folder.path(target)])
        if new.type == pafs.FileType.File and new.size == old.size:
            return  # another process has taken the same request, and its run must not find a file of another time
        with folder.filesystem.open_input_stream(folder.path(source)) as content, folder.replacing(target) as copy:
            _copy(content, copy)

    def _remove_left(self, name: str, record: FileRecord | StoredBatch) -> None:
        if not self._folder.is_local and "request" in record:
            return  # another process may have stored the same under this id
        with suppress(OSError):  # what stays is swept away later
            self._folder.remove(name)

    def delete_batch(self, batch_id: str) -> None:
        """The batch and everything that it made."""
        assert BATCH_ID.fullmatch(batch_id)
        for name in (".json", *BESIDE, ""):  # the first: without it, it is no batch
            self._folder.remove(f"batches/{batch_id}{name}")

    def run(self, batch_id: str) -> RunFolder:
        assert BATCH_ID.fullmatch(batch_id)
        folder, name = self._folder, f"batches/{batch_id}"
        return RunFolder(folder.filesystem, folder.path(name), f"{folder.shown}/{name}")

    def input_path(self, batch_id: str) -> str:
        """As a run's configuration names it."""
        assert BATCH_ID.fullmatch(batch_id)
        return f"{self._folder.shown if not self._folder.is_local else self._folder.root}/batches/{batch_id}.jsonl"

    def run_path(self, batch_id: str) -> str:
        return self.input_path(batch_id).removesuffix(".jsonl")

    def open_input(self, batch_id: str) -> BinaryIO:
        found: BinaryIO = self._folder.filesystem.open_input_stream(self._folder.path(f"batches/{batch_id}.jsonl"))
        return found

    def cancel(self, batch_id: str, at: int) -> None:
        if self.cancelled_at(batch_id) is None:
            self._write(f"batches/{batch_id}.cancel.json", {"at": at})

    def cancelled_at(self, batch_id: str) -> int | None:
        """When the cancellation was asked for."""
        found = self._read(f"batches/{batch_id}.cancel.json")
        return None if found is None else int(found["at"])

    def end(self, batch_id: str, ending: Ending) -> None:
        self._write(f"batches/{batch_id}.ended.json", ending)

    def ending(self, batch_id: str) -> Ending | None:
        found: Ending | None = self._read(f"batches/{batch_id}.ended.json")
        return found

    # Result files

    def result_bytes(self, batch_id: str, kind: str) -> int | None:
        """None: there is no such file."""
        info = self._folder.filesystem.get_file_info(self.run(batch_id).path(RESULTS[kind]))
        return int(info.size) if info.type == pafs.FileType.File else None

    def result(self, batch_id: str, kind: str) -> Iterator[bytes]:
        return self._parts(self.run(batch_id), RESULTS[kind])

    def delete_result(self, batch_id: str, kind: str) -> None:
        """The file, and the rows that it was made from."""
        run = self.run(batch_id)
        run.remove(RESULTS[kind])
        run.remove(f"data/status={'ok' if kind == 'output' else 'failed'}")

    def sweep(self, before: float) -> None:
        """Deletes what processes that were killed have left since earlier than `before` (seconds since 1970): content
        and results without a record, and temporary files. Not while a batch is being added: its input is a link, as old
        as the file that it links to."""
        with self.changing():
            self._sweep(before)

    def _sweep(self, before: float) -> None:
        for part, pattern, ids in (("files", LEFT_FILE, FILE_ID), ("batches", LEFT_BATCH, BATCH_ID)):
            selector = pafs.FileSelector(self._folder.path(part), allow_not_found=True)
            infos = self._folder.filesystem.get_file_info(selector)
            there = {name for name in self._names(part) if ids.fullmatch(name)}  # later: a record is written last
            for info in infos:
                found = pattern.fullmatch(info.base_name)
                is_old = info.mtime is None or info.mtime.timestamp() < before
                if found and is_old and (found[1] not in there or info.base_name.endswith(".tmp")):
                    self._folder.remove(f"{part}/{info.base_name}")

    def stored_bytes(self) -> int:
        """Of everything; the input of a batch counts again beside its file."""
        selector = pafs.FileSelector(self._folder.root, allow_not_found=True, recursive=True)
        infos = self._folder.filesystem.get_file_info(selector)
        return sum(int(info.size) for info in infos if info.type == pafs.FileType.File)

    def free_bytes(self) -> int | None:
        """On the disk where everything lies; None on a store."""
        return shutil.disk_usage(self._folder.root).free if self._folder.is_local else None

    def _same_key(self, part: str, own: str) -> list[str]:
        return [name for name in self._names(part) if name.startswith(own[: KEY_DIGITS - 24])]

    def _names(self, part: str) -> list[str]:
        selector = pafs.FileSelector(self._folder.path(part), allow_not_found=True)
        names = (info.base_name for info in self._folder.filesystem.get_file_info(selector))
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _parts(self, folder: RunFolder, name: str) -> Iterator[bytes]:
        stream = folder.filesystem.open_input_stream(folder.path(name))

        def parts() -> Iterator[bytes]:
            with stream:
                while part := stream.read(COPIED_BYTES):
                    yield part

        return parts()

    def _read(self, name: str) -> Any:
        text = self._folder.read_text(name)
        return None if text is None else json.loads(text)

    def _write(self, name: str, value: Any) -> None:
        self._folder.write_text(name, json.dumps(value) + "\n")


def _copy(source: IO[bytes], target: BinaryIO) -> None:
    while part := source.read(COPIED_BYTES):
        target.write(part)


def _newest(records: Iterator[Any]) -> list[Any]:
    found = [record for record in records if record is not None]
    return sorted(found, key=lambda record: (-record["created_at"], record["id"]))


def request_digest(*parts: Json) -> str:
    """Identifies what an `Idempotency-Key` came with."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
