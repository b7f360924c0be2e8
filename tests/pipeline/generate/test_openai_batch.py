"""OpenAI batch files belong to a finished run: whole, on the disk, and made again where they are not. Real files."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.generate.openai_batch import count_lines, has_batch_files, write_batch_files
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.store.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Three good rows and a failed one."""
    for status, ids in (("ok", "abc"), ("failed", "d")):
        columns = [pa.nulls(len(ids), field.type) for field in OUTPUT_SCHEMA]
        rows = pa.Table.from_arrays(columns, schema=OUTPUT_SCHEMA)
        ones = [1] * len(ids)
        for name, value in (("id", list(ids)), ("num_input_tokens", ones), ("num_generated_tokens", ones)):
            rows = rows.set_column(
                rows.schema.get_field_index(name),
                OUTPUT_SCHEMA.field(name),
                pa.array(value, OUTPUT_SCHEMA.field(name).type),
            )
        (tmp_path / f"data/status={status}").mkdir(parents=True)
        pq.write_table(rows, tmp_path / f"data/status={status}/part-s1-x-0.parquet")
    return RunFolder.open(str(tmp_path))


def state(**keys: Any) -> Any:
    return {"state": "finished", "input": {"format": "openai_batch"}, "books": {"ok": 3, "failed": 1}, **keys}


def test_they_are_as_long_as_was_written_down(folder: RunFolder) -> None:
    written = write_batch_files(folder, "opt")
    assert {name: lines for name, (lines, _) in written.items()} == {"batch_output.jsonl": 3, "batch_errors.jsonl": 1}
    finished = state(answers=written)
    assert has_batch_files(folder, finished)
    assert has_batch_files(folder, state())  # of an earlier version
    for name in written:
        text = folder.read_text(name)
        assert text is not None
        assert [json.loads(line)["custom_id"] for line in text.splitlines()] == (
            ["a", "b", "c"] if "out" in name else ["d"]
        )
        for damaged in (None, "", text[: len(text) // 2], text[:-1]):
            folder.remove(name) if damaged is None else folder.write_text(name, damaged)
            assert not has_batch_files(folder, finished), (name, damaged)
            assert not has_batch_files(folder, state()), (name, damaged)
        folder.write_text(name, text)
    assert has_batch_files(folder, finished)
    assert has_batch_files(folder, {"input": {"format": "jsonl"}})  # type: ignore[arg-type]
    assert count_lines(folder, "nowhere.jsonl") == 0


def test_they_are_on_the_disk_before_they_have_their_names(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (steps.append("replace"), replace(*names)))
    write_batch_files(folder, "opt")
    assert [step if step == "replace" else Path(step).name.partition(".")[0] for step in steps] == [
        "batch_output", "replace", folder.root.rpartition("/")[2],
        "batch_errors", "replace", folder.root.rpartition("/")[2],
    ]  # fmt: skip
