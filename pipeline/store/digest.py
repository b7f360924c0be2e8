"""Digests of model folders, and the refusal to go on where two fingerprints differ."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pipeline.config.job import ConfigError
from pipeline.formatting import Json
from skipdecode.checkpoint.lora_adapter import CONFIG_FILE, WEIGHTS_FILE

SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 64  # of each weight file


def digest_files(source: Path) -> str:
    """The digest of a model folder or a GGUF file: all bytes of configuration and tokenizer files and of a GGUF header,
    and of weight files the size and NUM_SAMPLES samples of 64 KiB."""
    total = hashlib.sha256()
    for path in _files(source):
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        if path.suffix == ".gguf":
            from skipdecode.checkpoint.gguf_header import read_header  # only such a file needs it

            with path.open("rb") as file:
                total.update(file.read(read_header(path).num_bytes))
        is_weights = path.suffix in (".safetensors", ".bin", ".gguf")
        step = max(size // NUM_SAMPLES, SAMPLE_BYTES) if is_weights else SAMPLE_BYTES
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                total.update(file.read(SAMPLE_BYTES))
    return total.hexdigest()


def digest_adapter(folder: Path) -> str:
    """The digest of a LoRA adapter: all bytes of its configuration and of its weights."""
    total = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    suffixes = (".json", ".txt", ".safetensors", ".bin")
    return sorted(p for p in source.iterdir() if p.suffix in suffixes and p.is_file())


def refuse_differences(
    before: Mapping[str, Json], now: Mapping[str, Json], free: Collection[str] = (), lines: Sequence[str] = ()
) -> None:
    """ConfigError with a line for each entry that differs and is not `free`, and with `lines`, if there are any."""
    keys = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key) and key not in free]
    found = [*(describe_difference(key, before.get(key), now.get(key)) for key in keys), *lines]
    if found:
        raise ConfigError.parse(
            "\n".join([*found, "a resumed run must not differ; use --overwrite or another output.path"])
        )


def describe_difference(key: str, before: Json, now: Json) -> str:
    return f"{key}: the run was started with {before!r}, now it is {now!r}"
