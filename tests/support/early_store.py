"""A store, on a local folder, that shows an object from the moment it is opened, as Azure's and HDFS's do."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from pipeline.fault_injection import fault_point


class Killed(Exception):
    """The process would be gone here."""


class EarlyStore(pafs.FileSystemHandler):  # type: ignore[misc]
    """Every change of the store is a step; at step number `dies_at`, and from there on, `Killed` is raised.

    `replaces`: whether a move may go over an object that is there (HDFS: not).
    """

    def __init__(self, root: Path, replaces: bool = True) -> None:
        self._local = pafs.SubTreeFileSystem(str(root), pafs.LocalFileSystem())
        self.replaces = replaces
        self.num_steps = 0
        self.dies_at: int | None = None

    def step(self) -> None:
        self.num_steps += 1
        if self.dies_at is not None and self.num_steps >= self.dies_at:
            raise Killed

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def get_type_name(self) -> str:
        return "early"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return self._local.get_file_info(paths)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        return self._local.get_file_info(selector)

    def create_dir(self, path: str, recursive: bool) -> None:
        self._local.create_dir(path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self.step()
        self._local.delete_dir(path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        self.step()
        self._local.delete_dir_contents(path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self.step()
        self._local.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self.step()
        if not self.replaces and self._local.get_file_info(target).type == pafs.FileType.File:
            raise FileExistsError(target)
        self._local.move(source, target)

    def copy_file(self, source: str, target: str) -> None:
        self.step()
        self._local.copy_file(source, target)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self._local.open_input_stream(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self._local.open_input_file(path)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        self.step()
        return pa.PythonFile(EarlyObject(self, self._local.open_output_stream(path, buffer_size=0)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError


class FaultyStore(EarlyStore):
    """Each step is a fault point of the process that makes it."""

    def step(self) -> None:
        super().step()
        fault_point("store step")


class EarlyObject:
    """Half of what is written is seen, and then the other half."""

    def __init__(self, store: EarlyStore, stream: Any) -> None:
        self._store, self._stream = store, stream

    @property
    def closed(self) -> bool:
        return bool(self._stream.closed)

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._stream.write(data[: len(data) // 2])
        self._store.step()
        self._stream.write(data[len(data) // 2 :])
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()
