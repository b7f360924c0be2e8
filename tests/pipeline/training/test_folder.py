"""The output folder of a fine-tuning: whole or not at all, whatever stops the writing, and two checkpoints."""

import json
import os
from pathlib import Path

import pytest

from pipeline.config.job import ConfigError
from pipeline.training.folder import TrainingFolder, check_no_overlap
from skipdecode import __version__


class Stop(BaseException):
    """Stands for a kill: nothing may catch it."""


@pytest.fixture
def folder(tmp_path: Path) -> TrainingFolder:
    return TrainingFolder.open(str(tmp_path / "model"))


def model(contents: str, *names: str) -> object:
    def write(staging: Path) -> None:
        for name in names or ("config.json", "model.safetensors"):
            (staging / name).write_text(contents)

    return write


def files(folder: TrainingFolder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.root.iterdir() if path.is_file()}


def test_a_stop_while_the_weights_are_written_leaves_the_earlier_model(folder: TrainingFolder) -> None:
    folder.publish(model("first"))  # type: ignore[arg-type]
    before = files(folder)

    def torn(staging: Path) -> None:
        (staging / "config.json").write_text("second")
        (staging / "model.safetensors").write_text("sec")
        raise Stop

    with pytest.raises(Stop):
        folder.publish(torn)
    assert files(folder) == before == {"config.json": "first", "model.safetensors": "first"}
    folder.publish(model("third"))  # type: ignore[arg-type]  # what was left behind is in nobody's way
    assert files(folder) == {"config.json": "third", "model.safetensors": "third"}
    assert not (folder.training / "staging").exists()


def test_a_folder_is_a_model_only_when_all_is_there(folder: TrainingFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    folder.publish(model("x", "model.safetensors", "tokenizer.json", "config.json"))  # type: ignore[arg-type]
    assert [name for name in order if not name.endswith(".tmp")] == [
        "tokenizer.json",
        "config.json",
        "model.safetensors",
    ]
    assert folder.has_model


def test_the_last_two_checkpoints_stay_and_a_torn_one_is_never_seen(folder: TrainingFolder) -> None:
    for step in (5, 10, 100):
        folder.save_checkpoint(step, lambda path, step=step: path.write_text(str(step)))  # type: ignore[misc]

    def torn(path: Path) -> None:
        path.write_text("10")
        raise Stop

    with pytest.raises(Stop):
        folder.save_checkpoint(105, torn)
    assert [step for step, _ in folder.checkpoints()] == [100, 10]
    assert folder.load_checkpoint(lambda path: {"text": path.read_text()}) == (100, {"text": "100"})


def test_two_that_write_a_file_at_once_each_have_their_own(folder: TrainingFolder) -> None:
    with folder.whole("training/x") as first:
        with folder.whole("training/x") as second:
            second.write_text("second")
        first.write_text("first")
    assert (folder.training / "x").read_text() == "first"
    (folder.training / "checkpoints").mkdir()
    for left in (folder.root / "config.json.0a1b2c3d.tmp", folder.training / "checkpoints/step-000000005.pt.0a1b.tmp"):
        left.write_text("of a killed run")
    folder.remove_temporary()
    assert [path.name for path in folder.root.rglob("*") if path.is_file()] == ["x"]


def test_a_lease_alone_is_no_model(folder: TrainingFolder) -> None:
    """It is left behind by a run that was killed before it had written anything."""
    folder.root.mkdir()
    (folder.root / "lease.json").write_text("{}")
    assert folder.check("fail") is None


def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(folder: TrainingFolder) -> None:
    for step in (5, 10):
        folder.save_checkpoint(step, lambda path, step=step: path.write_text(f'{{"step": {step}}}'))  # type: ignore[misc]
    folder.checkpoints()[0][1].write_text('{"st')
    assert folder.load_checkpoint(lambda path: json.loads(path.read_text())) == (5, {"step": 5})
    assert [step for step, _ in folder.checkpoints()] == [5]
    folder.checkpoints()[0][1].write_text("")
    with pytest.raises(RuntimeError, match="damaged, and no other"):  # never from the beginning without being asked
        folder.load_checkpoint(lambda path: json.loads(path.read_text()))
    assert [step for step, _ in folder.checkpoints()] == [5]

    def unreachable(path: Path) -> dict[str, int]:
        raise OSError("stale file handle")

    with pytest.raises(OSError, match="stale"):  # says nothing against the file
        folder.load_checkpoint(unreachable)
    assert [step for step, _ in folder.checkpoints()] == [5]


def test_the_log_is_rewound_to_the_checkpoint(folder: TrainingFolder) -> None:
    folder.rewind_log(0)
    assert folder.records() == []
    for step in (0, 1, 2, 3):
        folder.append_log({"step": step})
    with folder.log.open("a") as file:
        file.write('{"step": 4, "tr')
    assert [record["step"] for record in folder.records()] == [0, 1, 2, 3]
    folder.rewind_log(2)
    folder.append_log({"step": 3, "again": True})
    assert folder.records() == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "again": True}]


def test_when_the_place_is_taken(folder: TrainingFolder) -> None:
    for mode in ("fail", "resume", "overwrite"):
        assert folder.check(mode) is None
    folder.root.mkdir()
    (folder.root / "model.safetensors").write_text("someone's")
    for mode, message in (
        ("fail", "exists already; use --resume"),
        ("resume", "holds no training/run.json to resume"),
        ("overwrite", "no run of ours wrote it"),
    ):
        with pytest.raises(ConfigError, match=message):
            folder.check(mode)
    folder.write_state({"version": __version__, "state": "running"})
    assert folder.check("resume") == {"version": __version__, "state": "running"}
    assert folder.check("overwrite") is None
    (folder.root / "notes").write_text("mine")
    folder.clear()
    assert files(folder) == {"notes": "mine"}
    assert not folder.training.exists()


def test_a_file_in_the_way_a_torn_state_and_a_uri(tmp_path: Path, folder: TrainingFolder) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        TrainingFolder.open(str(tmp_path / "file")).check("fail")
    folder.training.mkdir(parents=True)
    (folder.training / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
        folder.check("resume")
    with pytest.raises(ConfigError, match="not a URI"):
        TrainingFolder.open("s3://bucket/model")


def test_what_is_read_must_not_lie_where_it_is_written(folder: TrainingFolder, tmp_path: Path) -> None:
    check_no_overlap(folder, [("data.path", str(tmp_path / "pairs.csv")), ("model.source", "s3://x/y")])
    for path in (folder.root, folder.root / "training/pairs.csv", tmp_path / "other/../model"):
        with pytest.raises(ConfigError, match=r"model.source: .* lies in output.path"):
            check_no_overlap(folder, [("model.source", str(path))])
    check_no_overlap(folder, [("model.source", str(tmp_path))])
    with pytest.raises(ConfigError, match=r"output.path: .* lies in data.path"):
        check_no_overlap(folder, [("data.path", str(tmp_path))])
