"""Where the time of a run went, on hand-made records: restarts, workers that leave, many records."""

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.report import main as report_main
from pipeline.report.figures import finish_report, last_sign_of_life, make_report
from pipeline.report.metrics_schemas import BATCH_SCHEMA, WINDOW_SCHEMA, WORKER_SCHEMA
from pipeline.report.page import render_report
from pipeline.report.timeline import Clock, Windows, actors, lanes, tail
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import Session

SESSION = Clock(((1000.0, 1100.0),))


def start(worker: str, ready_at: float, load_s: float = 5.0) -> dict[str, Any]:
    return {"worker": worker, "host": "h", "pid": 1, "load_s": load_s, "device": "cpu", "dtype": "float32",
            "ready_at": ready_at}  # fmt: skip


def windows(*parts: tuple[str, int, float, float]) -> Windows:
    """(worker, window, started_at, ended_at), 10 rows each."""
    records = [
        {"worker": w, "window": n, "started_at": a, "ended_at": b, "rows": 10, "failed": 0} for w, n, a, b in parts
    ]
    return Windows.of([pa.Table.from_pylist(records[i : i + 2], schema=WINDOW_SCHEMA) for i in range(0, len(parts), 2)])


def steady(worker: str, begin: float, end: float, length: float = 10.0) -> list[tuple[str, int, float, float]]:
    """A window after the other."""
    count = round((end - begin) / length)
    return [(worker, i + 1, begin + i * length, begin + (i + 1) * length) for i in range(count)]


def test_loading_again_is_not_idleness() -> None:
    parts = windows(("a", 1, 1010.0, 1030.0), ("a", 1, 1050.0, 1090.0))
    (actor,) = actors([start("a", 1010.0), start("a", 1050.0, load_s=15.0)], parts, SESSION)
    assert (actor["load_s"], actor["busy_s"], actor["restarts"], actor["rows"]) == (20.0, 60.0, 1, 20)
    assert actor["idle_s"] == pytest.approx(1100 - 1010 - 60 - 15)


def test_a_worker_that_left_is_idle_up_to_its_last_row_only() -> None:
    """Its node went at 1030; the others still got windows that it would have had."""
    parts = windows(*steady("a", 1000.0, 1100.0), *steady("b", 1000.0, 1030.0), *steady("c", 1000.0, 1090.0))
    found = {a["worker"]: a for a in actors([start(w, 1000.0) for w in "abc"], parts, SESSION)}
    assert [found[w]["left"] for w in "abc"] == [False, True, False]
    assert [found[w]["idle_s"] for w in "abc"] == pytest.approx([0.0, 0.0, 10.0])
    assert tail(parts, SESSION) == {
        "duration_s": pytest.approx(10.0), "idle_s": pytest.approx(10.0), "idle_share": pytest.approx(10 / 200),
        "left": 1,
    }  # fmt: skip


def test_who_has_nothing_left_while_others_end_what_they_have_is_idle() -> None:
    """Two windows ahead is what Ray Data lets a worker have; a part of another's window is no sign of work for all."""
    last = [("a", 4, 1030.0, 1060.0), ("a", 5, 1060.0, 1100.0), ("c", 0, 1080.0, 1090.0)]
    parts = windows(*steady("a", 1000.0, 1030.0), *steady("b", 1000.0, 1030.0), ("c", 1, 1000.0, 1030.0), *last)
    found = {a["worker"]: a for a in actors([start(w, 1000.0) for w in "abc"], parts, SESSION)}
    assert [found[w]["left"] for w in "abc"] == [False, False, False]
    assert found["b"]["idle_s"] == pytest.approx(70.0)
    share = tail(parts, SESSION)
    assert share is not None
    assert (share["idle_s"], share["left"]) == (pytest.approx(70.0 + 10.0), 0)


def test_the_tail_is_that_of_the_last_session() -> None:
    clock = Clock(((0.0, 50.0), (1000.0, 1100.0)))
    parts = windows(("old", 1, 0.0, 40.0), ("a", 1, 1000.0, 1090.0), ("b", 1, 1000.0, 1080.0))
    found = tail(parts, clock)
    assert found is not None
    assert found["idle_s"] == pytest.approx(10.0)
    idle = {a["worker"]: a["idle_s"] for a in actors([start("old", 0.0), start("a", 1000.0)], parts, clock)}
    assert idle == {"old": pytest.approx(10.0), "a": pytest.approx(10.0)}, "each to the end of its own session"


