"""Columns with structs, lists, maps, times and dictionaries, from the input to the data files that `verify` reads."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import generate, verify
from pipeline.generate.row_accounting import output_schema
from pipeline.generate.verify_files import check_files
from pipeline.input.read import read_file
from pipeline.schema import OUTPUT_SCHEMA, STATUS, list_columns, type_words
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from tests.pipeline.input.test_arrow_files import COLUMNS, STORED, write_arrow
from tests.support.input_helpers import make_config, make_plan
from tests.support.verbs import Call

CHATS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.null())]))
DICTIONARIES = pa.MapArray.from_arrays(
    pa.array([0, 1, 1, 2]), pa.array(["k", "l"]), pa.array(["v", "w"]).dictionary_encode()
)
MADE = COLUMNS | {
    "prompt": pa.array(["a", "b", ""]),
    "maps": pa.array([[[("k", [1, 2])]], None, []], pa.list_(pa.map_(pa.string(), pa.list_(pa.int8())))),
    "dictionaries": DICTIONARIES,
    "structs": pa.array([{"x": {"y": [{"z": 1.5}]}}, {"x": None}, None]),
}  # fmt: skip


def finished(table: pa.Table) -> pa.Table:
    """The rows as if a worker had made an answer of one token."""
    count = table.num_rows
    made = {
        "generated_text": ["x"] * count, "generated_tokens": [[1]] * count, "num_input_tokens": [1] * count,
        "num_generated_tokens": [1] * count, "finish_reason": ["stop"] * count, "layers_run": [1] * count,
        "ffns_run": [1] * count,
    }  # fmt: skip
    extra = table.column_names[6:]
    for name, values in made.items():
        table = table.append_column(OUTPUT_SCHEMA.field(name), pa.array(values, OUTPUT_SCHEMA.field(name).type))
    return table.select([*OUTPUT_SCHEMA.names, *extra]).append_column(STATUS, pa.array(["ok"] * count))


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_nested_columns_reach_the_data_files_unchanged_and_verify_knows_them(tmp_path: Path, format: str) -> None:
    source = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(pa.table(MADE), source)
        again = pq.read_table(source)  # as a tool that reads and writes: names of map items change
        pq.write_table(again, source)
    else:
        write_arrow(source, MADE, batch_rows=2)
    config = make_config(source)
    plan = make_plan(config)
    folder = RunFolder.open(str(tmp_path / "run"))
    folder.fence("s1")
    schema = output_schema(plan, pa.schema([]))
    sink = RunSink(folder.filesystem, folder.root, "s1", schema, None, execution_id="x")
    for number, block in enumerate(read_file(plan, 0, config, 2)):
        sink.write(finished(block), f"{number}")
    paths = folder.data_files("ok")
    assert len(paths) == 2
    found, _ = check_files(folder.filesystem, list(enumerate(paths)), list_columns(schema))
    assert found.problems.counts == {}
    table = pa.concat_tables(pq.read_table(path, partitioning=None) for path in paths)
    for name, column in MADE.items():
        if name not in ("id", "prompt"):
            assert table[name].to_pylist() == column.to_pylist(), name
            if name != "dictionaries":
                assert table.schema.field(name).type == STORED.get(name, column.type), name


def test_words_for_types_are_those_of_any_version_of_a_file() -> None:
    text = pa.map_(pa.string(), pa.field("a'b", pa.map_(pa.string(), pa.field("zz", pa.list_(pa.int8())))))
    assert type_words(str(text)) == "map<string, map<string, list<element: int8>>>"
    assert type_words("struct<a: string>") == "struct<a: string>"


@pytest.mark.slow
@pytest.mark.ray
def test_conversations_without_tool_calls_go_through_a_run_and_what_follows_it(
    call: Call, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Their `tool_calls` are all null, and they have more turns than there are rows."""
    turns = pa.array([[{"role": "user", "content": "a", "tool_calls": None}] * 3] * 6, CHATS)
    table = pa.table({"id": [f"r{n}" for n in range(6)], "prompt": ["The Mill"] * 6, "turns": turns})
    source, place = tmp_path / "a.parquet", tmp_path / "run"
    pq.write_table(table, source)
    keys = [f"model.source={tiny_checkpoint}", "model.dtype=float32", "decode.method=full",
            "sampling.max_new_tokens=2", "actors.num_actors=1", "actors.batch_size=2"]  # fmt: skip
    code, report, err = call(generate, "-i", source, "-o", place, *keys)
    assert (code, report["books"]["ok"]) == (0, 6), err
    rows = [row for path in place.glob("data/status=ok/*") for row in pq.ParquetFile(path).read().to_pylist()]
    assert sorted(row["id"] for row in rows) == table["id"].to_pylist()
    assert [row["turns"] for row in rows] == turns.to_pylist()
    assert call(verify, place)[0] == 0
