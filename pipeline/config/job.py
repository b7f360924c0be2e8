"""The configuration of a run: one frozen tree. How it is read and checked is `pipeline.config.tree`, offered here too.

Nothing is resolved here that needs a cluster, a checkpoint or an input file: `auto` stays `auto` until
`pipeline.generate.plan.plan_run`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from pipeline.config.input import InputConfig
from pipeline.config.tree import ConfigError, Section, build_config, read_tree, set_key
from skipdecode.checkpoint.hub import DEMO
from skipdecode.config.model import MAX_LOGPROBS, DecoderConfig, Quantization, SwiftKVConfig
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
MAX_SAMPLES = 1024  # of a document


class ModelConfig(Section):
    source: str = DEMO
    """A folder or a hub id in Hugging Face layout, or a .gguf file, of a family in docs/models.md."""
    adapter: str | None = None
    """The folder of a LoRA adapter for `source`, as PEFT saves it, merged into the weights at load; null: none."""
    tokenizer: str | None = None
    """A folder, a hub id or a .gguf file; null: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the decoder computes in; auto: bfloat16 where the device multiplies it, else float32."""
    quantization: Quantization | None = None
    """int8: weights of 8 bits, half of their bytes and other tokens; for bfloat16 on CPUs with AMX, or AVX-512 with
    BF16 and VNNI."""


class FFNSkipConfig(Section):
    """Feed-forward blocks that are left out; what the values may be is checked where the schedule is made."""

    mode: Literal["row", "calibrated", "fixed"] = "row"
    """row: the paper's rule. calibrated: the layers that the checkpoint carries (`jobs.calibrate`). fixed: `layers`."""
    threshold: float | None = None
    """row: the cosine similarity from which a row skips its later blocks; null: 0.98."""
    cold_start: int | None = None
    """row: layers from the bottom that never skip; null: 4."""
    cold_end: int | None = None
    """row: layers from the top that never skip; null: 4."""
    warmup_tokens: int | None = None
    """Decode steps at the start of an answer that skip nothing; null: 25, or what the checkpoint carries."""
    layers: tuple[int, ...] | None = None
    """fixed: layers whose feed-forward block is left out."""


class DecodeConfig(Section):
    method: MethodName | None = None
    """null: skipdecode if another key of the schedule is given, else the schedule that the checkpoint carries as
    `skip_decode`, else full depth. With `lossless`: the drafts it carries, and skipdecode at speedup 2 without any."""
    speedup: float | None = None
    """A preset of the paper: 2, 3, 4 or 5; 1 is full depth; null: `max_layers` and `min_layers`, or 2."""
    max_layers: int | None = None
    """skipdecode, early_exit: layers that run in the first decode step."""
    min_layers: int | None = None
    """skipdecode, early_exit: layers that run from the last step of `horizon` on."""
    warmup_layers: int | None = None
    """skipdecode: layers from the bottom that always run; null: 1."""
    horizon: int | None = None
    """Decode steps over which the depth falls; null: max(max_new_tokens - 1, 1), and 63 with `lossless`."""
    layers: int | tuple[int, ...] | None = None
    """For `unified`: how many layers run. For `layers`: which ones, a list of numbers from 0 on."""
    lossless: Annotated[bool, Field(strict=True)] | Literal["auto"] = False
    """true: the schedule only drafts, full depth verifies, and its tokens come out. auto: drafts are made
    where a gain is expected."""
    draft_tokens: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_DRAFTS, strict=True)] = "auto"
    """lossless: tokens drafted at a time; auto: as many as pay."""
    ffn_skip: FFNSkipConfig | None = None
    """FFN-SkipLLM on top of `method`; null: every layer that runs runs its feed-forward block."""
    prefix: Literal["auto", "off"] = "auto"
    """auto: what prompts of a window begin with alike is run once, where that saves time; off: every prompt by itself.
    Without effect under `sampling.deterministic`."""

    @property
    def is_given(self) -> bool:
        """Whether any key says how to decode; `prefix` does not, since it changes no token."""
        return bool(self.model_dump(exclude_defaults=True, exclude={"prefix"}))

    @field_validator("prefix", mode="before")
    @classmethod
    def _off_is_false_in_yaml(cls, value: object) -> object:
        return "off" if value is False else value


class PrefillConfig(Section):
    method: Literal["full", "swiftkv"] = "full"
    """swiftkv: prompt tokens stop half-way; needs a checkpoint that carries SwiftKV's weights."""


