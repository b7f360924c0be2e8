"""The configuration of `jobs.finetune` and `jobs.distill`: one frozen tree, as for `jobs.generate`.

Only types and ranges are checked here. What needs a checkpoint, the data or a cluster is checked by
`pipeline.training.training_plan`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from pipeline.config.job import Auto, OutputConfig, Section, SwiftKVSection, build_config, read_tree


class ModelShape(Section):
    """A model made from scratch, with a byte-level BPE tokenizer trained on the pairs."""

    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """256 bytes and the special tokens come first."""
    hidden_size: Annotated[int, Field(ge=1)] = 128
    """Width of the model."""
    num_hidden_layers: Annotated[int, Field(ge=1)] = 24
    """Number of layers."""
    num_attention_heads: Annotated[int, Field(ge=1)] = 4
    """Attention heads of a layer; divides `hidden_size`."""
    ffn_dim: Annotated[int, Field(ge=1)] = 512
    """Width of the feed-forward blocks."""
    max_position_embeddings: Annotated[int, Field(ge=1)] = 2048
    """Context length in tokens."""


class FinetuneModel(Section):
    source: str | None = None
    """The checkpoint to start from, a folder, a hub id or a .gguf file; null: from scratch, in `shape`."""
    adapter: str | None = None
    """The folder of a LoRA adapter of `source` to start from. `train.lora` trains on with it, in its shape; without
    `train.lora` it is merged into `source` first."""
    shape: ModelShape = ModelShape()
    swiftkv: SwiftKVSection | None = None
    """Gives the model SwiftKV's weights, so that `train.schedules` may have `prefill: swiftkv`: those of `source` if
    they have that shape, else taken from its own. null: none, not even those that `source` may have."""
    teacher: str | None = None
    """A frozen checkpoint with the same tokenizer that `train.distill` compares with; null: with `swiftkv` it is
    `source` with its `adapter`, else full depth of what is trained, as it is at that step."""


class FinetuneData(Section):
    path: Annotated[tuple[str, ...], Field(min_length=1)] = ("data/train.csv",)
    """Files, folders, patterns or URIs of Parquet, JSONL or CSV."""
    validation: Annotated[tuple[str, ...], Field(min_length=1)] = ("data/validation.csv",)
    """Pairs that choose the best checkpoint; the same forms as `path`."""
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    """Column of the prompts."""
    response_column: Annotated[str, Field(min_length=1)] = "response"
    """Column of the responses; the loss counts their tokens alone."""
    bad_rows: Literal["fail", "skip"] = "fail"
    """What to do with rows without a response, broken lines, and pairs longer than the model's context."""
    made_names_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of E2E pairs in which names are replaced by invented ones, so that the model copies them from the prompt;
    0 for any other data."""

    @field_validator("path", "validation", mode="before")
    @classmethod
    def _one_path_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class LoraSection(Section):
    """A LoRA adapter: low-rank updates of the linear layers are trained, and the model is frozen."""

    rank: Annotated[int, Field(ge=1)] = 16
    """The rank of the update B A."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """The update is scaled by alpha / rank; null: twice `rank`."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Linear layers by their last names, e.g. [q_proj, v_proj]; null: all of each layer."""


