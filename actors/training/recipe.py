"""The hyperparameters of a training run, and what follows from them: steps, learning rates, names of schedules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skipdecode.config.model import Trainable


@dataclass(frozen=True)
class TrainConfig:
    schedules: tuple[dict[str, Any], ...]
    """`decode:` mappings, with `prefill` beside their keys."""
    draw: Literal["one", "all"]
    """A step trains one schedule, drawn at random, or all of them with the mean of their losses."""
    horizon: int
    """Decode steps over which the depth falls in training."""
    epochs: float
    batch_size: int
    """Pairs per optimiser step, over all workers."""
    accumulate: int
    """Micro-batches that a worker's share of a step is cut into."""
    learning_rate: float
    """The peak, reached after `warmup_steps`; it then falls linearly to `final_learning_rate`."""
    final_learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    """The betas of AdamW."""
    weight_decay: float
    max_grad_norm: float
    distill: float
    """Share of the loss that compares with a teacher instead of the data (`ResponseLoss`)."""
    temperature: float
    """The temperature of the compared distributions."""
    hidden: float
    """Weight of the squared difference between the final hidden states."""
    trainable: Trainable
    fit_pairs: int
    """Pairs that SwiftKV's projections are fitted on before the first step; 0: they start as copies."""
    precision: Literal["float32", "bfloat16"]
    """bfloat16: autocast; weights and optimiser stay float32."""
    recompute: bool
    """Activation checkpointing: recompute each layer in the backward pass."""
    parallel: Literal["ddp", "fsdp"]
    log_every: int
    """In steps, as are the next two."""
    validate_every: int
    checkpoint_every: int
    validation_rows: int
    """Validation pairs per evaluation, drawn once."""
    seed: int


def num_steps(num_pairs: int, config: TrainConfig) -> int:
    """Optimiser steps, at least one."""
    return max(1, round(config.epochs * -(-num_pairs // config.batch_size)))


def learning_rate(step: int, total: int, config: TrainConfig) -> float:
    """The learning rate of update number `step`, counted from 0, of `total`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    left = (total - step) / max(total - config.warmup_steps, 1)
    return config.final_learning_rate + left * (config.learning_rate - config.final_learning_rate)


def schedule_names(schedules: Sequence[dict[str, Any]]) -> list[str]:
    """Names for logs and plots: the values (`skipdecode 5 3`), with their keys where two names would be equal."""
    names = [" ".join(str(value) for value in decode.values()) for decode in schedules]
    long = [" ".join(f"{key} {value}" for key, value in decode.items()) for decode in schedules]
    return [name if names.count(name) == 1 else whole for name, whole in zip(names, long, strict=True)]
