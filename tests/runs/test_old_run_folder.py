"""Run folders of an earlier version keep working: verify, report, retry, and --resume of a finished and a killed run.

`tests/fixtures/old-run.tar.xz` is what commit 5168830 wrote, on a CPU for which `dtype: auto` meant float32 then:
`prompts.jsonl` (60 rows, of which 31 has no prompt), `finished/`, and `unfinished/`, whose driver was killed after 36
rows. The page (report.html) is left out. A row that a retry may recover is made of a good one (`fail_a_row`).
"""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.generate.retry import retry
from pipeline.generate.run import RunResult, run
from pipeline.generate.verify import Verdict, verify
from pipeline.report.figures import rebuild_report

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_is_up")]

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "tests/fixtures/old-run.tar.xz"
CONFIG: dict[str, Any] = {
    "model": {"source": "models/opt-e2e"},
    "input": {"path": "prompts.jsonl"},
    "sampling": {"max_new_tokens": 48},
    "actors": {"batch_size": 6, "window_batches": 2},
    "limits": {"max_failed_rows": 5},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: the runs and their input, as old as they say, on a machine where `auto` means bfloat16."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    [(_, _, mtime_ns, _, _)] = state(tmp_path / "finished")["input"]["files"]
    os.utime(tmp_path / "prompts.jsonl", ns=(mtime_ns, mtime_ns))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.store.lease.LEASE_S", 0.5)  # of a driver that was killed on another machine
    monkeypatch.setattr("pipeline.generate.plan.settle_dtype", lambda name, *_: "bfloat16" if name == "auto" else name)
    return tmp_path


def state(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return document


def edit_fingerprint(folder: Path, *removed: str) -> None:
    """As a version wrote it that did not have these keys."""
    document = state(folder)
    for key in removed:
        del document["fingerprint"][key]
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """By id; fails when one is there twice."""
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("data/status=*/*.parquet"):
        for row in pq.ParquetFile(path).read().to_pylist():
            assert row["id"] not in found
            found[row["id"]] = row
    return found


def resume(folder: str, **sections: dict[str, Any]) -> RunResult:
    tree = CONFIG | {name: CONFIG.get(name, {}) | section for name, section in sections.items()}
    tree |= {"output": {"path": folder, "if_exists": "resume"}}
    return run(build_config(JobConfig, tree), print)


def verified(folder: str) -> Verdict:
    verdict = verify(folder, print)
    assert verdict.problems.counts == {}, verdict.problems.first
    assert verdict.is_proven
    assert verdict.input == "read"
    return verdict


def test_a_finished_run_verifies_and_its_report_is_made_again(place: Path) -> None:
    before = json.loads((place / "finished/report.json").read_text(encoding="utf-8"))
    assert verified("finished").rows == {"ok": 59, "failed": 1, "input": 60}
    _, figures = rebuild_report("finished")
    after = json.loads((place / "finished/report.json").read_text(encoding="utf-8"))
    assert after == json.loads(json.dumps(figures))
    assert before.keys() <= after.keys()
    for key in before.keys() - {"actors"}:
        assert after[key] == before[key], key
    assert after["actors"][0].items() >= before["actors"][0].items()
    assert "<svg" in (place / "finished/report.html").read_text(encoding="utf-8")


def test_resuming_a_finished_run_changes_nothing(place: Path) -> None:
    before = files(place / "finished")
    result = resume("finished")
    assert result.was_finished
    assert (result.report["completed"], result.report["failed"]) == (59, 1)
    assert files(place / "finished") == before


def test_a_killed_run_is_finished_in_the_type_it_was_begun_in(place: Path) -> None:
    before = rows(place / "unfinished")
    assert len(before) == 36
    result = resume("unfinished")
    assert not result.was_finished
    assert result.report["books"] == {"input": 60, "ok": 59, "failed": 1, "closed": True}
    after = rows(place / "unfinished")
    assert len(after) == 60
    assert {row: after[row] for row in before} == before
    now = state(place / "unfinished")
    assert now["fingerprint"] == state(place / "finished")["fingerprint"]
    starts = [
        row for path in (place / "unfinished/metrics").glob("workers-*") for row in pq.read_table(path).to_pylist()
    ]
    assert {start["dtype"] for start in starts} == {"float32"}
    assert len(starts) == 2
    verified("unfinished")


def fail_a_row(folder: Path, row: str) -> None:
    """As if the engine had failed of it: the row changes sides, in the data files and in the books."""
    for path in folder.glob("data/status=ok/*.parquet"):
        table = pq.ParquetFile(path).read()
        is_it = pc.equal(table["id"], row)
        if pc.any(is_it).as_py():
            failed = table.filter(is_it).to_pylist()[0] | {
                "generated_text": "", "generated_tokens": [], "num_generated_tokens": 0, "finish_reason": "error",
                "layers_run": 0, "ffns_run": 0, "error_code": "engine_error", "error_message": "out of memory",
            }  # fmt: skip
            target = folder / "data/status=failed" / path.name
            assert not target.exists()
            pq.write_table(table.filter(pc.invert(is_it)), path, write_page_checksum=True)
            pq.write_table(pa.Table.from_pylist([failed], table.schema), target, write_page_checksum=True)
    document = state(folder)
    document["books"] |= {"ok": 58, "failed": 2}
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.slow
def test_failed_rows_are_tried_again(place: Path) -> None:
    fail_a_row(place / "finished", "demo-00005")
    done = retry("finished", {}, [], print)
    assert (done.tried, done.recovered) == (1, 1)
    assert done.run.report["books"] == {"input": 60, "ok": 59, "failed": 1, "closed": True}
    again = rows(place / "finished")["demo-00005"]
    assert again["generated_text"]
    assert again["error_code"] == ""
    assert state(place / "finished")["fingerprint"]["model.dtype"] == "float32"
    assert verified("finished").rows == {"ok": 59, "failed": 1, "input": 60}


def test_a_key_that_the_run_lacks_means_its_default(place: Path) -> None:
    edit_fingerprint(place / "finished", "sampling.top_p", "prefill.method", "input.too_long", "model.quantization")
    assert resume("finished").was_finished
    for sections, said in (
        ({"sampling": {"top_p": 0.5}}, "sampling.top_p: the run was started with 1.0, now it is 0.5"),
        ({"input": {"too_long": "truncate_left"}}, "input.too_long: the run was started with 'fail_row', now it is"),
        ({"prefill": {"method": "swiftkv"}}, "prefill.method: the run was started with 'full', now it is 'swiftkv'"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype: the run was started with 'float32', now it is 'bfloat16'"),
    ):
        with pytest.raises(ConfigError, match="a resumed run must not differ") as refused:
            resume("finished", **sections)
        assert said in str(refused.value)
