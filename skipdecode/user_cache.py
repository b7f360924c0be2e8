"""The cache folder of this user: what another user could have put there is not taken.

What lies there is loaded as code (kernels), or decides on tokens (tokenizers). In HOME=/tmp, as containers with random
user ids have it, another user can be the first to make the folder. So the folder and its files must belong to this user
and be writable for nobody else, and links are not followed. Otherwise each process does the work for itself.
"""

import atexit
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def open_cache() -> Iterator[int | None]:
    """A descriptor of the cache folder, which is created if necessary; None if it is not this user's alone."""
    try:
        cache = open_own(_create(), None, os.O_DIRECTORY)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        yield None
        return
    try:
        yield cache
    finally:
        os.close(cache)


def _create() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipdecode-ray"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def open_own(path: str | Path, folder: int | None, flags: int = 0) -> int:
    """Opens what belongs to this user and is writable for nobody else. OSError for anything else, links included."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags, dir_fd=folder)
    found = os.fstat(opened)
    if found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return opened
    os.close(opened)
    raise PermissionError(f"{path}: another user could have changed it")


def keep(cache: int, name: str, content: bytes) -> None:
    """Writes a file of the cache atomically, since several processes of a machine may do so at once."""
    new = f"{name}.{secrets.token_hex(8)}"
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=cache), "wb") as file:
        file.write(content)
    os.replace(new, name, src_dir_fd=cache, dst_dir_fd=cache)


def own_folder(name: str) -> Path:
    """A folder in the cache for a library that takes its path; a temporary one, which this process removes at its end,
    where another user could put files there, or something else in the place of a folder above."""
    try:
        folder = _create() / name
        folder.mkdir(exist_ok=True, mode=0o700)
        for path in (folder.parent, folder):
            os.close(open_own(path, None, os.O_DIRECTORY))
        if all(map(_is_kept, folder.resolve().parents)):
            return folder
    except (OSError, RuntimeError):
        pass
    own = tempfile.mkdtemp(prefix="skipdecode-ray-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    return Path(own)


def _is_kept(folder: Path) -> bool:
    """Whether others can neither rename nor remove what this user has in it."""
    found = folder.stat()
    is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and not is_open
