"""One run from configuration to closed books: check everything, start, decode, report.

Reads from top to bottom. Everything that can be known before the start is checked before the start (`ConfigError`, exit
code 2). After the start a bad row is a failed row.
"""

import json
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from pipeline.build import PipelineSpec, build_pipeline
from pipeline.checks import Model, Note, check_apart, check_model, check_output
from pipeline.cluster import STAGE_CPUS, Pool, plan_pool, start_ray
from pipeline.config import ConfigError, JobConfig
from pipeline.input.files import list_input
from pipeline.input.plan import InputPlan, plan_input
from pipeline.input.scan import scan_file
from pipeline.metrics import start_collector
from pipeline.openai_batch import write_batch_files
from pipeline.progress import Progress
from pipeline.report import last_sign_of_life, make_report
from pipeline.report_html import render_report
from pipeline.run_folder import RunFolder, compare_fingerprints, fingerprint
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.sink import RunSink
from pipeline.spec import make_spec

FLUSH_TIMEOUT_S = 60

MAX_FILES = 10_000  # output files of one status at most, for large corpora

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
    folder: RunFolder
    earlier: dict[str, Any] | None
    """`run.json` of the run to resume."""
    input: InputPlan
    pool: Pool
    fingerprint: dict[str, Any]


def run(config: JobConfig, note: Note) -> RunResult:
    """Generates the corpus that `config` asks for. ConfigError: nothing was started. Anything else raised: it broke."""
    planned = plan_run(config, note)
    if planned.earlier is not None:
        compare_fingerprints(planned.earlier["fingerprint"], planned.fingerprint)
        if planned.earlier["state"] == "finished":
            note(f"{planned.folder.shown}: finished before, nothing to do")
            return _result(planned, planned.earlier["report"], was_finished=True)
    elif config.output.if_exists == "overwrite":
        planned.folder.clear()
    return _execute(planned, note)


def plan_run(config: JobConfig, note: Note) -> PlannedRun:
    """Checks model, output, input and cluster, cheapest first; starts Ray, and nothing else."""
    model = check_model(config, note)
    folder = RunFolder.open(config.output.path)
    earlier = check_output(folder, config)
    listing = list_input(config.input)
    check_apart(folder, listing)
    cluster = start_ray()
    note(f"ray: {cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs" + (" (embedded)" if cluster.is_embedded else ""))
    pool = plan_pool(config.actors, cluster, ray.available_resources())
    scan = ray.remote(num_cpus=STAGE_CPUS)(scan_file)
    held = ray.put(listing)
    scans = _get([scan.remote(held, index, config.input) for index in range(len(listing.files))])
    plan = plan_input(listing, scans, config.input)
    note(
        f"input: {plan.num_rows} rows in {len(listing.files)} {listing.format} files, {plan.num_duplicates} duplicates"
    )
    prints = fingerprint(config, model.decode, model.folder, plan)
    return PlannedRun(config, model, folder, earlier, plan, pool, prints)


def _execute(planned: PlannedRun, note: Note) -> RunResult:
    folder, plan = planned.folder, planned.input
    folder.remove("checkpoint/staging")
    done = np.empty(0, "S16") if planned.earlier is None else folder.done_digests()
    left = plan.num_rows - len(done)
    spec = make_spec(planned.config, planned.model, plan, done if len(done) else None, planned.pool)
    state = _first_state(planned)
    session = state["sessions"][-1]
    folder.write_state(state)
    low, high = planned.pool.min_size, planned.pool.max_size
    note(
        f"decode: {low if low == high else f'{low}..{high}'} actors, {spec.window_rows} rows at a time, "
        f"{planned.model.decode}; {left} rows to do" + (f", {len(done)} done" if len(done) else "")
    )
    collector = start_collector(folder.filesystem, folder.root, session["id"])
    try:
        if left:
            _stream(spec, folder, collector, left, planned.config.limits.no_progress_timeout_s)
    except BaseException:
        state["state"] = "interrupted"
        raise
    finally:
        _flush(collector, note)
        session["ended_at"] = time.time()
        _close_books(folder, state)
    if not state["books"]["closed"]:
        folder.write_state(state | {"state": "interrupted"})
        raise RuntimeError(f"the books do not close: {state['books']}; --resume goes on with the run")
    if plan.listing.format == "openai_batch":
        write_batch_files(folder, planned.model.source)
    report = make_report(folder, state)
    folder.write_text("report.html", render_report(report, state))
    folder.write_text("report.json", json.dumps(report, indent=2) + "\n")
    folder.write_state(state | {"state": "finished", "report": report})  # last: a finished run has everything
    return _result(planned, report)


def _flush(collector: Any, note: Note) -> None:
    """Asks for the last figures; a run without them is still a run."""
    try:
        ray.get(collector.flush.remote(), timeout=FLUSH_TIMEOUT_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        note(f"metrics: the collector is gone, the report lacks its last figures ({type(error).__name__})")


def _first_state(planned: PlannedRun) -> dict[str, Any]:
    """`run.json` at the start of a session."""
    earlier = [] if planned.earlier is None else planned.earlier["sessions"]
    for session in earlier:
        if session["ended_at"] is None:  # killed: it lived at least until its last record
            session["ended_at"] = last_sign_of_life(planned.folder, session)
    session = {"id": uuid.uuid4().hex[:12], "started_at": time.time(), "ended_at": None}
    return {
        "state": "running",
        "fingerprint": planned.fingerprint,
        "config": planned.config.model_dump(mode="json"),
        "model": {"source": planned.model.source, "layers": planned.model.config.num_hidden_layers},
        "decode": planned.model.decode,
        "sessions": [*earlier, session],
        "books": {"input": planned.input.num_rows, "ok": None, "failed": None, "closed": False},
    }


def _stream(spec: PipelineSpec, folder: RunFolder, collector: Any, left: int, no_progress_timeout_s: float) -> None:
    """Decodes and writes all rows that are left."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_no_progress_timeout_s = no_progress_timeout_s
    schema = pa.schema([*OUTPUT_SCHEMA, *spec.plan.extra_schema])
    rows_per_file = left // MAX_FILES if left > MAX_FILES * spec.window_rows else None
    sink = RunSink(folder.filesystem, folder.root, schema, rows_per_file)
    with Progress(collector, left), warnings.catch_warnings():
        # a small input cannot use all the tasks it may have, and need not
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
        build_pipeline(spec, collector).write_datasink(sink, ray_remote_args={"num_cpus": STAGE_CPUS})


def _close_books(folder: RunFolder, state: dict[str, Any]) -> None:
    """Counts what is on disk and writes it down, whatever happened before."""
    books = state["books"]
    books["ok"], books["failed"] = folder.count_rows("ok"), folder.count_rows("failed")
    books["closed"] = books["ok"] + books["failed"] == books["input"]
    folder.write_state(state)


def _result(planned: PlannedRun, report: dict[str, Any], was_finished: bool = False) -> RunResult:
    limit = planned.config.limits.max_failed_rows
    allowed = limit if isinstance(limit, int) else limit * report["books"]["input"]
    return RunResult(report, planned.folder, report["failed"] > allowed, was_finished)


def _get(refs: list[Any]) -> list[Any]:
    """Results of tasks; a ConfigError raised in one comes out as itself."""
    try:
        return list(ray.get(refs))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(str(error.cause)) from error
        raise