def test_moments_outside_of_sessions_are_moved_before() -> None:
    clock = Clock(((0.0, 50.0), (1000.0, 1100.0)))
    assert clock.at(np.array([-5.0, 20.0, 50.0, 70.0, 1010.0, 2000.0])).tolist() == [0.0, 20.0, 50.0, 50.0, 60.0, 150.0]
    assert clock.at(1010.0) == 60.0


def test_spans_of_a_lane_are_joined_where_nobody_sees_the_gap() -> None:
    parts = windows(("a", 1, 1020.0, 1030.0), ("a", 1, 1010.0, 1020.1), ("a", 2, 1050.0, 1060.0))
    (lane,) = lanes([start("a", 1010.0), start("b", 1020.0)], parts, SESSION, 1)
    assert lane["busy"] == [(10.0, 20.0), (50.0, 10.0)]
    assert lane["load"] == [(5.0, 5.0)]


STATE: dict[str, Any] = {
    "former": [], "files": {"data/status=ok/part-0-0-0.parquet": [5, ""]},
    "version": "1.0.0", "state": "finished", "sessions": [{"id": "0" * 12, "started_at": 0.0, "ended_at": 10_000.0}],
    "books": {"input": 5, "ok": 5, "failed": 0, "closed": True}, "decode": {"method": "skipdecode", "speedup": 2},
    "model": {"source": "m", "layers": 24}, "fingerprint": {"prefill.method": "full"}, "input": {"documents": 5},
    "config": {"actors": {"price_per_hour": None}, "sampling": {"max_new_tokens": 8},
               "baseline": {"fraction": 0.02}},
}  # fmt: skip


def write_records(folder: Path, count: int) -> None:
    """`count` batches and as many parts of windows, of 64 workers, every 50th batch measured."""
    (folder / "metrics").mkdir(parents=True)
    at = np.arange(count) * 9_000.0 / count
    is_paired = np.arange(count) % 50 == 0
    worker = pa.array([f"worker-{i:05d}" for i in range(64)]).take(pa.array(np.arange(count) % 64))
    columns: dict[str, Any] = {"worker": worker, "started_at": at, "decode_s": np.full(count, 0.5)}
    for field in BATCH_SCHEMA:
        if pa.types.is_list(field.type):  # no drafts
            columns[field.name] = pa.nulls(count, field.type)
        elif field.name not in columns:
            is_null = ~is_paired if field.name.startswith(("full_", "predicted_")) else np.zeros(count, bool)
            values = pa.array(np.ones(count, "i8"), mask=is_null | (field.type == pa.string()))
            columns[field.name] = values.cast(field.type)
    columns["output_tokens"] = pa.array(np.full(count, 3, "i8"))
    pq.write_table(pa.table(columns, schema=BATCH_SCHEMA), folder / f"metrics/batches-{'0' * 12}-00000.parquet")
    parts = {"worker": worker, "started_at": at, "ended_at": at + 0.5, "rows": np.ones(count, "i4"),
             "failed": np.zeros(count, "i4"), "window": np.arange(count, dtype="i4") // 64 + 1}  # fmt: skip
    pq.write_table(pa.table(parts, schema=WINDOW_SCHEMA), folder / f"metrics/windows-{'0' * 12}-00001.parquet")
    starts = [start(f"worker-{i:05d}", 0.0) for i in range(64)]
    table = pa.Table.from_pylist(starts, schema=WORKER_SCHEMA)
    pq.write_table(table, folder / f"metrics/workers-{'0' * 12}-00002.parquet")


def test_memory_does_not_grow_by_records(tmp_path: Path) -> None:
    """A record as a Python dict takes 1.4 kB: 560 MB for these."""
    count = 400_000
    write_records(tmp_path, count)
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)  # counts anew
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        figures = make_report(RunFolder.open(str(tmp_path)), STATE).figures
        most = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert most < 200 * count + 60e6, f"{most / 1e6:.0f} MB"
    assert figures["speedup"]["batches"] == count // 50
    assert figures["speedup"]["measured"] == pytest.approx((2 / 1) / (1.5 / 3))
    assert sum(actor["rows"] for actor in figures["actors"]) == count
    assert sum(figures["throughput"]["output_tokens_per_s"]) * figures["throughput"]["bin_s"] == pytest.approx(
        3 * count
    )
    assert figures["decoded_again"]["rows"] == count, "the data files are empty here"


