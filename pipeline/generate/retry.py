"""`jobs.retry`: generates the failed rows of a finished run again, and closes the books again.

What is generated is read from the input, not from the failed rows: the fingerprint proves that it is unchanged, and a
failed row may lack its prompt, its token ids and its own sampling parameters. The rows are written aside and change
places with the failed ones in one commit (`commit`), so at no moment is a row lost. A row that fails again stays
failed, with the new reason. Left out: rows whose failure is in the input (no prompt, no text, a broken line, an id for
the second time): they can only fail again.
"""

import time
import uuid
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config import ConfigError, JobConfig, build_config
from pipeline.generate.fingerprint import compare_fingerprints
from pipeline.generate.run import (
    PlannedRun,
    RunResult,
    close_books,
    finish_run,
    first_state,
    plan_run,
    settle_rows,
    stream_rows,
    was_finished,
)
from pipeline.schema import BAD_PARAMETERS, ENGINE_ERROR, POISON_ROW, PROMPT_TOO_LONG
from pipeline.store.commit import finish_commit, start_commit
from pipeline.store.lease import Lease
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.write import write_whole
from pipeline.units import Note

RETRYABLE = frozenset({PROMPT_TOO_LONG, BAD_PARAMETERS, POISON_ROW, ENGINE_ERROR})
MAY_DIFFER = ("input.too_long", "sampling.max_new_tokens")
"""Keys of the fingerprint that a retry may change. Others (paths, actors, limits) are free."""


@dataclass(frozen=True)
class RetryResult:
    run: RunResult
    tried: int
    recovered: int
    """Rows that are good now."""


def retry(path: str, given: dict[str, Any], overrides: list[str], note: Note) -> RetryResult:
    """Tries the failed rows of the run in `path` again, with what is `given` in place of its own configuration.

    `overrides`: the part of it that was said on the command line, for the record.

    ConfigError: nothing was changed. Anything else raised: the rows are as they were, or the commit is begun and the
    next `retry` or `--resume` ends it.
    """
    folder = RunFolder.open(path)
    state = folder.read_state()
    if state is None:
        raise ConfigError("", f"{path}: no run.json, so not a run folder")
    tree: dict[str, Any] = state["config"]
    for section, values in given.items():
        tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
    tree["output"] = {"path": path, "if_exists": "resume"}
    planned = plan_run(build_config(JobConfig, tree), note, index_all=True)
    assert planned.earlier is not None
    compare_fingerprints(planned.earlier, planned.fingerprint, planned.input, free=MAY_DIFFER)
    if state["state"] not in ("finished", "retrying", "committing"):
        raise ConfigError("", f"{path}: the run is {state['state']}; finish it first: jobs.generate --resume")
    session = uuid.uuid4().hex[:12]
    with Lease(folder, session, note) as lease:
        if folder.read_state() != planned.earlier:
            raise ConfigError("", f"{path}: another run has worked in this folder meanwhile; start again")
        return _execute(planned, session, overrides, lease, note)


def _execute(planned: PlannedRun, session: str, overrides: list[str], lease: Lease, note: Note) -> RetryResult:
    folder, earlier = planned.folder, planned.earlier
    assert earlier is not None
    is_finished = earlier["state"] == "finished"
    finish_commit(folder, earlier, note)
    tried = {path: count for path in folder.data_files("failed") if (count := _count_retryable(folder, path))}
    total = sum(tried.values())
    if not total:
        note(f"{folder.shown}: nothing to retry")
        if is_finished:
            return RetryResult(was_finished(planned), 0, 0)
    state = first_state(planned, session, "retrying")
    try:
        folder.write_state(state)
        folder.fence(session)
        if total:
            _generate(planned, state, total, lease, note)
            lease.check()
            _commit(folder, state, list(tried), overrides, total)
    except BaseException:
        if is_finished and "commit" not in state and lease.holds():  # nothing has happened yet
            folder.write_state(earlier | {"sessions": state["sessions"]})
        raise
    finish_commit(folder, state, note)
    state["state"] = "retrying"
    close_books(folder, state)
    if not state["books"]["closed"]:
        folder.write_state(state | {"state": "interrupted"})
        raise RuntimeError(f"the books do not close: {state['books']}; --resume goes on with the run")
    return RetryResult(finish_run(planned, state, note), total, state["retries"][-1]["ok"] if total else 0)


def _count_retryable(folder: RunFolder, path: str) -> int:
    table = pq.read_table(path, columns=["error_code"], filesystem=folder.filesystem, partitioning=None)
    return int(pc.sum(_is_retryable(table)).as_py() or 0)


def _is_retryable(table: pa.Table) -> Any:
    return pc.is_in(table["error_code"], value_set=pa.array(sorted(RETRYABLE)))


def _place(state: dict[str, Any]) -> str:
    return f"checkpoint/retry-{state['sessions'][-1]['id']}"


def _generate(planned: PlannedRun, state: dict[str, Any], total: int, lease: Lease, note: Note) -> None:
    """The rows that are tried again, into files beside the data."""
    files = [path for status in STATUSES for path in planned.folder.data_files(status)]
    plan, done = settle_rows(planned, files, note, RETRYABLE)
    left = plan.num_rows - (done.num_rows if done else 0)
    if left != total:
        raise ConfigError(
            "",
            f"{planned.folder.shown}: {left - total} rows are neither good nor failed; jobs.verify names them, "
            "jobs.generate --resume makes them again",
        )
    stream_rows(planned, plan, done, state, lease, note, _place(state))


def _commit(folder: RunFolder, state: dict[str, Any], failed: list[str], overrides: list[str], total: int) -> None:
    """Puts the new rows and the failed ones that were not tried in place of the files `failed`."""
    place, session = _place(state), state["sessions"][-1]
    counts = {status: folder.count_rows(status, place) for status in STATUSES}
    assert sum(counts.values()) == total, f"{total} rows were tried, {counts} came back"
    for number, path in enumerate(failed):
        table = pq.read_table(path, filesystem=folder.filesystem, partitioning=None)
        rest = table.filter(pc.invert(_is_retryable(table)))
        if rest.num_rows:
            name = f"{place}/status=failed/rest-{session['id']}-{number:06d}.parquet"
            write_whole(folder.filesystem, folder.root, name, rest, session["id"])
    moves = [
        [f"{place}/status={status}/{name}", f"data/status={status}/{name}"]
        for status in STATUSES
        for name in (path.rpartition("/")[2] for path in folder.data_files(status, place))
    ]
    record = {"session": session["id"], "at": time.time(), "overrides": overrides, "tried": total} | counts
    state["retries"] = [*state["retries"], record]
    start_commit(folder, state, moves, [path.removeprefix(f"{folder.root}/") for path in failed])
