"""`jobs.export`: every good row once, in files that others open, whole or not at all."""

import gzip
import json
import shutil
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs import export
from pipeline.export import export as export_run
from pipeline.export.export_plan import ExportPlan, Options
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from tests.support.exported_runs import EXTRA, expected, make_run, rows
from tests.support.measured_memory import most_bytes
from tests.support.verbs import Call


def test_a_data_set_has_shards_of_equal_size_and_a_card(run: Path, tmp_path: Path, call: Call) -> None:
    code, document, err = call(export, run, "-o", tmp_path / "out", "--rows-per-file", 5)
    assert code == 0, err
    assert document == {
        "output": str(tmp_path / "out"), "run": str(run), "format": "dataset", "rows": 12, "files": 3,
        "columns": [*OUTPUT_SCHEMA.names, *EXTRA],
    }  # fmt: skip
    shards = sorted((tmp_path / "out/data").iterdir())
    assert [path.name for path in shards] == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    tables = [pq.read_table(path) for path in shards]
    assert [table.num_rows for table in tables] == [5, 5, 2]
    assert pa.concat_tables(tables).to_pylist() == expected()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "data"]
    _, head, body = (tmp_path / "out/README.md").read_text(encoding="utf-8").split("---\n", 2)
    card = yaml.safe_load(head)
    assert "license" not in card
    assert card["configs"] == [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*"}]}]
    assert card["size_categories"] == ["n<1K"]
    assert card["skipdecode"] == {
        "model": "my-model", "decode": {"method": "skipdecode", "speedup": 2.0},
        "sampling": {"max_new_tokens": 64, "temperature": 0.0, "seed": 0},
        "agreement": 0.874, "speedup": 1.88, "rows": 12, "date": "2026-09-21",
    }  # fmt: skip
    for text in (
        "`my-model`",
        "87.4 %",
        "1.88",
        "12 (good rows only)",
        "2026-09-21",
        "| city | string | column of the corpus |",
    ):
        assert text in body, text
    assert "/secret" not in head + body


@pytest.mark.slow
def test_datasets_opens_it(run: Path, tmp_path: Path, call: Call) -> None:
    datasets = pytest.importorskip("datasets")
    assert call(export, run, "-o", tmp_path / "out", "--rows-per-file", 5)[0] == 0
    opened = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert list(opened) == ["train"]
    assert opened["train"].to_list() == expected()


@pytest.mark.parametrize("compression", [None, "none", "gzip", "zstd"])
def test_json_lines(run: Path, tmp_path: Path, call: Call, compression: str | None) -> None:
    more = [] if compression is None else ["--compression", compression]
    code, document, err = call(export, run, "-o", tmp_path / "out", "--format", "jsonl", "--rows-per-file", 7, *more)
    assert (code, document["files"]) == (0, 2), err
    suffix = {"gzip": ".gz", "zstd": ".zst"}.get(str(compression), "")
    found = []
    for number in range(2):
        data = (tmp_path / "out" / f"part-0000{number}-of-00002.jsonl{suffix}").read_bytes()
        if compression == "zstd":
            data = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        text = (gzip.decompress(data) if compression == "gzip" else data).decode()
        assert text.endswith("\n")
        found += [json.loads(line) for line in text.splitlines()]
    wanted = expected()
    for row in wanted:
        row["when"] = row["when"] and row["when"].isoformat()
    assert found == wanted


def test_into_an_empty_folder_behind_a_link(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    code, document, err = call(export, run, "-o", tmp_path / "link", "--format", "jsonl")
    assert code == 0, err
    assert len(list((tmp_path / "there").glob("part-*"))) == document["files"]
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(("which", "count"), [("failed", 3), ("all", 15)])
def test_failed_rows_come_when_asked_for_and_columns_in_the_order_asked_for(
    run: Path, tmp_path: Path, call: Call, which: str, count: int
) -> None:
    arguments = ["--rows", which, "--columns", "error_code, id", "--format", "parquet", "--compression", "none"]
    assert call(export, run, "-o", tmp_path / "out", *arguments)[0] == 0
    table = pq.read_table(tmp_path / "out/part-00000-of-00001.parquet")
    assert table.column_names == ["error_code", "id"]
    assert table["error_code"].to_pylist() == [""] * (count - 3) + ["bad_line"] * 3
    assert table["id"].to_pylist()[-1] == "r14"


def test_a_run_that_is_not_finished(run: Path, tmp_path: Path, call: Call) -> None:
    folder = RunFolder.open(str(run))
    state = folder.read_state()
    assert state is not None
    state["books"] |= {"ok": None, "failed": None}
    state.pop("report")
    folder.write_state(state | {"state": "interrupted"})
    code, _, err = call(export, run, "-o", tmp_path / "out")
    assert (code, "the run is interrupted; finish it (generate --resume)" in err) == (2, True)
    assert call(export, run, "-o", tmp_path / "out", "--partial")[1]["rows"] == 12
    card = (tmp_path / "out/README.md").read_text()
    assert "from an unfinished run" in card
    assert "| speedup over full depth, measured | not measured |" in card
    folder.write_state(state | {"state": "committing"})
    code, _, err = call(export, run, "-o", tmp_path / "again", "--partial")
    assert (code, "a retry was interrupted; finish it first" in err) == (2, True)


def test_what_is_refused_before_anything_is_written(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("mine")
    (tmp_path / "link").symlink_to(run)
    for arguments, text in (
        ([tmp_path / "none", "-o", tmp_path / "out"], "not a run folder (it has no run.json)"),
        ([run, "-o", tmp_path / "full"], "exists already; name another folder"),
        ([run, "-o", tmp_path / "full/x"], "exists already"),
        ([run, "-o", run / "export"], "lies in the run folder"),
        ([run, "-o", tmp_path / "link/export"], "lies in the run folder"),
        ([run, "-o", tmp_path / "out", "--columns", "id,answer"], "--columns: no column 'answer'; there are: id"),
        ([run, "-o", tmp_path / "out", "--columns", "id,id"], "--columns: 'id,id': name each column once"),
        ([run, "-o", tmp_path / "out", "--rows-per-file", "0"], "--rows-per-file: 0 rows; give 1 or more"),
        ([run, "-o", "hf://models/org/name"], "a data set on the hub is hf://datasets/ORG/NAME"),
        ([run, "--to", "hf://datasets/name"], "a data set on the hub is hf://datasets/ORG/NAME"),
    ):  # fmt: skip
        code, document, err = call(export, *arguments)
        assert (code, document["exit_code"], text in err) == (2, 2, True), (arguments, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "link", "run"]
    make_run(tmp_path / "empty", num_files=0)
    code, _, err = call(export, tmp_path / "empty", "-o", tmp_path / "out")
    assert (code, "holds no good rows" in err) == (2, True)


def test_a_lost_file_is_noticed(run: Path, tmp_path: Path, call: Call) -> None:
    min((run / "data/status=ok").iterdir()).unlink()
    code, _, err = call(export, run, "-o", tmp_path / "out")
    assert (code, "the data files hold 9 such rows, but run.json says 12; `skipdecode verify`" in err) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_file_that_changes_during_the_export_is_noticed(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are counted in the footers first, and again when they are read."""
    first = min((run / "data/status=ok").iterdir())
    real = export_run.plan_export

    def plan(options: Options) -> ExportPlan:
        made = real(options)
        pq.write_table(pq.ParquetFile(first).read()[:2], first)
        return made

    monkeypatch.setattr(export_run, "plan_export", plan)
    code, _, err = call(export, run, "-o", tmp_path / "out")
    assert (code, "read 11 rows, expected 12; start again" in err) == (1, True), err
    assert not (tmp_path / "out").exists()


def test_a_file_that_does_not_belong_to_the_run_is_not_exported(run: Path, tmp_path: Path, call: Call) -> None:
    """One of an earlier session that came after the books were closed."""
    first = min((run / "data/status=ok").iterdir())
    shutil.copy(first, first.with_name("part-s0-x-0000.parquet"))
    code, document, err = call(export, run, "-o", tmp_path / "out")
    assert (code, document["rows"]) == (0, 12), err


def test_an_error_in_the_middle_leaves_nothing(
    run: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = max((run / "data/status=ok").iterdir())
    content = bytearray(last.read_bytes())
    content[40] ^= 255  # a page, which has a checksum
    last.write_bytes(bytes(content))
    (tmp_path / "out").mkdir()
    code, _, err = call(export, run, "-o", tmp_path / "out", "--rows-per-file", 3)
    assert code == 1, err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert list((tmp_path / "out").iterdir()) == []
    memory = fsspec.filesystem("memory")
    code, _, err = call(export, run, "-o", "fsspec+memory:///torn", "--rows-per-file", 3)
    assert code == 1, err
    assert memory.find("/torn") == []

    def interrupt(*_: object) -> str:
        assert not list((tmp_path / "out").iterdir()), "nothing is seen before the end"
        raise KeyboardInterrupt

    monkeypatch.setattr(export_run, "make_card", interrupt)
    make_run(tmp_path / "other")
    code, _, err = call(export, tmp_path / "other", "-o", tmp_path / "out")
    assert (code, "nothing was exported" in err) == (1, True)
    assert list((tmp_path / "out").iterdir()) == []


def test_elsewhere_than_on_a_disk(run: Path, tmp_path: Path, call: Call) -> None:
    code, document, err = call(export, run, "-o", "fsspec+memory:///exported/here", "--rows-per-file", 5)
    assert code == 0, err
    memory = fsspec.filesystem("memory")
    names = sorted(path.removeprefix("/exported/here/") for path in memory.find("/exported"))
    assert names == ["README.md", *(f"data/train-0000{i}-of-00003.parquet" for i in range(3))]
    found = [pq.read_table(memory.open(f"/exported/here/{name}")) for name in names[1:]]
    assert pa.concat_tables(found).to_pylist() == expected()
    assert document["files"] == 3
    memory.rm("/exported", recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["dataset", "jsonl"])
def test_memory_stays_flat(tmp_path: Path, call: Call, format: str) -> None:
    """400 MB of rows, in files of 40."""
    for number in range(10):
        long = pa.array([f"{number}" * 10_000] * 4000)
        if number == 0:
            state = make_run(tmp_path / "run", 0, {"long": pa.array(["x"])})
            folder = RunFolder.open(str(tmp_path / "run"))
            folder.fence("s1")
            sink = RunSink(folder.filesystem, folder.root, "s1", pq.read_schema(folder.data_files("failed")[0]), None)
        sink.write(rows(4000 * number, {"long": long}), f"{number:04d}")
    state["books"] |= {"ok": 40_000, "failed": 1}
    state["files"] = folder.read_files(folder.all_data_files())
    folder.write_state(state)
    with most_bytes(200 << 20):
        code, document, err = call(export, tmp_path / "run", "-o", tmp_path / "out", "--format", format)
    assert (code, document["rows"]) == (0, 40_000), err
