"""What may be copied out of a model folder: its own files, and nothing that a link in it leads to."""

import os
from pathlib import Path

import pytest

from pipeline.config.job import ConfigError
from pipeline.store.model_folder import own_files, tokenizer_files


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "id_rsa").write_text("PRIVATE KEY")
    return tmp_path / "id_rsa"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").write_text("{}")
    return tmp_path / "model"


@pytest.mark.parametrize("name", ["merges.txt", "vocab.json", "chat_template.jinja"])
@pytest.mark.parametrize("is_relative", [False, True])
def test_a_link_out_of_the_folder_is_refused(folder: Path, secret: Path, name: str, is_relative: bool) -> None:
    (folder / name).symlink_to(Path("..", secret.name) if is_relative else secret)
    with pytest.raises(ConfigError, match=rf"{name} is a link to {secret}, out of the folder"):
        tokenizer_files(folder)


def test_a_chain_of_links_is_followed_to_its_end(folder: Path, secret: Path) -> None:
    (folder / "hop").symlink_to(secret)
    (folder / "merges.txt").symlink_to("hop")
    with pytest.raises(ConfigError, match=r"merges\.txt is a link"):
        tokenizer_files(folder)


def test_links_within_the_folder_are_taken(folder: Path) -> None:
    (folder / "vocab.json").symlink_to("tokenizer.json")
    assert tokenizer_files(folder).keys() == {"tokenizer.json", "vocab.json"}


def test_the_hubs_cache_is_made_of_links(tmp_path: Path, secret: Path) -> None:
    repo = tmp_path / "models--a--b"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "blobs/1").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    assert tokenizer_files(snapshot) == {"tokenizer.json": b"{}"}
    (repo / "blobs/2").symlink_to(secret)
    (snapshot / "merges.txt").symlink_to("../../blobs/2")
    with pytest.raises(ConfigError, match=r"merges\.txt is a link"):
        tokenizer_files(snapshot)


def test_a_folder_that_is_a_link_itself(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert tokenizer_files(tmp_path / "link").keys() == {"tokenizer.json"}


def test_only_files_with_the_names_are_taken(folder: Path, secret: Path) -> None:
    (folder / "NOTICE.txt").symlink_to(secret)
    (folder / "vocab.json").mkdir()
    os.mkfifo(folder / "merges.txt")
    assert [path.name for path in own_files(folder, ("tokenizer*", "vocab.json", "merges.txt"))] == ["tokenizer.json"]
    with pytest.raises(ConfigError, match="NOTICE"):
        own_files(folder, ("NOTICE*",))
