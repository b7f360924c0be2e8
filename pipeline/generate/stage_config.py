"""Translates a job's configuration into those of the stages: how rows are tokenised, and what each worker loads.

Every value is resolved here; no stage sees "auto" or a path that only the driver knows.
"""

from typing import NamedTuple

import pyarrow as pa

from actors.generator_config import GeneratorConfig
from pipeline.cluster.pool import Pool
from pipeline.config.job import JobConfig
from pipeline.input.openai_rows import CHAT_URLS
from pipeline.resolve_model import ResolvedModel, adapter_path, worker_path
from pipeline.schema import asked_schema
from pipeline.stages.tokenize import TokenizeConfig
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling


def make_sampling(config: JobConfig) -> Sampling:
    """The sampling of rows that set no parameters of their own."""
    given = config.sampling.model_dump(exclude_none=True)
    return Sampling().with_parameters({name: value for name, value in given.items() if name in Sampling.names()})


def asked_of(config: JobConfig) -> pa.Schema:
    """The columns after `OUTPUT_SCHEMA` that a run asks for."""
    has_own = config.input.sampling_column is not None
    return asked_schema(config.sampling, config.output.reasoning_parser, has_row_parameters=has_own)


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


def make_stage_configs(
    config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool
) -> tuple[TokenizeConfig, GeneratorConfig]:
    """Configurations of the tokenising tasks and of the workers."""
    paths = worker_paths(config, model)
    tokens = make_tokenize_config(config, paths.tokenizer or paths.source, model.config, make_sampling(config))
    return tokens, make_generator_config(config, model, dtype, pool, paths)


def make_generator_config(
    config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool, paths: Paths
) -> GeneratorConfig:
    """The configuration of one worker of `pool`. `dtype`: resolved, never "auto"."""
    batch_size = config.actors.batch_size
    return GeneratorConfig(
        source=paths.source,
        tokenizer=paths.tokenizer,
        adapter=paths.adapter,
        decode=model.decode,
        prefill=model.prefill,
        implementation=model.config.implementation,
        dtype=dtype,
        quantization=config.model.quantization,
        kv_cache_dtype=config.model.kv_cache_dtype,
        device="cuda" if pool.num_gpus else "cpu",
        num_devices=config.actors.num_devices,
        num_threads=pool.num_threads,
        batch_size=None if batch_size == "auto" else batch_size,
        length_buckets=config.actors.length_buckets,
        deterministic=config.sampling.deterministic,
        baseline_fraction=config.baseline.fraction,
        shares_prefixes=config.decode.prefix == "auto",
        memory_share=config.actors.memory_share * min(1.0, pool.num_gpus or 1.0),  # workers on one GPU divide it
        require_kernels=config.actors.require_kernels,
    )


def make_tokenize_config(
    config: JobConfig, source: str, model: DecoderConfig, sampling: Sampling, format: str = ""
) -> TokenizeConfig:
    """The configuration of the tokenising tasks. `source`: the tokenizer's path; `format`: the input's."""
    return TokenizeConfig(
        source,
        model,
        sampling,
        config.input.too_long,
        chat=config.input.is_chat,
        chat_urls=chat_urls(format),
        has_row_parameters=config.input.sampling_column is not None,
        reasoning_parser=config.output.reasoning_parser,
    )


def chat_urls(format: str) -> frozenset[str] | None:
    """The values of the column `url` that mark a row as a chat; None if the format has no such column."""
    return CHAT_URLS if format == "openai_batch" else None
