"""One run from configuration to closed books: check everything, start, decode, report.

Reads from top to bottom. Everything that can be known before the start is checked before the start (`ConfigError`, exit
code 2). After the start a bad row is a failed row.
"""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from actors.generator import MAX_BATCH_ROWS, GeneratorConfig
from actors.tokenizer import OPTTokenizer
from pipeline.build import PipelineSpec, build_pipeline
from pipeline.cluster import Cluster, plan_pool, start_ray
from pipeline.config import ConfigError, JobConfig
from pipeline.input.files import list_input
from pipeline.input.plan import InputPlan, plan_input
from pipeline.input.scan import scan_file
from pipeline.metrics import start_collector
from pipeline.openai_batch import write_batch_files
from pipeline.progress import Progress
from pipeline.report import make_report
from pipeline.report_html import render_report
from pipeline.run_folder import RunFolder, compare_fingerprints, fingerprint
from pipeline.schema import OUTPUT_SCHEMA
from pipeline.sink import RunSink
from pipeline.stages import TokenizeConfig
from skipdecode.config import OPTConfig
from skipdecode.plan import Schedule, make_schedule
from skipdecode.sampling import Sampling
from skipdecode.weights import check_folder, resolve_source

MAX_FILES = 10_000  # output files of one status at most, for large corpora

BLOCK_BYTES = 8 << 20  # Ray joins blocks up to this before the next stage sees them; 128 MiB would delay the first row

Note = Callable[[str], None]
"""Takes one line for a human."""


@dataclass(frozen=True)
class Model:
    """A checkpoint that was found fit to run, and how it will be decoded."""

    folder: Path
    source: str
    """What the workers open: the folder as given when it travels with the job, else absolute."""
    config: OPTConfig
    decode: dict[str, Any]
    schedule: Schedule


@dataclass(frozen=True)
class RunResult:
    report: dict[str, Any]
    folder: RunFolder
    too_many_failed: bool
    was_finished: bool = False


def run(config: JobConfig, note: Note) -> RunResult:
    """Generates the corpus that `config` asks for. ConfigError: nothing was started. Anything else raised: it broke."""
    model = check_model(config, note)
    folder = RunFolder.open(config.output.path)
    earlier = check_output(folder, config)
    listing = list_input(config.input)
    cluster = start_ray()
    note(f"ray: {cluster.num_cpus:g} CPUs, {cluster.num_gpus:g} GPUs" + (" (embedded)" if cluster.is_embedded else ""))
    pool = plan_pool(config.actors, cluster, ray.available_resources())
    scan = ray.remote(num_cpus=0.25)(scan_file)
    held = ray.put(listing)
    scans = _get([scan.remote(held, index, config.input) for index in range(len(listing.files))])
    plan = plan_input(listing, scans, config.input)
    note(
        f"input: {plan.num_rows} rows in {len(listing.files)} {listing.format} files, {plan.num_duplicates} duplicates"
    )
    prints = fingerprint(config, model.decode, model.folder, plan)
    if earlier is not None:
        compare_fingerprints(earlier["fingerprint"], prints)
        if earlier["state"] == "finished":
            note(f"{folder.shown}: finished before, nothing to do")
            return _result(config, earlier["report"], folder, was_finished=True)
    elif config.output.if_exists == "overwrite":
        folder.clear()
    return _execute(config, model, folder, earlier, plan, prints, cluster, pool, note)


def check_model(config: JobConfig, note: Note) -> Model:
    """Finds the checkpoint, checks its files against its config, and settles the schedule; ConfigError otherwise."""
    try:
        folder = resolve_source(config.model.source)
        opt = OPTConfig.from_folder(folder)
        check_folder(folder)
        tokenizer = config.model.tokenizer
        OPTTokenizer(resolve_source(tokenizer, "model.tokenizer") if tokenizer else folder, opt)
        decode = resolve_decode(config, opt, note)
        new = config.sampling.max_new_tokens
        schedule = make_schedule(decode, num_layers=opt.num_hidden_layers, max_new_tokens=new)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if new >= opt.max_position_embeddings:
        raise ConfigError(
            f"sampling.max_new_tokens: {new} leaves no room for a prompt in the model's "
            f"{opt.max_position_embeddings} positions"
        )
    return Model(folder, config.model.source, opt, decode, schedule)


