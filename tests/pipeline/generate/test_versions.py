"""What a run folder says of the version that wrote it, and the refusal of folders that a version before 1.0 wrote."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import skipdecode
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.export.export_plan import Options, plan_export
from pipeline.generate.check_paths import check_output
from pipeline.generate.retry import retry
from pipeline.generate.verify import verify
from pipeline.report.figures import open_run
from pipeline.store.run_folder import RunFolder
from pipeline.training.folder import TrainingFolder

BEFORE = {
    "state": "finished", "fingerprint": {}, "books": {"input": 0, "ok": 0, "failed": 0, "closed": True},
    "sessions": [{"id": "0123456789ab", "started_at": 1.0, "ended_at": 2.0}], "config": {}, "decode": {}, "model": {},
}  # fmt: skip


def job(folder: Path, if_exists: str) -> JobConfig:
    return build_config(JobConfig, {"input": {"path": ["x"]}, "output": {"path": str(folder), "if_exists": if_exists}})


READERS: dict[str, Callable[[Path], object]] = {
    "resume": lambda folder: check_output(RunFolder.open(str(folder)), job(folder, "resume")),
    "retry": lambda folder: retry(str(folder), {}, [], print),
    "verify": lambda folder: verify(str(folder), print),
    "report": lambda folder: open_run(str(folder)),
    "export": lambda folder: plan_export(Options(run=str(folder), target=str(folder.parent / "out"))),
    "finetune": lambda folder: TrainingFolder(folder).check("resume"),
}


@pytest.mark.parametrize("verb", READERS)
def test_a_folder_of_before_1_0_is_refused_in_one_sentence(tmp_path: Path, verb: str) -> None:
    folder = tmp_path / "run"
    (folder / "training").mkdir(parents=True)
    for name in ("run.json", "training/run.json"):
        (folder / name).write_text(json.dumps(BEFORE))
    with pytest.raises(ConfigError) as refused:
        READERS[verb](folder)
    assert str(refused.value) == (
        f"{folder}: made by a version before 1.0, which this version cannot continue; start a new output folder"
    )


def test_it_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(BEFORE))
    assert check_output(RunFolder.open(str(tmp_path)), job(tmp_path, "overwrite")) is None
    (tmp_path / "training").mkdir()
    (tmp_path / "training/run.json").write_text(json.dumps(BEFORE))
    assert TrainingFolder(tmp_path).check("overwrite") is None


def test_a_folder_that_says_its_version_is_read(tmp_path: Path) -> None:
    state = BEFORE | {"version": skipdecode.__version__}
    (tmp_path / "run.json").write_text(json.dumps(state))
    assert check_output(RunFolder.open(str(tmp_path)), job(tmp_path, "resume")) == state
