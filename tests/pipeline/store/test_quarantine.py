"""The files that say which rows kill workers: written whole, read for the run's own sessions, gone with the run."""

from pathlib import Path

import pyarrow.fs as pafs
import pytest

from pipeline.store.quarantine import Finding, Quarantine, read_quarantine, write_quarantine
from pipeline.store.run_folder import RunFolder

FIRST, SECOND, OTHER = "a" * 12, "b" * 12, "c" * 12


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(pafs.LocalFileSystem(), str(tmp_path), str(tmp_path))


def test_the_sessions_of_a_run_are_read_together(folder: RunFolder) -> None:
    write_quarantine(folder, FIRST, Quarantine({"r1": Finding(3, "died")}))
    write_quarantine(folder, SECOND, Quarantine({}, {"key": Finding(3, "its twin died")}))
    write_quarantine(folder, OTHER, Quarantine({"r2": Finding(3, "of a run that was overwritten")}))
    found = read_quarantine(folder, [FIRST, SECOND, "d" * 12], 3)
    assert found == Quarantine({"r1": Finding(3, "died")}, {"key": Finding(3, "its twin died")})


def test_a_raised_limit_gives_rows_another_try(folder: RunFolder) -> None:
    write_quarantine(folder, FIRST, Quarantine({"r1": Finding(3, ""), "r2": Finding(5, "")}))
    assert read_quarantine(folder, [FIRST], 5).rows.keys() == {"r2"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": 1}', '{"rows": {"r1": {"num_deaths": 3}}}', "null"])
def test_a_damaged_file_costs_a_search_and_no_more(text: str, folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / f"quarantine-{FIRST}.json").write_text(text)
    assert read_quarantine(folder, [FIRST], 1) == Quarantine()


def test_the_files_are_ours_and_go_with_the_run(folder: RunFolder, tmp_path: Path) -> None:
    write_quarantine(folder, FIRST, Quarantine({"r1": Finding(3, "died")}))
    (tmp_path / f"quarantine-{FIRST}.json.0a1b2c3d.tmp").touch()
    assert folder.unexpected_files() == []
    assert folder.quarantine_files() == [f"quarantine-{FIRST}.json"]
    folder.clear(SECOND, lambda: None)
    folder.fence(SECOND)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_full_disk_is_for_others_to_report(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.store.atomic_files.os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    write_quarantine(folder, FIRST, Quarantine({"r1": Finding(3, "died")}))
    assert read_quarantine(folder, [FIRST], 1) == Quarantine()
