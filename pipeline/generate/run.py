"""One run from configuration to closed books: check everything, start, decode, report.

Reads from top to bottom. Everything that can be known before the start is checked before the start (`ConfigError`, exit
code 2). After the start a bad row is a failed row.
"""

import math
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import ray
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
)

from pipeline.checkpoint import Model, check_model, check_quantization, resolve_dtype
from pipeline.cluster import Pool, find_pool, start_ray
from pipeline.config import ConfigError, JobConfig
from pipeline.console import live_progress
from pipeline.generate.backpressure import FewBlocksAhead
from pipeline.generate.dataset import PipelineSpec, build_pipeline
from pipeline.generate.ending import (
    allowed_failures,
    check_budget,
    early_limit,
    note_if_full,
    reason_to_stop,
    stop_on_sigterm,
)
from pipeline.generate.fingerprint import compare_fingerprints, fingerprint, list_files
from pipeline.generate.openai_batch import write_batch_files
from pipeline.generate.places import check_apart, check_output
from pipeline.generate.row_index import index_outputs, mark_rows, match_rows, scan_input
from pipeline.generate.spec import make_spec
from pipeline.generate.waiting import WaitForTasks
from pipeline.input.files import list_input
from pipeline.input.match import DoneRows
from pipeline.input.plan import InputPlan, plan_input
from pipeline.ray_noise import hide_restart_warnings
from pipeline.report.collector import start_collector
from pipeline.report.figures import finish_report, last_sign_of_life
from pipeline.schema import OUTPUT_SCHEMA, list_columns
from pipeline.stages.attempts import start_ledger
from pipeline.stages.leftovers import KeepWorkers, start_leftovers
from pipeline.store.commit import finish_commit
from pipeline.store.lease import Lease
from pipeline.store.run_folder import STATUSES, RunFolder
from pipeline.store.write import RunSink
from pipeline.units import Note

FLUSH_TIMEOUT_S, HURRIED_FLUSH_TIMEOUT_S = 60, 1  # the second: after a signal

MAX_FILES = 10_000  # output files of one status, for large corpora; more where Ray cuts windows (above 12 MiB)

BLOCK_BYTES = 8 << 20  # Ray joins blocks up to this before the next stage sees them; 128 MiB would delay the first row


@dataclass(frozen=True)
class RunResult:
    report: dict[str, Any]
    folder: RunFolder
    too_many_failed: bool
    was_finished: bool = False


@dataclass(frozen=True)
class PlannedRun:
    """A run that was found possible."""

    config: JobConfig
    model: Model
    dtype: str
    folder: RunFolder
    earlier: dict[str, Any] | None
    """`run.json` of the run to resume."""
    input: InputPlan
    entries: list[Any]
    """Of the input's rows (`row_index`); empty if nothing has to be looked up."""
    pool: Pool
    fingerprint: dict[str, Any]
    is_finished: bool
    """The run in the folder was finished before, and its files are there still."""


def run(config: JobConfig, note: Note) -> RunResult:
    """Generates the corpus that `config` asks for. ConfigError: nothing was started. Anything else raised: it broke."""
    planned = plan_run(config, note)
    if planned.earlier is not None:
        compare_fingerprints(planned.earlier, planned.fingerprint, planned.input)
        if planned.is_finished:
            note(f"{planned.folder.shown}: finished before, nothing to do")
            return was_finished(planned)
    session = uuid.uuid4().hex[:12]
    with Lease(planned.folder, session, note) as lease:
        if config.output.if_exists == "overwrite":
            planned.folder.fence(session)  # first: a writer of the old run must not add to the new one
            planned.folder.clear()
        elif planned.folder.read_state() != planned.earlier:
            raise ConfigError("output.path", f"another run has worked in {planned.folder.shown} meanwhile; start again")
        return _execute(planned, session, lease, note)


def was_finished(planned: PlannedRun) -> RunResult:
    assert planned.earlier is not None
    return _result(planned, planned.earlier["report"], was_finished=True)


def plan_run(config: JobConfig, note: Note, index_all: bool = False) -> PlannedRun:
    """Checks model, output, input and cluster, cheapest first; starts Ray, and nothing else.

    `index_all`: so that single rows can be looked up, as a resume must.
    """
    model = check_model(config, note)
    folder = RunFolder.open(config.output.path)
    earlier = check_output(folder, config)
    listing = list_input(config.input)
    check_apart(folder, listing)
    cluster = start_ray()
    stop_on_sigterm()
    note(f"ray: {cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs" + (" (embedded)" if cluster.is_embedded else ""))
    pool = find_pool(config.actors, cluster)
    device = "cuda" if pool.num_gpus else "cpu"
    dtype = resolve_dtype(config.model.dtype, device)
    check_quantization(config.model.quantization, model.config, dtype, device, is_here=cluster.is_embedded)
    is_finished = earlier is not None and earlier["state"] == "finished" and has_all_rows(folder, earlier, note)
    is_open = earlier is not None and not is_finished
    scans, entries = scan_input(listing, config.input, index_all or is_open, note)
    plan = plan_input(listing, scans, config.input)
    note(f"input: {plan.num_rows} rows in {len(listing.files)} {listing.format} files")
    prints = fingerprint(config, model.decode, model.folder, dtype, plan)
    return PlannedRun(config, model, dtype, folder, earlier, plan, entries, pool, prints, is_finished)


