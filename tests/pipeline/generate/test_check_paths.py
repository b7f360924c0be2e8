"""A finished run has all that it promised: a torn report, or what came late, makes `--resume` go on."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.generate.check_paths import check_output, has_all_rows
from pipeline.input.ids import sum_outputs
from pipeline.store.run_folder import RunFolder, id_metadata

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


def put(root: Path, name: str, id: str) -> None:
    table = pa.table({"id": [id], "error_code": [""], "error_message": [""]})
    path = root / f"data/status=ok/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(id_metadata(sum_outputs(table))), path)


def test_a_data_file_in_place_of_another_with_as_many_rows_is_found(tmp_path: Path) -> None:
    folder, notes = RunFolder.open(str(tmp_path)), list[str]()
    put(tmp_path, "part-s1-x-0", "a")
    state = STATE | {"books": {"ok": 1, "failed": 0}, "files": folder.read_files(folder.all_data_files())}
    (tmp_path / "report.json").write_text(json.dumps({"completed": 1, "failed": 0}))
    assert has_all_rows(folder, state, notes.append), notes
    put(tmp_path, "part-s1-x-0", "b")
    assert not has_all_rows(folder, state, notes.append)
    assert "its data files are not those that its books were closed with" in notes[0]


def test_a_folder_that_cannot_be_written_is_refused_at_once() -> None:
    """Here by the kernel, also for root."""
    output = {"path": "/sys/kernel", "if_exists": "overwrite"}
    config = build_config(JobConfig, {"model": {"source": "m"}, "input": {"path": "in"}, "output": output})
    with pytest.raises(ConfigError, match=r"output\.path: /sys/kernel: no file can be written there: .*denied"):
        check_output(RunFolder.open("/sys/kernel"), config)
