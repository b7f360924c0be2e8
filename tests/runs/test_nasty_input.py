"""Inputs and accidents that ended jobs elsewhere, through a whole run: right code, right message, nothing lost."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import generate, verify
from tests.support.processes import row_list
from tests.support.verbs import Call

pytestmark = pytest.mark.ray

NASTY = [
    "", " ", "\n\n", "\0", "a\0b", "\ufeffbom", "\u202eright to left", "\u200b\u200d\ufe0f", "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘", "👩‍👩‍👧‍👦🏳️‍🌈",
    "</s>", "<s><pad></s><unk>", "<|endoftext|>", "{{7*7}} ${jndi:ldap://x}", "'; DROP TABLE rows;--",
    "NaN", "null", "None", "-1e309", '"quoted, with commas"', "tab\tand\rreturn", "\u2028\u2029", "\U0010ffff",
    "ﷺ" * 20, "../../etc/passwd", "%s%n%d", "status=failed", "in.jsonl:0",
]  # fmt: skip


Job = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def job(call: Call, tiny_checkpoint: Path, tmp_path: Path) -> Job:
    """`job(verb, *arguments)` for the run in tmp_path/run: exit code, JSON document, stderr."""
    fixed = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=4", "-o"]
    return lambda verb, *more: call(verb, *(fixed if verb is generate else []), tmp_path / "run", *more)


def rows(tmp_path: Path, status: str) -> list[dict[str, Any]]:
    return row_list(tmp_path / "run", status)


@pytest.mark.slow
def test_a_folder_of_nasty_files(tmp_path: Path, job: Job) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "empty.jsonl").write_text("")
    (source / "torn.jsonl").write_text('{"id": "whole", "prompt": "x"}\n{"id": "torn", "prom')
    (source / "huge.jsonl").write_text(json.dumps({"id": "huge", "prompt": "word " * 6_000_000}) + "\n")
    nasty = [{"id": f"n{i}", "prompt": text} for i, text in enumerate(NASTY)]
    same = [{"id": "same", "prompt": "x"}] * 10_001
    for name, some in (("nasty", nasty), ("same", same)):
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (source / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    code, report, err = job(generate, "-i", str(source), "limits.max_failed_rows=10002", "input.id_column=id")
    assert code == 0, err
    ok, failed = rows(tmp_path, "ok"), rows(tmp_path, "failed")
    assert {row["id"] for row in ok} == {"whole", "same", *(row["id"] for row in nasty)}
    assert {row["id"]: row["prompt"] for row in ok if row["id"] in {r["id"] for r in nasty}} == {
        row["id"]: row["prompt"] for row in nasty
    }
    assert report["errors"] == {"duplicate_id": 10_000, "bad_line": 1, "prompt_too_long": 1}
    messages = {row["error_code"]: row["error_message"] for row in failed}
    assert messages["bad_line"].startswith("torn.jsonl line 2: ")
    assert "prompt tokens and 4 new ones do not fit" in messages["prompt_too_long"]
    (huge,) = [row for row in failed if row["id"] == "huge"]
    assert len(huge["prompt"]) == 30_000_000
    origins = {row["error_message"].partition(":")[0] for row in failed if row["error_code"] == "duplicate_id"}
    assert origins == {f"same.jsonl row {n}" for n in range(2, 10_002)}
    code, verdict, err = job(verify)
    assert (code, verdict["rows"]) == (0, {"ok": len(ok), "failed": 10_002, "input": len(ok) + 10_002}), err


@pytest.mark.slow
def test_a_truncated_parquet_file_is_named_before_the_start(tmp_path: Path, job: Job) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a", "b"):
        pq.write_table(pa.table({"prompt": ["x"] * 100}), source / f"{name}.parquet")
    data = (source / "b.parquet").read_bytes()
    (source / "b.parquet").write_bytes(data[: len(data) // 2])
    code, document, err = job(generate, "-i", str(source))
    assert (code, document["exit_code"]) == (2, 2)
    assert f"input.path: {source / 'b.parquet'}: cannot be read" in err
    assert not (tmp_path / "run/run.json").exists()


@pytest.mark.slow
def test_half_of_the_state_is_lost(tmp_path: Path, job: Job) -> None:
    """The state of a run is its data files. What is lost is made again, and nothing else is touched."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i % 55}", "prompt": f"row {i}"}) + "\n" for i in range(60)))
    arguments = ["-i", str(source), "actors.batch_size=2", "actors.window_batches=2", "limits.max_failed_rows=5"]
    assert job(generate, *arguments)[0] == 0
    before = {row["id"]: row["generated_tokens"] for row in rows(tmp_path, "ok")}
    paths = sorted((tmp_path / "run/data").rglob("*.parquet"))
    lost = random.Random(0).sample(paths, len(paths) // 2)
    kept = {path: path.stat().st_mtime_ns for path in paths if path not in lost}
    for path in lost:
        path.unlink()
    shutil.rmtree(tmp_path / "run/checkpoint", ignore_errors=True)
    state = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(state | {"state": "running"}))
    code, report, err = job(generate, *arguments, "--resume")
    assert code == 0, err
    assert report["books"] == {"input": 60, "ok": 55, "failed": 5, "closed": True}
    assert {row["id"]: row["generated_tokens"] for row in rows(tmp_path, "ok")} == before
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert job(verify)[0] == 0


