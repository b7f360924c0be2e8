"""Row accounting: the `run.json` that a session begins with, and the reconciliation of rows in and rows out.

`store.run_folder` writes it; the report is made by `report.figures`.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa

from pipeline.generate.fingerprint import list_files
from pipeline.generate.plan import PlannedRun
from pipeline.generate.row_index import sum_duplicates
from pipeline.generate.stage_config import asked_of
from pipeline.input.ids import ID_MODULUS
from pipeline.input.input_plan import InputPlan
from pipeline.report.figures import last_sign_of_life
from pipeline.schema import CHOICE, OUTPUT_SCHEMA, list_columns
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.run_state import Phase, RunState, Session
from skipdecode import __version__

Check: TypeAlias = Callable[[], None]
"""`Lease.check`: raises where the folder is another session's."""


def first_state(planned: PlannedRun, session: str, phase: Phase, earlier_sessions: Sequence[str] = ()) -> RunState:
    """`run.json` at the start of a session. `earlier_sessions`: those that no earlier state names.

    No data file is `known` yet; the caller adds those of the earlier state.
    """
    earlier = planned.earlier
    began = time.time() if earlier else planned.started_at
    before = earlier["former"] if earlier else []
    return {
        "version": __version__,
        "state": phase,
        "fingerprint": earlier["fingerprint"] if earlier else planned.fingerprint,
        "config": earlier["config"] if earlier else planned.config.model_dump(mode="json"),
        "model": {
            "source": planned.model.source,
            "adapter": planned.config.model.adapter,
            "layers": planned.model.config.num_hidden_layers,
            "implementation": planned.model.config.implementation,
            "quantization": planned.config.model.quantization,
            "kv_cache_dtype": planned.config.model.kv_cache_dtype,
        },
        "decode": planned.model.decode,
        "input": {
            "format": planned.input.listing.format,
            "files": list_files(planned.input),
            "documents": planned.input.num_documents,
        },
        "columns": list_columns(output_schema(planned.input, asked_of(planned.config))),
        "sessions": [*_ended(planned.folder, earlier), {"id": session, "started_at": began, "ended_at": None}],
        "retries": earlier["retries"] if earlier else [],
        "books": {"input": planned.input.num_rows, "ok": None, "failed": None, "closed": False},
        "former": list(dict.fromkeys([*before, *earlier_sessions])),
        "known": [],
    }


def _ended(folder: RunFolder, earlier: RunState | None) -> list[Session]:
    """The sessions so far; one that was killed lived at least until its last record."""
    sessions = earlier["sessions"] if earlier else []
    for session in sessions:
        if session["ended_at"] is None:
            session["ended_at"] = last_sign_of_life(folder, session)
    return sessions


def reconcile(folder: RunFolder, state: RunState, check: Check, expected: int | None) -> None:
    """Counts the rows in the data files and writes the result into `run.json`; `check` is called before that.

    Rows are accounted for (`books.closed`) if there are as many as in the input, with the same sum of ids: `expected`
    (None: not known). So a row that is lost and another that is there twice do not cancel out.
    """
    folder.remove_empty(check)  # what came late, or of a writer that was stopped with us
    if unknown := folder.unattributed_files(state):
        raise RuntimeError(f"{unknown[0]}: no session of this run wrote it; move it away, and --resume goes on")
    books, files = state["books"], folder.read_files(folder.run_files(state))
    if unsaid := [name for name, (_, ids) in files.items() if not ids]:
        raise RuntimeError(
            f"{folder.path(unsaid[0])}: not as a run wrote it; delete it, and --resume makes its rows again"
        )
    counts = {status: sum(int(files[name][0]) for name in files if f"/status={status}/" in name) for status in STATUSES}
    output = sum(int(str(ids), 16) for _, ids in files.values()) % ID_MODULUS
    books["ok"], books["failed"] = counts["ok"], counts["failed"]
    books["closed"] = sum(counts.values()) == books["input"] and expected in (None, output)
    state["files"] = files
    state["ids"] = {"input": None if expected is None else f"{expected:032x}", "output": f"{output:032x}"}
    folder.write_state(state, check)


def expected_ids(planned: PlannedRun, plan: InputPlan) -> int | None:
    """The sum of the ids that the data files must have; None where it is not known. `plan` has its duplicates."""
    return None if planned.id_sum is None else (planned.id_sum + sum_duplicates(plan)) % ID_MODULUS


def refuse_unreconciled(folder: RunFolder, state: RunState, check: Check) -> None:
    """RuntimeError if rows are missing or doubled: such a run may not end as finished."""
    if not state["books"]["closed"]:
        folder.write_state(state | {"state": "interrupted"}, check)
        raise RuntimeError(
            f"the books do not close: {state['books']}, ids {state.get('ids')}; --resume goes on with the run"
        )


def output_schema(plan: InputPlan, asked: pa.Schema) -> pa.Schema:
    """The columns of the data files; `asked`: those that the configuration asks for."""
    choice = [pa.field(CHOICE, pa.string())] if plan.has_choices else []
    return pa.schema([*OUTPUT_SCHEMA, *asked, *choice, *plan.carried_schema])
