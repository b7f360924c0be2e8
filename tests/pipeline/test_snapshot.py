"""Every node reads the revision that the driver found, whatever the hub says by then. On a real cache of the hub's."""

from pathlib import Path

import pytest

from pipeline.resolve_model import worker_path
from skipdecode.checkpoint.hub import PINNED, pin, resolve_source

OLD, NEW = "0" * 39 + "a", "0" * 39 + "b"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`org/name` with two revisions in the cache; `main` is the older."""
    made = tmp_path / "hub/models--org--name"
    (made / "refs").mkdir(parents=True)
    (made / "refs/main").write_text(OLD)
    for revision in (OLD, NEW):
        (made / "snapshots" / revision).mkdir(parents=True)
        (made / "snapshots" / revision / "model.safetensors").write_text(revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return made


def test_a_worker_reads_what_the_driver_read(repo: Path) -> None:
    told = worker_path("org/name", resolve_source("org/name"))
    assert told == f"org/name@{OLD}"
    (repo / "refs/main").write_text(NEW)  # somebody has pushed, and this node asks now
    assert resolve_source("org/name") == repo / "snapshots" / NEW
    assert resolve_source(told) == repo / "snapshots" / OLD
    with pytest.raises(ValueError, match=f"'org/name@{'0' * 40}' is no folder here and could not be fetched"):
        resolve_source(f"org/name@{'0' * 40}")


def test_other_sources_stay_as_they_are(repo: Path, tmp_path: Path) -> None:
    assert resolve_source("org/name") == repo / "snapshots" / OLD
    for source, folder in (
        ("org/name", tmp_path / OLD),
        (str(tmp_path), tmp_path),
        ("a/b/c", repo / "snapshots" / OLD),
    ):
        assert pin(source, folder) == source
    assert not PINNED.fullmatch(f"a/b/c@{OLD}")
    folder = tmp_path / f"org/name@{OLD}"
    folder.mkdir(parents=True)
    assert resolve_source(str(folder)) == folder, "a folder of that name is one"
