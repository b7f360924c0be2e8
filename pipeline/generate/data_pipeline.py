"""From a planned run to a lazy Ray Data pipeline: read, tokenise, decode, then finish and write.

Building it has no side effects beyond putting the input plan into the object store. What the stages do is in
`pipeline.stages` and `pipeline.store.row_writer`; how the configuration becomes theirs, in `stage_config`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from actors.generator_config import GeneratorConfig
from pipeline.cluster.pool import STAGE_CPUS, Pool
from pipeline.cluster.priority import run_in_background
from pipeline.cluster.ray_internals import limit_last_stage, number_of_task
from pipeline.config.job import InputConfig
from pipeline.estimate.forecast import window_rows
from pipeline.generate.plan import PlannedRun
from pipeline.generate.resume import Work
from pipeline.generate.sharing import sized
from pipeline.generate.stage_config import chat_urls, make_stage_configs
from pipeline.input.datasource import CorpusDatasource
from pipeline.input.id_matching import DoneRows
from pipeline.input.input_plan import InputPlan
from pipeline.input.prompt_templates import Prompter, form_of
from pipeline.stages.decode import DecodeStage
from pipeline.stages.detokenize import detokenize
from pipeline.stages.endpoint_model import SharedEndpoint
from pipeline.stages.packed_window import unpack
from pipeline.stages.tokenize import TokenizeConfig, tokenize
from pipeline.store.row_writer import RunSink

MAX_FILES = 10_000  # output files of one status, for large corpora; more where Ray cuts prompts (above 12 MiB a window)
LIGHT_TASKS_PER_ACTOR = 2  # of each kind (reading, tokenising, finishing with writing): one at work, one ready

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class PipelineSpec:
    """What the stages are built from; every value is resolved."""

    input: InputConfig
    plan: InputPlan
    done: DoneRows | None
    """Rows that are written already."""
    prompter: Prompter | None
    """Renders prompts from templates and messages; None where prompts are a column's text."""
    tokenize: TokenizeConfig
    generator: GeneratorConfig
    pool: Pool
    window_rows: int
    """Rows that an actor takes per call (`actors.window_batches` batches)."""
    background: bool
    """`actors.background`"""
    endpoint: SharedEndpoint | None = None
    """Decodes the rows in place of models of the pool."""


@dataclass(frozen=True)
class HelperActors:
    """Actors on the driver's node that every worker talks to."""

    collector: ActorHandle
    """`report.collector.MetricsCollector`"""
    attempts: ActorHandle
    """`stages.attempt_tracker.AttemptTracker`"""
    steal_queue: ActorHandle | None
    """`stages.work_stealing.StealQueue`; None if workers do not share windows."""


def build_pipeline(spec: PipelineSpec, sink: RunSink, helpers: HelperActors) -> Dataset:
    """A dataset without rows. Running it writes every row of the plan that is not done, exactly once, in any order."""
    # as many light tasks as the actors can use: Ray would start one process for each quarter of a CPU
    num_light = LIGHT_TASKS_PER_ACTOR * (spec.pool.max_size if spec.endpoint is None else spec.endpoint.num_replicas)
    few = TaskPoolStrategy(size=num_light)
    light = _in_background if spec.background else _as_it_is
    sampling = spec.tokenize.sampling
    prepare = run_in_background if spec.background else None
    source = CorpusDatasource(spec.plan, spec.input, spec.done, spec.prompter, prepare)
    rows = ray.data.read_datasource(source, num_cpus=STAGE_CPUS, compute=few)
    # Ray joins small files into one block; one block is one actor's work, and nothing is written until its end. Without
    # `strict` the last rows of every block would be a small window of their own
    rows = rows.repartition(target_num_rows_per_block=spec.window_rows, strict=True)
    # `repartition` cannot be given these: a whole CPU, Ray's default, may never be free while readers wait for it, and
    # whenever blocks have piled up, it would start dozens of processes, which decoding waits for
    limit_last_stage(rows, STAGE_CPUS, num_light)
    rows = rows.map_batches(
        light(tokenize), fn_kwargs={"config": spec.tokenize}, batch_size=spec.window_rows, batch_format="pyarrow",
        zero_copy_batch=True, num_cpus=STAGE_CPUS, compute=few,
    )  # fmt: skip
    rows = rows.map_batches(
        DecodeStage,
        fn_constructor_args=(
            spec.generator,
            sampling,
            helpers.collector,
            helpers.attempts,
            helpers.steal_queue,
            spec.background,
            spec.endpoint,
        ),
        batch_size=spec.window_rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            min_size=spec.pool.min_size, max_size=spec.pool.max_size, max_tasks_in_flight_per_actor=2
        ),
        num_cpus=spec.pool.num_cpus,
        num_gpus=spec.pool.num_gpus or None,
    )
    # the last stage is three steps, unpack -> finish -> write: Ray cuts blocks between stages by their bytes, and a
    # repeated task may get other rows than before
    last_steps = {
        "unpack": light(unpack),
        "finish": partial(detokenize, config=spec.tokenize, extra_names=tuple(spec.plan.carried_schema.names)),
        "number_of_task": number_of_task,
    }
    windows_per_file = None if sink.rows_per_file is None else sink.rows_per_file // spec.window_rows
    return rows.map_batches(
        sink, fn_kwargs=last_steps, batch_size=windows_per_file, batch_format="pyarrow",
        zero_copy_batch=True, num_cpus=STAGE_CPUS, compute=few,
    )  # fmt: skip


def _in_background(step: Callable[P, T]) -> Callable[P, T]:
    """The step, with its name; whatever process Ray calls it in goes to the background first."""

    @wraps(step)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        run_in_background()
        return step(*args, **kwargs)

    return run


def _as_it_is(step: Callable[P, T]) -> Callable[P, T]:
    return step


def make_spec(planned: PlannedRun, work: Work) -> PipelineSpec:
    """The stages of a planned run. Their dtype is resolved, so that all workers and sessions decode alike."""
    config, pool = planned.config, planned.pool
    tokens, generator = make_stage_configs(config, planned.model, planned.dtype, pool)
    tokens = replace(
        tokens,
        chat_urls=chat_urls(planned.input.listing.format),
        has_choices=planned.input.has_choices,
        tool_form=form_of(planned.prompter),
    )
    return PipelineSpec(
        input=config.input,
        plan=work.plan,
        done=work.done,
        prompter=planned.prompter,
        tokenize=tokens,
        generator=generator,
        pool=pool,
        window_rows=window_rows(
            config if planned.endpoint is None else sized(config, planned.endpoint),
            pool.max_size,
            work.num_left,
            has_gpu=bool(pool.num_gpus),
        ),
        background=config.actors.background,
        endpoint=planned.endpoint,
    )


def rows_per_file(num_rows: int, window_rows: int) -> int | None:
    """Whole windows, so that a corpus makes at most MAX_FILES files of a status; None: a file per window."""
    windows = -(-num_rows // (MAX_FILES * window_rows))
    return windows * window_rows if windows > 1 else None