class TrainSection(Section):
    """The recipe. All keys but the last group change the result, so a resumed run must agree in them."""

    schedules: Annotated[tuple[dict[str, JsonValue], ...], Field(min_length=1)] = (
        {"method": "full"},
        {"method": "skipdecode", "speedup": 2},
        {"method": "skipdecode", "speedup": 3},
        {"method": "skipdecode", "speedup": 4},
        {"method": "skipdecode", "speedup": 5},
    )
    """`decode:` mappings. `prefill: swiftkv` beside their keys: with the prompt under SwiftKV."""
    draw: Literal["one", "all"] = "one"
    """one: each step trains one schedule, drawn at random. all: each step trains all of them and takes the mean loss;
    prompts and full depth run once for all. That pays off for long prompts and needs memory for every schedule."""
    default_schedule: dict[str, JsonValue] | None = None
    """The schedule that the checkpoint carries, which jobs use by default; null: skipdecode at speedup 2 if that is in
    `schedules`, otherwise the first schedule that skips layers, otherwise full depth. Schedules without
    `prefill: swiftkv` are preferred."""
    horizon: Annotated[int, Field(ge=1)] = 63
    """Decode steps over which the depth falls: `sampling.max_new_tokens` of later jobs, less one."""
    epochs: Annotated[float, Field(gt=0)] = 3
    """Passes over the pairs; fractions are allowed."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Pairs per optimiser step, over all workers."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """The peak, reached at the end of the warm-up."""
    final_learning_rate: Annotated[float, Field(ge=0, validate_default=True)] = 2e-5
    """The learning rate at the last step, reached by linear decay; at most `learning_rate`."""
    warmup_steps: Annotated[int, Field(ge=1)] = 300
    """Steps in which the learning rate rises to its peak; a training of no more steps than that takes a tenth of its
    own."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """The betas of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """The weight decay of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are clipped to this norm."""
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the loss that is the KL divergence from the teacher at full depth; the rest is the loss on the data."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Temperature of the distributions that distillation compares; the divergence is multiplied by its square."""
    hidden: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of an extra loss: the mean squared difference from the teacher's last hidden states."""
    trainable: Literal["all", "swiftkv"] = "all"
    """all: the whole model. swiftkv: only the weights that SwiftKV adds."""
    fit_pairs: Annotated[int, Field(ge=0)] = 0
    """Pairs over which SwiftKV's new key and value projections are initialised by least squares; 0: they start as
    copies of the model's own, averaged over each group."""
    lora: LoraSection | None = None
    """Trains a LoRA adapter for `model.source` instead of the model, and saves it as a PEFT folder, which later
    jobs take as `model.adapter`; null: trains the model."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """bfloat16: autocast; weights and optimiser stay float32."""
    validate_every: Annotated[int, Field(ge=1)] = 500
    """Steps between validations."""
    validation_rows: Annotated[int, Field(ge=1)] = 512
    """At most so many pairs of `data.validation` are used."""
    seed: int = 0
    """Seed of initial weights, of the order of pairs, and of the schedule of each step."""

    accumulate: Annotated[int, Field(ge=1)] = 1
    """Micro-batches that a worker's share of a step is cut into."""
    recompute: bool = False
    """Activation checkpointing."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: a copy on every worker. fsdp: weights, gradients and optimiser are sharded."""
    log_every: Annotated[int, Field(ge=1)] = 20
    """Steps between two lines of the log."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 200
    """Steps between checkpoints; every best validation is saved as a checkpoint, too."""

    @field_validator("final_learning_rate")
    @classmethod
    def _it_falls(cls, value: float, info: ValidationInfo) -> float:
        peak = info.data.get("learning_rate", value)
        if value > peak:
            raise ValueError(
                f"above train.learning_rate={peak:g}, so the rate would rise; give both, e.g. "
                f"train.final_learning_rate={peak / 10:g}"
            )
        return value


HOW = ("accumulate", "recompute", "parallel", "log_every", "checkpoint_every")  # of `train`: change no result


class WorkersSection(Section):
    num_workers: Auto | Annotated[int, Field(ge=1)] = "auto"
    """auto: one per GPU, and one on CPUs."""
    use_gpu: Auto | bool = "auto"
    """auto: where the cluster has GPUs."""
    num_cpus: Auto | Annotated[float, Field(gt=0)] = "auto"
    """Ray CPUs that each worker asks for."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """torch threads of each worker; null: its share of the cores."""
    max_failures: Annotated[int, Field(ge=0)] = 2
    """How often Ray Train restarts dead workers, from the last checkpoint."""


class FinetuneOutput(OutputConfig):
    path: Annotated[str, Field(min_length=1)] = "outputs/finetuned"
    """A folder that every worker sees."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of the stored weights; null: bfloat16, or with `train.trainable=swiftkv` that of `model.source`, or with
    `train.lora` float32."""
    model_type: Literal["llama_swiftkv"] | None = None
    """`model_type` of the written config.json; null: that of the model. llama_swiftkv: the layout of Snowflake's
    checkpoints for a Llama with `model.swiftkv`, which ArcticInference loads, and transformers alone does not."""


class FinetuneConfig(Section):
    model: FinetuneModel = FinetuneModel()
    data: FinetuneData = FinetuneData()
    train: TrainSection = TrainSection()
    workers: WorkersSection = WorkersSection()
    output: FinetuneOutput = FinetuneOutput()


def load_finetune_config(path: str | Path | None, overrides: Sequence[str] = ()) -> FinetuneConfig:
    return build_config(FinetuneConfig, read_tree(path, overrides))
