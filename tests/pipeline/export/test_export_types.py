"""`jobs.export` of columns that a format has no type for: bytes, times, maps, nulls."""

import base64
import datetime
import decimal
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import export
from pipeline.export.shards import plain, to_rows
from tests.support.exported_runs import make_run
from tests.support.null_columns import NULLS
from tests.support.verbs import Call

ODD: dict[str, pa.Array] = {
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    "price": pa.array([decimal.Decimal("1.50"), None, None], pa.decimal128(10, 2)),
    "raw": pa.array([b"\xff", None, b""]),
    "span": pa.array([datetime.timedelta(seconds=90), None, None], pa.duration("ms")),
    "real": pa.array([math.nan, math.inf, 0.1]),
}


MAPS = pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.int64()))]))
LISTS = {"list": pa.list_, "large": pa.large_list, "fixed": lambda type_: pa.list_(type_, 1)}


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
