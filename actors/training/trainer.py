"""The training loop of one worker. It trains several schedules, so that one checkpoint serves every speed.

Batch, schedule and learning rate are functions of the seed and the step, and a step's loss is the mean over all its
tokens. So a resumed run has the same loss curve, and so has one with more workers or more accumulation. Several workers
use `torch.distributed`, which the launcher (Ray Train, torchrun) initialises. No Ray here.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from actors.training.recipe import TrainConfig, learning_rate, num_steps, schedule_names
from actors.training.state import Weights, collect_state, full_state, restore_state
from actors.training.workers import Pair, inner, no_sync, parts_of, rank_and_size, wrap
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch
from skipdecode.schedules.from_config import listed_schedule
from skipdecode.schedules.schedule import Schedule
from skipdecode.training.lora import adapter_modules
from skipdecode.training.loss import ResponseLoss
from skipdecode.training.swiftkv_init import SwiftKVLeastSquares

SORTED_BATCHES = 50  # rows are sorted by length within chunks of this many batches: little padding, still shuffled


@dataclass(frozen=True)
class Hooks:
    """Callbacks, called on every worker at the same steps. Their tensors are live: write them, do not keep them."""

    log: Callable[[dict[str, Any]], None]
    """Called with a record: the mean loss since the last one, or a validation."""
    keep_best: Callable[[Weights, dict[str, Any]], None]
    """Called with the weights of the lowest mean validation loss so far (empty except on rank 0) and their record.

    The checkpoint of the same step comes first, and a run resumed from it calls this again, so that the two agree after
    any crash.
    """
    checkpoint: Callable[[dict[str, Any], dict[str, Any]], None]
    """Called with the state for `train(resume=...)` (empty except on rank 0) and the record of the step."""


def init_weights(model: Decoder, seed: int) -> None:
    """Initialises as Hugging Face's OPT, with residual outputs scaled by 1/sqrt(2 L) as in GPT-2."""
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
            continue
        is_residual = name.endswith(("out_proj.weight", "fc2.weight"))
        scale = std / (2 * model.config.num_hidden_layers) ** 0.5 if is_residual else std
        torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)


def length_sorted_batches(pairs: Sequence[Pair], batch_size: int, seed: str) -> list[list[Pair]]:
    """Shuffled batches of pairs of similar lengths, each pair once."""
    rng = random.Random(seed)
    order = list(range(len(pairs)))
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), SORTED_BATCHES * batch_size):
        chunk = sorted(
            order[start : start + SORTED_BATCHES * batch_size], key=lambda i: (len(pairs[i][0]), len(pairs[i][1]))
        )
        batches += [[pairs[i] for i in chunk[j : j + batch_size]] for j in range(0, len(chunk), batch_size)]
    rng.shuffle(batches)
    return batches


