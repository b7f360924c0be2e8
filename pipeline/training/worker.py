"""The function that each Ray Train worker runs: build the model, load the last checkpoint, train; rank 0 writes.

A start, a resume and the restart of a dead worker follow the same path: continue from the newest complete checkpoint.
The loop itself is `actors.training.trainer`, which does not depend on Ray.
"""

import datetime
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

import ray
import ray.train.torch
import torch
import torch.distributed as dist

from actors.training.recipe import TrainConfig
from actors.training.state import Weights, load_state, model_of, save_state
from actors.training.trainer import Hooks, init_weights, train
from actors.training.workers import Pair
from pipeline.cluster.machine import provenance
from pipeline.formatting import Json
from pipeline.training.folder import TrainingFolder
from pipeline.training.training_records import ValidationLine
from skipdecode.checkpoint.weights import adapter_of, load_model, save_model
from skipdecode.config.model import DecoderConfig
from skipdecode.config.wrapped import WrappedConfig
from skipdecode.model.decoder import Decoder
from skipdecode.training.lora import LoraShape, add_lora, save_adapter

Checkpoint: TypeAlias = dict[str, object]
"""What `actors.training.state` reads and writes: weights, moments and progress, of which only the step is our
business."""


@dataclass(frozen=True)
class TrainingJob:
    """What a worker needs to know."""

    folder: Path
    source: str | None
    """The checkpoint to start from, as the workers find it; None: from scratch."""
    config: DecoderConfig
    """The model's configuration, with the schedule that the result will carry."""
    teacher: str | None
    """The checkpoint that distillation compares with; None: full depth of the model itself."""
    teacher_adapter: str | None
    """Merged into it."""
    train: TrainConfig
    dtype: str
    """The dtype of the stored weights."""
    threads: int
    pairs: "ray.ObjectRef[tuple[list[Pair], list[Pair]]]"
    """Training and validation pairs, as tokens."""
    lora: LoraShape | None
    """The adapter that is trained instead of the model."""
    adapter: str | None
    """The one to start from, as the workers find it: trained on with `lora`, else merged."""
    base: str
    """The base model that the adapter names: `model.source` as configured."""


class WorkerSettings(TypedDict):
    """`train_loop_config` of Ray Train."""

    job: TrainingJob


@dataclass(frozen=True)
class Trained:
    best: ValidationLine


@dataclass(frozen=True)
class Failed:
    """For what another attempt would not cure."""

    message: str


def run_worker(settings: WorkerSettings) -> Trained | Failed:
    """Trains as one of the workers."""
    job = settings["job"]
    torch.set_num_threads(job.threads)
    device = ray.train.torch.get_device()
    pairs, validation = ray.get(job.pairs)
    folder = TrainingFolder(job.folder)
    resumed = _restore(folder)
    model = _initial(job, device)
    if dist.get_rank() == 0:
        step = 0 if resumed is None else resumed[0]
        folder.rewind_log(step)
        folder.append_log({"step": step, "start": describe(device)})
    try:
        teacher = None if job.teacher is None else load_model(job.teacher, adapter=job.teacher_adapter, device=device)
        state = None if resumed is None else resumed[1]
        best = train(model, pairs, validation, job.train, _hooks(job, folder, model), state, teacher)
        return Trained(cast(ValidationLine, best))
    except FloatingPointError as error:
        return Failed(str(error))


def _restore(folder: TrainingFolder) -> tuple[int, Checkpoint] | None:
    """Step and contents of the same checkpoint on every worker: rank 0 chooses."""
    chosen: list[int | None] = [None]
    if dist.get_rank() == 0 and (found := folder.load_checkpoint(load_state)):
        chosen = [found[0]]
    dist.broadcast_object_list(chosen)
    step = chosen[0]
    return None if step is None else (step, load_state(dict(folder.checkpoints())[step]))


def _initial(job: TrainingJob, device: torch.device) -> Decoder:
    if job.source is not None:
        merged = job.adapter if job.lora is None else None
        model, shape = load_model(job.source, adapter=merged, device=device), job.config.swiftkv
        if job.lora is not None:
            model = model.without_swiftkv()
            start = None if job.adapter is None else adapter_of(job.adapter, model)
            add_lora(model, job.lora, job.train.seed, start)
            return model
        if shape is None:
            model = model.without_swiftkv()
        elif model.config.swiftkv != shape:
            model = model.with_swiftkv(shape.kv_layers, shape.group_size)
        if isinstance(job.config, WrappedConfig):  # it saves itself
            model.config = job.config
        return model
    model = Decoder(job.config)
    init_weights(model, job.train.seed)
    return model.to(device)


def _hooks(job: TrainingJob, folder: TrainingFolder, model: Decoder) -> Hooks:
    if dist.get_rank() != 0:
        return Hooks(log=lambda _: None, keep_best=lambda *_: None, checkpoint=lambda *_: None)

    def keep_best(weights: Weights, record: dict[str, Json]) -> None:
        dtype, lora = getattr(torch, job.dtype), job.lora
        if lora is not None:
            own = {name.removeprefix("model."): value for name, value in weights.items()}
            folder.publish(lambda staging: save_adapter(own, staging, job.config, lora, job.base, dtype=dtype))
            return
        # a model of transformers is whole on each worker, and knows what its files are like
        best = model if isinstance(job.config, WrappedConfig) else model_of(weights, job.config)
        folder.publish(lambda staging: save_model(best, staging, dtype=dtype))

    def checkpoint(state: Checkpoint, record: dict[str, Any]) -> None:
        folder.save_checkpoint(record["step"], lambda path: save_state(state, path))

    return Hooks(folder.append_log, keep_best, checkpoint)


def describe(device: torch.device) -> dict[str, Json]:
    """The process, device and versions of rank 0, for the log."""
    here: dict[str, Json] = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "workers": dist.get_world_size(),
    }
    return here | provenance(device, ("torch", "ray"))
