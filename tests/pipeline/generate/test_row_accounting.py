"""The books are closed by id: a row that is lost and one that is there twice do not make up for each other."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.job import ConfigError
from pipeline.generate.resume import refuse_unattributed
from pipeline.generate.row_accounting import reconcile, refuse_unreconciled
from pipeline.generate.row_index import sum_duplicates
from pipeline.input.expansion import Expansion
from pipeline.input.ids import (
    ID_MODULUS,
    already_used,
    describe_location,
    digest_id,
    digest_ids,
    row_keys,
    sum_digests,
    sum_made_ids,
    sum_outputs,
)
from pipeline.schema import STATUS
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder, id_metadata
from tests.support.input_helpers import make_config, make_plan

SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "error_code", "error_message")])


def rows(*ids: str, code: str = "", message: str = "") -> pa.Table:
    columns = {"id": list(ids), "error_code": [code] * len(ids), "error_message": [message] * len(ids)}
    return pa.table(columns, schema=pa.schema([(name, pa.string()) for name in columns]))


def duplicate(id: str, location: str) -> pa.Table:
    return rows(id, code="duplicate_id", message=f"{location}{already_used(id)}in row 1; bad_line: x")


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"])), max_size=40), st.randoms())
def test_the_sum_is_that_of_the_numbers_in_any_order(ids: list[str], random: Any) -> None:
    wanted = sum(int.from_bytes(digest_id(id), "little") for id in ids) % ID_MODULUS
    assert sum_digests(digest_ids(ids)) == wanted
    assert sum(row_keys(rows(*ids))) % ID_MODULUS == wanted
    random.shuffle(ids)
    cut = random.randrange(len(ids) + 1)
    assert (sum_outputs(rows(*ids[:cut])) + sum_outputs(rows(*ids[cut:]))) % ID_MODULUS == wanted


def test_made_ids_are_summed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.input.ids.SUMMED_AT_ONCE", 3)
    (tmp_path / "a.txt").write_text("x\n" * 10)
    plan = make_plan(make_config(tmp_path / "a.txt"))
    wanted = sum_digests(digest_ids([f"a.txt:{row}" for row in range(10)]))
    assert sum_made_ids(plan.listing.files[0].name, 10, plan.listing.expansion.all_ids) == wanted
    wanted = sum_digests(digest_ids([f"a.txt:{row}-{sample}" for row in range(10) for sample in range(4)]))
    assert sum_made_ids(plan.listing.files[0].name, 10, Expansion(samples=4).all_ids) == wanted


def test_rows_with_one_id_are_distinguished_by_their_locations(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": "i", "prompt": "x"}\n' * 3)
    plan = make_plan(make_config(tmp_path / "a.jsonl"))
    of_input = 3 * sum_digests(digest_ids(["i"])) + sum_duplicates(plan)
    second, third = (duplicate("i", describe_location("a.jsonl", row)) for row in (1, 2))
    assert sum(map(sum_outputs, (rows("i"), second, third))) % ID_MODULUS == of_input % ID_MODULUS
    keys = [key for table in (rows("i"), second, third) for key in row_keys(table)]
    assert len(set(keys)) == 3
    assert sum(keys) % ID_MODULUS == of_input % ID_MODULUS
    assert sum(map(sum_outputs, (rows("i"), second, second))) % ID_MODULUS != of_input % ID_MODULUS
    assert sum(map(sum_outputs, (rows("i"), rows("i"), third))) % ID_MODULUS != of_input % ID_MODULUS


def state(num_rows: int) -> Any:
    books = {"input": num_rows, "ok": None, "failed": None, "closed": False}
    return {"state": "running", "sessions": [{"id": "s1"}], "former": ["s0"], "known": [], "books": books}


@pytest.mark.parametrize(
    ("ok", "failed", "is_closed"),
    [
        ("ab", "c", True),
        ("abc", "", True),
        ("", "cba", True),
        ("ab", "b", False),  # c is lost, b doubled
        ("aab", "", False),
        ("abd", "", False),
        ("ab", "", False),
        ("abc", "c", False),
    ],
)
def test_a_lost_row_and_a_doubled_one_do_not_cancel_out(tmp_path: Path, ok: str, failed: str, is_closed: bool) -> None:
    folder = RunFolder.open(str(tmp_path))
    folder.fence("s1")
    sink = RunSink(folder.filesystem, folder.root, "s1", SCHEMA, None, execution_id="x", row_keys=row_keys)
    for number, (id, status) in enumerate([*((i, "ok") for i in ok), *((i, "failed") for i in failed)]):
        sink.write(rows(id).append_column(STATUS, pa.array([status])), f"{number}")
    for path in tmp_path.rglob("*.parquet"):
        assert b"skipdecode.ids" in pq.read_metadata(path).metadata
    expected, closed = sum_digests(digest_ids(list("abc"))), state(3)
    reconcile(folder, closed, lambda: None, expected)
    assert closed["books"] == {"input": 3, "ok": len(ok), "failed": len(failed), "closed": is_closed}
    assert len(closed["files"]) == len(ok) + len(failed)
    assert closed["ids"]["input"] == f"{expected:032x}"
    assert folder.read_state() == closed
    if not is_closed:
        with pytest.raises(RuntimeError, match="the books do not close"):
            refuse_unreconciled(folder, closed, lambda: None)
        assert folder.read_state() == closed | {"state": "interrupted"}
    unknown = state(3)
    reconcile(folder, unknown, lambda: None, None)  # where nobody knows the ids of the input, the counts decide
    assert unknown["books"]["closed"] == (len(ok) + len(failed) == 3)


def put(root: Path, name: str, id: str) -> None:
    path = root / f"data/status=ok/{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows(id).replace_schema_metadata(id_metadata(sum_outputs(rows(id)))), path)


def test_a_file_that_came_late_is_not_counted(tmp_path: Path) -> None:
    """Between the removal of late files and the count: of a run that was here before."""
    put(tmp_path, "part-s1-x-0", "a")
    put(tmp_path, "part-s0-x-0", "a")
    counted = state(1)
    reconcile(RunFolder.open(str(tmp_path)), counted, lambda: None, sum_digests(digest_ids(["a"])))
    assert counted["books"]["closed"]
    assert list(counted["files"]) == ["data/status=ok/part-s1-x-0.parquet"]


@pytest.mark.parametrize("name", ["part-s9-x-0", "mine"])
def test_a_file_that_no_session_of_the_run_wrote_is_named(tmp_path: Path, name: str) -> None:
    put(tmp_path, "part-s1-x-0", "a")
    put(tmp_path, name, "b")
    with pytest.raises(RuntimeError, match=rf"{name}\.parquet: no session of this run wrote it; move it away"):
        reconcile(RunFolder.open(str(tmp_path)), state(2), lambda: None, None)
    with pytest.raises(ConfigError, match=rf"{name}\.parquet: no session that run\.json names wrote it"):
        refuse_unattributed(RunFolder.open(str(tmp_path)), state(2))
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
