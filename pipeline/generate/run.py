"""One run from configuration to report: plan, decode what is left, reconcile, report.

A session is one execution of a command on a run folder. It holds the folder's lease, so that no two sessions work there
at a time, and begins with a fence, after which no writer of an earlier session can add a file. Once decoding has
started, a bad row is recorded as failed and never stops the run. Not here: the checks before the start (`plan`) and the
decoding itself (`stream`).
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config.job import ConfigError, JobConfig
from pipeline.fault_injection import fault_point
from pipeline.formatting import Log
from pipeline.generate.fingerprint import compare_fingerprints
from pipeline.generate.openai_batch import write_batch_files
from pipeline.generate.plan import PlannedRun, plan_run
from pipeline.generate.resume import find_work, refuse_unattributed, remove_late
from pipeline.generate.row_accounting import expected_ids, first_state, reconcile, refuse_unreconciled
from pipeline.generate.stopping import Deadline, allowed_failures, no_space_left
from pipeline.generate.stream import stream_rows
from pipeline.report.figures import finish_report
from pipeline.stages.endpoint_model import EndpointName
from pipeline.store.lease import Lease
from pipeline.store.retry_commit import finish_commit
from pipeline.store.row_writer import DISK_FULL
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.run_state import RunState


@dataclass(frozen=True)
class RunResult:
    report: dict[str, Any]
    """`report.json`; only row counts if the report could not be made."""
    folder: RunFolder
    failures_allowed: int
    """Rows that may fail, by `limits.max_failed_rows`."""
    was_finished: bool = False

    @property
    def too_many_failed(self) -> bool:
        return bool(self.report["failed"] > self.failures_allowed)


def run(
    config: JobConfig,
    log: Log,
    check_may_start: Callable[[], None] = lambda: None,
    endpoint: EndpointName | None = None,
) -> RunResult:
    """Generates the corpus that `config` asks for.

    Raises ConfigError if nothing was started; any other exception means that the run failed midway. `check_may_start`
    is called when this run holds the folder and has changed nothing yet, and raises ConfigError if it may not begin.
    `endpoint`: decodes the rows, if it serves the same model.
    """
    deadline = Deadline(config.limits.window_s)
    planned = plan_run(config, log, endpoint=endpoint)
    if planned.earlier is not None:
        compare_fingerprints(planned.earlier, planned.fingerprint, planned.input)
        if planned.is_finished:
            log(f"{planned.folder.shown}: finished before, nothing to do")
            return result_of_finished(planned)
    session = uuid.uuid4().hex[:12]
    try:
        with Lease(planned.folder, session, log) as lease:
            is_overwritten = config.output.if_exists == "overwrite"
            earlier_sessions = _earlier_sessions(planned.folder, planned.earlier, lease, is_overwritten)
            check_may_start()
            return _run_session(planned, session, earlier_sessions, lease, log, deadline)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise no_space_left(planned.folder.shown) from error


def _earlier_sessions(folder: RunFolder, earlier: RunState | None, lease: Lease, is_overwritten: bool) -> list[str]:
    """The sessions before this run whose writers may still be alive; ConfigError if the run that is there is not
    `earlier` any more, unless it is overwritten."""
    earlier_sessions = [] if lease.previous_session is None else [lease.previous_session]
    if is_overwritten:
        return earlier_sessions + _sessions_of_any(folder)
    if folder.read_state() != earlier:
        raise ConfigError("output.path", f"another run has worked in {folder.shown} meanwhile; start again")
    return earlier_sessions


def _sessions_of_any(folder: RunFolder) -> list[str]:
    """The sessions of the run that is there, whatever version made it: their writers may still be alive."""
    old = folder.read_any_state()
    return [*old.get("former", []), *(one["id"] for one in old["sessions"])] if old else []


def _run_session(
    planned: PlannedRun,
    session: str,
    earlier_sessions: list[str],
    lease: Lease,
    log: Log,
    deadline: Deadline | None = None,
) -> RunResult:
    folder, earlier = planned.folder, planned.earlier
    if earlier is not None:
        finish_commit(folder, earlier, log, lease.check)
    state = first_state(planned, session, "running", earlier_sessions)
    if earlier is None:
        folder.write_state(state, lease.check)  # before any other file: a folder without it cannot be resumed
    folder.fence(session, lease.check)
    if planned.config.output.if_exists == "overwrite":
        # whoever takes over counts no file of the old run by now, so none that is deleted late
        folder.clear(session, lease.check)
    if earlier is not None:
        remove_late(folder, earlier, lease.check, log)
        folder.remove_empty(lease.check, log)
    refuse_unattributed(folder, state)
    known = [] if earlier is None else folder.run_files(earlier)
    state["known"] = [folder.name(path) for path in known]
    work = find_work(planned, known, log)
    folder.write_state(state, lease.check)
    if work.num_left:
        stream_rows(planned, work, state, lease, log, deadline)
    remove_late(folder, state, lease.check, log)
    reconcile(folder, state, lease.check, expected_ids(planned, work.plan))
    refuse_unreconciled(folder, state, lease.check)
    return finish_run(planned, state, lease, log)


def finish_run(planned: PlannedRun, state: RunState, lease: Lease, log: Log) -> RunResult:
    """Writes the report and the batch files once the data files are complete, and marks the run finished."""
    folder, session = planned.folder, state["sessions"][-1]
    session["ended_at"] = session["ended_at"] or time.time()
    lease.check()
    if planned.input.listing.format == "openai_batch":
        samples, created = planned.config.sampling.n, int(planned.started_at)
        model_name = planned.config.output.model_name or planned.model.source
        paths = {status: folder.run_files(state, [status]) for status in STATUSES}
        state["answers"] = write_batch_files(folder, paths, model_name, created, lease.check, samples)
    report = finish_report(folder, state | {"state": "finished"}, log, lease.check)
    lease.check()
    fault_point("leaving")
    folder.release(session["id"])
    for name in folder.quarantine_files():  # those rows are in data/ by now
        lease.check()
        folder.remove(name)
    state.pop("known", None)
    folder.write_state(
        state | {"state": "finished", "report": report}, lease.check
    )  # last: a finished run has everything
    return _result(planned, report)


def result_of_finished(planned: PlannedRun) -> RunResult:
    """The result of a run that is done already."""
    assert planned.earlier is not None
    return _result(planned, planned.earlier["report"], was_finished=True)


def _result(planned: PlannedRun, report: dict[str, Any], was_finished: bool = False) -> RunResult:
    allowed = allowed_failures(planned.config.limits.max_failed_rows, report["books"]["input"])
    return RunResult(report, planned.folder, allowed, was_finished)