@pytest.mark.slow
def test_a_torn_data_file_is_named(tmp_path: Path, job: Job) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"row {i}"}) + "\n" for i in range(8)))
    arguments = ["-i", str(source), "actors.batch_size=2", "actors.window_batches=1"]
    assert job(generate, *arguments)[0] == 0
    path = min((tmp_path / "run/data/status=ok").glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:-20])
    code, _, err = job(generate, *arguments, "--resume")
    assert (code, f"output.path: {path}: not a whole Parquet file" in err) == (2, True), err
    path.unlink()
    assert job(generate, *arguments, "--resume")[0] == 0
    assert job(verify)[0] == 0


@pytest.mark.slow
def test_an_overdrawn_budget_ends_the_run_early_and_a_larger_one_goes_on(tmp_path: Path, job: Job) -> None:
    source = tmp_path / "in.jsonl"
    lines = [{"id": f"r{i}", "prompt": None if i % 3 == 0 else f"row {i % 97}"} for i in range(960)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["-i", str(source), "actors.batch_size=8", "actors.window_batches=1", "baseline.fraction=0"]
    code, document, err = job(generate, *arguments, "limits.max_failed_rows=5")
    assert code == document["exit_code"] == 3, err
    assert "rows have failed, more than limits.max_failed_rows allows" in document["error"]
    assert f"error: {document['error']}" in err
    assert "good rows stay, --resume with a larger limit goes on" in err
    assert json.loads((tmp_path / "run/run.json").read_text())["state"] == "interrupted"
    before = {row["id"]: row for row in rows(tmp_path, "ok")}
    assert len(before) < 480, "it must end early"
    code, report, err = job(generate, *arguments, "--resume", "limits.max_failed_rows=0.4")
    assert code == 0, err
    assert report["books"] == {"input": 960, "ok": 640, "failed": 320, "closed": True}
    after = {row["id"]: row for row in rows(tmp_path, "ok")}
    assert {row: after[row] for row in before} == before
    assert job(generate, *arguments, "--resume", "limits.max_failed_rows=319")[0] == 3, "judged by the limit of today"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_and_the_run_goes_on_when_there_is_room(tmp_path: Path, job: Job) -> None:
    source, disk = tmp_path / "in.jsonl", tmp_path / "run"
    lines = [
        {"id": f"r{i}", "prompt": f"row {i}", "ballast": random.Random(i).randbytes(4000).hex()} for i in range(300)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode()}")
    try:
        arguments = ["-i", str(source), "actors.batch_size=16", "actors.window_batches=1"]
        code, _, err = job(generate, *arguments)
        assert code == 1, err
        assert f"error: output.path: {disk}: no space left; make room, and --resume" in err
        before = {row["id"]: row for row in rows(tmp_path, "ok")}
        assert 0 < len(before) < 300
        subprocess.run(["mount", "-o", "remount,size=50m", str(disk)], check=True)
        code, _, err = job(generate, *arguments, "--resume")
        assert code == 0, err
        after = {row["id"]: row for row in rows(tmp_path, "ok")}
        assert len(after) == 300
        assert {row: after[row] for row in before} == before
        assert job(verify)[0] == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
