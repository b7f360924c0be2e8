"""Types of what a training writes: lines of `training/log.jsonl`, `training/run.json` and `training.json`.

Types, and no more; who writes them is `worker` (the log) and `finetune` (the rest).
"""

from collections.abc import Iterable
from typing import Literal, NotRequired, TypeAlias, TypedDict, final

from pipeline.formatting import Json

Fingerprint: TypeAlias = dict[str, Json]
"""Everything that decides the weights, flat: a resumed run must agree in every entry."""


@final
class StartLine(TypedDict):
    """A session begins, at `step`."""

    step: int
    start: dict[str, Json]
    """Time, host, process, device and versions (`worker.describe`)."""


@final
class FitLine(TypedDict):
    """Before the first step: SwiftKV's keys and values see the pairs that they are fitted to (`train.fit_pairs`)."""

    step: int
    fitted: int
    """Pairs seen."""
    fit_pairs: int


@final
class LossLine(TypedDict):
    """The mean training loss since the last such line."""

    step: int
    steps: int
    """Steps of the whole training."""
    epoch: float
    elapsed_s: float
    train_loss: float
    """Nats per response token."""
    pairs_per_s: float


@final
class ValidationLine(TypedDict):
    step: int
    steps: int
    epoch: float
    elapsed_s: float
    validation_loss: dict[str, float]
    """Loss by schedule, in nats per response token."""
    mean: float


LogLine: TypeAlias = StartLine | FitLine | LossLine | ValidationLine
"""Told apart by their keys: `start`, `fitted`, `train_loss`, `validation_loss`."""


def fitting(fitted: int, fit_pairs: int) -> str:
    """A `FitLine` for people."""
    return f"fitting SwiftKV's keys and values   {fitted}/{fit_pairs} pairs"


def losses_in(lines: Iterable[LogLine]) -> list[LossLine]:
    return [line for line in lines if "train_loss" in line]


class TrainingRecord(TypedDict):
    """`training.json`: what was made, how, from what, on what."""

    best: ValidationLine
    steps: int
    warmup_steps: int
    """The warm-up that was used; `config` has the one that was asked for."""
    duration_s: float
    pairs: int
    validation_pairs: int
    skipped_rows: int
    response_tokens: int
    skip_decode: dict[str, Json] | None
    sessions: list[dict[str, Json]]
    """`StartLine.start` of each, and `from_step`."""
    finished_at: str
    config: dict[str, Json]


class TrainingState(TypedDict):
    """`training/run.json`: marks the folder as ours, and says how far the training got."""

    version: str
    """Version of skipdecode-ray that wrote it."""
    state: Literal["running", "interrupted", "finished"]
    fingerprint: Fingerprint
    warmup_steps: int
    """The warm-up that was used; `config` has the one that was asked for."""
    config: dict[str, Json]
    record: NotRequired[TrainingRecord]
    """Only in a finished run."""