def test_a_report_that_cannot_be_made_is_no_failed_run(tmp_path: Path) -> None:
    """The counts are kept, the note says what to do, and what a retry left behind is gone."""
    write_records(tmp_path, 100)
    (tmp_path / "data/status=ok").mkdir(parents=True)
    (tmp_path / "data/status=ok/part-0-0-0.parquet").write_bytes(b"torn")
    (tmp_path / "report.json").write_text("{}")
    notes: list[str] = []
    found = finish_report(RunFolder.open(str(tmp_path)), STATE, notes.append)
    assert found == {"version": "1.0.0", "completed": 5, "failed": 0, "books": STATE["books"]}
    assert not (tmp_path / "report.json").exists()
    (log,) = notes
    assert "report: could not be made (Arrow" in log
    assert f"python -m jobs.report {tmp_path}" in log
    (tmp_path / "data/status=ok/part-0-0-0.parquet").unlink()
    (tmp_path / "run.json").write_text(json.dumps(STATE))
    assert report_main([str(tmp_path)]) == 0
    assert (tmp_path / "report.json").is_file()


def test_records_of_an_overwritten_run_are_left_out(tmp_path: Path) -> None:
    """Its collector may have been late, too."""
    write_records(tmp_path, 100)
    before = make_report(RunFolder.open(str(tmp_path)), STATE).figures
    for path in list((tmp_path / "metrics").iterdir()):
        shutil.copy(path, path.with_name(path.name.replace("0" * 12, "1" * 12)))
    assert make_report(RunFolder.open(str(tmp_path)), STATE).figures == before


def test_metrics_may_lack_columns(tmp_path: Path) -> None:
    """Without columns that came later: no error, and no figure where there is none."""
    write_records(tmp_path, 100)
    gone_columns = {"batches": ["ffns_run", "split_error"], "windows": ["window"], "workers": ["backend"]}
    for kind, gone in gone_columns.items():
        (path,) = (tmp_path / "metrics").glob(f"{kind}-*")
        pq.write_table(pq.read_table(path, partitioning=None).drop_columns(gone), path)
    report = make_report(RunFolder.open(str(tmp_path)), STATE)
    figures = report.figures
    assert {actor["backend"] for actor in figures["actors"]} == {None}
    assert "Kernels" not in render_report(figures, STATE, report.lanes)
    assert figures["ffns_per_token"] is None
    assert figures["layers_per_token"] == pytest.approx(0.5)
    assert figures["split_batches"] == {"count": 0, "first": None}
    assert figures["tail"]["left"] == 0


def test_damaged_metrics_cost_figures_and_no_more(tmp_path: Path) -> None:
    """Torn, empty, or damaged in the middle: neither the report nor a resume needs them."""
    write_records(tmp_path, 100)
    for number, kind in enumerate(("batches", "windows", "workers")):
        path = tmp_path / f"metrics/{kind}-{'0' * 12}-{number:05d}.parquet"
        pq.write_table(pq.read_table(path), tmp_path / "again", write_page_checksum=True)
        whole = (tmp_path / "again").read_bytes()
        for bad, damaged in enumerate((b"", b"torn", whole[:-9], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])):
            path.with_name(f"{kind}-{'0' * 12}-{3 + bad:05d}.parquet").write_bytes(damaged)
    folder, notes = RunFolder.open(str(tmp_path)), list[str]()
    figures = finish_report(folder, STATE, notes.append)
    assert sum(actor["rows"] for actor in figures["actors"]) == 100  # type: ignore[attr-defined]
    assert len(notes) >= 11
    assert all("left out, the figures lack what it says" in log for log in notes)
    assert (tmp_path / "report.json").exists()
    session: Session = {"id": "0" * 12, "started_at": 5.0, "ended_at": None}
    assert last_sign_of_life(folder, session) > 5.0
