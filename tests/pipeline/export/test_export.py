"""`jobs.export`: every good row once, in files that others open, whole or not at all. The run folder is made here."""

import base64
import datetime
import decimal
import gzip
import json
import math
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs import export
from pipeline.export import run as export_run
from pipeline.export.shards import plain, to_rows
from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState
from pipeline.store.write import RunSink
from tests.pipeline.input.test_arrow_files import NULLS
from tests.pipeline.input.test_bombs import most_bytes
from tests.support.verbs import Call

EXTRA: dict[str, pa.Array] = {
    "city": pa.array(["Leeds", None, "Yörk|"]),
    "when": pa.array([datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC), None, None], pa.timestamp("us", "UTC")),
    "nested": pa.array([{"a": [{"b": 1.5}]}, None, {"a": []}]),
}
ODD: dict[str, pa.Array] = {
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "price": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(10, 2)),
    "raw": pa.array([b"\xff", None, b""]),
    "span": pa.array([datetime.timedelta(seconds=90), None, None], pa.duration("ms")),
    "real": pa.array([math.nan, math.inf, 0.1]),
}


MAPS = pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int64()))]))
LISTS = {"list": pa.list_, "large": pa.large_list, "fixed": lambda type_: pa.list_(type_, 1)}


def rows(first: int, columns: dict[str, pa.Array], is_good: bool = True) -> pa.Table:
    count = len(next(iter(columns.values())))
    made: dict[str, list[Any]] = {
        "id": [f"r{first + i}" for i in range(count)],
        "prompt": [f"prompt\n{first + i} é" for i in range(count)],
        "generated_text": [f"answer {first + i}" for i in range(count)],
        "generated_tokens": [[1, 2] if is_good else []] * count,
        "num_input_tokens": [3] * count,
        "num_generated_tokens": [2 if is_good else 0] * count,
        "finish_reason": ["stop" if is_good else "error"] * count,
        "layers_run": [4] * count,
        "ffns_run": [4] * count,
        "error_code": ["" if is_good else "bad_line"] * count,
        "error_message": ["" if is_good else "torn"] * count,
    }
    arrays = [pa.array(made[field.name], field.type) for field in OUTPUT_SCHEMA]
    names = [*OUTPUT_SCHEMA.names, *columns, STATUS]
    return pa.table([*arrays, *columns.values(), ["ok" if is_good else "failed"] * count], names)


def make_run(root: Path, num_files: int = 4, columns: dict[str, pa.Array] = EXTRA) -> RunState:
    """3 good rows in each file, and one file of 3 failed ones; the state of a finished run."""
    folder = RunFolder.open(str(root))
    folder.fence("s1")
    parts = [rows(3 * number, columns, number < num_files) for number in range(num_files + 1)]
    schema = parts[0].drop_columns([STATUS]).schema
    sink = RunSink(folder.filesystem, folder.root, "s1", schema, None, stream="x")
    for number, part in enumerate(parts):
        sink.write(part, f"{number:04d}")
    folder.leave("s1")
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "stop": ()}
    report = {"agreement": {"exact_rows": 0.5, "token_match": 0.874, "rows": 8}, "speedup": {"measured": 1.88}}
    state: Any = {
        "state": "finished", "fingerprint": {}, "config": {"sampling": sampling}, "report": report,
        "model": {"source": "/secret/place/my-model", "layers": 24},
        "decode": {"method": "skipdecode", "speedup": 2.0, "layers": None},
        "books": {"input": 3 * num_files + 3, "ok": 3 * num_files, "failed": 3, "closed": True},
        "sessions": [{"id": "s1", "started_at": 1.79e9, "ended_at": 1.79e9 + 60}],
    }  # fmt: skip
    folder.write_state(state)
    found: RunState = state
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


def expected(columns: dict[str, pa.Array] = EXTRA, num_files: int = 4) -> list[dict[str, Any]]:
    parts = [rows(3 * number, columns).drop_columns([STATUS]) for number in range(num_files)]
    found: list[dict[str, Any]] = pa.concat_tables(parts).to_pylist()
    return found


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
        "12 (the good ones)",
        "2026-09-21",
        "| city | string | of the corpus |",
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


def test_json_has_no_bytes_no_times_and_no_nan(tmp_path: Path, call: Call) -> None:
    make_run(tmp_path / "run", columns=ODD)
    assert (
        call(export, tmp_path / "run", "-o", tmp_path / "out", "--format", "jsonl", "--columns", ",".join(ODD))[0] == 0
    )
    lines = (tmp_path / "out/part-00000-of-00001.jsonl").read_text().splitlines()
    nothing = dict.fromkeys(ODD)
    assert [json.loads(line) for line in lines[:3]] == [
        nothing | {"map": [["k", 1]], "price": "1.50", "raw": base64.b64encode(b"\xff").decode(), "span": 90.0},
        nothing,
        nothing | {"map": [], "raw": "", "real": 0.1},
    ]


def test_a_data_set_has_lists_of_keys_and_values_for_maps(tmp_path: Path, call: Call) -> None:
    make_run(tmp_path / "run", columns={"map": ODD["map"], "maps": pa.array([[{"m": [("k", 1)]}], None, []], MAPS)})
    for format in ("dataset", "parquet"):
        assert call(export, tmp_path / "run", "-o", tmp_path / format, "--format", format)[0] == 0
    pairs = pq.read_table(tmp_path / "dataset/data")
    assert pairs["map"].to_pylist()[:3] == [[{"key": "k", "value": 1}], None, []]
    assert pairs["maps"].to_pylist()[:3] == [[{"m": [{"key": "k", "value": 1}]}], None, []]
    assert pq.read_table(tmp_path / "parquet")["map"].to_pylist()[:3] == [[("k", 1)], None, []]