def train(
    model: Decoder,
    pairs: Sequence[Pair],
    validation: Sequence[Pair],
    config: TrainConfig,
    hooks: Hooks,
    resume: dict[str, Any] | None = None,
    teacher: Decoder | None = None,
) -> dict[str, Any]:
    """Trains in place and returns the record of the best validation.

    Of a model with an adapter (`skipdecode.training.lora`) only the adapter is trained and handed out. `resume` is a
    state from `load_state`. `teacher` is frozen and complete on each worker; None: the model at full depth. Raises
    FloatingPointError if the loss is not finite.
    """
    schedules = [listed_schedule(model.config, entry, config.horizon + 1) for entry in config.schedules]
    validation = random.Random(0).sample(validation, min(config.validation_rows, len(validation)))
    if resume is None and config.fit_pairs:
        fit_swiftkv(model, pairs, config, hooks.log)
    loss = _loss_to_train(model, config, teacher)
    module = wrap(loss, config.parallel)
    optimizer = _optimizer(model, config)
    total, per_epoch = num_steps(len(pairs), config), -(-len(pairs) // config.batch_size)
    step, best, elapsed_s, meter = 0, dict[str, Any](), 0.0, _LossMeter()
    if resume is not None:
        restore_state(loss, optimizer, resume)
        step, best, elapsed_s = resume["step"], resume["best"], resume["elapsed_s"]
        meter = _LossMeter(resume["losses_since_log"])
        if best and best["step"] == step:
            hooks.keep_best(full_state(get_model_state_dict, loss), best)
    started, epoch, batches = time.monotonic() - elapsed_s, -1, list[list[Pair]]()
    while step < total:
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            batches = length_sorted_batches(pairs, config.batch_size, f"{config.seed} epoch {epoch}")
        one = random.Random(f"{config.seed} step {step}").choice(schedules)
        drawn = [one] if config.draw == "one" else schedules
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, total, config)
        value = _step(module, optimizer, batches[step % per_epoch], drawn, config, model.device)
        step += 1
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} at step {step}; lower train.learning_rate")
        is_last, is_best = step == total, False
        meter.add(value, len(batches[(step - 1) % per_epoch]))
        elapsed_s = round(time.monotonic() - started, 1)
        record: dict[str, Any] = {"step": step, "steps": total, "epoch": step / per_epoch, "elapsed_s": elapsed_s}
        if step % config.log_every == 0 or is_last:
            hooks.log(record | meter.record())
        if step % config.validate_every == 0 or is_last:
            record |= _validate(module, validation, config, schedules, step, model.device)
            hooks.log(record)
            is_best = record["mean"] < best.get("mean", math.inf)
            best = record if is_best else best
        if step % config.checkpoint_every == 0 or is_last or is_best:
            progress = {"step": step, "best": best, "elapsed_s": time.monotonic() - started}
            hooks.checkpoint(collect_state(loss, optimizer, progress | {"losses_since_log": meter.losses}), record)
        if is_best:
            hooks.keep_best(full_state(get_model_state_dict, loss), best)
    model.eval().requires_grad_(False)
    return best


def fit_swiftkv(
    model: Decoder, pairs: Sequence[Pair], config: TrainConfig, log: Callable[[dict[str, Any]], None]
) -> None:
    """Fits SwiftKV's projections by least squares on `config.fit_pairs` of the pairs, the same on every worker.

    `log` is called with the number of pairs so far after each batch.
    """
    rank, world = rank_and_size()
    chosen = random.Random(f"{config.seed} fit").sample(pairs, min(config.fit_pairs, len(pairs)))
    rows = max(1, config.batch_size // (world * config.accumulate))
    fit = SwiftKVLeastSquares(model)
    for number, batch in enumerate(length_sorted_batches(chosen, rows, f"{config.seed} fit")[rank::world], start=1):
        with _autocast(model.device, config.precision):
            fit.add(teacher_batch(batch, model.config.filler_token_id, model.device))
        log({"step": 0, "fitted": min(number * rows * world, len(chosen)), "fit_pairs": len(chosen)})
    if world > 1:
        for total in fit.sums:
            dist.all_reduce(total)
    fit.solve()


def _loss_to_train(model: Decoder, config: TrainConfig, teacher: Decoder | None) -> ResponseLoss:
    """The loss, with gradients enabled for the weights that are trained."""
    lora = adapter_modules(model)
    model.train().requires_grad_(config.trainable == "all" and not lora)
    for added in lora if model.swiftkv is None else [*lora, model.swiftkv]:
        added.requires_grad_(True)
    if lora and config.precision == "bfloat16":  # autocast caches its copies of trained weights only
        for layer in model.layers:
            for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
                if not linear.weight.requires_grad:
                    linear.weight.data = linear.weight.data.bfloat16()
    return ResponseLoss(
        model,
        distill=config.distill,
        temperature=config.temperature,
        hidden=config.hidden,
        teacher=teacher,
        recompute=config.recompute,
    )


def mean_loss(model: Decoder, pairs: Sequence[Pair], schedule: Schedule, batch_rows: int) -> float:
    """The teacher-forced loss under `schedule` over all pairs, in nats per response token; exp of it is perplexity."""
    return mean_losses(model, pairs, [schedule], batch_rows)[0]


def mean_losses(model: Decoder, pairs: Sequence[Pair], schedules: Sequence[Schedule], batch_rows: int) -> list[float]:
    """`mean_loss` under each schedule; prompts run only once."""
    return _mean_losses(ResponseLoss(model).eval(), pairs, schedules, batch_rows, model.device, "float32")


class _LossMeter:
    """Collects losses and rows between two log records."""

    def __init__(self, losses: Sequence[float] = ()) -> None:
        self.losses = list(losses)
        self._rows, self._started = 0, time.monotonic()

    def add(self, loss: float, rows: int) -> None:
        self.losses.append(loss)
        self._rows += rows

    def record(self) -> dict[str, float]:
        now = time.monotonic()
        record = {"train_loss": sum(self.losses) / len(self.losses)}
        record["pairs_per_s"] = self._rows / max(now - self._started, 1e-9)
        self.losses, self._rows, self._started = [], 0, now
        return record


def _step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[Pair],
    schedules: Sequence[Schedule],
    config: TrainConfig,
    device: torch.device,
) -> float:
    """Makes one update; returns the mean loss before it, per response token and schedule, over all workers."""
    rank, world = rank_and_size()
    num_tokens = sum(len(response) for _, response in batch)
    parts = parts_of(batch, world * config.accumulate)[rank::world]
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=device)
    for i, (part, weight) in enumerate(parts):
        with no_sync(module, is_last=i == len(parts) - 1):
            loss = weight * _losses(module, part, schedules, config, device).mean()
            torch.autograd.backward(loss * (world / num_tokens))  # DDP and FSDP average over workers
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(module.parameters(), config.max_grad_norm)
    optimizer.step()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / num_tokens


