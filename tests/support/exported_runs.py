"""Folders of finished runs, made by hand for the tests of `jobs.export`, and the rows that they hold."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.schema import OUTPUT_SCHEMA, STATUS
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState

EXTRA: dict[str, pa.Array] = {
    "city": pa.array(["Leeds", None, "Yörk|"]),
    "when": pa.array([datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC), None, None], pa.timestamp("us", "UTC")),
    "nested": pa.array([{"a": [{"b": 1.5}]}, None, {"a": []}]),
}


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
    sink = RunSink(folder.filesystem, folder.root, "s1", schema, None, execution_id="x")
    for number, part in enumerate(parts):
        sink.write(part, f"{number:04d}")
    folder.release("s1")
    sampling = {"max_new_tokens": 64, "temperature": 0.0, "seed": 0, "stop": ()}
    report = {"agreement": {"exact_rows": 0.5, "token_match": 0.874, "rows": 8}, "speedup": {"measured": 1.88}}
    state: Any = {
        "version": "1.0.0", "state": "finished", "fingerprint": {}, "config": {"sampling": sampling}, "report": report,
        "model": {"source": "/secret/place/my-model", "layers": 24},
        "decode": {"method": "skipdecode", "speedup": 2.0, "layers": None},
        "books": {"input": 3 * num_files + 3, "ok": 3 * num_files, "failed": 3, "closed": True},
        "sessions": [{"id": "s1", "started_at": 1.79e9, "ended_at": 1.79e9 + 60}], "former": [], "known": [],
        "files": folder.read_files(folder.all_data_files()),
    }  # fmt: skip
    folder.write_state(state)
    found: RunState = state
    return found


def expected(columns: dict[str, pa.Array] = EXTRA, num_files: int = 4) -> list[dict[str, Any]]:
    parts = [rows(3 * number, columns).drop_columns([STATUS]) for number in range(num_files)]
    found: list[dict[str, Any]] = pa.concat_tables(parts).to_pylist()
    return found
