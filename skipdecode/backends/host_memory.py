"""The memory and cores of the host: those of the machine, or of the container where its limits are lower."""

import os
from pathlib import Path

# by version of Linux's control groups: the limit, the usage, and the part of it that is page cache (in memory.stat)
MEMORY_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}


def available_bytes() -> int:
    """Memory that can still be allocated; page cache counts as free."""
    left = [_bytes_left(path, version) for version, path in _groups("memory")]
    return min([_of_machine(), *(bytes_left for bytes_left in left if bytes_left is not None)])


def total_bytes() -> int:
    """The memory limit of this process together with the others in its container."""
    limits = [_limit(path, version) for version, path in _groups("memory")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *(limit for limit in limits if limit is not None)])


def num_cores() -> int:
    """Cores that this process may use, at least one."""
    # macOS has no affinity
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(path, version) for version, path in _groups("cpu")]
    return max(1, int(min([cores, *(quota for quota in quotas if quota is not None)])))


def _of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not on Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(
    controller: str, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, Path]]:
    """(version, folder) of every control group that limits this process: its own and all above it.

    `own` names them as the machine sees them. In a container that path may not exist, and `root` is its own group.
    """
    try:
        lines = [line.split(":", 2) for line in own.read_text(encoding="utf-8", errors="surrogateescape").splitlines()]
    except OSError:  # not on Linux
        return []
    found = []
    for _, controllers, name in lines:
        if controllers and controller not in controllers.split(","):
            continue
        version, top = (1, root / controller) if controllers else (2, root)
        folder = top / name.strip().lstrip("/")
        found += [(version, path) for path in (folder, *folder.parents) if path.is_relative_to(top)]
    return found


def _bytes_left(group: Path, version: int) -> int | None:
    """Bytes left below the limit of a control group; None if it has no limit or does not say."""
    _, usage, cache = MEMORY_FILES[version]
    limit = _limit(group, version)
    if limit is None:
        return None
    try:
        used = int((group / usage).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return max(limit - used + sum(int(stat.get(name, 0)) for name in cache), 0)
    except (OSError, ValueError):
        return None


def _limit(group: Path, version: int) -> int | None:
    """The memory limit of a control group in bytes; None if it has none or does not say."""
    try:
        return int((group / MEMORY_FILES[version][0]).read_text(encoding="ascii"))
    except (OSError, ValueError):  # ValueError: `max`
        return None


def _quota(group: Path, version: int) -> float | None:
    """The CPU limit of a control group in cores; None if it has none or does not say."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    try:
        quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
