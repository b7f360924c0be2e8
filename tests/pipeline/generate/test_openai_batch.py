"""OpenAI batch files belong to a finished run: whole, on the disk, and made again where they are not. Real files."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import SamplingConfig
from pipeline.generate.openai_batch import has_batch_files, read_lines_record, write_batch_files
from pipeline.generate.verify import _changed_batch_files
from pipeline.input import expansion
from pipeline.input.expansion import Expansion
from pipeline.input.read import read_file
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.store.run_folder import STATUSES, RunFolder
from tests.support.input_helpers import make_config, make_plan


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


def paths_of(folder: RunFolder) -> dict[str, list[str]]:
    return {status: folder.data_files(status) for status in STATUSES}


def state(**keys: Any) -> Any:
    return {"state": "finished", "input": {"format": "openai_batch"}, "books": {"ok": 3, "failed": 1}, **keys}


def test_they_are_as_long_as_was_written_down(folder: RunFolder) -> None:
    written = write_batch_files(folder, paths_of(folder), "opt", 1)
    assert {name: record["lines"] for name, record in written.items()} == {
        "batch_output.jsonl": 3, "batch_errors.jsonl": 1
    }  # fmt: skip
    finished = state(answers=written)
    assert has_batch_files(folder, finished)
    for name in written:
        text = folder.read_text(name)
        assert text is not None
        assert [json.loads(line)["custom_id"] for line in text.splitlines()] == (
            ["a", "b", "c"] if "out" in name else ["d"]
        )
        for damaged in (None, "", text[: len(text) // 2], text[:-1]):
            folder.remove(name) if damaged is None else folder.write_text(name, damaged)
            assert not has_batch_files(folder, finished), (name, damaged)
        folder.write_text(name, text)
    assert has_batch_files(folder, finished)
    assert has_batch_files(folder, {"input": {"format": "jsonl"}})  # type: ignore[arg-type]
    assert read_lines_record(folder, "nowhere.jsonl")["lines"] == 0


def test_a_byte_that_changed_is_named(folder: RunFolder) -> None:
    """The file is as long as before."""
    finished = state(answers=write_batch_files(folder, paths_of(folder), "opt", 1))

    def changed() -> list[str]:
        return _changed_batch_files({name: read_lines_record(folder, name) for name in finished["answers"]}, finished)

    assert changed() == []
    for name in finished["answers"]:
        text = folder.read_text(name)
        assert text is not None
        folder.write_text(name, text.replace("batch_req", "match_req", 1))
        assert has_batch_files(folder, finished)
        (problem,) = changed()
        assert problem.startswith(f"{name}: is not as it was written")
        folder.write_text(name, text)


def test_they_are_on_the_disk_before_they_have_their_names(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (steps.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names: (steps.append("replace"), replace(*names)))
    write_batch_files(folder, paths_of(folder), "opt", 1)
    assert [step if step == "replace" else Path(step).name.partition(".")[0] for step in steps] == [
        "batch_output", "replace", folder.root.rpartition("/")[2],
        "batch_errors", "replace", folder.root.rpartition("/")[2],
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 3])
def test_lines_of_every_kind_have_one_line_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """However many rows the reader makes of them, and whatever it could not keep of them."""
    monkeypatch.setattr(expansion, "MAX_DOCUMENT_BYTES", 4000)
    body = {"prompt": "p", "temperature": 1}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "two": {"body": body | {"n": 2}}, "huge": {"body": body | {"prompt": "x" * 3000, "n": 2}},
        "get": {"method": "GET", "body": body | {"n": 2}}, "elsewhere": {"url": "/v1/else", "body": body | {"n": 4}},
        "no_body": {"body": 7}, "no_number": {"body": body | {"n": 2, "top_p": float("nan")}},
        "bad_n": {"body": body | {"n": 0}}, "greedy": {"body": {"prompt": "p", "temperature": 0, "n": 2}},
    }  # fmt: skip
    usual = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": id} | usual | own) + "\n" for id, own in kinds.items()]
    source = tmp_path / "in.jsonl"
    source.write_text("".join([*lines, "not json\n", *lines[:3]]))  # these twice
    config = make_config(source)
    plan = make_plan(config, Expansion.of(config, SamplingConfig(n=n, temperature=1.0)))
    rows = [row for block in read_file(plan, 0, config) for row in block.to_pylist()]
    schema = pa.schema([*OUTPUT_SCHEMA, *plan.carried_schema])
    for status in ("ok", "failed"):
        own = [row for row in rows if bool(row["error_code"]) == (status == "failed")]
        made = {"generated_text": "t", "num_input_tokens": 1, "num_generated_tokens": 1, "finish_reason": "stop"}
        table = pa.Table.from_pylist([made | row for row in own], schema=schema)
        (tmp_path / f"run/data/status={status}").mkdir(parents=True)
        pq.write_table(table, tmp_path / f"run/data/status={status}/part-s1-x-0.parquet")
    folder = RunFolder.open(str(tmp_path / "run"))
    written = write_batch_files(folder, paths_of(folder), "m", 1, samples=n)
    found = {
        name: sorted(json.loads(line)["custom_id"] for line in (folder.read_text(name) or "").splitlines())
        for name in written
    }
    assert found["batch_output.jsonl"] == ["plain", "two"]
    assert found["batch_errors.jsonl"] == sorted([*list(kinds)[2:], *list(kinds)[:3], f"in.jsonl:{len(kinds)}"])