def has_all_rows(folder: RunFolder, state: dict[str, Any], note: Note) -> bool:
    """Whether a finished run has its report, and data files that count what its books say."""
    try:
        there = {status: folder.count_rows(status) for status in STATUSES}
    except (OSError, pa.ArrowException):
        return False  # a torn file; who reads the rows names it
    books = {status: state["books"][status] for status in STATUSES}
    if books != there:
        note(f"{folder.shown}: finished before, but its data files hold {there} rows now, and its books say {books}")
    return books == there and folder.read_text("report.json") is not None


def _execute(planned: PlannedRun, session: str, lease: Lease, note: Note) -> RunResult:
    folder = planned.folder
    if planned.earlier is not None:
        finish_commit(folder, planned.earlier, note)
    state = first_state(planned, session, "running")
    if planned.earlier is None:
        folder.write_state(state)  # before anything else lies there: a folder without it cannot be resumed
    last = folder.read_known() if planned.earlier else (session, [])
    folder.fence(session)
    if last is not None:
        remove_late(folder, *last, note)
    known = [path for status in STATUSES for path in folder.data_files(status)]
    folder.write_known(session, known)
    plan, done = settle_rows(planned, known, note)
    folder.write_state(state)
    left = plan.num_rows - (done.num_rows if done else 0)
    if left:
        stream_rows(planned, plan, done, state, lease, note)
    lease.check()
    remove_late(folder, session, known, note)
    close_books(folder, state)
    if not state["books"]["closed"]:
        folder.write_state(state | {"state": "interrupted"})
        raise RuntimeError(f"the books do not close: {state['books']}; --resume goes on with the run")
    return finish_run(planned, state, note)


def remove_late(folder: RunFolder, session: str, known: list[str], note: Note) -> None:
    for path in folder.remove_late(session, known):
        note(f"{path}: removed; a writer of an earlier session was late, and its rows are made again")


def settle_rows(
    planned: PlannedRun, data_files: list[str], note: Note, without_codes: frozenset[str] = frozenset()
) -> tuple[InputPlan, DoneRows | None]:
    """The plan with its duplicates, and the rows that data files have; those with `without_codes` count as not done."""
    if not planned.entries:
        return planned.input, None
    num_outputs, outputs = index_outputs(planned.folder.filesystem, data_files, note, without_codes)
    matches = match_rows(planned.input, planned.entries, outputs, num_outputs)
    plan, done = mark_rows(planned.input, matches)
    if plan.num_duplicates:
        note(f"input: {plan.num_duplicates} rows have the id of an earlier one")
    return plan, done if done.num_rows else None


def stream_rows(
    planned: PlannedRun,
    plan: InputPlan,
    done: DoneRows | None,
    state: dict[str, Any],
    lease: Lease,
    note: Note,
    place: str = "data",
) -> None:
    """Decodes all rows that are not done into `place`; however it ends, `run.json` says so."""
    folder, session = planned.folder, state["sessions"][-1]
    num_done = done.num_rows if done else 0
    spec = make_spec(planned.config, planned.model, planned.dtype, plan, done, planned.pool)
    low, high = planned.pool.min_size, planned.pool.max_size
    note(
        f"decode: {low if low == high else f'{low}..{high}'} actors, {spec.window_rows} rows at a time, "
        f"{planned.model.decode}; {plan.num_rows - num_done} rows to do" + (f", {num_done} done" if num_done else "")
    )
    limits = planned.config.limits
    collector = start_collector(folder.filesystem, folder.root, session["id"], plan.num_rows - num_done)
    is_retry = place != "data"  # of rows that have failed already: there cannot be more of them
    ends_at = math.inf if is_retry else early_limit(limits.max_failed_rows, planned.input.num_rows)
    failed = 0 if is_retry else folder.count_rows("failed")
    ledger = start_ledger(limits.max_row_attempts, spec.window_rows, ends_at, failed)
    shares = planned.config.actors.share_leftovers and high > 1
    leftovers = start_leftovers() if shares else None
    try:
        check_budget(failed, ends_at)
        sink = _make_sink(spec, folder, session["id"], plan.num_rows - num_done, place)
        helpers = (collector, ledger, leftovers)
        with live_progress(collector, plan.num_rows - num_done, note):
            _stream(spec, sink, helpers, limits.no_progress_timeout_s)
    except BaseException as error:
        lease.check()  # whoever has taken the folder over writes its run.json
        state["state"] = "interrupted"
        with note_if_full(folder, note):
            folder.write_state(state)  # at once: who stops a job may not wait
            flush_timeout_s = FLUSH_TIMEOUT_S if isinstance(error, Exception) else HURRIED_FLUSH_TIMEOUT_S
            _end_session(folder, state, collector, flush_timeout_s, note)
        reason = reason_to_stop(error, ledger, folder.shown)
        if reason is error:
            raise
        raise reason from error
    _end_session(folder, state, collector, FLUSH_TIMEOUT_S, note)


