"""`jobs.verify` and `jobs.retry` on a real Ray: a run is made once, then damaged in every way verify must see."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import generate, retry, verify
from pipeline.schema import OUTPUT_SCHEMA, list_columns
from tests.support.verbs import Call

pytestmark = pytest.mark.ray

ROWS = [{"id": f"r{i}", "prompt": f"row {i}", "n": i} for i in range(40)]
BAD = [
    {"id": "long", "prompt": "word " * 500},
    {"id": "null", "prompt": None},
    {"id": "r3", "prompt": "a duplicate"},
    {"id": "r3", "prompt": None},
]


@pytest.fixture(scope="module")
def made(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `in/` (two files) and `run/`: 40 rows good, one too long, one null, two duplicates."""
    root = tmp_path_factory.mktemp("verify")
    (root / "in").mkdir()
    lines = [json.dumps(row) + "\n" for row in [*ROWS, *BAD]]
    (root / "in/a.jsonl").write_text("".join(lines[:25]))
    (root / "in/b.jsonl").write_text("\n" + "".join(lines[25:]))
    arguments = [
        f"model.source={tiny_checkpoint}", "model.dtype=float32", "sampling.max_new_tokens=8", "-i", str(root / "in"),
        "-o", str(root / "run"), "actors.batch_size=4", "actors.window_batches=1", "limits.max_failed_rows=10",
    ]  # fmt: skip
    assert generate.main(arguments) == 0
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run to damage."""
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def files(run: Path, status: str = "ok") -> list[Path]:
    return sorted((run / f"data/status={status}").glob("*.parquet"))


def change(path: Path, **columns: Any) -> None:
    """Replaces columns of a data file, by functions of the list of values."""
    table = pq.ParquetFile(path).read()
    for name, function in columns.items():
        at = table.schema.get_field_index(name)
        table = table.set_column(
            at, table.schema.field(at), pa.array(function(table[name].to_pylist()), table.schema.field(at).type)
        )
    pq.write_table(table, path)


def edit(run: Path, name: str, **values: Any) -> None:
    document = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps(document | values))


def cut_off(run: Path) -> None:
    """As an interrupted run leaves a folder: a file is missing, and nothing is counted."""
    files(run)[0].unlink()
    edit(run, "run.json", state="interrupted", books={"input": 44, "ok": None, "failed": None, "closed": False})


def test_a_run_is_proven(made: Path, call: Call) -> None:
    code, document, err = call(verify, made / "run")
    assert code == 0, err
    assert document["rows"] == {"ok": 40, "failed": 4, "input": 44}
    assert (document["verified"], document["input"], document["problems"]) == (True, "read", {})
    assert "verified: every input row is present exactly once" in err


def test_no_run_folder(tmp_path: Path, call: Call) -> None:
    assert call(verify, tmp_path)[0] == 2
    (tmp_path / "run.json").write_text("{}")
    assert call(verify, tmp_path)[0] == 2
    code, document, err = call(verify, tmp_path / "nowhere")
    assert (code, document["exit_code"]) == (2, 2)
    assert "not a run folder" in err


def drop_a_file(run: Path) -> None:
    files(run)[0].unlink()


def drop_the_duplicate_that_is_null(run: Path) -> None:
    for path in files(run, "failed"):
        table = pq.ParquetFile(path).read()
        kept = [not (row["id"] == "r3" and "prompt_missing" in row["error_message"]) for row in table.to_pylist()]
        pq.write_table(table.filter(pa.array(kept)), path)


def double_a_file(run: Path) -> None:
    first = files(run)[0]
    shutil.copy(first, first.with_name(first.name.replace("-00000", "-90000")))


def double_across_status(run: Path) -> None:
    table = pq.ParquetFile(files(run)[0]).read().slice(0, 1).to_pylist()[0]
    table |= {"error_code": "engine_error", "error_message": "x", "finish_reason": "error", "generated_tokens": [],
              "num_generated_tokens": 0}  # fmt: skip
    path = files(run, "failed")[0]
    both = pq.ParquetFile(path).read()
    pq.write_table(pa.concat_tables([both, pa.Table.from_pylist([table], schema=both.schema)]), path)


def tear_a_file(run: Path) -> None:
    files(run)[1].write_bytes(files(run)[1].read_bytes()[:-30])


def rot_a_page(run: Path) -> None:
    data = bytearray(files(run)[0].read_bytes())
    column = pq.read_metadata(files(run)[0]).row_group(0).column(0)
    first = column.dictionary_page_offset or column.data_page_offset
    data[first + column.total_compressed_size - 1] ^= 0xFF  # the last byte of the last page
    files(run)[0].write_bytes(bytes(data))


def an_odd_code(run: Path) -> None:
    for path in files(run, "failed"):
        change(path, error_code=lambda codes: ["odd" if code == "prompt_too_long" else code for code in codes])


def drop_a_column(run: Path) -> None:
    pq.write_table(pq.ParquetFile(files(run)[0]).read().drop_columns(["n"]), files(run)[0])


def stray_files(run: Path) -> None:
    (run / "data/_SUCCESS").write_text("")
    (run / "data/status=ok/mine.txt").write_text("")
    (run / "checkpoint/staging/x").mkdir(parents=True)
    (run / "checkpoint/staging/x/half.parquet").write_text("PAR1")
    (run / "notes.md").write_text("")


DAMAGE = [
    (drop_a_file, {"missing", "count"}, "'r"),
    (drop_the_duplicate_that_is_null, {"missing", "count"}, "'r3' (b.jsonl row 19)"),
    (double_a_file, {"doubled", "count"}, "'r"),
    (double_across_status, {"doubled", "count"}, "status=failed/"),
    (lambda run: change(files(run)[0], id=lambda ids: ["q", *ids[1:]]), {"unknown", "missing"}, "'q' ("),
    (tear_a_file, {"file", "missing", "count"}, "not a whole Parquet file"),
    (rot_a_page, {"file", "missing", "count"}, "not a whole Parquet file"),
    (drop_a_column, {"schema", "missing", "count"}, "missing: n int64"),
    (stray_files, {"stray"}, "data/_SUCCESS"),
    (lambda run: change(files(run)[0], finish_reason=lambda v: ["error"] * len(v)), {"row"}, "finish_reason of a row"),
    (lambda run: change(files(run)[0], num_generated_tokens=lambda v: [n + 1 for n in v]), {"row", "count"}, "is not"),
    (lambda run: change(files(run)[0], error_code=lambda v: ["engine_error"] * len(v)), {"row"}, "of a good"),
    (an_odd_code, {"row", "count"}, "none of ours"),
    (lambda run: change(files(run)[0], generated_text=lambda v: [None, *v[1:]]), {"row"}, "generated_text is null"),
    (lambda run: edit(run, "run.json", state="interrupted"), {"state"}, "at 44 of 44 rows; jobs.generate --resume"),
    (cut_off, {"state", "missing"}, "the run is interrupted at "),
    (lambda run: edit(run, "report.json", completed=39), {"count"}, "completed is 39, counted 40"),
    (lambda run: (run / "report.json").unlink(), {"count"}, "completed is None"),
    (lambda run: (run / "report.json").write_text('{"completed": 4'), {"count"}, "completed is None"),
    (lambda run: (run / "report.json").write_bytes(b"\xff[]"), {"count"}, "completed is None"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "kinds", "text"), DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_named(run: Path, call: Call, damage: Any, kinds: set[str], text: str) -> None:
    damage(run)
    code, document, err = call(verify, run)
    assert code == 1
    assert not document["verified"]
    assert kinds <= document["problems"].keys(), err
    assert document["problems"].keys() <= kinds | {"unknown", "doubled"}, err
    assert text in err
    assert all(0 < len(p["first"]) <= min(20, p["count"]) for p in document["problems"].values())


def test_an_input_that_moved_changed_or_went(made: Path, run: Path, call: Call, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(made / "in", moved)  # with the times
    assert call(verify, run, "-i", moved)[0] == 0
    with (moved / "a.jsonl").open("a") as file:
        file.write('{"id": "new", "prompt": "x"}\n')
    code, document, err = call(verify, run, "-i", moved)
    assert (code, document["input"]) == (1, "changed")
    assert "a.jsonl: the run was started with" in err
    assert "'new' (a.jsonl row 26)" in err
    code, document, err = call(verify, run, "-i", tmp_path / "nowhere")
    assert (code, document["input"], list(document["problems"])) == (1, "unreadable", ["input"])
    assert "--no-input" in err
    code, document, err = call(verify, run, "--no-input")
    assert (code, document["input"]) == (0, "left out")
    assert "verified: no id is present twice" in err
    whole = files(run)[0].read_bytes()
    change(files(run)[0], id=lambda ids: ["q", *ids[1:]])
    code, document, err = call(verify, run, "--no-input")
    assert (code, list(document["problems"])) == (1, ["count"]), err
    assert "run.json: the sum of all ids is" in err
    files(run)[0].write_bytes(whole)
    double_a_file(run)
    assert call(verify, run, "--no-input")[1]["problems"]["doubled"]["count"] > 0


def good(run: Path) -> dict[str, list[int]]:
    return {row["id"]: row["generated_tokens"] for p in files(run) for row in pq.ParquetFile(p).read().to_pylist()}


def test_retry_makes_good_what_can_be(run: Path, call: Call) -> None:
    before = good(run)
    code, document, err = call(retry, run, "input.too_long=truncate_left")
    assert code == 0, err
    assert (document["tried"], document["recovered"], document["completed"], document["failed"]) == (1, 1, 41, 3)
    after = good(run)
    assert after.pop("long")
    assert after == before
    code, document, err = call(verify, run)
    assert (code, document["rows"]) == (0, {"ok": 41, "failed": 3, "input": 44}), err
    state = json.loads((run / "run.json").read_text())
    (record,) = state["retries"]
    assert record["overrides"] == ["input.too_long=truncate_left"]
    assert (record["tried"], record["ok"], record["failed"]) == (1, 1, 0)
    assert len(state["sessions"]) == 2
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    code, document, err = call(retry, run)
    assert (code, document["tried"]) == (0, 0)
    assert "nothing to retry" in err
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == written


@pytest.mark.slow
def test_a_row_that_fails_again_stays_failed(run: Path, call: Call) -> None:
    code, document, err = call(retry, run, "sampling.max_new_tokens=9", "limits.max_failed_rows=3")
    assert code == 3, err
    assert (document["tried"], document["recovered"], document["failed"]) == (1, 0, 4)
    messages = [m for p in files(run, "failed") for m in pq.ParquetFile(p).read()["error_message"].to_pylist()]
    assert any("and 9 new ones do not fit" in message for message in messages)
    assert call(verify, run)[0] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.seed=5"], "sampling.seed: the run was started with 0, now it is 5"),
        (["decode.speedup=2"], "decode.method: the run was started with 'full', now it is 'skipdecode'"),
        (["input.too_lng=x"], "input.too_lng: unknown key"),
    ],
)
def test_retry_refuses_what_would_make_another_run(run: Path, call: Call, overrides: list[str], message: str) -> None:
    before = (run / "run.json").read_bytes()
    code, _, err = call(retry, run, *overrides)
    assert (code, message in err) == (2, True), err
    assert (run / "run.json").read_bytes() == before


def test_retry_wants_a_finished_run(run: Path, call: Call, tmp_path: Path) -> None:
    edit(run, "run.json", state="interrupted")
    code, _, err = call(retry, run)
    assert (code, "--resume" in err) == (2, True)
    code, _, err = call(retry, tmp_path / "nowhere")
    assert (code, "not a run folder" in err) == (2, True)


def test_columns_are_those_of_the_contract(made: Path) -> None:
    columns = json.loads((made / "run/run.json").read_text())["columns"]
    assert columns == [*list_columns(OUTPUT_SCHEMA), ["n", "int64"]]
    assert ["generated_tokens", "list<element: int32>"] in columns
