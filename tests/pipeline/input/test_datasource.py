"""The input as a Ray Data source, on a real Ray."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.input.id_matching import DoneRows, match
from pipeline.input.ids import output_entries
from pipeline.input.input_plan import InputPlan
from tests.support.input_helpers import input_rows, make_config, make_plan, read_table, write, write_jsonl


@pytest.fixture(scope="module")
def ray_data(ray_is_up: None) -> Any:
    import ray.data

    return ray.data


def ray_corpus(root: Path) -> Path:
    for number in range(3):
        rows = [{"id": f"{number}-{n}", "prompt": f"p{n}", "n": n} for n in range(2500)]
        write_jsonl(root / f"{number}.jsonl", [*rows, {"id": "0-0", "prompt": "again"}])
    write(root / "empty.jsonl", "")
    write(root / "bad.jsonl", "bad\n")
    return root


def done_rows(config: Any, plan: InputPlan, outputs: pa.Table) -> DoneRows:
    """The rows of the plan that `outputs` has."""
    names = [file.name for file in plan.listing.files]
    found = match(input_rows(plan.listing, config, plan), output_entries(outputs, 0), names)
    assert (found.num_unknown, found.num_doubled, found.num_missing) == (0, 0, plan.num_rows - len(outputs))
    done = DoneRows(plan.num_rows_per_file)
    done.add(found.done)
    return done


@pytest.mark.ray
def test_ray_reads_every_row_once_and_skips_what_is_done(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.input.datasource import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    plan = make_plan(config)
    expected = read_table(tmp_path / "in").to_pylist()
    assert len(expected) == 3 * 2501 + 1

    def read(done: DoneRows | None = None) -> list[dict[str, Any]]:
        dataset = ray_data.read_datasource(CorpusDatasource(plan, config, done))
        assert dataset.columns() == plan.schema.names
        rows: list[dict[str, Any]] = dataset.take_all()
        assert dataset.count() == len(rows)
        return sorted(rows, key=lambda row: (row["id"], row["error_message"]))

    everything = read()
    assert everything == sorted(expected, key=lambda row: (row["id"], row["error_message"]))
    rest = read(done_rows(config, plan, pa.Table.from_pylist(expected[1000:5000], schema=plan.schema)))
    assert rest == sorted(expected[:1000] + expected[5000:], key=lambda row: (row["id"], row["error_message"]))
    # Of the four rows with id "0-0" one duplicate is done: the other three have to come again.
    assert sum(row["id"] == "0-0" for row in rest) == 2 + (2 - sum(row["id"] == "0-0" for row in expected[1000:5000]))


@pytest.mark.ray
def test_ray_tasks_are_small_and_tell_the_truth(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.input.datasource import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    plan = make_plan(config)
    tasks = CorpusDatasource(plan, config).get_read_tasks(100)
    assert [task.metadata.num_rows for task in tasks] == [2501, 2501, 2501, 1]  # no task for the empty file
    blocks = iter(tasks[0]())
    assert len(next(blocks)) == 1024  # a generator: the rest is not read yet
    assert sum(map(len, blocks)) == 2501 - 1024
    table = read_table(tmp_path / "in")
    assert CorpusDatasource(plan, config, done_rows(config, plan, table)).get_read_tasks(1) == []
    rest = CorpusDatasource(plan, config, done_rows(config, plan, table[: 2501 + 100])).get_read_tasks(1)
    assert [task.metadata.num_rows for task in rest] == [2401, 2501, 1]
    prepared = list[str]()
    (first, *_) = CorpusDatasource(plan, config, prepare=lambda: prepared.append("in its process")).get_read_tasks(1)
    assert prepared == []
    next(iter(first()))
    assert prepared == ["in its process"]


@pytest.mark.ray
def test_ray_honours_limit_and_block_splits(tmp_path: Path, ray_data: Any) -> None:
    from pipeline.input.datasource import CorpusDatasource

    config = make_config(ray_corpus(tmp_path / "in"))
    source = CorpusDatasource(make_plan(config), config)
    assert ray_data.read_datasource(source).limit(30).count() == 30
    split = ray_data.read_datasource(source, override_num_blocks=16).materialize()
    assert split.count() == 3 * 2501 + 1
    assert len({row["id"] for row in split.take_all()}) == 7501
