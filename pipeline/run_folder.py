"""The run folder: what lies where, the fingerprint that ties a run to its inputs, and the books.

`run.json` is replaced atomically, so it is always one whole state. What is done is read from the data files themselves.
Works on any filesystem pyarrow knows.
"""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from pipeline.config import ConfigError, JobConfig
from pipeline.input.ids import DIGEST, row_digests
from pipeline.input.plan import InputPlan
from skipdecode.weights import resolve_source

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
CODE_VERSION = 1  # raise when a change alters the tokens or rows that the same configuration gives
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 64  # of each weight file, for the fingerprint


@dataclass(frozen=True)
class RunFolder:
    filesystem: pafs.FileSystem
    root: str
    """Inside the filesystem, without a trailing slash."""
    shown: str
    """As the user gave it."""

    @classmethod
    def open(cls, path: str) -> "RunFolder":
        """A local path or a URI; nothing is created."""
        try:
            if "://" in path:
                filesystem, root = pafs.FileSystem.from_uri(path)
            else:
                filesystem, root = pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
        except (ValueError, OSError) as error:
            raise ConfigError(f"output.path: {path}: {error}") from error
        return cls(filesystem, root.rstrip("/"), path)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def exists(self) -> bool:
        """Whether there is anything at the place: a file, or a folder that is not empty."""
        kind = self.filesystem.get_file_info(self.root).type
        if kind == pafs.FileType.Directory:
            return bool(self.filesystem.get_file_info(pafs.FileSelector(self.root)))
        return bool(kind != pafs.FileType.NotFound)

    def read_state(self) -> dict[str, Any] | None:
        """`run.json`, or None."""
        try:
            with self.filesystem.open_input_stream(self.path("run.json")) as stream:
                state: dict[str, Any] = json.loads(stream.readall())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise ConfigError(f"output.path: {self.path('run.json')} is not JSON ({error}); use --overwrite") from error
        return state

    def write_state(self, state: dict[str, Any]) -> None:
        self.write_text("run.json", json.dumps(state, indent=2, default=str) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replaces a small file atomically."""
        self.filesystem.create_dir(self.root, recursive=True)
        is_local = isinstance(self.filesystem, pafs.LocalFileSystem)
        target = self.path(name)
        with self.filesystem.open_output_stream(f"{target}.tmp" if is_local else target) as stream:
            stream.write(text.encode())
        if is_local:
            os.replace(f"{target}.tmp", target)

    def strangers(self) -> list[str]:
        """What bears a name of ours although no run.json says that a run wrote it."""
        infos = {name: self.filesystem.get_file_info(self.path(name)) for name in OURS}
        there = [name for name, info in infos.items() if info.type != pafs.FileType.NotFound]
        return [] if "run.json" in there else there

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

    def data_files(self, status: str) -> list[str]:
        """Paths of the finished files of one status, sorted."""
        return self.files(f"data/status={status}")

    def files(self, folder: str) -> list[str]:
        selector = pafs.FileSelector(self.path(folder), allow_not_found=True)
        return sorted(i.path for i in self.filesystem.get_file_info(selector) if i.path.endswith(".parquet"))

    def count_rows(self, status: str) -> int:
        """Rows of one status, from the file footers."""
        with ThreadPoolExecutor(16) as pool:
            return sum(pool.map(self._num_rows, self.data_files(status)))

    def _num_rows(self, path: str) -> int:
        return int(pq.read_metadata(path, filesystem=self.filesystem).num_rows)

    def done_digests(self) -> np.ndarray[Any, Any]:
        """Sorted 'S16' digests of all rows that are written: 16 bytes each, in memory."""
        parts = [
            row_digests(pq.read_table(path, filesystem=self.filesystem, columns=["id", "error_code", "error_message"]))
            for status in ("ok", "failed")
            for path in self.data_files(status)
        ]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, DIGEST)


def fingerprint(config: JobConfig, decode: dict[str, Any], model_folder: Path, plan: InputPlan) -> dict[str, Any]:
    """Everything that decides what a row becomes, flat: a resumed run must agree in every entry."""
    entries: dict[str, Any] = {"code_version": CODE_VERSION}
    entries |= {f"decode.{key}": value for key, value in decode.items()}
    for section, names in (
        ("sampling", None),
        ("prefill", None),
        ("input", ("prompt_column", "id_column", "too_long", "limit", "format")),
        ("model", ("dtype",)),
    ):
        values = getattr(config, section).model_dump(mode="json")
        entries |= {f"{section}.{key}": value for key, value in values.items() if names is None or key in names}
    if config.sampling.deterministic:
        entries["actors.batch_size"] = config.actors.batch_size
        entries["actors.length_buckets"] = list(config.actors.length_buckets)
    entries["model.files"] = digest_files(model_folder)
    if config.model.tokenizer:
        entries["model.tokenizer"] = digest_files(resolve_source(config.model.tokenizer, "model.tokenizer"))
    listing = hashlib.sha256()
    for file in plan.listing.files:
        listing.update(f"{file.name}\0{file.size_bytes}\0{file.mtime_ns}\n".encode())
    entries["input.files"] = listing.hexdigest()
    return {key: list(value) if isinstance(value, tuple) else value for key, value in entries.items()}


def digest_files(folder: Path) -> str:
    """Of configuration and tokenizer files all bytes; of weight files the size and NUM_SAMPLES samples of 64 KiB."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".txt", ".safetensors", ".bin")):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        is_weights = path.suffix in (".safetensors", ".bin")
        step = max(size // NUM_SAMPLES, SAMPLE_BYTES) if is_weights else SAMPLE_BYTES
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def compare_fingerprints(before: dict[str, Any], now: dict[str, Any]) -> None:
    """ConfigError that names each entry in which a resumed run differs, with both values."""
    differing = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if differing:
        lines = [
            f"{key}: the run was started with {before.get(key)!r}, now it is {now.get(key)!r}" for key in differing
        ]
        raise ConfigError("\n".join([*lines, "a resumed run must not differ; use --overwrite or another output.path"]))
