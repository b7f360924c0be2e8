"""Decodes and writes the remaining rows of a run, and records in `run.json` how that ended.

The pipeline is built in `dataset` and executed in `execution`; `stopping` explains why a run ended early.
"""

import math
import time
from contextlib import suppress
from functools import partial

import ray
from ray.actor import ActorHandle

from pipeline.cluster.progress import live_progress
from pipeline.cluster.worker_records import Counts
from pipeline.config.job import WINDOW_BATCHES, JobConfig
from pipeline.estimate.early_estimate import SAMPLED_FILES, SAMPLED_ROWS, EarlyEstimate
from pipeline.estimate.forecast import Shape
from pipeline.estimate.sample import sample_rows
from pipeline.formatting import Log, count
from pipeline.generate.data_pipeline import HelperActors, PipelineSpec, build_pipeline, make_spec, rows_per_file
from pipeline.generate.execution import execute, prepare
from pipeline.generate.plan import PlannedRun
from pipeline.generate.resume import Work
from pipeline.generate.row_accounting import expected_ids, output_schema, reconcile
from pipeline.generate.stopping import Deadline, DeadlinePassed, check_budget, early_limit, log_if_full, reason_to_stop
from pipeline.input.ids import row_keys
from pipeline.report.collector import start_collector
from pipeline.stages.attempt_tracker import start_attempt_tracker
from pipeline.stages.work_stealing import start_steal_queue
from pipeline.store.lease import Lease
from pipeline.store.quarantine import Quarantine, read_quarantine, write_quarantine
from pipeline.store.row_writer import RunSink
from pipeline.store.run_folder import RunFolder
from pipeline.store.run_state import RunState

SLOW_READ_BYTES_S = 10e6  # of input; 60 MB/s on a disk
RECORDS_TIMEOUT_S = 2
FLUSH_TIMEOUT_S, HURRIED_FLUSH_TIMEOUT_S = 60, 1  # the second: after a signal


def stream_rows(
    planned: PlannedRun, work: Work, state: RunState, lease: Lease, log: Log, deadline: Deadline | None = None
) -> None:
    """Decodes all remaining rows, and records in `run.json` how that ended, successfully or not. Raises
    DeadlinePassed if `deadline` passes before."""
    deadline = deadline or Deadline(None)
    folder, session = planned.folder, state["sessions"][-1]["id"]
    spec, expected = make_spec(planned, work), expected_ids(planned, work.plan)
    _note_start(planned, work, spec, log)
    estimate = _start_estimate(planned, work, spec, log)
    is_retry = work.subfolder != "data"  # its rows have failed already, so their number cannot grow
    max_failures = math.inf if is_retry else early_limit(planned.config.limits.max_failed_rows, planned.input.num_rows)
    failed = 0 if is_retry else folder.count_rows("failed")
    sessions = [] if is_retry else [one["id"] for one in state["sessions"]]  # a retry tries such rows again
    quarantine = read_quarantine(folder, sessions, planned.config.limits.max_row_attempts)
    if quarantine.rows or quarantine.prompts:
        found = f"{count(len(quarantine.rows), 'row')} and {count(len(quarantine.prompts), 'prompt')}"
        log(f"quarantine: {found} killed workers in earlier sessions, and are not tried again")
    helpers = _start_helpers(planned, work, spec, session, max_failures, failed, quarantine)
    try:
        check_budget(failed, max_failures)
        sink = _make_sink(spec, folder, session, work)
        prepare(
            keep_workers=helpers.steal_queue is not None,
            no_progress_timeout_s=window_limit_s(planned.config, has_gpu=bool(planned.pool.num_gpus))
            + skipping_s(work),
        )
        on_counts = partial(_update_estimate, estimate, helpers.collector)
        with deadline, live_progress(helpers.collector, work.num_left, log, on_counts):
            execute(build_pipeline(spec, sink, helpers))
            _await_records(helpers.collector, work.num_left)
        _name_sick_workers(helpers.attempts, log)
    except BaseException as error:
        lease.check()  # if another process has taken the folder over, run.json is not ours to write
        state["state"] = "expired" if deadline.has_passed else "interrupted"
        with log_if_full(folder, log):
            folder.write_state(state, lease.check)  # at once: the process may be killed soon
            flush_timeout_s = FLUSH_TIMEOUT_S if isinstance(error, Exception) else HURRIED_FLUSH_TIMEOUT_S
            _end_session(folder, state, helpers.collector, flush_timeout_s, expected, lease, log)
        if deadline.has_passed:
            left = planned.input.num_rows - (state["books"]["ok"] or 0) - (state["books"]["failed"] or 0)
            raise DeadlinePassed(
                f"the window of limits.window_s={planned.config.limits.window_s:g} is over, and {count(left, 'row')} "
                "are left; --resume goes on with the run"
            ) from error
        reason = reason_to_stop(error, helpers.attempts, folder.shown)
        if reason is error:
            raise
        raise reason from error
    if estimate is not None and estimate.found is not None and len(state["sessions"]) == 1:
        state["estimate"] = estimate.found
    _end_session(folder, state, helpers.collector, FLUSH_TIMEOUT_S, expected, lease, log)


