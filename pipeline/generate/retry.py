"""`jobs.retry`: generates the failed rows of a finished run again, and reconciles the rows again.

Prompts are read from the input, not from the failed rows: the fingerprint proves that it is unchanged, and a failed row
may lack its prompt, its token ids and its own sampling parameters. The new rows are written to a separate folder and
replace the failed ones in one commit (`store.retry_commit`), so no row is ever lost. A row that fails again stays
failed, with the new reason. Rows that failed because of the input (no prompt, no text, a broken line, a duplicate id)
are not tried, since they would fail again.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.config.input import stored_input
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.formatting import Json, Log
from pipeline.generate.fingerprint import compare_fingerprints
from pipeline.generate.plan import PlannedRun, plan_run
from pipeline.generate.resume import find_work, refuse_unattributed, remove_late
from pipeline.generate.row_accounting import expected_ids, first_state, reconcile, refuse_unreconciled
from pipeline.generate.run import RunResult, finish_run, result_of_finished
from pipeline.generate.stream import stream_rows
from pipeline.input.ids import sum_outputs
from pipeline.input.input_plan import InputPlan
from pipeline.schema import BAD_PARAMETERS, ENGINE_ERROR, POISON_ROW, PROMPT_TOO_LONG
from pipeline.store.lease import Lease
from pipeline.store.retry_commit import finish_commit, start_commit
from pipeline.store.row_writer import write_whole
from pipeline.store.run_folder import STATUSES, RunFolder, id_metadata
from pipeline.store.run_state import RetryState, RunState

RETRYABLE = frozenset({PROMPT_TOO_LONG, BAD_PARAMETERS, POISON_ROW, ENGINE_ERROR})
MAY_DIFFER = ("input.too_long", "sampling.max_new_tokens")
"""Keys of the fingerprint that a retry may change. Others (paths, actors, limits) are free."""


@dataclass(frozen=True)
class RetryResult:
    run: RunResult
    tried: int
    recovered: int
    """Rows that are good now."""


def retry(path: str, given: Mapping[str, Json], overrides: list[str], log: Log) -> RetryResult:
    """Tries the failed rows of the run in `path` again. `given` overrides the configuration of the run.

    `overrides`: the part of it from the command line, for the record.

    Raises ConfigError if nothing was changed. After any other exception the rows are as before, or the commit has begun
    and the next `retry` or `--resume` completes it.
    """
    folder = RunFolder.open(path)
    state = folder.read_state()
    if state is None:
        raise ConfigError("", f"{path}: no run.json, so not a run folder")
    planned = plan_run(build_config(JobConfig, _own_config(state, given, path)), log, index_all=True)
    assert planned.earlier is not None
    compare_fingerprints(planned.earlier, planned.fingerprint, planned.input, free=MAY_DIFFER)
    if state["state"] not in ("finished", "retrying", "committing"):
        raise ConfigError("", f"{path}: the run is {state['state']}; finish it first: jobs.generate --resume")
    session = uuid.uuid4().hex[:12]
    with Lease(folder, session, log) as lease:
        if folder.read_state() != planned.earlier:
            raise ConfigError("", f"{path}: another run has worked in this folder meanwhile; start again")
        return _execute(planned, session, overrides, lease, log)


def _own_config(state: RunState, given: Mapping[str, Json], path: str) -> dict[str, Json]:
    """The configuration of the run, overridden by `given`."""
    tree: dict[str, Json] = {**state["config"], "input": stored_input(state["config"]["input"])}
    for section, values in given.items():
        before = tree.get(section) or {}
        tree[section] = before | values if isinstance(before, dict) and isinstance(values, dict) else values
    return tree | {"output": {"path": path, "if_exists": "resume"}}


def _execute(planned: PlannedRun, session: str, overrides: list[str], lease: Lease, log: Log) -> RetryResult:
    folder, earlier = planned.folder, planned.earlier
    assert earlier is not None
    is_finished = earlier["state"] == "finished"
    finish_commit(folder, earlier, log, lease.check)
    remove_late(folder, earlier, lease.check, log)
    folder.remove_empty(lease.check, log)
    known = folder.run_files(earlier)
    failed = folder.run_files(earlier, ["failed"])
    tried = {path: count for path in failed if (count := _count_retryable(folder, path))}
    total = sum(tried.values())
    if not total:
        log(f"{folder.shown}: nothing to retry")
        if is_finished:
            folder.fence(session, lease.check)  # a retry that died may have left files, or an upload of it came late
            folder.release(session)
            return RetryResult(result_of_finished(planned), 0, 0)
    state = first_state(
        planned, session, "retrying", [] if lease.previous_session is None else [lease.previous_session]
    )
    refuse_unattributed(folder, state)
    state["known"] = [folder.name(path) for path in known]
    expected: int | None = None
    try:
        folder.write_state(state, lease.check)
        folder.fence(session, lease.check)
        if total:
            expected = expected_ids(planned, _generate(planned, state, known, total, lease, log))
            lease.check()
            _commit(folder, state, list(tried), overrides, total, lease)
        else:  # it ends what was cut off, and closes the books
            expected = expected_ids(planned, find_work(planned, known, log).plan)
    except BaseException:
        if is_finished and "commit" not in state and lease.holds():  # nothing has happened yet
            folder.write_state(earlier | {"sessions": state["sessions"]}, lease.check)
        raise
    finish_commit(folder, state, log, lease.check)
    remove_late(folder, state, lease.check, log)
    state["state"] = "retrying"
    reconcile(folder, state, lease.check, expected)
    refuse_unreconciled(folder, state, lease.check)
    return RetryResult(finish_run(planned, state, lease, log), total, state["retries"][-1]["ok"] if total else 0)


def _count_retryable(folder: RunFolder, path: str) -> int:
    table = pq.read_table(path, columns=["error_code"], filesystem=folder.filesystem, partitioning=None)
    return int(pc.sum(_is_retryable(table)).as_py() or 0)


def _is_retryable(table: pa.Table) -> pa.ChunkedArray:
    return pc.is_in(table["error_code"], value_set=pa.array(sorted(RETRYABLE)))


def _retry_folder(state: RunState) -> str:
    return f"checkpoint/retry-{state['sessions'][-1]['id']}"


def _generate(planned: PlannedRun, state: RunState, files: list[str], total: int, lease: Lease, log: Log) -> InputPlan:
    """Decodes the rows to retry again, into files outside `data/`; returns the plan with its duplicates.

    `files`: the data files of the run.
    """
    work = find_work(planned, files, log, without_codes=RETRYABLE, subfolder=_retry_folder(state))
    if work.num_left != total:
        raise ConfigError(
            "",
            f"{planned.folder.shown}: {work.num_left - total} rows are neither good nor failed; jobs.verify names "
            "them, jobs.generate --resume makes them again",
        )
    stream_rows(planned, work, state, lease, log)
    return work.plan


def _commit(
    folder: RunFolder, state: RunState, failed: list[str], overrides: list[str], total: int, lease: Lease
) -> None:
    """Puts the new rows and the failed ones that were not tried in place of the files `failed`."""
    subfolder, session = _retry_folder(state), state["sessions"][-1]
    made = folder.one_attempt_each([path for status in STATUSES for path in folder.data_files(status, subfolder)])
    rows = {name: int(count) for name, (count, _) in folder.read_files(made).items()}
    ok = sum(count for name, count in rows.items() if "/status=ok/" in name)
    still_failed = sum(rows.values()) - ok
    assert ok + still_failed == total, f"{total} rows were tried, {ok} good and {still_failed} failed came back"
    for number, path in enumerate(failed):
        table = pq.read_table(path, filesystem=folder.filesystem, partitioning=None)
        rest = table.filter(pc.invert(_is_retryable(table)))
        if rest.num_rows:
            name = f"{subfolder}/status=failed/rest-{session['id']}-{number:06d}.parquet"
            rest = rest.replace_schema_metadata(id_metadata(sum_outputs(rest)))
            write_whole(folder.filesystem, folder.root, name, rest, session["id"])
            rows[name] = rest.num_rows
    moves = [[name, f"data{name.removeprefix(subfolder)}"] for name in sorted(rows)]
    record: RetryState = {
        "session": session["id"],
        "at": time.time(),
        "overrides": overrides,
        "tried": total,
        "ok": ok,
        "failed": still_failed,
    }
    state["retries"] = [*state["retries"], record]
    start_commit(folder, state, moves, [path.removeprefix(f"{folder.root}/") for path in failed], lease.check)
