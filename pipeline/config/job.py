"""The configuration of a run: one frozen tree of sections. How it is read and checked is in `pipeline.config.tree`.

Nothing that needs a cluster, a checkpoint or an input file is resolved here: `auto` stays `auto` until
`pipeline.generate.plan.plan_run`. The docstrings of the fields are what users read in docs/configuration.md.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from pipeline.config.input import InputConfig
from pipeline.config.tree import ConfigError, Section, build_config, read_tree, set_key
from pipeline.formatting import Json
from skipdecode.checkpoint.hub import DEMO
from skipdecode.config.model import (
    MAX_LOGPROBS,
    DecoderConfig,
    KVCacheDtype,
    Quantization,
    SwiftKVConfig,
    WantedImplementation,
)
from skipdecode.config.sampling import MAX_BIAS, MAX_PATTERN_TOKENS, MAX_PENALTY
from skipdecode.config.structured_outputs import StructuredOutputs
from skipdecode.cost.gpu_specs import MEMORY_SHARE
from skipdecode.schedules.from_config import METHODS
from skipdecode.schedules.lossless import MOST_DRAFTS

__all__ = [
    "MAX_LINE_BYTES",
    "ActorsConfig",
    "Auto",
    "BaselineConfig",
    "ConfigError",
    "DecodeConfig",
    "FFNSkipConfig",
    "InputConfig",
    "JobConfig",
    "LimitsConfig",
    "ModelConfig",
    "OutputConfig",
    "PrefillConfig",
    "ReasoningParser",
    "SamplingConfig",
    "Section",
    "SwiftKVSection",
    "build_config",
    "load_config",
    "read_tree",
    "set_key",
]  # fmt: skip


if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]

MAX_LINE_BYTES = 64 << 20  # a prompt may have 30 MB
MAX_SAMPLES = 1024  # per prompt

ReasoningParser = Literal["think"]
Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]


class ModelConfig(Section):
    source: str = DEMO
    """A folder or hub id in Hugging Face layout, or a .gguf file. docs/models.md lists the supported families."""
    adapter: str | None = None
    """The folder of a LoRA adapter in PEFT's format, merged into the weights of `source` at load; null: no adapter."""
    tokenizer: str | None = None
    """A folder, hub id or .gguf file with another tokenizer; null: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type that the decoder computes in; auto: bfloat16 where the device multiplies it natively, else float32."""
    implementation: WantedImplementation = "auto"
    """Whose layers run: own (the families with kernels), or transformers (any decoder-only model with attention). auto:
    own where a family takes the model, else transformers."""
    quantization: Quantization | None = None
    """int8: 8-bit weights, which halves the bytes read per step and changes some tokens. For bfloat16 on CPUs with AMX,
    or with AVX-512 that has BF16 and VNNI. int4: 4-bit weights and 8-bit inputs of products, in blocks of 32, for CPUs
    with AVX2; a .gguf file of Q4_0, Q4_1 or Q8_0 keeps its blocks. fp8: 8-bit weights (e4m3) and inputs of products,
    for bfloat16 on GPUs of compute capability 8.9 and later (L4, H100). null: the weights as they are."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8: 8-bit keys and values (e4m3, a scale per layer and head), which halves the memory and the bytes read per
    token of context and changes some tokens. For bfloat16 on GPUs of compute capability 8.9 and later (L4, H100). auto:
    keys and values in the type that the decoder computes in."""


class FFNSkipConfig(Section):
    """FFN-SkipLLM: which feed-forward blocks of generated tokens are skipped."""

    mode: Literal["row", "calibrated", "fixed"] = "row"
    """row: the paper's rule. calibrated: the layers that the checkpoint carries (`jobs.calibrate`). fixed: `layers`."""
    threshold: float | None = None
    """row: the cosine similarity of the states before and after a block from which a row skips the next ones; null:
    0.98."""
    cold_start: int | None = None
    """row: layers from the bottom that never skip; null: 4."""
    cold_end: int | None = None
    """row: layers from the top that never skip; null: 4."""
    warmup_tokens: int | None = None
    """How many decode steps at the start of an answer skip nothing; null: 25, or what the checkpoint carries."""
    layers: tuple[int, ...] | None = None
    """fixed: the layers whose feed-forward block is skipped, numbered from 0."""


