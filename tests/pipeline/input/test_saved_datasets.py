"""Folders saved by `datasets`, and data sets on a hub or another file system of fsspec's."""

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pytest
from huggingface_hub import constants

from pipeline.input.read import read_file
from tests.support.hub import client_of, serve_hub
from tests.support.input_helpers import column, make_config, make_plan, read_rows, refuse, write, write_jsonl
from tests.support.saved_datasets import save_splits, save_to_disk, write_stream

TABLE = pa.table({"prompt": [f"p{i}" for i in range(2500)], "label": [i % 2 for i in range(2500)]})
PROMPTS = TABLE["prompt"].to_pylist()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_saved_data_set_is_read_without_what_was_computed_since(tmp_path: Path, num_shards: int) -> None:
    folder = save_to_disk(tmp_path / "saved", TABLE, num_shards)
    write_stream(folder / "cache-bcb1ed67b6f96dd9.arrow", TABLE.append_column("q", TABLE["prompt"]))
    (folder / "README.md").write_text("A data set.")
    for path in (folder, folder / "*.arrow", folder / "*", tmp_path, folder / "data-*", f"fsspec+file://{folder}"):
        rows = read_rows(path)
        assert column(rows, "prompt") == PROMPTS, path
        assert set(rows[0]) & {"q", "label"} == {"label"}
    shard = f"data-00000-of-0000{num_shards}.arrow"
    assert column(read_rows(folder), "id")[:2] == [f"{shard}:0", f"{shard}:1"]
    assert "q" in read_rows(folder / "cache-bcb1ed67b6f96dd9.arrow")[0], "named, it is what was asked for"


def test_splits_have_to_be_named(tmp_path: Path) -> None:
    folder = save_splits(tmp_path / "saved", train=TABLE, test=TABLE[:10])
    refuse(folder, rf"input\.path: {folder} holds the splits train, test; name the one to read: {folder}/train")
    refuse(tmp_path, "holds the splits train, test")
    assert len(read_rows(folder / "test")) == 10
    rows = read_rows((folder / "test", folder / "train"))
    assert column(rows, "id")[9:11] == ["test/data-00000-of-00001.arrow:9", "train/data-00000-of-00001.arrow:0"]
    one = save_splits(tmp_path / "one", train=TABLE[:5])
    assert column(read_rows(one), "prompt") == PROMPTS[:5]


def test_a_saved_data_set_that_is_not_whole(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved", TABLE, 3)
    (folder / "data-00001-of-00003.arrow").unlink()
    refuse(folder, rf"{folder}: state.json names 'data-00001-of-00003.arrow', which is not there; copy all its files")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    refuse(folder, "picks its rows by an index; .* flatten_indices")


def test_names_that_only_look_like_a_saved_data_set(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "state.json", [{"prompt": "x"}])
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "y"}])
    assert column(read_rows(tmp_path), "prompt") == ["y", "x"]
    for content in ('{"_data_files": 1}', "[]", "{"):
        write(tmp_path / "b/state.json", content)
        write_stream(tmp_path / "b/a.arrow", TABLE)
        refuse(tmp_path / "b", "is arrow and .* is jsonl")


@pytest.mark.slow
def test_what_datasets_itself_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = TABLE[:50].append_column("nested", pa.array([{"a": [{"b": i}], "c": None} for i in range(50)]))
    made = datasets.Dataset(table).cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    made.save_to_disk(tmp_path / "saved", num_shards=2)
    mapped = datasets.load_from_disk(tmp_path / "saved").map(lambda row: {"q": row["prompt"] + "!"})
    assert mapped.cache_files
    rows = read_rows(tmp_path / "saved")
    assert [{name: row[name] for name in table.column_names} for row in rows] == table.to_pylist()
    datasets.DatasetDict({"train": made, "test": made.select([3, 1])}).save_to_disk(tmp_path / "splits")
    refuse(tmp_path / "splits", "holds the splits train, test")
    assert column(read_rows(tmp_path / "splits/test"), "prompt") == ["p3", "p1"]
    ours = save_splits(tmp_path / "ours", train=TABLE, test=TABLE[:2])
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")) for root in (ours, tmp_path / "splits")]
    assert names[0] == names[1]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the data set hf://datasets/org/corpus."""
    root = tmp_path / "hub"
    root.mkdir()
    with serve_hub(root) as endpoint, client_of(endpoint, monkeypatch):
        yield root


def forget() -> None:
    """What a process that starts anew does not know."""
    huggingface_hub.HfFileSystem.clear_instance_cache()


