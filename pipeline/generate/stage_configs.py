"""From a checked configuration to what the stages are told: paths, sampling, batch sizes, windows, files."""

from dataclasses import replace
from typing import NamedTuple

from actors.generator import GeneratorConfig
from pipeline.checkpoint import ResolvedModel, adapter_path, worker_path
from pipeline.cluster.pool import Pool
from pipeline.config.job import JobConfig
from pipeline.estimate.forecast import window_rows
from pipeline.generate.dataset import PipelineSpec
from pipeline.generate.plan import PlannedRun
from pipeline.generate.resume import Work
from pipeline.input.openai_rows import CHAT_URL
from pipeline.stages.tokenize import TokenizeConfig
from skipdecode.checkpoint.hub import resolve_source
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling

MAX_FILES = 10_000  # output files of one status, for large corpora; more where Ray cuts prompts (above 12 MiB a window)


def make_spec(planned: PlannedRun, work: Work) -> PipelineSpec:
    """With the settled dtype, so that all workers and sessions decode alike."""
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
    """That of rows which say nothing themselves."""
    s = config.sampling
    return Sampling(
        s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.seed, s.stop, s.ignore_eos, s.logprobs, s.prompt_logprobs
    )


class Paths(NamedTuple):
    """Where a worker finds what it loads."""

    source: str
    tokenizer: str | None
    adapter: str | None


def worker_paths(config: JobConfig, model: ResolvedModel) -> Paths:
    """As any node of the cluster finds them."""
    own = config.model.tokenizer
    return Paths(
        worker_path(model.source, model.folder),
        own and worker_path(own, resolve_source(own, "model.tokenizer")),
        adapter_path(config.model.adapter, model),
    )


def local_paths(config: JobConfig, model: ResolvedModel) -> Paths:
    """As this process finds them, without Ray."""
    own = config.model.tokenizer
    tokenizer = own and str(resolve_source(own, "model.tokenizer"))
    return Paths(str(model.folder), tokenizer, None if model.adapter is None else str(model.adapter))


def make_stages(
    config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool, baseline_fraction: float
) -> tuple[TokenizeConfig, GeneratorConfig]:
    """What the tasks that tokenise and the workers are told; `dtype`: settled."""
    paths = worker_paths(config, model)
    generator = replace(make_generator(config, model, dtype, pool, paths), baseline_fraction=baseline_fraction)
    return tokenize_config(config, paths.tokenizer or paths.source, model.config, make_sampling(config)), generator


def make_generator(config: JobConfig, model: ResolvedModel, dtype: str, pool: Pool, paths: Paths) -> GeneratorConfig:
    """Of one worker of `pool` in a run that begins anew."""
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