class DecodeConfig(Section):
    method: MethodName | None = None
    """null: skipdecode if another key of the schedule is given, else the schedule that the checkpoint carries as
    `skip_decode`, else full depth. With `lossless`: the drafts it carries, and skipdecode at speedup 2 without any."""
    speedup: float | None = None
    """One of the SkipDecode paper's presets, 2, 3, 4 or 5; 1 is full depth. null: `max_layers` and `min_layers` say it,
    or else 2."""
    max_layers: int | None = None
    """skipdecode, early_exit: how many layers run in the first decode step."""
    min_layers: int | None = None
    """skipdecode, early_exit: how many layers run from the end of `horizon` on."""
    warmup_layers: int | None = None
    """skipdecode: how many layers from the bottom always run; null: 1."""
    horizon: int | None = None
    """The number of decode steps over which the depth falls; null: max(max_new_tokens - 1, 1), or 63 with
    `lossless`."""
    layers: int | tuple[int, ...] | None = None
    """unified: how many layers run. layers: which ones, a list of numbers from 0 on."""
    lossless: Annotated[bool, Field(strict=True)] | Literal["auto"] = False
    """true: the schedule only drafts tokens and full depth verifies them, so the output is that of full depth. auto:
    drafts only where that is expected to be faster."""
    draft_tokens: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_DRAFTS, strict=True)] = "auto"
    """lossless: how many tokens are drafted at a time; auto: as many as pay off."""
    ffn_skip: FFNSkipConfig | None = None
    """FFN-SkipLLM on top of `method`; null: no feed-forward block is skipped."""
    prefix: Literal["auto", "off"] = "auto"
    """auto: a prefix shared by several prompts of a window runs once, where that saves time. off: every prompt runs by
    itself. No effect under `sampling.deterministic`."""

    @property
    def is_given(self) -> bool:
        """Whether any key says how to decode; `prefix` does not, since it changes no token."""
        return bool(self.model_dump(exclude_defaults=True, exclude={"prefix"}))

    @field_validator("prefix", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value


class PrefillConfig(Section):
    method: Literal["full", "swiftkv"] | None = None
    """swiftkv: prompt tokens skip the upper layers; needs a checkpoint that carries SwiftKV's weights. null: swiftkv
    for a checkpoint that was released to run that way (`llama_swiftkv`), unless `decode.lossless` is set; else full."""


class SwiftKVSection(Section):
    """The shape of SwiftKV for a model that is to get it (`distill`, `bench`)."""

    kv_layers: Annotated[int, Field(ge=1)] | None = None
    """How many layers from the bottom keep their own keys and values; null: half of all layers."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """How many neighbouring layers above those share one set of keys and values (AcrossKV); must divide their
    number."""

    def shape(self, model_config: DecoderConfig) -> SwiftKVConfig:
        """The same as the model's configuration has it; ValueError if a model of this shape cannot."""
        shape = SwiftKVConfig(self.kv_layers or -(-model_config.num_hidden_layers // 2), self.group_size)
        shape.check(model_config)
        return shape


def read_schema(text: str) -> Json:
    """A JSON schema from its own text, or from the file of that name; ValueError."""
    if not text.lstrip().startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(f"json: no file with a schema: {error}") from error
    try:
        schema: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"json: not a JSON schema: {error}") from error
    return schema


class RepetitionDetectionSection(Section):
    """When an answer counts as a loop."""

    max_pattern_size: Annotated[int, Field(ge=1, le=MAX_PATTERN_TOKENS)]
    """Tokens of the longest pattern."""
    min_pattern_size: Annotated[int, Field(ge=1)] = 1
    """Tokens of the shortest pattern."""
    min_count: Annotated[int, Field(ge=2)] = 12
    """How many times a pattern must follow itself. Text that is no loop has fewer: four zeros, or the rule of a table
    with eight columns."""

    @field_validator("min_pattern_size")
    @classmethod
    def _fits(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_pattern_size", value):
            raise ValueError("must be at most max_pattern_size")
        return value


class SamplingConfig(Section):
    prompt_logprobs: bool = False
    """Whether prompt tokens are scored too, at full depth (column `prompt_logprobs`)."""
    max_new_tokens: Annotated[int, Field(ge=0)] = 64
    """The most tokens that an answer may have; 0, with `prompt_logprobs`, only scores the prompt."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """0 is greedy decoding."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens with at least this much probability in all; 1: from all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the likeliest tokens; 0: no limit."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Sample from the tokens with at least this share of the likeliest one's probability, of those that `top_k` and
    `top_p` leave; 0: no limit."""
    repetition_penalty: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    """Makes tokens of the prompt and the answer less likely (above 1) or more (below), as in transformers; 1: none."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of every token that the answer has, as in OpenAI's API; -2 to 2."""
    frequency_penalty: Penalty = 0.0
    """Taken from the logit of a token for each time that the answer has it, as in OpenAI's API; -2 to 2."""
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = Field(
        default_factory=dict
    )
    """By token id, what is added to its logit, -100 to 100."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Random numbers depend on the seed, the row's id and the step, and on nothing else."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer, and are not part of it."""
    ignore_eos: bool = False
    """Whether generation continues after the end-of-text token."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens before which an answer ends neither at the end-of-text token nor at `stop_token_ids`."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Token ids that end an answer, and are not part of its text."""
    repetition_detection: RepetitionDetectionSection | None = None
    """Ends an answer whose last tokens repeat themselves; its `finish_reason` is `repetition`. null: never."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the generated tokens (column `logprobs`) and of this many of the likeliest tokens at each
    position (`top_logprobs`), as the model gives them before temperature, `top_k` and `top_p`. null: none."""
    deterministic: bool = False
    """Fixes the shapes of batches, so that in bfloat16 too a row's tokens depend only on the model, the configuration,
    the prompt, the id and the seed."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """How many answers each prompt gets, each in a row with its own id; more than 1 needs a `temperature`."""

    structured_outputs: dict[str, Any] | None = None
    """What every answer must look like, one of `json` (a schema, or a file with one), `json_object: true`, `regex`,
    `choice` (a list of texts) and `grammar` (Lark or GBNF); null: anything. An answer that `max_new_tokens` cuts off is
    not valid, as the column `is_valid` says."""

    @field_validator("structured_outputs")
    @classmethod
    def _is_one_structure(cls, value: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if value is None:
            return None
        if isinstance(schema := value.get("json"), str):
            value = value | {"json": read_schema(schema)}
        StructuredOutputs.of(value)
        for name in ("ignore_eos", "min_new_tokens"):
            if info.data.get(name):
                raise ValueError(f"excludes sampling.{name}: the grammar says where an answer ends")
        return value

    @field_validator("n")
    @classmethod
    def _samples_differ(cls, value: int, info: ValidationInfo) -> int:
        if value > 1 and not info.data.get("temperature", 1.0):
            raise ValueError(f"{value} samples at sampling.temperature 0 are the same; set a temperature, or n to 1")
        return value

    @field_validator("max_new_tokens")
    @classmethod
    def _something_is_asked_for(cls, value: int, info: ValidationInfo) -> int:
        if value == 0 and not info.data.get("prompt_logprobs"):
            raise ValueError("should be at least 1; 0 scores prompts alone, and needs sampling.prompt_logprobs=true")
        return value

    @field_validator("min_new_tokens")
    @classmethod
    def _is_within_the_limit(cls, value: int, info: ValidationInfo) -> int:
        if value > (most := info.data.get("max_new_tokens", value)):
            raise ValueError(f"must be at most sampling.max_new_tokens ({most})")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _one_token_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, int) else value


class OutputConfig(Section):
    path: Annotated[str, Field(min_length=1)] = "outputs/run"
    """The run folder: a local path or a URI."""
    if_exists: Literal["fail", "resume", "overwrite"] = "fail"
    """What to do if the folder is not empty; `--resume` and `--overwrite` set it."""
    model_name: Annotated[str, Field(min_length=1)] | None = None
    """The `model` that OpenAI answer lines name; null: `model.source`."""
    reasoning_parser: ReasoningParser | None = None
    """think: what a model writes between `<think>` and `</think>` before it answers goes to the column `reasoning`, and
    `generated_text` is the answer alone. null: the text stays whole."""


WINDOW_BATCHES, GPU_WINDOW_BATCHES = 4, 16
"""`actors.window_batches: auto`, without a GPU for each worker and with one."""
Auto = Literal["auto"]
PoolSize = Auto | Annotated[int, Field(ge=1)] | tuple[int, int]


class ActorsConfig(Section):
    num_actors: PoolSize = "auto"
    """How many workers decode, or [min, max] for a pool that grows and shrinks."""
    num_gpus: Auto | Annotated[float, Field(ge=0)] = "auto"
    """GPUs per worker; auto: 1 where the cluster has GPUs, else 0. Below 1, workers share a GPU. Above 1, the layers of
    a model that does not fit on one GPU are split over several (pipeline parallelism)."""
    num_cpus: Auto | Annotated[float, Field(gt=0)] = "auto"
    """CPUs per worker; a number also limits its torch threads."""
    batch_size: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Rows per batch; auto: as many as fit in memory, by prompt length."""
    memory_share: Annotated[float, Field(gt=0.0, le=0.95)] = MEMORY_SHARE
    """The share of a GPU's memory that a worker uses for weights and KV caches; the rest is for activations and CUDA
    graphs. On CPUs a worker uses a quarter of the free memory."""
    require_kernels: bool = False
    """Whether a worker that would decode with torch's operators, without the CUDA graphs that it should have, or with
    padding of prompts that need none, counts as one that cannot start. Otherwise it decodes more slowly, and the end of
    the run says so."""
    length_buckets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
    )
    """Upper ends of the ranges of prompt lengths, in tokens; all rows of a batch are of one range."""
    window_batches: Auto | Annotated[int, Field(ge=1)] = "auto"
    """How many batches of rows a worker takes at a time and sorts by length; auto: 16 for a worker with a GPU, whose
    batches are short and have to be full, else 4 (several GPUs: a model that takes its time)."""
    background: bool = False
    """Whether workers, and what reads, tokenizes and writes, leave the CPUs to everything else that runs on their
    machines, and take what is left (Linux: SCHED_IDLE; elsewhere the lowest priority). With autogroups, to all else
    that Ray runs there."""
    share_leftovers: bool = True
    """Whether idle workers take over rows that another worker has not started (work stealing)."""
    price_per_hour: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """What all machines of the run cost per hour together, in any currency; used in the estimate and the report."""

    @field_validator("num_gpus")
    @classmethod
    def _whole(cls, value: Auto | float) -> Auto | float:
        if value != "auto" and value > 1 and value != int(value):
            raise ValueError(f"more than one GPU per actor come whole, got {value:g}")
        return value

    @property
    def num_devices(self) -> int:
        """How many devices the layers of a worker's model are split over."""
        return 1 if self.num_gpus == "auto" else max(1, int(self.num_gpus))

    def batches_of_window(self, *, has_gpu: bool) -> int:
        """`window_batches`, with `auto` resolved for workers with or without GPUs."""
        if self.window_batches != "auto":
            return self.window_batches
        return GPU_WINDOW_BATCHES if has_gpu and self.num_devices == 1 else WINDOW_BATCHES

    @field_validator("length_buckets")
    @classmethod
    def _sorted(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError(f"must be strictly increasing, got {list(value)}")
        return value

    @field_validator("num_actors")
    @classmethod
    def _pool(cls, value: PoolSize) -> PoolSize:
        if isinstance(value, tuple) and not 1 <= value[0] <= value[1]:
            raise ValueError(f"a pool is [min, max] with 1 <= min <= max, got {list(value)}")
        return value


class BaselineConfig(Section):
    fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    """The share of batches that are also decoded at full depth, to measure speedup and agreement; at least the first
    few of each worker, unless it is 0."""


class LimitsConfig(Section):
    max_failed_rows: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """How many rows may fail before the exit code is 3: a whole number, or a share of the input (0.0 to 1.0)."""
    max_row_attempts: Annotated[int, Field(ge=1)] = 3
    """How many times a worker may die on a row that it decodes alone before the row fails as `poison_row`."""
    max_line_bytes: Annotated[int, Field(ge=1)] = MAX_LINE_BYTES
    """The most bytes that a line of the input (a row, in CSV) may have when decompressed; longer ones fail as
    `bad_line`."""
    no_progress_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """Seconds without a finished window after which the run ends with an error; four times as many where
    `actors.window_batches` auto is 16."""
    window_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds from the start of the command after which decoding ends; `--resume` makes the rows that are left. null:
    no limit."""


class JobConfig(Section):
    """All configuration keys of `skipdecode generate`."""

    model: ModelConfig = ModelConfig()
    decode: DecodeConfig = DecodeConfig()
    prefill: PrefillConfig = PrefillConfig()
    sampling: SamplingConfig = SamplingConfig()
    input: InputConfig = InputConfig()
    output: OutputConfig = OutputConfig()
    actors: ActorsConfig = ActorsConfig()
    baseline: BaselineConfig = BaselineConfig()
    limits: LimitsConfig = LimitsConfig()


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> JobConfig:
    """The configuration of a YAML file (None: all defaults) with `a.b=value` overrides applied in order, checked."""
    return build_config(JobConfig, read_tree(path, overrides))