def test_maps_in_lists_of_any_kind_become_lists_too(tmp_path: Path, call: Call) -> None:
    parts = {name: make(MAPS.value_type.field(0).type) for name, make in LISTS.items()}
    make_run(
        tmp_path / "run", columns={name: pa.array([[[("k", 1)]], None, [[]]], type_) for name, type_ in parts.items()}
    )
    assert call(export, tmp_path / "run", "-o", tmp_path / "out")[0] == 0
    table = pq.read_table(tmp_path / "out/data")
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())]))
    for name, make in LISTS.items():
        assert table[name].to_pylist()[:3] == [[[{"key": "k", "value": 1}]], None, [[]]], name
        assert table[name].type == make(pairs), name


@pytest.mark.parametrize("format", ["dataset", "jsonl", "parquet"])
def test_columns_of_nulls_are_exported(tmp_path: Path, call: Call, format: str) -> None:
    """More null values than rows, inside lists, structs and maps."""
    make_run(tmp_path / "run", columns=NULLS)
    code, document, err = call(export, tmp_path / "run", "-o", tmp_path / "out", "--format", format)
    assert (code, document["rows"]) == (0, 12), err
    names, whole = list(NULLS), pa.table(NULLS).to_pylist()
    if format == "jsonl":
        lines = (tmp_path / "out/part-00000-of-00001.jsonl").read_text().splitlines()
        assert [[json.loads(line)[name] for name in names] for line in lines[:3]] == [
            [plain(row[name]) for name in names] for row in whole
        ]
        return
    pairs = [{"key": "k", "value": None}, {"key": "l", "value": None}]
    wanted = [row | ({"map of null": pairs} if format == "dataset" else {}) for row in whole]
    folder = tmp_path / "out" / ("data" if format == "dataset" else "")
    assert pq.read_table(folder).select(names).to_pylist() == wanted * 4


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
    assert (code, "the run is interrupted; finish it (jobs.generate --resume)" in err) == (2, True)
    assert call(export, run, "-o", tmp_path / "out", "--partial")[1]["rows"] == 12
    card = (tmp_path / "out/README.md").read_text()
    assert "of a run that is not finished" in card
    assert "| speedup over full depth, measured | not measured |" in card
    folder.write_state(state | {"state": "committing"})
    code, _, err = call(export, run, "-o", tmp_path / "again", "--partial")
    assert (code, "a retry is exchanging rows" in err) == (2, True)


def test_what_is_refused_before_anything_is_written(run: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("mine")
    (tmp_path / "link").symlink_to(run)
    for arguments, text in (
        ([tmp_path / "none", "-o", tmp_path / "out"], "no run.json, so not a run folder"),
        ([run, "-o", tmp_path / "full"], "exists already; name another folder"),
        ([run, "-o", tmp_path / "full/x"], "exists already"),
        ([run, "-o", run / "export"], "lies in the run folder"),
        ([run, "-o", tmp_path / "link/export"], "lies in the run folder"),
        ([run, "-o", tmp_path / "out", "--columns", "id,answer"], "--columns: no column 'answer'; there are: id"),
        ([run, "-o", tmp_path / "out", "--columns", "id,id"], "--columns: 'id,id': name each column once"),
        ([run, "-o", tmp_path / "out", "--rows-per-file", "0"], "--rows-per-file: 0 is no number of rows"),
        ([run, "-o", "hf://datasets/org/name"], "then upload it"),
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
    assert (code, "the data files hold 9 such rows, run.json says 12; jobs.verify" in err) == (1, True)
    assert not (tmp_path / "out").exists()


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
    folder.write_state(state)
    with most_bytes(200 << 20):
        code, document, err = call(export, tmp_path / "run", "-o", tmp_path / "out", "--format", format)
    assert (code, document["rows"]) == (0, 40_000), err


def test_times_that_python_cannot_say_come_as_text() -> None:
    """In lists and structs, too; their neighbours come as ever."""
    far = pa.array([2**50, 0, None], pa.int64())
    when, day = far.cast(pa.timestamp("s")), pa.array([2**30, 0, None], pa.int32()).cast(pa.date32())
    inside = pa.StructArray.from_arrays([when, pa.array(["a", "b", "c"])], ["at", "name"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), when)
    fixed = pa.FixedSizeListArray.from_arrays(when, 1)
    deep = pa.LargeListArray.from_arrays(pa.array([0, 1, 2, 3]), fixed)
    columns = {"when": when, "day": day, "inside": inside, "lists": lists, "fixed": fixed, "deep": deep}
    batch = pa.RecordBatch.from_pydict(columns)
    text, epoch = f"<value out of range: {2**50}>", datetime.datetime(1970, 1, 1)
    days = (f"<value out of range: {2**30}>", epoch.date(), None)
    assert to_rows(batch) == [
        {"when": at, "day": day, "inside": {"at": at, "name": name}, "lists": [at], "fixed": [at], "deep": [[at]]}
        for at, day, name in zip((text, epoch, None), days, "abc", strict=True)
    ]
