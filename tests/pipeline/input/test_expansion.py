"""A document becomes a row for each template and sample: ids, order, blocks, duplicates, what is done or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.job import ConfigError, SamplingConfig
from pipeline.input import ids
from pipeline.input.expansion import MAX_DOCUMENT_BYTES, Documents, Expansion, expand
from pipeline.input.files import list_input
from pipeline.input.input_plan import ROW_SCHEMA, InputPlan
from pipeline.input.line_reader import BLOCK_BYTES
from pipeline.input.read import read_file, read_rest
from pipeline.input.scan import scan_file
from pipeline.schema import RESERVED_COLUMNS, SOURCE_SCHEMA
from tests.support.examples import examples
from tests.support.input_helpers import make_config, make_plan, read_rows, refuse, write, write_jsonl, write_parquet
from tests.support.saved_datasets import write_stream

SAMPLED = SamplingConfig(n=3, temperature=1.0)


def expansion(names: tuple[str, ...] = ("",), samples: int = 1) -> Expansion:
    return Expansion(names, samples)


names = st.lists(st.from_regex(r"[a-z0-9_]{1,4}", fullmatch=True), min_size=1, max_size=4, unique=True)


@given(names | st.just([""]), st.integers(1, 5), st.lists(st.text(st.characters(codec="utf-8"), max_size=6)))
def test_ids_are_those_of_the_contract_and_never_meet_where_documents_do_not(
    names: list[str], samples: int, given: list[str]
) -> None:
    made = [f"a.txt:{number}" for number in range(3)]
    own = expansion(tuple(names), samples)
    for document in [*given, *made]:
        ids = own.ids(document)
        wanted = [
            "-".join([document, *([name] if name else []), *([str(sample)] if samples > 1 else [])])
            for name in names
            for sample in range(samples)
        ]
        assert ids == wanted
        assert len(set(ids)) == own.count() == len(ids)
    rows = [id for document in made for id in own.ids(document)]
    assert len(set(rows)) == len(rows)


@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=140),
    names=names | st.just([""]),
    rows_per_block=st.integers(1, 50),
    data=st.data(),
)
@settings(max_examples=examples(40))
def test_blocks_hold_every_row_once_in_order(
    counts: list[int], names: list[str], rows_per_block: int, data: st.DataObject
) -> None:
    size = st.sampled_from([10, BLOCK_BYTES // 3, BLOCK_BYTES + 1])
    num_bytes = data.draw(st.lists(size, min_size=len(counts), max_size=len(counts)))
    ids = [f"d{number}" for number in range(len(counts))]
    values: dict[str, list[Any]] = {name: [None] * len(ids) for name in ROW_SCHEMA.names}
    values |= {"id": ids, "prompt": ids, "error_code": [""] * len(ids), "error_message": [""] * len(ids)}
    table = pa.table({**values, "n": list(range(len(ids)))}, pa.schema([*ROW_SCHEMA, ("n", pa.int64())]))
    schema = pa.schema([*ROW_SCHEMA, *SOURCE_SCHEMA, ("n", pa.int64())])
    documents = Documents(table, num_bytes, ids, [{}] * len(ids), list(counts))
    blocks = list(expand(documents, expansion(tuple(names)), schema, None, None, rows_per_block))
    assert all(len(block) <= rows_per_block and block.schema == schema for block in blocks)
    by_document = dict(zip(ids, num_bytes, strict=True))
    sizes = [sum(by_document[id] for id in block["source_id"].to_pylist()) for block in blocks]
    assert all(total <= BLOCK_BYTES + 1000 or len(block) == 1 for total, block in zip(sizes, blocks, strict=True))
    rows = pa.concat_tables(blocks).to_pylist()
    wanted = [
        (id, number, name or None, sample)
        for number, (id, count) in enumerate(zip(ids, counts, strict=True))
        for name in names
        for sample in range(count)
    ]
    assert [(row["source_id"], row["n"], row["template"], row["sample"]) for row in rows] == wanted
    assert [row["prompt"] for row in rows] == [id for id, *_ in wanted]


def test_rows_of_a_document_that_would_take_too_much_fail_and_hold_nothing() -> None:
    text = "x" * 3000
    values: dict[str, list[Any]] = {name: [None] for name in ROW_SCHEMA.names}
    values |= {"id": ["big"], "prompt": [text], "error_code": [""], "error_message": [""]}
    table = pa.table({**values, "more": [text]}, pa.schema([*ROW_SCHEMA, ("more", pa.string())]))
    schema = pa.schema([*ROW_SCHEMA, *SOURCE_SCHEMA, ("more", pa.string())])
    documents = Documents(table, [MAX_DOCUMENT_BYTES // 1000], ["a row 1"], [{}], ())
    (block,) = expand(documents, expansion(samples=1001), schema, None, None, 2000)
    row = block.to_pylist()[1000]
    assert (row["id"], row["source_id"], row["prompt"], row["more"]) == ("big-1000", "big", None, None)
    assert row["error_code"] == "bad_line"
    assert "1001 rows" in row["error_message"]
    assert len(list(expand(documents, expansion(samples=999), schema, None, None, 10))) == 100


def sampled_plan(path: Path, sampling: SamplingConfig = SAMPLED, **keys: Any) -> tuple[InputPlan, Any]:
    config = make_config(path, **keys)
    return make_plan(config, Expansion.of(config, sampling)), config


def all_rows(plan: InputPlan, config: Any) -> list[dict[str, Any]]:
    blocks = [block for index in range(len(plan.listing.files)) for block in read_file(plan, index, config)]
    assert [sum(map(len, [block])) for block in blocks]
    return [row for block in blocks for row in block.to_pylist()]


def test_ids_have_as_many_parts_as_tell_rows_apart() -> None:
    assert Expansion().ids("x") == Expansion(samples=3).ids("x", 1) == ["x"]
    assert Expansion(("a", "b")).ids("x") == ["x-a", "x-b"]
    assert Expansion(samples=2).ids("x") == Expansion().ids("x", 2) == ["x-0", "x-1"]
    assert Expansion(("a", "b"), 2).ids("x") == ["x-a-0", "x-a-1", "x-b-0", "x-b-1"]


def test_samples_of_every_format(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "prompt": "p", "n": 1}, {"prompt": "q", "n": 2}, "bad"])
    write_parquet(tmp_path / "a.parquet", {"id": ["x", None, "z"], "prompt": ["p", "q", None], "n": [1, 2, 3]})
    write(tmp_path / "a.csv", "id,prompt,n\nx,p,1\n,q,2\nz\n")
    for name, made in (("a.jsonl", "a.jsonl:1"), ("a.parquet", "a.parquet:1"), ("a.csv", "a.csv:1")):
        plan, config = sampled_plan(tmp_path / name)
        rows = all_rows(plan, config)
        assert (plan.num_documents, plan.num_rows, len(rows)) == (3, 9, 9)
        assert [row["id"] for row in rows][:6] == ["x-0", "x-1", "x-2", f"{made}-0", f"{made}-1", f"{made}-2"]
        assert [row["source_id"] for row in rows][:6] == ["x"] * 3 + [made] * 3
        assert [row["sample"] for row in rows] == [0, 1, 2] * 3
        assert {row["template"] for row in rows} == {None}
        assert [row["prompt"] for row in rows][:6] == ["p"] * 3 + ["q"] * 3
        assert [bool(row["error_code"]) for row in rows] == [False] * 6 + [True] * 3, "a bad document fails all"
        assert len({row["error_message"] for row in rows[6:]}) == 1
    write(tmp_path / "a.txt", "one\ntwo\n")
    rows = all_rows(*sampled_plan(tmp_path / "a.txt"))
    assert [(row["id"], row["prompt"]) for row in rows][2:4] == [("a.txt:0-2", "one"), ("a.txt:1-0", "two")]


def test_a_limit_counts_documents(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"id": f"{name}{n}", "prompt": "p"} for n in range(4)])
    plan, config = sampled_plan(tmp_path, limit=6)
    assert (plan.num_documents_per_file, plan.num_rows_per_file) == ((4, 2), (12, 6))
    assert [row["source_id"] for row in all_rows(plan, config)][-3:] == ["b1"] * 3


def test_an_id_that_collides_is_a_duplicate(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "prompt": "p"}, {"id": "x", "prompt": "q"}])
    rows = all_rows(*sampled_plan(path))
    assert [row["error_code"] for row in rows] == [""] * 3 + ["duplicate_id"] * 3
    assert rows[3]["error_message"].endswith(" (counting a row for each template and sample)")
    lines = [
        {"custom_id": "x", "n": 2},
        {"custom_id": "x-1", "n": 1},
        {"custom_id": "y-0", "n": 1},
        {"custom_id": "y", "n": 2},
    ]
    path = write_batch(tmp_path / "b.jsonl", lines)
    rows = all_rows(*sampled_plan(path, SamplingConfig(temperature=1.0)))
    assert [(row["id"], row["error_code"]) for row in rows] == [
        ("x-0", ""), ("x-1", ""), ("x-1", "duplicate_id"), ("y-0", ""), ("y-0", "duplicate_id"), ("y-1", ""),
    ]  # fmt: skip
    assert "b.jsonl row 3" in rows[2]["error_message"]


def test_a_document_whose_third_sample_is_missing_makes_only_that_one(tmp_path: Path) -> None:
    from pipeline.input.id_matching import DoneRows

    path = write_jsonl(tmp_path / "a.jsonl", [{"id": f"r{n}", "prompt": "p"} for n in range(3)])
    plan, config = sampled_plan(path)
    done = DoneRows(plan.num_rows_per_file)
    done.add(np.array([0, 1, 3, 4, 5, 6, 7, 8], np.uint64))
    rows = [row for block in read_rest(plan, done, 0, config) for row in block.to_pylist()]
    assert [row["id"] for row in rows] == ["r0-2"]


@pytest.mark.parametrize("name", SOURCE_SCHEMA.names)
def test_names_of_sources_are_reserved_in_runs_that_write_them(tmp_path: Path, name: str) -> None:
    assert name not in RESERVED_COLUMNS
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "x", "prompt": "p", name: "mine"}])
    assert read_rows(path)[0][name] == "mine"
    with pytest.raises(ValueError, match=f"has a column '{name}', a name that the output uses"):
        sampled_plan(path)


def write_batch(path: Path, lines: list[dict[str, Any]]) -> Path:
    rows = [
        {"custom_id": line["custom_id"], "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": "p"} | {key: value for key, value in line.items() if key != "custom_id"}}
        for line in lines
    ]
    return write_jsonl(path, rows)


def test_lines_say_their_own_n(tmp_path: Path) -> None:
    lines = [{"custom_id": "a", "n": 2, "temperature": 1}, {"custom_id": "b"}, {"custom_id": "c", "n": None}]
    plan, config = sampled_plan(write_batch(tmp_path / "a.jsonl", lines), SamplingConfig())
    rows = all_rows(plan, config)
    assert [(row["id"], row["source_id"], row["sample"]) for row in rows] == [
        ("a-0", "a", 0), ("a-1", "a", 1), ("b", "b", 0), ("c", "c", 0),
    ]  # fmt: skip
    assert not any(row["error_code"] for row in rows)
    plan, config = sampled_plan(write_batch(tmp_path / "b.jsonl", lines[1:]), SamplingConfig())
    assert not plan.has_sources
    assert "source_id" not in all_rows(plan, config)[0]
    rows = all_rows(*sampled_plan(tmp_path / "a.jsonl", SAMPLED))
    assert [row["id"] for row in rows] == ["a-0", "a-1", "b-0", "b-1", "b-2", "c-0", "c-1", "c-2"]


@pytest.mark.parametrize("n", [0, -1, 1025, 10**30, True, 1.5, "2", [2]])
def test_a_line_whose_n_is_none_fails(tmp_path: Path, n: Any) -> None:
    rows = all_rows(*sampled_plan(write_batch(tmp_path / "a.jsonl", [{"custom_id": "a", "n": n}]), SamplingConfig()))
    assert [(row["id"], row["error_code"]) for row in rows] == [("a", "bad_parameters")]
    assert "body.n must be an integer from 1 to 1024" in rows[0]["error_message"]


def test_samples_of_a_greedy_line_fail(tmp_path: Path) -> None:
    lines = [{"custom_id": "a", "n": 2}, {"custom_id": "b", "n": 2, "temperature": 0.5}]
    rows = all_rows(*sampled_plan(write_batch(tmp_path / "a.jsonl", lines), SamplingConfig()))
    assert [row["error_code"] for row in rows] == ["bad_parameters"] * 2 + [""] * 2
    rows = all_rows(*sampled_plan(tmp_path / "a.jsonl", SamplingConfig(temperature=1)))
    assert not any(row["error_code"] for row in rows)


def test_a_limit_cuts_a_file_whose_lines_differ(tmp_path: Path) -> None:
    lines = [{"custom_id": f"r{n}", "n": 1 + n % 3, "temperature": 1} for n in range(9)]
    write_batch(tmp_path / "a.jsonl", lines[:5])
    write_batch(tmp_path / "b.jsonl", lines[5:])
    plan, config = sampled_plan(tmp_path, SamplingConfig(), limit=7)
    assert (plan.num_documents_per_file, plan.num_rows_per_file) == ((5, 2), (9, 4))
    assert len(all_rows(plan, config)) == 13


def test_a_name_of_a_template_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p"}])
    with pytest.raises(ValueError, match="pattern"):
        make_config(path, templates={"A": "{{ prompt }}"})
    refuse(path, "input.prompt_column", prompt_column="other")


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow"])
def test_a_file_that_becomes_more_rows_than_a_task_can_index_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    rows = [{"id": f"r{n}", "prompt": "x"} for n in range(4)]
    path, table = tmp_path / f"a.{format}", pa.Table.from_pylist(rows)
    if format == "arrow":
        write_stream(path, table)
    else:
        write_jsonl(path, rows) if format == "jsonl" else write_parquet(path, table.to_pydict())
    monkeypatch.setattr(ids, "MOST_INDEXED", 12)
    assert make_plan(make_config(path), Expansion.of(make_config(path), SAMPLED)).num_rows == 12
    monkeypatch.setattr(ids, "MOST_INDEXED", 11)
    with pytest.raises(ConfigError, match=rf"input.path: .*a.{format} becomes 12 rows or more, and .* 11; split the"):
        make_plan(make_config(path), Expansion.of(make_config(path), SAMPLED))
    without = write_parquet(tmp_path / "b.parquet", {"prompt": ["x"] * 5})
    config = make_config(without)
    listing = list_input(config, expansion=Expansion.of(config, SAMPLED))
    assert len(scan_file(listing, 0, config, index_all=True)[1]) == 15, "a resume may index what could begin"
