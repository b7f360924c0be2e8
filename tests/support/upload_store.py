"""An object store in memory, as S3 is one: an object appears whole at the end of its upload, and an upload whose sender
is gone may still end at any later time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs


@dataclass(eq=False)
class Upload:
    store: "UploadStore"
    path: str
    data: bytes

    def land(self) -> None:
        """The object appears; nothing happens if it has before."""
        if self in self.store.pending:
            self.store.pending.remove(self)
            self.store.put(self.path, self.data)


class UploadStore(pafs.FileSystemHandler):  # type: ignore[misc]
    """`stop` is called before anything is deleted."""

    def __init__(self, stop: Callable[[], None] = lambda: None) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.pending: list[Upload] = []
        self._stop = stop
        self._clock = 0.0

    def begin(self, path: str, data: bytes) -> Upload:
        upload = Upload(self, path, data)
        self.pending.append(upload)
        return upload

    def put(self, path: str, data: bytes) -> None:
        self._clock += 1.0
        self.objects[path] = data, self._clock

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def get_type_name(self) -> str:
        return "uploads"

    def normalize_path(self, path: str) -> str:
        return path

    def _info(self, path: str) -> pafs.FileInfo:
        if path in self.objects:
            data, written_at = self.objects[path]
            return pafs.FileInfo(path, pafs.FileType.File, size=len(data), mtime=written_at)
        is_folder = any(name.startswith(f"{path}/") for name in self.objects)
        return pafs.FileInfo(path, pafs.FileType.Directory if is_folder else pafs.FileType.NotFound)

    def get_file_info(self, paths: list[str]) -> list[pafs.FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        base = f"{selector.base_dir}/"
        found: dict[str, None] = {}
        for name in self.objects:
            if name.startswith(base):
                parts = name.removeprefix(base).split("/")
                for depth in range(1, len(parts) + 1 if selector.recursive else 2):
                    found[base + "/".join(parts[:depth])] = None
        return [self._info(path) for path in found]

    def create_dir(self, path: str, recursive: bool) -> None:
        """There are none."""

    def delete_dir(self, path: str) -> None:
        self._stop()
        for name in [name for name in self.objects if name.startswith(f"{path}/")]:
            del self.objects[name]

    def delete_file(self, path: str) -> None:
        self._stop()
        if self.objects.pop(path, None) is None:
            raise FileNotFoundError(path)

    def move(self, source: str, target: str) -> None:
        self._stop()
        self.put(target, self._read(source))
        self.delete_file(source)

    def _read(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][0]

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self._read(path))

    def open_input_file(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self._read(path))

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError  # files are written by `begin`

    delete_dir_contents = delete_root_dir_contents = copy_file = open_output_stream = open_append_stream = _unused