def _end_session(folder: RunFolder, state: dict[str, Any], collector: Any, flush_timeout_s: float, note: Note) -> None:
    _flush(collector, flush_timeout_s, note)
    state["sessions"][-1]["ended_at"] = time.time()
    close_books(folder, state)


def finish_run(planned: PlannedRun, state: dict[str, Any], note: Note) -> RunResult:
    """Everything that is made of the data files once they are complete."""
    folder, session = planned.folder, state["sessions"][-1]
    session["ended_at"] = session["ended_at"] or time.time()
    if planned.input.listing.format == "openai_batch":
        write_batch_files(folder, planned.model.source)
    report = finish_report(folder, state | {"state": "finished"}, note)
    folder.remove("checkpoint")
    folder.write_state(state | {"state": "finished", "report": report})  # last: a finished run has everything
    return _result(planned, report)


def _flush(collector: Any, timeout_s: float, note: Note) -> None:
    """Asks for the last figures; a run without them is still a run."""
    try:
        ray.get(collector.flush.remote(), timeout=timeout_s)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        note(f"metrics: the collector is gone, the report lacks its last figures ({type(error).__name__})")


def first_state(planned: PlannedRun, session: str, name: str) -> dict[str, Any]:
    """`run.json` at the start of a session; `name`: of the state."""
    earlier = planned.earlier or {}
    sessions = earlier.get("sessions", [])
    for before in sessions:
        if before["ended_at"] is None:  # killed: it lived at least until its last record
            before["ended_at"] = last_sign_of_life(planned.folder, before)
    return {
        "state": name,
        "fingerprint": earlier.get("fingerprint", planned.fingerprint),
        "config": earlier.get("config", planned.config.model_dump(mode="json")),
        "model": {
            "source": planned.model.source,
            "layers": planned.model.config.num_hidden_layers,
            "quantization": planned.config.model.quantization,
        },
        "decode": planned.model.decode,
        "input": {"format": planned.input.listing.format, "files": list_files(planned.input)},
        "columns": list_columns(output_schema(planned.input)),
        "sessions": [*sessions, {"id": session, "started_at": time.time(), "ended_at": None}],
        "retries": earlier.get("retries", []),
        "books": {"input": planned.input.num_rows, "ok": None, "failed": None, "closed": False},
    }


def output_schema(plan: InputPlan) -> pa.Schema:
    return pa.schema([*OUTPUT_SCHEMA, *plan.extra_schema])


def _make_sink(spec: PipelineSpec, folder: RunFolder, session: str, left: int, place: str) -> RunSink:
    windows_per_file = -(-left // (MAX_FILES * spec.window_rows))
    rows_per_file = windows_per_file * spec.window_rows if windows_per_file > 1 else None
    return RunSink(folder.filesystem, folder.root, session, output_schema(spec.plan), rows_per_file, place)


def _stream(spec: PipelineSpec, sink: RunSink, helpers: tuple[Any, Any, Any], no_progress_timeout_s: float) -> None:
    """Decodes and writes all rows that are left. `helpers`: collector, ledger, leftovers (or None)."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.custom_execution_callback_classes = [WaitForTasks, *([KeepWorkers] if helpers[2] is not None else [])]
    context.execution_no_progress_timeout_s = no_progress_timeout_s
    context.retried_map_errors = False  # a repeat in a task would go on with its numbers of files (`store.write`)
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, FewBlocksAhead])
    hide_restart_warnings()
    with warnings.catch_warnings():
        # a small input cannot use all the tasks it may have, and need not
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
        for _ in build_pipeline(spec, sink, *helpers).iter_internal_ref_bundles():
            pass  # nothing comes out; what Ray's writers return for each block would be kept until the end


def close_books(folder: RunFolder, state: dict[str, Any]) -> None:
    """Counts what is on disk and writes it down, whatever happened before."""
    books = state["books"]
    books["ok"], books["failed"] = folder.count_rows("ok"), folder.count_rows("failed")
    books["closed"] = books["ok"] + books["failed"] == books["input"]
    folder.write_state(state)


def _result(planned: PlannedRun, report: dict[str, Any], was_finished: bool = False) -> RunResult:
    allowed = allowed_failures(planned.config.limits.max_failed_rows, report["books"]["input"])
    return RunResult(report, planned.folder, report["failed"] > allowed, was_finished)
