"""From a planned run to a lazy Ray Data pipeline: read, tokenise, decode, finish, write; `run` runs it.

No side effects beyond putting the input plan into the object store. What the stages do is `pipeline.stages.tokenize`,
`pipeline.stages.decode` and `pipeline.store.row_writer`.
"""

from dataclasses import dataclass
from functools import partial

import ray
from ray.actor import ActorHandle
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from actors.generator import GeneratorConfig
from pipeline.cluster.pool import STAGE_CPUS, Pool
from pipeline.cluster.ray_internals import set_last_stage_cpus
from pipeline.config.job import InputConfig
from pipeline.input.datasource import CorpusDatasource
from pipeline.input.id_matching import DoneRows
from pipeline.input.plan import InputPlan
from pipeline.input.prompt_templates import Prompter
from pipeline.stages.decode import DecodeStage
from pipeline.stages.packed_window import unpack
from pipeline.stages.tokenize import TokenizeConfig, finish, tokenize
from pipeline.store.row_writer import RunSink

LIGHT_TASKS_PER_ACTOR = 2  # of each kind (reading, tokenising, finishing with writing): one at work, one ready


@dataclass(frozen=True)
class PipelineSpec:
    """Everything the stages are told; resolved, so that building needs no more questions."""

    input: InputConfig
    plan: InputPlan
    done: DoneRows | None
    """Rows that are written already."""
    prompter: Prompter | None
    """Makes prompts where they are made."""
    tokenize: TokenizeConfig
    generator: GeneratorConfig
    pool: Pool
    window_rows: int
    """Rows that an actor takes at a time."""


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
    """A dataset without rows: whoever runs it has every row of the plan that is not done written once, in any order."""
    # as many light tasks as the actors can use: Ray would start one process for each quarter of a CPU
    few = TaskPoolStrategy(size=LIGHT_TASKS_PER_ACTOR * spec.pool.max_size)
    sampling = spec.tokenize.sampling
    source = CorpusDatasource(spec.plan, spec.input, spec.done, spec.prompter)
    rows = ray.data.read_datasource(source, num_cpus=STAGE_CPUS, compute=few)
    # Ray joins small files into one block; one block is one actor's work, and nothing is written until its end. Strict:
    # else the last rows of every block that was read would be a window of their own, of a batch and a bit
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
