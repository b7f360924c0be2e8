"""From a planned run to a lazy Ray Data pipeline: read, tokenise, decode, finish, write; and what each stage is told.

Building it has no side effects beyond putting the input plan into the object store. What the stages do is in
`pipeline.stages.tokenize`, `pipeline.stages.decode` and `pipeline.store.row_writer`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import ray
from ray.actor import ActorHandle
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from actors.generator import GeneratorConfig
from pipeline.checkpoint import ResolvedModel, adapter_path, worker_path
from pipeline.cluster.pool import STAGE_CPUS, Pool
from pipeline.cluster.ray_internals import set_last_stage_cpus
from pipeline.config.job import InputConfig, JobConfig
from pipeline.estimate.forecast import window_rows
from pipeline.generate.plan import PlannedRun
from pipeline.generate.resume import Work
from pipeline.input.datasource import CorpusDatasource
from pipeline.input.id_matching import DoneRows
from pipeline.input.openai_rows import CHAT_URL
from pipeline.input.plan import InputPlan
from pipeline.input.prompt_templates import Prompter
from pipeline.stages.decode import DecodeStage
from pipeline.stages.packed_window import unpack
from pipeline.stages.tokenize import TokenizeConfig, finish, tokenize
from pipeline.store.row_writer import RunSink
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling

LIGHT_TASKS_PER_ACTOR = 2  # of each kind (reading, tokenising, finishing with writing): one at work, one ready


@dataclass(frozen=True)
class PipelineSpec:
    """Everything the stages are told, with nothing left to be resolved."""

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
    """Rows of a micro-batch window, which an actor takes at a time."""


@dataclass(frozen=True)
class HelperActors:
    """Actors on the driver's node that every worker talks to."""

    collector: ActorHandle
    """`report.collector.MetricsCollector`"""
    attempts: ActorHandle
    """`stages.attempt_tracker.AttemptTracker`"""
    steal_queue: ActorHandle | None
    """`stages.work_stealing.StealQueue`; None where workers share nothing."""


def build_pipeline(spec: PipelineSpec, sink: RunSink, helpers: HelperActors) -> Dataset:
    """A dataset without rows. Running it writes every row of the plan that is not done once, in any order."""
    # as many light tasks as the actors can use: Ray would start one process for each quarter of a CPU
    few = TaskPoolStrategy(size=LIGHT_TASKS_PER_ACTOR * spec.pool.max_size)
    sampling = spec.tokenize.sampling
    source = CorpusDatasource(spec.plan, spec.input, spec.done, spec.prompter)
    rows = ray.data.read_datasource(source, num_cpus=STAGE_CPUS, compute=few)
    # Ray joins small files into one block; one block is one actor's work, and nothing is written until its end. Without
    # `strict` the last rows of every block would be a small window of their own
    rows = rows.repartition(target_num_rows_per_block=spec.window_rows, strict=True)
    # it has no argument for it; a whole CPU, as Ray would ask for, may never be free beside readers that wait for it
    set_last_stage_cpus(rows, STAGE_CPUS)
    rows = rows.map_batches(
        tokenize, fn_kwargs={"config": spec.tokenize}, batch_size=spec.window_rows, batch_format="pyarrow",
        zero_copy_batch=True, num_cpus=STAGE_CPUS, compute=few,
    )  # fmt: skip
    rows = rows.map_batches(
        DecodeStage,
        fn_constructor_args=(spec.generator, sampling, helpers.collector, helpers.attempts, helpers.steal_queue),
        batch_size=spec.window_rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            min_size=spec.pool.min_size, max_size=spec.pool.max_size, max_tasks_in_flight_per_actor=2
        ),
        num_cpus=spec.pool.num_cpus,
        num_gpus=spec.pool.num_gpus or None,
    )
    end = partial(finish, config=spec.tokenize, extra_names=tuple(spec.plan.carried_schema.names))
    windows_per_file = None if sink.rows_per_file is None else sink.rows_per_file // spec.window_rows
    return rows.map_batches(
        sink, fn_kwargs={"finish": end, "unpack": unpack}, batch_size=windows_per_file, batch_format="pyarrow",
        zero_copy_batch=True, num_cpus=STAGE_CPUS, compute=few,
    )  # fmt: skip