def _losses(
    module: nn.Module, part: Sequence[Pair], schedules: Sequence[Schedule], config: TrainConfig, device: torch.device
) -> torch.Tensor:
    batch = teacher_batch(part, inner(module).model.config.filler_token_id, device)
    with _autocast(device, config.precision):
        losses: torch.Tensor = module(batch, *schedules)
    return losses


def _autocast(device: torch.device, precision: str) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16")


@torch.no_grad()
def _mean_losses(
    module: nn.Module, pairs: Sequence[Pair], schedules: Sequence[Schedule], batch_rows: int, device: torch.device,
    precision: str,
) -> list[float]:  # fmt: skip
    rank, world = rank_and_size()
    pad = inner(module).model.config.filler_token_id
    total = torch.zeros(len(schedules), device=device, dtype=torch.float64)
    for batch in length_sorted_batches(pairs, batch_rows * world, "validation"):
        part, weight = parts_of(batch, world)[rank]
        with _autocast(device, precision):
            total += weight * module(teacher_batch(part, pad, device), *schedules)
    if world > 1:
        dist.all_reduce(total)
    return (total / sum(len(response) for _, response in pairs)).tolist()


def _validate(
    module: nn.Module,
    pairs: Sequence[Pair],
    config: TrainConfig,
    schedules: Sequence[Schedule],
    step: int,
    device: torch.device,
) -> dict[str, Any]:
    """The loss of each schedule in nats per response token, and the mean of these, for the record of `step`.

    Raises FloatingPointError if it is not finite.
    """
    module.eval()
    rows = max(1, config.batch_size // rank_and_size()[1])
    means = _mean_losses(module, pairs, schedules, rows, device, config.precision)
    losses = dict(zip(schedule_names(config.schedules), means, strict=True))
    module.train()
    mean = sum(losses.values()) / len(losses)
    if not math.isfinite(mean):
        raise FloatingPointError(f"the validation loss is {losses} at step {step}; lower train.learning_rate")
    return {"validation_loss": losses, "mean": mean}


def _optimizer(model: Decoder, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW without weight decay for norms and biases."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay}
    others = {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0}
    return torch.optim.AdamW([matrices, others], lr=config.learning_rate, betas=config.betas, fused=True)
