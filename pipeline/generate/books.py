"""`run.json` over a run's life: how a session begins it, and how the books are closed.

Left out: how it is written (`store.run_folder`), the report (`report.figures`).
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa

from pipeline.generate.fingerprint import list_files
from pipeline.generate.plan import PlannedRun
from pipeline.input.plan import InputPlan
from pipeline.report.figures import last_sign_of_life
from pipeline.schema import OUTPUT_SCHEMA, list_columns
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.run_state import Phase, RunState, Session

Check: TypeAlias = Callable[[], None]
"""`Lease.check`: raises where the folder is another session's."""


def first_state(planned: PlannedRun, session: str, phase: Phase, former: Sequence[str] = ()) -> RunState:
    """`run.json` at the start of a session. `former`: sessions before it that no earlier state names."""
    earlier = planned.earlier
    before = earlier.get("former", []) if earlier else []
    return {
        "state": phase,
        "fingerprint": earlier["fingerprint"] if earlier else planned.fingerprint,
        "config": earlier["config"] if earlier and "config" in earlier else planned.config.model_dump(mode="json"),
        "model": {
            "source": planned.model.source,
            "layers": planned.model.config.num_hidden_layers,
            "quantization": planned.config.model.quantization,
        },
        "decode": planned.model.decode,
        "input": {"format": planned.input.listing.format, "files": list_files(planned.input)},
        "columns": list_columns(output_schema(planned.input)),
        "sessions": [*_ended(planned.folder, earlier), {"id": session, "started_at": time.time(), "ended_at": None}],
        "retries": earlier.get("retries", []) if earlier else [],
        "books": {"input": planned.input.num_rows, "ok": None, "failed": None, "closed": False},
        "former": list(dict.fromkeys([*before, *former])),
    }


def _ended(folder: RunFolder, earlier: RunState | None) -> list[Session]:
    """The sessions so far; one that was killed lived at least until its last record."""
    sessions = earlier["sessions"] if earlier else []
    for session in sessions:
        if session["ended_at"] is None:
            session["ended_at"] = last_sign_of_life(folder, session)
    return sessions


def close_books(folder: RunFolder, state: RunState, check: Check) -> None:
    """Counts what is on disk and writes it down, whatever happened before; `check` is asked before it is written."""
    books = state["books"]
    ok, failed = folder.count_rows("ok"), folder.count_rows("failed")
    books["ok"], books["failed"], books["closed"] = ok, failed, ok + failed == books["input"]
    state["files"] = [folder.name(path) for status in STATUSES for path in folder.data_files(status)]
    folder.write_state(state, check)


def refuse_open_books(folder: RunFolder, state: RunState, check: Check) -> None:
    """RuntimeError where rows are missing, or there twice: a run may not end as if it had all."""
    if not state["books"]["closed"]:
        folder.write_state(state | {"state": "interrupted"}, check)
        raise RuntimeError(f"the books do not close: {state['books']}; --resume goes on with the run")


def output_schema(plan: InputPlan) -> pa.Schema:
    """The columns of the data files."""
    return pa.schema([*OUTPUT_SCHEMA, *plan.extra_schema])
