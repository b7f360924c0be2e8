"""Memory that may be taken: of the machine, and of the control groups that the process is in."""

from pathlib import Path

import pytest

from skipdecode import host_memory
from skipdecode.host_memory import available_bytes

MIB = 2**20
UNLIMITED = 9223372036854771712  # what version 1 says for no limit


def group(folder: Path, version: int, limit: int | str, used: int, inactive: int) -> None:
    names = host_memory.FILES[version]
    folder.mkdir(parents=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {inactive}\nactive_file 7\n")


def left(own: str, tmp_path: Path) -> list[int | None]:
    (tmp_path / "own").write_text(own)
    groups = host_memory._groups(tmp_path / "own", tmp_path / "fs")
    return [host_memory._left(path, version) for version, path in groups]


def test_a_group_and_all_above_it(tmp_path: Path) -> None:
    group(tmp_path / "fs/pods/one", 2, "max", 100 * MIB, 0)
    group(tmp_path / "fs/pods.slice", 2, 1, 1, 0)
    group(tmp_path / "fs/pods/one/main", 2, 300 * MIB, 250 * MIB, 20 * MIB)
    (tmp_path / "fs/pods/memory.max").write_text("a word\n")
    assert left("0::/pods/one/main\n", tmp_path) == [70 * MIB, None, None, None]


def test_the_first_version(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory/job", 1, 200 * MIB, 250 * MIB, 10 * MIB)
    (tmp_path / "fs/memory/memory.limit_in_bytes").write_text(f"{UNLIMITED}\n")
    own = "3:cpuset:/job\n4:memory:/job\n0::/\n"
    assert left(own, tmp_path) == [0, None, None], "over its limit; the root's use is not there; no version 2"


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    group(tmp_path / "fs/memory", 1, 512 * MIB, 12 * MIB, 0)
    assert left("4:memory:/docker/0123\n", tmp_path) == [None, None, 500 * MIB]


def test_the_least_of_all_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert 0 < available_bytes() <= host_memory._of_machine() + 512 * MIB
    group(tmp_path / "small", 2, 300 * MIB, 250 * MIB, 0)
    monkeypatch.setattr(host_memory, "_groups", lambda own, root: [(2, tmp_path / "none"), (2, tmp_path / "small")])
    assert available_bytes() == 50 * MIB
    monkeypatch.setattr(host_memory, "_groups", lambda own, root: [])
    assert available_bytes() > 100 * MIB


def test_no_control_groups(tmp_path: Path) -> None:
    assert host_memory._groups(tmp_path / "missing", tmp_path) == []