def resolve_decode(config: JobConfig, opt: OPTConfig, note: Note) -> dict[str, Any]:
    """The `decode:` mapping that holds: the job's own, else the checkpoint's, else SkipDecode at speedup 2."""
    given = {key: value for key, value in config.decode.model_dump().items() if value is not None}
    if given:
        return given
    if opt.skip_decode is not None:
        return dict(opt.skip_decode)
    note(
        "decode: this checkpoint carries no skip_decode schedule, so it was not tuned for one; using skipdecode at "
        "speedup 2. Its text will differ from full depth (see agreement in the report); "
        "decode.method=full turns skipping off"
    )
    return {"method": "skipdecode", "speedup": 2}


def check_output(folder: RunFolder, config: JobConfig) -> dict[str, Any] | None:
    """The state of the run to resume, or None for a new one; ConfigError when the place is taken."""
    mode = config.output.if_exists
    try:
        folder.filesystem.create_dir(folder.root, recursive=True)
    except OSError as error:
        raise ConfigError(f"output.path: {folder.shown} cannot be created: {error}") from error
    if mode == "overwrite" or not folder.exists():
        return None
    if mode == "fail":
        raise ConfigError(
            f"output.path: {folder.shown} exists already; use --resume to go on with it, --overwrite to start anew, "
            "or another output.path"
        )
    state = folder.read_state()
    if state is None:
        raise ConfigError(f"output.path: {folder.shown} exists but holds no run.json to resume; use --overwrite")
    return state


def _execute(
    config: JobConfig,
    model: Model,
    folder: RunFolder,
    earlier: dict[str, Any] | None,
    plan: InputPlan,
    prints: dict[str, Any],
    cluster: Cluster,
    pool: Any,
    note: Note,
) -> RunResult:
    done = folder.done_digests() if earlier is not None else np.empty(0, "S16")
    left = plan.num_rows - len(done)
    window = window_rows(config, pool.max_size, left, has_gpu=bool(pool.num_gpus))
    spec = make_spec(config, model, plan, done if len(done) else None, pool, window)
    session = {"id": uuid.uuid4().hex[:12], "started_at": time.time(), "ended_at": None, "rows_before": len(done)}
    state: dict[str, Any] = {
        "state": "running",
        "fingerprint": prints,
        "config": config.model_dump(mode="json"),
        "model": {"source": model.source, "layers": model.config.num_hidden_layers},
        "decode": model.decode,
        "sessions": [*(earlier["sessions"] if earlier else []), session],
        "books": {"input": plan.num_rows, "ok": None, "failed": None, "closed": False},
    }
    folder.write_state(state)
    note(
        f"decode: {pool.min_size}{f'..{pool.max_size}' if pool.max_size > pool.min_size else ''} actors, "
        f"{spec.window_rows} rows at a time, {model.decode}; {left} rows to do"
        + (f", {len(done)} done" if len(done) else "")
    )
    collector = start_collector(folder.filesystem, folder.root, str(session["id"]))
    try:
        if left:
            _stream(config, spec, folder, plan, collector, left)
        state["state"] = "finished"
    except BaseException:
        state["state"] = "interrupted"
        raise
    finally:
        ray.get(collector.flush.remote())
        session["ended_at"] = time.time()
        _close_books(folder, state)
    if not state["books"]["closed"]:
        state["state"] = "interrupted"
        folder.write_state(state)
        raise RuntimeError(f"the books do not close: {state['books']}; the run can be resumed")
    if plan.listing.format == "openai_batch":
        write_batch_files(folder, model.source)
    report = make_report(folder, state)
    folder.write_text("report.html", render_report(report, state))
    folder.write_text("report.json", _json(report))
    folder.write_state(state | {"report": report})
    return _result(config, report, folder)


