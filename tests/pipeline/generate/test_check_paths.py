"""A finished run has all that it promised: a torn report, or what came late, makes `--resume` go on."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.generate.check_paths import has_all_rows
from pipeline.store.run_folder import RunFolder

STATE: Any = {"state": "finished", "books": {"input": 0, "ok": 0, "failed": 0, "closed": True}, "files": {},
              "input": {"format": "jsonl"}}  # fmt: skip
WHOLE = json.dumps({"completed": 0, "failed": 0}).encode()


@pytest.mark.parametrize("report", [b"", WHOLE[:-5], b"\xff\xfe", b"[]", b"null", WHOLE.replace(b"0", b"1")])
def test_a_report_that_is_not_whole_is_made_again(tmp_path: Path, report: bytes) -> None:
    folder, notes = RunFolder.open(str(tmp_path)), list[str]()
    (tmp_path / "report.json").write_bytes(WHOLE)
    assert has_all_rows(folder, STATE, notes.append)
    assert notes == []
    (tmp_path / "report.json").write_bytes(report)
    assert not has_all_rows(folder, STATE, notes.append)
    assert "its report.json is not whole; it is made again" in notes[0]


def test_what_a_dead_retry_uploaded_late_is_found(tmp_path: Path) -> None:
    folder, notes = RunFolder.open(str(tmp_path)), list[str]()
    (tmp_path / "report.json").write_bytes(WHOLE)
    folder.write_text("checkpoint/retry-s1/status=ok/part-s1-x-0.parquet", "late")
    assert not has_all_rows(folder, STATE, notes.append)
    assert "came late; it is removed" in notes[0]
    folder.fence("s2")
    folder.release("s2")
    assert has_all_rows(folder, STATE, notes.append)
