"""`build_processor`: a function from a Ray `Dataset` to a lazy `Dataset` with generated text.

The stages are those of a run (tokenise, decode, finish), with the attempt tracker that finds rows which kill their
worker. There is no run folder, no report and no resume; the caller writes the rows. A bad row gets an error code.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from pipeline.cluster.pool import STAGE_CPUS, find_pool, look_at_cluster
from pipeline.cluster.ray_internals import limit_last_stage, use_policies, with_own_context
from pipeline.config.job import JobConfig, build_config, load_config
from pipeline.estimate.forecast import window_rows
from pipeline.formatting import Json
from pipeline.generate.data_pipeline import LIGHT_TASKS_PER_ACTOR
from pipeline.generate.execution import FewBlocksAhead
from pipeline.generate.plan import find_chat_template, resolve_run_dtype
from pipeline.generate.stage_config import make_stage_configs
from pipeline.input.prompt_templates import Prompter, check_chat_template_is_used, compile_templates
from pipeline.processor.dataset_rows import Value, check_columns, finish_windows, merged, prepare
from pipeline.processor.stage import ProcessorStage, SilentCollector
from pipeline.resolve_model import check_model
from pipeline.stages.attempt_tracker import start_attempt_tracker

logger = logging.getLogger(__name__)

RowFunction: TypeAlias = Callable[[dict[str, Value]], dict[str, Value]]

IGNORED: Final = (
    "input.path", "input.format", "input.limit", "output.path", "output.if_exists", "output.model_name", "baseline",
    "actors.share_leftovers", "actors.price_per_hour", "limits.max_failed_rows", "limits.max_line_bytes",
    "limits.no_progress_timeout_s",
)  # fmt: skip
"""Keys of a job that a stage has no use for, so that one file can serve both."""
PREPARED_ROWS: Final = 1024  # a batch of rows to be tokenised


class Processor:
    """Made by `build_processor`; called with a `Dataset` as often as one likes."""

    def __init__(
        self, config: JobConfig, preprocess: RowFunction | None = None, postprocess: RowFunction | None = None
    ) -> None:
        """ConfigError where the configuration or the checkpoint is wrong."""
        self.config, self._preprocess, self._postprocess = config, preprocess, postprocess
        if ignored := ignored_keys(config):
            logger.warning("a stage has no use for these keys, and ignores them: %s", ", ".join(ignored))
        check_chat_template_is_used(config.input)
        self._model = check_model(config, logger.warning)
        self._chat = find_chat_template(config, self._model) if config.input.is_chat else None
        compile_templates(config.input)

    def __call__(self, dataset: Dataset) -> Dataset:
        """The rows of `dataset`, in any order, with the columns of a run. Nothing is decoded before they are asked for.

        ConfigError where the cluster has no room for the workers, or a column that is known already is amiss.
        """
        config = self.config
        schema = None if self._preprocess is not None else dataset.schema(fetch_if_missing=False)
        if schema is not None:
            check_columns(schema.names, config)
        cluster = look_at_cluster()
        pool = find_pool(config.actors, cluster)
        dtype = resolve_run_dtype(config, self._model, None, cluster, pool)
        tokens, generator = make_stage_configs(config, self._model, dtype, pool)
        generator = replace(generator, baseline_fraction=0.0)  # without a report, nobody would see a baseline
        size = window_rows(config, pool.max_size, sys.maxsize, has_gpu=bool(pool.num_gpus))
        attempts = start_attempt_tracker(config.limits.max_row_attempts, size, math.inf, 0)
        # a small dataset cannot use all the tasks it may have, and need not
        warnings.filterwarnings("ignore", message="The maximum number of concurrent tasks for")
        num_light = LIGHT_TASKS_PER_ACTOR * pool.max_size
        few = TaskPoolStrategy(size=num_light)
        light = {"batch_format": "pyarrow", "zero_copy_batch": True, "num_cpus": STAGE_CPUS, "compute": few}

        rows = with_own_context(dataset)
        use_policies(rows.context, [FewBlocksAhead])  # else a corpus of short prompts waits in the driver
        if self._preprocess is not None:
            rows = rows.map(partial(merged, function=self._preprocess), num_cpus=STAGE_CPUS)
        prompter = Prompter.of(config.input, "", self._chat, datetime.now(UTC))
        keys = {"config": config, "tokens": tokens, "prompter": prompter}
        rows = rows.map_batches(prepare, fn_kwargs=keys, batch_size=PREPARED_ROWS, **light)
        rows = rows.repartition(target_num_rows_per_block=size, strict=True)
        limit_last_stage(rows, STAGE_CPUS, num_light)
        rows = rows.map_batches(
            ProcessorStage,
            fn_constructor_args=(generator, tokens.sampling, SilentCollector(), attempts),
            batch_size=size,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ActorPoolStrategy(min_size=pool.min_size, max_size=pool.max_size, max_tasks_in_flight_per_actor=2),
            num_cpus=pool.num_cpus,
            num_gpus=pool.num_gpus or None,
        )
        rows = rows.map_batches(finish_windows, fn_kwargs={"tokens": tokens}, batch_size=None, **light)
        return rows if self._postprocess is None else rows.map(self._postprocess, num_cpus=STAGE_CPUS)


def build_processor(
    config: JobConfig | Mapping[str, Json] | str | Path,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
) -> Processor:
    """A function from a Ray `Dataset` to a `Dataset`, as `ray.data.llm.build_processor` gives one.

    `config`: what `jobs.generate` takes, as an object, a mapping or a YAML file. `preprocess`: row -> row; what it
    gives is put over the row's columns. `postprocess`: row -> row; what it gives is the row that comes out, of failed
    rows too. ConfigError where something is wrong: nothing was started.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, JobConfig):
        config = build_config(JobConfig, dict(config))
    return Processor(config, preprocess, postprocess)


def ignored_keys(config: JobConfig) -> list[str]:
    """The keys in `IGNORED` that were set."""
    given: dict[str, dict[str, Json]] = config.model_dump(exclude_unset=True)
    names = {name for section, keys in given.items() for name in (section, *(f"{section}.{key}" for key in keys))}
    return [key for key in IGNORED if key in names]