MAX_FILES = 10_000  # output files of one status, for large corpora; more where Ray cuts prompts (above 12 MiB a window)


def make_spec(planned: PlannedRun, work: Work) -> PipelineSpec:
    """What the stages are told, with the settled dtype, so that all workers and sessions decode alike."""
    config, pool = planned.config, planned.pool
    tokens, generator = make_stages(config, planned.model, planned.dtype, pool, config.baseline.fraction)
    tokens = replace(tokens, chat_url=chat_url(planned.input.listing.format), has_choices=planned.input.has_choices)
    return PipelineSpec(
        input=config.input,
        plan=work.plan,
        done=work.done,
        prompter=planned.prompter,
        tokenize=tokens,
        generator=generator,
        pool=pool,
        window_rows=window_rows(config, pool.max_size, work.num_left, has_gpu=bool(pool.num_gpus)),
    )


def make_sampling(config: JobConfig) -> Sampling:
    """The sampling of rows that set no parameters of their own."""
    s = config.sampling
    return Sampling(
        s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos, s.logprobs, s.prompt_logprobs
    )


class Paths(NamedTuple):
    """The model, tokenizer and adapter that a worker loads."""

    source: str
    tokenizer: str | None
    adapter: str | None


def worker_paths(config: JobConfig, model: ResolvedModel) -> Paths:
    """Paths that are valid on every node of the cluster."""
    own = config.model.tokenizer
    return Paths(
        worker_path(model.source, model.folder),
        own and worker_path(own, resolve_source(own, "model.tokenizer")),
        adapter_path(config.model.adapter, model),
    )


def local_paths(config: JobConfig, model: ResolvedModel) -> Paths:
    """Paths that are valid in this process, without Ray."""
    own = config.model.tokenizer
    tokenizer = own and str(resolve_source(own, "model.tokenizer"))
    return Paths(str(model.folder), tokenizer, None if model.adapter is None else str(model.adapter))


def make_stages(
    config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool, baseline_fraction: float
) -> tuple[TokenizeConfig, GeneratorConfig]:
    """Configurations of the tokenising tasks and of the workers; `dtype` is settled."""
    paths = worker_paths(config, model)
    generator = replace(make_generator(config, model, dtype, pool, paths), baseline_fraction=baseline_fraction)
    return tokenize_config(config, paths.tokenizer or paths.source, model.config, make_sampling(config)), generator


def make_generator(config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool, paths: Paths) -> GeneratorConfig:
    """The configuration of one worker of `pool`."""
    batch_size = config.actors.batch_size
    return GeneratorConfig(
        source=paths.source,
        tokenizer=paths.tokenizer,
        adapter=paths.adapter,
        decode=model.decode,
        prefill=config.prefill.method,
        dtype=dtype,
        quantization=config.model.quantization,
        device="cuda" if pool.num_gpus else "cpu",
        num_devices=config.actors.num_devices,
        num_threads=pool.num_threads,
        batch_size=None if batch_size == "auto" else batch_size,
        length_buckets=config.actors.length_buckets,
        deterministic=config.sampling.deterministic,
        baseline_fraction=config.baseline.fraction,
        shares_prefixes=config.decode.prefix == "auto",
        memory_share=config.actors.memory_share * min(1.0, pool.num_gpus or 1.0),  # those on one GPU share this
    )


def tokenize_config(
    config: JobConfig, source: str, model: DecoderConfig, sampling: Sampling, format: str = ""
) -> TokenizeConfig:
    """`source`: of the tokenizer; `format`: of the input."""
    return TokenizeConfig(
        source, model, sampling, config.input.too_long, chat=config.input.is_chat, chat_url=chat_url(format)
    )


def chat_url(format: str) -> str | None:
    """How rows of that format say that they are chats."""
    return CHAT_URL if format == "openai_batch" else None


def rows_per_file(num_rows: int, window_rows: int) -> int | None:
    """Whole windows, so that a corpus makes at most MAX_FILES files of a status; None: a file per window."""
    windows = -(-num_rows // (MAX_FILES * window_rows))
    return windows * window_rows if windows > 1 else None