def test_a_data_set_on_the_hub(hub: Path) -> None:
    for split, rows in (("train", TABLE[:1500]), ("test", TABLE[1500:])):
        for shard in range(2):
            part = rows.slice(shard * 700, 700)
            path = hub / "data" / f"{split}-0000{shard}-of-00002.parquet"
            path.parent.mkdir(exist_ok=True)
            pa.parquet.write_table(part, path)
    (hub / "README.md").write_text("---\nlicense: mit\n---\n")
    (hub / ".gitattributes").write_text("*.parquet lfs\n")
    (hub / "dataset_infos.json").write_text("{}")
    rows = read_rows("hf://datasets/org/corpus/data/train-*.parquet")
    assert column(rows, "prompt") == PROMPTS[:1400]
    assert rows[700]["id"] == "train-00001-of-00002.parquet:0"
    assert len(read_rows("hf://datasets/org/corpus")) == 1400 + 1000
    assert len(read_rows("hf://datasets/org/corpus@main/data/test-00000-of-00002.parquet")) == 700
    refuse("hf://datasets/org/corpus/data/dev-*", "no file matches")
    refuse("hf://datasets/org/other/data", r"input\.path: hf://datasets/org/other/data: ")
    refuse("hf://datasets", r"input\.path: hf://datasets: cannot be read")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.csv.zst", "a.txt.gz", "a.arrow"])
def test_every_format_from_the_hub(hub: Path, name: str) -> None:
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS] if ".jsonl" in name else PROMPTS
    text = "\n".join(["prompt"] * (".csv" in name) + lines).encode()
    if name.endswith(".arrow"):
        write_stream(hub / name, TABLE)
    else:
        packed = {"gz": gzip.compress, "zst": lambda data: pa.compress(data, "zstd", asbytes=True)}
        write(hub / name, packed.get(name.rpartition(".")[2], bytes)(text))
    assert column(read_rows(f"hf://datasets/org/corpus/{name}"), "prompt") == PROMPTS


@pytest.mark.slow
def test_a_branch_that_moves_is_read_as_it_was_and_is_another_input(hub: Path) -> None:
    write_jsonl(hub / "a.jsonl", [{"prompt": "one"}])
    for uri in ("hf://datasets/org/corpus/a.jsonl", "hf://datasets/org/corpus@main/*"):
        config = make_config(uri)
        plan = make_plan(config)
        assert all(plan.etags)
        write_jsonl(hub / "a.jsonl", [{"prompt": "two"}])  # as long, and there is no time of change
        forget()
        (block,) = read_file(plan, 0, config)
        assert block["prompt"].to_pylist() == ["one"]
        later = make_plan(config)
        assert later.etags != plan.etags
        assert [file.name for file in later.listing.files] == [file.name for file in plan.listing.files] == ["a.jsonl"]
        assert column(read_rows(uri), "prompt") == ["two"]
        write_jsonl(hub / "a.jsonl", [{"prompt": "one"}])
        forget()
        assert make_plan(config).etags == plan.etags


def test_names_of_several_data_sets_are_without_their_commits(hub: Path) -> None:
    for name in ("x/a.jsonl", "y/a.jsonl"):
        write_jsonl(hub / name, [{"prompt": name}])
    uris = tuple(f"hf://datasets/org/corpus{place}" for place in ("@main/x", "/y/a.jsonl"))
    assert column(read_rows(uris), "id") == ["x/a.jsonl:0", "y/a.jsonl:0"]


def test_a_hub_that_is_not_there(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    forget()
    refuse("hf://datasets/org/corpus", r"input\.path: hf://datasets/org/corpus: cannot be read: ")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    forget()
    refuse("hf://datasets/org/corpus", r"input\.path: hf://datasets/org/corpus: cannot be read: .*offline")


def test_other_file_systems_of_fsspec(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in/a.jsonl", [{"prompt": "x"}])
    write_jsonl(tmp_path / "in/b c.jsonl", [{"prompt": "y"}])
    uri = f"fsspec+file://{tmp_path}/in"
    assert column(read_rows(uri), "id") == ["a.jsonl:0", "b c.jsonl:0"]
    assert column(read_rows(f"{uri}/*.jsonl"), "prompt") == ["x", "y"]
    assert column(read_rows(f"{uri}/b c.jsonl"), "prompt") == ["y"]
    refuse(f"{uri}/gone", "no such file")
    refuse("fsspec+nosuch://x", r"input\.path: fsspec\+nosuch://x: cannot be read: .*nosuch")
    refuse((uri, tmp_path / "in"), "one run reads from one filesystem")
    shutil.rmtree(tmp_path / "in")
