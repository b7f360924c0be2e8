"""Paths, patterns and formats: which files are read, under which names, and what is refused."""

import bz2
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pytest

from pipeline.config.job import ConfigError, InputConfig
from pipeline.input.files import list_input, resolve_path
from pipeline.input.formats import parse_suffix
from tests.support.input_helpers import (
    column,
    make_config,
    make_plan,
    read_rows,
    refuse,
    write,
    write_jsonl,
    write_parquet,
)


def corpus(root: Path) -> Path:
    for name in ("b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt"):
        write(root / name, f"{name}\n")
    for name in ("_tmp.txt", ".hidden.txt", "_work/x.txt", ".git/y.txt", "README.md", "LICENSE", "notes.md"):
        write(root / name, "not a prompt\n")
    return root


def test_folder_is_recursive_sorted_and_skips_hidden_names_and_paperwork(tmp_path: Path) -> None:
    rows = read_rows(corpus(tmp_path / "in"))
    assert column(rows, "prompt") == ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert column(rows, "id") == ["a.txt:0", "b.txt:0", "sub/c.txt:0", "sub/deep/d.txt:0"]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("?.txt", ["a.txt", "b.txt"]),
        ("*", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("**/*.txt", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("**/d*", ["sub/deep/d.txt"]),
        ("s*/c.txt", ["sub/c.txt"]),
        ("**", ["a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt"]),
        ("*b", ["sub/c.txt", "sub/deep/d.txt"]),
        ("_*.txt", ["_tmp.txt"]),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_patterns(tmp_path: Path, scheme: str, pattern: str, names: list[str]) -> None:
    listing = list_input(make_config(f"{scheme}{corpus(tmp_path / 'in')}/{pattern}"))
    assert [file.name for file in listing.files] == names


def test_patterns_work_on_a_filesystem_that_is_not_local(tmp_path: Path, monkeypatch: Any) -> None:
    inner = pafs.SubTreeFileSystem(str(corpus(tmp_path / "bucket")), pafs.LocalFileSystem())

    class FakeFileSystem:
        @staticmethod
        def from_uri(uri: str) -> tuple[Any, str]:
            assert uri.startswith("s3://")
            return inner, uri.removeprefix("s3://").split("?")[0]

    monkeypatch.setattr(pafs, "FileSystem", FakeFileSystem)
    listing = list_input(make_config("s3://sub/**/?.txt?region=eu-west-1"))
    assert [(file.path, file.name) for file in listing.files] == [
        ("sub/c.txt", "c.txt"),
        ("sub/deep/d.txt", "deep/d.txt"),
    ]


def test_a_name_with_wildcard_characters_is_taken_as_it_is_if_it_exists(tmp_path: Path) -> None:
    write(tmp_path / "a*.txt", "star\n")
    write(tmp_path / "ab.txt", "other\n")
    assert column(read_rows(tmp_path / "a*.txt"), "prompt") == ["star"]


def test_uri_options_are_no_wildcard() -> None:
    filesystem, path, pattern = resolve_path("s3://bucket/p?/x*.jsonl?region=eu-west-1&scheme=http")
    assert (type(filesystem).__name__, path, pattern) == ("S3FileSystem", "bucket", ["p?", "x*.jsonl"])


def test_uri_escapes(tmp_path: Path) -> None:
    write(tmp_path / "a b.txt", "x\n")
    assert column(read_rows(f"file://{tmp_path}/a%20b.txt"), "id") == ["a b.txt:0"]
    assert column(read_rows(f"file://{tmp_path}/a%20*.txt"), "id") == ["a b.txt:0"]


def test_same_file_reached_twice_is_read_once_and_order_is_as_given(tmp_path: Path) -> None:
    root = corpus(tmp_path / "in")
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    paths = (root / "b.txt", root, f"file://{root}/a.txt", tmp_path / "link", root / "sub" / ".." / "b.txt")
    rows = read_rows(paths)
    assert column(rows, "prompt") == ["b.txt", "a.txt", "sub/c.txt", "sub/deep/d.txt"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    (tmp_path / "in" / "loop").symlink_to(tmp_path / "in", target_is_directory=True)
    assert len(read_rows(tmp_path / "in")) == 1


def test_made_ids_stay_when_the_corpus_moves_or_grows(tmp_path: Path) -> None:
    for place in ("here", "there/mounted"):
        write(tmp_path / place / "x" / "same.txt", "1\n2\n")
        write(tmp_path / place / "y" / "same.txt", "3\n")
    before = column(read_rows(tmp_path / "here"), "id")
    assert before == ["x/same.txt:0", "x/same.txt:1", "y/same.txt:0"]
    assert column(read_rows(tmp_path / "there" / "mounted"), "id") == before
    write(tmp_path / "here" / "new.txt", "4\n")
    assert set(before) < set(column(read_rows(tmp_path / "here"), "id"))
    (tmp_path / "here" / "y" / "same.txt").unlink()
    (tmp_path / "here" / "new.txt").unlink()
    # One subfolder left: the name must not lose its "x/".
    assert column(read_rows(tmp_path / "here"), "id") == before[:2]


def test_files_of_one_name_from_two_paths_get_different_ids(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a" / "f.txt", "1\n"), write(tmp_path / "b" / "f.txt", "2\n")
    assert column(read_rows((a, b)), "id") == ["a/f.txt:0", "b/f.txt:0"]


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"input\.path: prompts/: no such file or folder; -i names where the prompts are$"
    ):
        make_plan(InputConfig())
    refuse("prompts/", r"input\.path: prompts/: no such file or folder$")
    refuse(tmp_path / "gone", r"input\.path: .*gone: no such file or folder$")
    refuse(tmp_path / "gone" / "*.txt", r"input\.path: .*gone/\*\.txt: no such file")
    (tmp_path / "empty").mkdir()
    refuse(tmp_path / "empty", r"input\.path: .*empty: no file matches")
    refuse(tmp_path / "empty" / "*.txt", r"input\.path: .*\*\.txt: no file matches")
    write(tmp_path / "a.txt", "x\n")
    refuse((tmp_path / "a.txt", tmp_path / "gone"), r"input\.path: .*gone")
    refuse("nosuch://bucket/x.jsonl", r"input\.path: nosuch://bucket/x\.jsonl")


def test_a_link_to_nowhere_is_not_left_out_silently(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    (tmp_path / "in" / "b.txt").symlink_to(tmp_path / "unmounted.txt")
    refuse(tmp_path / "in", r"b\.txt: a link to nowhere")


def test_special_files_and_unreadable_names(tmp_path: Path) -> None:
    write(tmp_path / "in" / "a.txt", "x\n")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    refuse(tmp_path / "in", r"pipe\.txt: not a regular file")
    os.unlink(tmp_path / "in" / "pipe.txt")
    with open(os.fsencode(tmp_path / "in") + b"/b\xff.txt", "wb"):
        pass
    refuse(tmp_path / "in", r"input\.path: .*in: cannot be read")


def test_two_filesystems(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x\n")
    refuse(
        (tmp_path / "a.txt", "mock:///b.txt"),
        r"input\.path: mock:///b\.txt: one run reads from one filesystem",
    )


def test_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", b"\xef\xbb\xbf")
    refuse(tmp_path, r"input\.path: no rows in ")
    write(tmp_path / "c.txt", "x\n")
    assert column(read_rows(tmp_path), "id") == ["c.txt:0"]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("a.jsonl", "jsonl"),
        ("a.NDJSON", "jsonl"),
        ("a.json", "jsonl"),
        ("a.csv", "csv"),
        ("a.tsv.gz", "csv"),
        ("a.txt", "text"),
        ("a.text.zst", "text"),
        ("a.parquet", "parquet"),
        ("a.jsonl.bz2", "jsonl"),
    ],
)
def test_format_from_the_name(name: str, format: str) -> None:
    assert parse_suffix(f"folder.csv/{name}")[0] == format


def test_formats_do_not_mix(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    write(tmp_path / "b.csv", "prompt\nx\n")
    refuse(tmp_path, r"a\.jsonl is jsonl and .*b\.csv is csv")
    assert len(read_rows(tmp_path / "*.csv")) == 1


@pytest.mark.parametrize("name", ["data.xlsx", "prompts", "a.parquet.gz", "a.gz", "b.jsonl.lz4"])
def test_unknown_suffix(tmp_path: Path, name: str) -> None:
    write(tmp_path / "a.jsonl", '{"prompt": "x"}\n')
    write(tmp_path / name, '{"prompt": "y"}\n')
    refuse(tmp_path, rf"input\.format: cannot tell the format of .*{name}.*set input\.format")
    if not name.endswith("gz"):
        assert column(read_rows(tmp_path / name, format="jsonl"), "prompt") == ["y"]


def test_explicit_format_reads_any_name_but_never_parquet_as_text(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", '{"a": 1}\n')
    assert column(read_rows(path, format="text"), "prompt") == ['{"a": 1}']
    assert column(read_rows(write(tmp_path / "d" / "x.md", "md\n").parent, format="text"), "prompt") == ["md"]
    write_parquet(tmp_path / "p.parquet", {"prompt": ["x"]})
    refuse(tmp_path / "p.parquet", r"input\.format: text, but .*p\.parquet is parquet", format="text")
    refuse(path, r"input\.format: parquet, but .*log\.jsonl is jsonl", format="parquet")


def compress_zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, "zstd", asbytes=True)
    return packed


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zst": compress_zstd,
}


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_compressed(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"id": f"i{n}", "prompt": f"ü{n}"}) + "\n" for n in range(5000)]
    halves = ["".join(lines[:2500]), "".join(lines[2500:])]
    data = b"".join(COMPRESS[suffix](half.encode()) for half in halves)  # two members, as pigz and cat make them
    write(tmp_path / f"a.jsonl.{suffix}", data)
    rows = read_rows(tmp_path)
    assert [(r["id"], r["prompt"]) for r in rows] == [(f"i{n}", f"ü{n}") for n in range(5000)]
    write(tmp_path / f"a.jsonl.{suffix}", data[:-5])
    refuse(tmp_path, rf"input\.path: .*a\.jsonl\.{suffix}: cannot be read: .*[Tt]runcated")
    for name, text in (("b.csv", "prompt\nhi\n"), ("c.txt", "hi\n"), ("d.tsv", "prompt\tx\nhi\t\n")):
        write(tmp_path / name / f"{name}.{suffix}", COMPRESS[suffix](text.encode()))
        assert column(read_rows(tmp_path / name), "prompt") == ["hi"]