def _stream(
    config: JobConfig, spec: PipelineSpec, folder: RunFolder, plan: InputPlan, collector: Any, left: int
) -> None:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_no_progress_timeout_s = config.limits.no_progress_timeout_s
    schema = schema_of(plan)
    rows_per_file = left // MAX_FILES if left > MAX_FILES * spec.window_rows else None
    sink = RunSink(folder.filesystem, folder.root, schema, rows_per_file)
    with Progress(collector, left):
        build_pipeline(spec, collector).write_datasink(sink, ray_remote_args={"num_cpus": 0.25})


def schema_of(plan: InputPlan) -> Any:
    """The schema of every output file."""
    import pyarrow as pa

    return pa.schema([*OUTPUT_SCHEMA, *plan.extra_schema])


def make_spec(
    config: JobConfig, model: Model, plan: InputPlan, done: np.ndarray[Any, Any] | None, pool: Any, window: int
) -> PipelineSpec:
    """What the stages are told."""
    source = worker_path(model.source, model.folder)
    tokenizer = config.model.tokenizer and worker_path(config.model.tokenizer, Path(config.model.tokenizer))
    s = config.sampling
    sampling = Sampling(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos)
    batch_size = config.actors.batch_size
    generator = GeneratorConfig(
        source=source,
        tokenizer=tokenizer,
        decode=model.decode,
        dtype=config.model.dtype,
        device="cuda" if pool.num_gpus else "cpu",
        num_threads=pool.num_threads,
        batch_size=None if batch_size == "auto" else batch_size,
        length_buckets=config.actors.length_buckets,
        deterministic=s.deterministic,
        baseline_fraction=config.baseline.fraction,
    )
    return PipelineSpec(
        input=config.input,
        plan=plan,
        done=done,
        tokenize=TokenizeConfig(tokenizer or source, model.config, sampling, config.input.too_long),
        generator=generator,
        pool=pool,
        window_rows=window,
    )


def worker_path(source: str, folder: Path) -> str:
    """How a worker finds the model: a relative path travels with a job's working_dir; else absolute, or the hub id."""
    if not Path(source).is_dir():
        return source  # a hub id: each node fetches it once
    has_working_dir = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    return source if has_working_dir and not Path(source).is_absolute() else str(folder.resolve())


def window_rows(config: JobConfig, num_actors: int, num_rows: int, *, has_gpu: bool) -> int:
    """Rows an actor takes at a time: `window_batches` batches, but so few that every actor gets two windows or more."""
    size = config.actors.batch_size
    rows = MAX_BATCH_ROWS["cuda" if has_gpu else "cpu"] if size == "auto" else size
    return max(1, min(config.actors.window_batches * rows, -(-num_rows // (2 * num_actors))))


def _close_books(folder: RunFolder, state: dict[str, Any]) -> None:
    """Counts what is on disk, writes it down, whatever happened before."""
    books = state["books"]
    books["ok"], books["failed"] = folder.count_rows("ok"), folder.count_rows("failed")
    books["closed"] = books["ok"] + books["failed"] == books["input"]
    folder.write_state(state)


def _result(config: JobConfig, report: dict[str, Any], folder: RunFolder, was_finished: bool = False) -> RunResult:
    limit = config.limits.max_failed_rows
    allowed = limit if isinstance(limit, int) else limit * report["books"]["input"]
    return RunResult(report, folder, report["failed"] > allowed, was_finished)


def _get(refs: list[Any]) -> list[Any]:
    """Results of tasks; a ConfigError raised in one comes out as itself."""
    try:
        return list(ray.get(refs))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ConfigError):
            raise ConfigError(str(error.cause)) from error
        raise


def _json(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value, indent=2) + "\n"