def _name_sick_workers(attempts: ActorHandle, log: Log) -> None:
    """Says which workers sat out, and why."""
    with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):  # the rows are there all the same
        for line in ray.get(attempts.sitting_out.remote(), timeout=RECORDS_TIMEOUT_S):
            log(f"workers: {line}; others decoded its rows")


def _await_records(collector: ActorHandle, num_rows: int) -> None:
    """Waits until the collector has heard of all rows: workers send their records and do not wait for them."""
    ends_at = time.monotonic() + RECORDS_TIMEOUT_S
    with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):  # figures only
        while ray.get(collector.counts.remote(), timeout=RECORDS_TIMEOUT_S)["rows"] < num_rows:
            if time.monotonic() > ends_at:
                return
            time.sleep(0.05)


def _start_estimate(planned: PlannedRun, work: Work, spec: PipelineSpec, log: Log) -> EarlyEstimate | None:
    """An estimate from a sample; None if the remaining rows are no fair sample of the input, or cannot be read, or an
    endpoint decodes them."""
    if work.num_done or work.subfolder != "data" or planned.endpoint is not None:  # no pace of its own there
        return None
    sampling, actors = spec.tokenize.sampling, planned.config.actors
    shape = Shape(
        rows=work.num_left,
        window_rows=spec.window_rows,
        actors=planned.pool.max_size,
        baseline_fraction=planned.config.baseline.fraction,
        max_new_tokens=sampling.max_new_tokens,
    )
    try:
        sample = sample_rows(work.plan, spec.input, spec.prompter, spec.tokenize, sampling, SAMPLED_ROWS, SAMPLED_FILES)
    except Exception as error:  # the run itself reports what is wrong with its rows; here only figures are lost
        log(f"estimate: none, since the first rows could not be looked at ({error})")
        return None
    if not sample.requests:  # all fail, or templates are slow
        return None
    return EarlyEstimate(sample, shape, actors.price_per_hour, log)


def _update_estimate(estimate: EarlyEstimate | None, collector: ActorHandle, counts: Counts) -> None:
    if estimate is not None and estimate.is_ready(counts["rows"]):
        with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):  # figures only
            estimate.log_once(ray.get(collector.pace.remote(), timeout=10))


def window_limit_s(config: JobConfig, *, has_gpu: bool) -> float:
    """Seconds that a window may take: `limits.no_progress_timeout_s`, and more where windows are large by default."""
    large = config.actors.batches_of_window(has_gpu=has_gpu) if config.actors.window_batches == "auto" else 0
    return config.limits.no_progress_timeout_s * max(1.0, large / WINDOW_BATCHES)


def skipping_s(work: Work) -> float:
    """Seconds that a reader may take until its first row: a file that is almost done shows no progress while it is
    read."""
    if work.done is None:
        return 0.0
    shares = zip(work.done.num_rows_per_file, work.plan.num_rows_per_file, work.plan.num_bytes_per_file, strict=True)
    return max((num_bytes * done / max(count, 1) / SLOW_READ_BYTES_S for done, count, num_bytes in shares), default=0.0)


def _note_start(planned: PlannedRun, work: Work, spec: PipelineSpec, log: Log) -> None:
    low, high = planned.pool.min_size, planned.pool.max_size
    pool = count(low, "actor") if low == high else f"{low}..{high} actors"
    if planned.endpoint is not None:
        pool = f"{count(planned.endpoint.num_replicas, 'replica')} of the endpoint, {count(low, 'window')} at a time"
    log(
        f"decode: {pool}, {spec.window_rows} rows at a time, "
        f"{planned.model.decode}; {work.num_left} rows to do" + (f", {work.num_done} done" if work.num_done else "")
    )


def _start_helpers(
    planned: PlannedRun,
    work: Work,
    spec: PipelineSpec,
    session: str,
    max_failures: float,
    failed: int,
    quarantine: Quarantine,
) -> HelperActors:
    folder, actors = planned.folder, planned.config.actors
    save = partial(write_quarantine, folder, session)
    shares = actors.share_leftovers and planned.pool.max_size > 1 and planned.endpoint is None
    return HelperActors(
        start_collector(folder.filesystem, folder.root, session, work.num_left),
        start_attempt_tracker(
            planned.config.limits.max_row_attempts,
            spec.window_rows,
            max_failures,
            failed,
            quarantine,
            save,
            num_workers=planned.pool.min_size,
            may_sit_out=shares,
        ),
        start_steal_queue() if shares else None,
    )


def _make_sink(spec: PipelineSpec, folder: RunFolder, session: str, work: Work) -> RunSink:
    rows = rows_per_file(work.num_left, spec.window_rows)
    schema = output_schema(spec.plan, spec.tokenize.asked_schema)
    return RunSink(folder.filesystem, folder.root, session, schema, rows, work.subfolder, row_keys=row_keys)


def _end_session(
    folder: RunFolder,
    state: RunState,
    collector: ActorHandle,
    flush_timeout_s: float,
    expected: int | None,
    lease: Lease,
    log: Log,
) -> None:
    """Collects the last figures, which may fail without harm to the run, and counts the rows."""
    try:
        ray.get(collector.flush.remote(), timeout=flush_timeout_s)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        log(f"metrics: the collector is gone, the report lacks its last figures ({type(error).__name__})")
    state["sessions"][-1]["ended_at"] = time.time()
    reconcile(folder, state, lease.check, expected)
