"""How much memory the host has to give: that of the machine, or of the container where that has less."""

import os
from pathlib import Path

# limit, what counts against it, and what of that gives way (in memory.stat), by version of Linux's control groups
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes() -> int:
    """Memory that nobody needs. Not free pages: the page cache gives way."""
    left = [_left(path, version) for version, path in _groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))]
    return min([_of_machine(), *(bytes_left for bytes_left in left if bytes_left is not None)])


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # no Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(own: Path, root: Path) -> list[tuple[int, Path]]:
    """(version, folder) of the control groups whose limits hold for this process: its own, and all above it.

    `own` names them as the machine sees them. In a container that name may not be there, and `root` is its own group.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8").splitlines()]
    except OSError:  # no Linux
        return []
    found = []
    for _, controllers, name in lines:
        if controllers and "memory" not in controllers.split(","):
            continue
        version, top = (1, root / "memory") if controllers else (2, root)
        folder = top / name.strip().lstrip("/")
        found += [(version, path) for path in (folder, *folder.parents) if path.is_relative_to(top)]
    return found


def _left(group: Path, version: int) -> int | None:
    """Below the limit of a control group; None: it has none, or does not say."""
    limit, usage, gives_way = FILES[version]
    try:
        most, used = ((group / name).read_text(encoding="ascii").strip() for name in (limit, usage))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return None if most == "max" else max(int(most) - int(used) + int(stat.get(gives_way, 0)), 0)
    except (OSError, ValueError):
        return None
