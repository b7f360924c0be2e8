"""The main job on a real Ray, again: resumed, refused, without its collector, beside what another cluster left."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray

from tests.support.pipeline_runs import prompts, read, write_jsonl
from tests.support.verbs import Job

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_resume_writes_what_is_missing_and_nothing_twice(job: Job, tmp_path: Path) -> None:
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts(40))]
    rows += [{"id": "7", "prompt": "a duplicate"}]
    source = write_jsonl(tmp_path / "in.jsonl", rows)
    arguments = ["-i", str(source), "actors.batch_size=4", "actors.window_batches=1", "limits.max_failed_rows=1"]
    assert job(*arguments)[0] == 0
    before = {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()}
    files = sorted((tmp_path / "run/data/status=ok").glob("*.parquet"))
    assert len(files) > 4
    lost = {row for path in files[::2] for row in pq.ParquetFile(path).read(["id"])["id"].to_pylist()}
    for path in files[::2]:
        path.unlink()
    state = json.loads((tmp_path / "run/run.json").read_text())
    (tmp_path / "run/run.json").write_text(json.dumps(state | {"state": "interrupted"}))  # as a killed driver leaves it
    code, report, err = job(*arguments, "--resume")
    assert code == 0
    assert f"{len(lost)} rows to do, {41 - len(lost)} done" in err
    assert {key: row["generated_tokens"] for key, row in read(tmp_path / "run").items()} == before
    assert report["books"] == {"input": 41, "ok": 40, "failed": 1, "closed": True}
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run/data").rglob("*.parquet")}
    code, report, err = job(*arguments, "--resume")
    assert (code, report["was_finished"]) == (0, True)
    assert "finished before, nothing to do" in err
    assert written == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "run/data").rglob("*.parquet")}


@pytest.mark.slow
def test_resume_refuses_another_run(job: Job, tmp_path: Path, tiny_checkpoint: Path, checkpoint_factory: Any) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts(8)])
    arguments = ["-i", str(source), "decode.speedup=2"]
    assert job(*arguments)[0] == 0
    for change, key in (
        (["sampling.max_new_tokens=13"], "sampling.max_new_tokens: the run was started with 12, now it is 13"),
        (["decode.speedup=3"], "decode.speedup: the run was started with 2.0, now it is 3.0"),
        (["input.limit=5"], "input.limit: the run was started with None, now it is 5"),
    ):
        code, _, err = job(*arguments, "--resume", *change)
        assert code == 2
        assert key in err
    other = tmp_path / "other-model"
    shutil.copytree(checkpoint_factory("125m", layers=6, seed=9), other)
    code, _, err = job(*arguments, "--resume", model=other)
    assert (code, "model.files: " in err) == (2, True)
    write_jsonl(source, [{"prompt": prompt} for prompt in prompts(9)])
    code, _, err = job(*arguments, "--resume")
    assert (code, "input.files: " in err) == (2, True)


@pytest.mark.slow
def test_a_lost_collector_costs_figures_and_no_run(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector dies right after its start; every row is written all the same."""
    import pipeline.generate.stream

    real = pipeline.generate.stream.start_collector

    def short_lived(*arguments: Any) -> Any:
        collector = real(*arguments)
        ray.kill(collector)
        return collector

    monkeypatch.setattr(pipeline.generate.stream, "start_collector", short_lived)
    rows = [{"prompt": prompt} for prompt in prompts(20)]
    code, report, err = job("-i", str(write_jsonl(tmp_path / "in.jsonl", rows)))
    assert code == 0, err
    assert "the collector is gone" in err
    assert report["books"] == {"input": 20, "ok": 20, "failed": 0, "closed": True}
    assert report["speedup"]["measured"] is None


@pytest.mark.slow
def test_a_file_left_behind_by_another_cluster_does_not_matter(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = Path(tempfile.mkdtemp(prefix="r"))  # short: Ray puts sockets there
    (stale / "ray").mkdir()
    (stale / "ray/ray_current_cluster").write_text("192.0.2.2:26379")
    monkeypatch.setenv("RAY_TMPDIR", str(stale))
    source = write_jsonl(tmp_path / "in.jsonl", [{"prompt": "a"}])
    command = [sys.executable, "-m", "jobs.generate", f"model.source={tiny_checkpoint}", "-i", str(source), "-o"]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "core_worker.cc" not in done.stderr, "a line that looks like an error: pipeline.cluster.ray_logging"