class SwiftKVSection(Section):
    """The shape of SwiftKV, where a model is given it (`jobs.distill`, `jobs.bench`)."""

    kv_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers with K/V of their own, from the bottom; null: half of them."""
    group_size: Annotated[int, Field(ge=1)] = 1
    """Neighbouring layers above that share one K/V (AcrossKV); divides their number."""

    def shape(self, model_config: DecoderConfig) -> SwiftKVConfig:
        """For a model of that shape; ValueError when it cannot have it."""
        shape = SwiftKVConfig(self.kv_layers or -(-model_config.num_hidden_layers // 2), self.group_size)
        shape.check(model_config)
        return shape


class SamplingConfig(Section):
    prompt_logprobs: bool = False
    """Whether the tokens of the prompts are scored too, at full depth (column `prompt_logprobs`)."""
    max_new_tokens: Annotated[int, Field(ge=0)] = 64
    """Tokens of an answer at most; 0 scores the prompt alone, with `prompt_logprobs`."""
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Draw from the smallest set of tokens with this much probability; 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0: no limit."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Random numbers depend on seed, row id and step alone."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; they are not part of it."""
    ignore_eos: bool = False
    """Whether answers go on behind the end-of-text token."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities of the generated tokens (column `logprobs`), and of so many likeliest tokens in the place of
    each (`top_logprobs`): the model's own, before temperature, `top_k` and `top_p`. null: none."""
    deterministic: bool = False
    """Fixes batch shapes: tokens depend on model, configuration, prompt, id and seed alone, in bfloat16 too."""
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Answers to each prompt, a row each with an id of its own; more than 1 needs a `temperature`."""

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

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class OutputConfig(Section):
    path: Annotated[str, Field(min_length=1)] = "outputs/run"
    """The folder to write: local, or a URI."""
    if_exists: Literal["fail", "resume", "overwrite"] = "fail"
    """What to do where the folder holds something; `--resume` and `--overwrite` set it."""


Auto = Literal["auto"]
PoolSize = Auto | Annotated[int, Field(ge=1)] | tuple[int, int]


class ActorsConfig(Section):
    num_actors: PoolSize = "auto"
    """A number, or [min, max] for a pool that grows and shrinks."""
    num_gpus: Auto | Annotated[float, Field(ge=0)] = "auto"
    """GPUs of each actor; auto: 1 where the cluster has GPUs, else 0. Below 1 actors share one. Above 1 the model's
    layers lie on so many, in turns: for models that do not fit one."""
    num_cpus: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Of each actor; a number bounds its torch threads too."""
    batch_size: Auto | Annotated[int, Field(ge=1)] = "auto"
    """Rows of a batch; auto: what memory allows, by prompt length."""
    memory_share: Annotated[float, Field(gt=0.0, le=0.95)] = MEMORY_SHARE
    """Of a GPU's memory, what a worker takes for weights and caches; prompts' states and graphs have the rest. Hosts
    give a quarter of what is free."""
    length_buckets: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] = (
        32,
        64,
        128,
        256,
        512,
        1024,
        2048,
    )
    """Prompt lengths, in tokens; rows of one batch are of one bucket."""
    window_batches: Annotated[int, Field(ge=1)] = 4
    """Batches' worth of rows an actor takes at a time and sorts by length."""
    share_leftovers: bool = True
    """Whether actors that have nothing left to do take over parts of other actors' windows."""
    price_per_hour: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """What all machines of the run together cost per hour, in any currency; for estimate and report."""

    @field_validator("num_gpus")
    @classmethod
    def _whole(cls, value: Auto | float) -> Auto | float:
        if value != "auto" and value > 1 and value != int(value):
            raise ValueError(f"more than one GPU per actor come whole, got {value:g}")
        return value

    @property
    def num_devices(self) -> int:
        """That the layers of a worker's model lie on."""
        return 1 if self.num_gpus == "auto" else max(1, int(self.num_gpus))

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
    """Share of batches also decoded at full depth; at least the first few of each worker, unless it is 0."""


class LimitsConfig(Section):
    max_failed_rows: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """A whole number of rows, or a share of the input (a float from 0.0 to 1.0)."""
    max_row_attempts: Annotated[int, Field(ge=1)] = 3
    """Deaths of a worker with a row alone in hand, until the row fails as `poison_row`."""
    max_line_bytes: Annotated[int, Field(ge=1)] = MAX_LINE_BYTES
    """Of a line of the input (a row of CSV); a longer one fails as `bad_line`, whatever it decompresses to."""
    no_progress_timeout_s: Annotated[float, Field(gt=0)] = 1800
    """Seconds without a finished block after which the run ends."""


class JobConfig(Section):
    """Everything `python -m jobs.generate` can be told."""

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
    """Reads `path` (YAML; None: all defaults), applies `a.b=value` overrides in order, checks it all."""
    return build_config(JobConfig, read_tree(path, overrides))
