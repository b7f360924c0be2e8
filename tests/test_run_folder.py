"""The run folder: what counts as taken, what is cleared, and what changes the fingerprint."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from pipeline.config import ConfigError
from pipeline.run_folder import RunFolder, compare_fingerprints, digest_files
from pipeline.sink import write_whole


def test_an_empty_folder_is_free_and_a_file_is_not(tmp_path: Path) -> None:
    assert not RunFolder.open(str(tmp_path / "no")).exists()
    assert not RunFolder.open(str(tmp_path)).exists()
    (tmp_path / "file").write_text("")
    assert RunFolder.open(str(tmp_path)).exists()
    assert RunFolder.open(str(tmp_path / "file")).exists()


def test_state_is_replaced_whole_and_a_broken_one_is_named(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path / "run"))
    assert folder.read_state() is None
    folder.write_state({"a": 1})
    folder.write_state({"a": 2})
    assert folder.read_state() == {"a": 2}
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.json"]
    (tmp_path / "run/run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json is not JSON"):
        folder.read_state()


def test_clearing_leaves_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "data/status=ok").mkdir(parents=True)
    (tmp_path / "data/status=ok/x.parquet").write_text("x")
    (tmp_path / "run.json").write_text("{}")
    RunFolder.open(str(tmp_path)).clear()
    assert [p.name for p in tmp_path.iterdir()] == ["precious.txt"]


def test_done_rows_are_those_of_whole_files(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path))
    table = pa.table({"id": ["a", "b"], "error_code": ["", ""], "error_message": ["", ""]})
    write_whole(folder.filesystem, folder.root, "data/status=ok/1.parquet", table)
    write_whole(folder.filesystem, folder.root, "data/status=ok/1.parquet", table)  # a repeated task
    failed = pa.table({"id": ["a"], "error_code": ["duplicate_id"], "error_message": ["row 3"]})
    write_whole(folder.filesystem, folder.root, "data/status=failed/1.parquet", failed)
    digests = folder.done_digests()
    assert len(digests) == len(set(digests.tolist())) == 3
    assert (np.sort(digests) == digests).all()
    assert (folder.count_rows("ok"), folder.count_rows("failed")) == (2, 1)


def test_a_write_that_fails_leaves_no_file_among_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = pq.write_table

    def torn(table: pa.Table, where: str, **more: object) -> None:
        real(table, where, **more)
        Path(where).write_bytes(Path(where).read_bytes()[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="No space"):
        write_whole(pafs.LocalFileSystem(), str(tmp_path), "data/status=ok/1.parquet", pa.table({"id": ["a"]}))
    assert not list((tmp_path / "data").rglob("*.parquet"))


def test_one_changed_weight_or_setting_changes_the_digest(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    before = digest_files(model)
    assert before == digest_files(tiny_checkpoint)
    tensors = load_file(model / "model.safetensors")
    tensors["model.decoder.layers.5.fc2.bias"][7] += 1e-3
    save_file(tensors, model / "model.safetensors")
    changed = digest_files(model)
    assert changed != before
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": 3}))
    assert digest_files(model) != changed


def test_differences_are_named_with_both_values() -> None:
    compare_fingerprints({"a": 1, "b": 2}, {"b": 2, "a": 1})
    with pytest.raises(ConfigError, match=r"a: the run was started with 1, now it is 3\nc: .* None, now it is 4"):
        compare_fingerprints({"a": 1, "b": 2}, {"a": 3, "b": 2, "c": 4})
