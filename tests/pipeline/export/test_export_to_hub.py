"""Exports to the Hub, against a hub on loopback: the same files as in a folder, in one commit; and what goes wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import pipeline.export.export as export_run
from jobs import export
from tests.support.hub import client_of
from tests.support.processes import free_ports
from tests.support.verbs import Call
from tests.support.writable_hub import REPO, TOKEN, Hub, serve_writable_hub

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use 'content:DeprecationWarning"
)  # of the client, in its uploads by LFS
URI = f"hf://datasets/{REPO}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # its protocol has no fake here
    with serve_writable_hub() as hub, client_of(hub.url, monkeypatch):
        yield hub


@pytest.mark.parametrize("folder", ["", "/runs/july"])
def test_the_files_of_a_folder_in_one_commit(run: Path, tmp_path: Path, call: Call, hub: Hub, folder: str) -> None:
    assert call(export, run, "-o", tmp_path / "answers", "--rows-per-file", 5)[0] == 0
    code, document, err = call(export, run, "--to", URI + folder, "--rows-per-file", 5)
    assert code == 0, err
    assert f"exported: {URI}{folder}" in err
    written = {str(path.relative_to(tmp_path / "answers")): path for path in (tmp_path / "answers").rglob("*.*")}
    prefix = f"{folder}/".lstrip("/")
    assert hub.files.keys() == {".gitattributes"} | {prefix + name for name in written}
    for name, path in written.items():
        content = path.read_bytes()
        if name == "README.md":
            content = content.replace(b"# answers", b"# " + (folder or REPO).rpartition("/")[2].encode())
        assert hub.files[prefix + name] == content, name
    assert hub.commits == ["Export of a run of skipdecode-ray"]
    assert (document["output"], document["files"]) == (f"{REPO}{folder}", 3)
    assert hub.objects, "Parquet went by LFS"


def test_what_is_there_is_not_touched(run: Path, call: Call, hub: Hub) -> None:
    hub.files["README.md"] = b"mine"
    code, _, err = call(export, run, "--to", URI)
    assert (code, f"{URI} has files already (README.md); name another data set" in err) == (2, True)
    assert call(export, run, "--to", f"{URI}/july")[0] == 0, "another folder is free"
    code, _, err = call(export, run, "--to", f"{URI}/july/")
    assert (code, "has files already (july/README.md)" in err) == (2, True)
    assert len(hub.commits) == 1


def test_what_goes_wrong_is_said_with_the_remedy(
    run: Path, call: Call, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(uri: str = URI) -> str:
        code, document, err = call(export, run, "--to", uri)
        assert code == 2, err
        assert "Traceback" not in err
        assert hub.commits == []
        return str(document["error"])

    assert "hf repos create org/none --type dataset" in refused("hf://datasets/org/none")
    hub.may_write = False
    assert f"the token may not write to {REPO}; use one with write access" in refused()
    hub.may_write = True
    real = export_run.make_card

    def others_commit(plan: export_run.ExportPlan) -> str:
        hub.files["theirs"] = b""
        return real(plan)

    monkeypatch.setattr(export_run, "make_card", others_commit)
    assert f"{REPO} has changed meanwhile; start again" in refused()
    monkeypatch.setattr(export_run, "make_card", real)
    del hub.files["theirs"]
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "the hub does not accept the token; hf auth login" in refused()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "needs a token of the hub: hf auth login, or set HF_TOKEN" in refused()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in refused()


def test_an_upload_that_fails_leaves_nothing(run: Path, call: Call, hub: Hub) -> None:
    hub.takes_objects = False
    code, document, _ = call(export, run, "--to", URI)
    assert code == 2
    assert f"the upload failed, and {REPO} is as it was: " in document["error"]
    assert (hub.commits, hub.files.keys()) == ([], {".gitattributes"})


def test_a_hub_that_cannot_be_reached(run: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with client_of(f"http://127.0.0.1:{free_ports(1)[0]}", monkeypatch):
        code, document, _ = call(export, run, "--to", URI)
    assert code == 2
    assert "the hub cannot be reached" in document["error"]
    assert f"hf upload {REPO} FOLDER --type dataset" in document["error"]
