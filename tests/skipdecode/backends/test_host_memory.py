"""Memory and cores that may be taken: of the machine, and of the control groups that the process is in."""

import os
from pathlib import Path

import pytest

from skipdecode.backends import host_memory as host
from skipdecode.backends.host_memory import available_bytes, num_cores, total_bytes

MIB = 2**20
UNLIMITED = 9223372036854771712  # what version 1 says for no limit


def group(folder: Path, version: int, limit: int | str, used: int, inactive: int) -> None:
    names = host.MEMORY_FILES[version]
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    read_once, read_again = names[2]
    (folder / "memory.stat").write_text(f"anon 5\n{read_once} {inactive - MIB}\n{read_again} {MIB}\nfile 7\n")


def groups(controller: str, own: str, tmp_path: Path) -> list[tuple[int, Path]]:
    (tmp_path / "own").write_text(own)
    return host._groups(controller, tmp_path / "own", tmp_path / "fs")


def left(own: str, tmp_path: Path) -> list[int | None]:
    return [host._bytes_left(path, version) for version, path in groups("memory", own, tmp_path)]


def quotas(own: str, tmp_path: Path) -> list[float | None]:
    return [host._quota(path, version) for version, path in groups("cpu", own, tmp_path)]


def test_a_group_and_all_above_it(tmp_path: Path) -> None:
    group(tmp_path / "fs/pods/one", 2, "max", 100 * MIB, MIB)
    group(tmp_path / "fs/pods.slice", 2, 1, 1, MIB)
    group(tmp_path / "fs/pods/one/main", 2, 300 * MIB, 250 * MIB, 20 * MIB)
    (tmp_path / "fs/pods/memory.max").write_text("a word\n")
    (tmp_path / "fs/pods/cpu.max").write_text("250000 100000\n")
    (tmp_path / "fs/pods/one/cpu.max").write_text("max 100000\n")
    own = "0::/pods/one/main\n"
    assert left(own, tmp_path) == [70 * MIB, None, None, None]
    assert quotas(own, tmp_path) == [None, None, 2.5, None]


def test_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/job", 1, 200 * MIB, 250 * MIB, 10 * MIB)
    (tmp_path / "fs/memory/memory.limit_in_bytes").write_text(f"{UNLIMITED}\n")
    (tmp_path / "fs/cpu/job").mkdir(parents=True)
    for folder, quota in (("job", 50_000), (".", -1)):
        (tmp_path / "fs/cpu" / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "fs/cpu" / folder / "cpu.cfs_period_us").write_text("100000\n")
    own = "3:cpuset:/job\n4:memory:/job\n5:cpu,cpuacct:/job\n0::/\n"
    assert left(own, tmp_path) == [0, None, None], "over its limit; the root's use is not there; no version 2"
    assert quotas(own, tmp_path) == [0.5, None, None]


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory", 1, 512 * MIB, 12 * MIB, MIB)
    assert left("4:memory:/docker/0123\n", tmp_path) == [None, None, 501 * MIB]


def test_the_least_of_all_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert 0 < available_bytes() <= host._of_machine() + 512 * MIB
    assert 1 <= num_cores() <= cores
    group(tmp_path / "small", 2, 300 * MIB, 250 * MIB, MIB)
    (tmp_path / "small/cpu.max").write_text("20000 100000\n")
    monkeypatch.setattr(host, "_groups", lambda controller: [(2, tmp_path / "none"), (2, tmp_path / "small")])
    assert (available_bytes(), total_bytes(), num_cores()) == (51 * MIB, 300 * MIB, 1)
    monkeypatch.setattr(host, "_groups", lambda controller: [])
    assert 100 * MIB < available_bytes() < total_bytes()
    assert num_cores() == cores


def test_no_control_groups(tmp_path: Path) -> None:
    assert host._groups("memory", tmp_path / "missing", tmp_path) == []
