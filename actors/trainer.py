"""The training loop: one process, one device, schedules drawn at random so that one checkpoint serves every speed.

The first form of `jobs.finetune`: AdamW, linear warm-up and decay, gradient clipping, validation per schedule, the best
weights kept. No data-parallel training and no resume of the optimiser yet.
"""

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from skipdecode.model import OPT
from skipdecode.plan import Schedule, make_schedule
from skipdecode.train import response_loss, teacher_batch
from skipdecode.weights import save_opt

Pair = tuple[list[int], list[int]]
"""(prompt tokens with BOS, response tokens with EOS)"""


@dataclass(frozen=True)
class TrainConfig:
    schedules: tuple[dict[str, Any], ...]
    """`decode:` mappings; each step draws one."""
    horizon: int
    """Decode steps over which the depth falls in training; goes into the checkpoint."""
    epochs: float
    full_depth_epochs: float
    """At the start, only full depth: the features every schedule builds on."""
    batch_size: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    validate_every: int
    """Steps."""
    validation_rows: int
    """How many validation pairs are looked at each time, drawn once."""
    seed: int


def init_weights(model: OPT, seed: int) -> None:
    """Hugging Face OPT's initialisation, residual outputs scaled down by 1/sqrt(2 L) as in GPT-2."""
    generator = torch.Generator().manual_seed(seed)
    std = model.config.init_std
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.constant_(parameter, 1.0 if name.endswith("norm.weight") else 0.0)
            continue
        is_residual = name.endswith(("out_proj.weight", "fc2.weight"))
        scale = std / (2 * model.config.num_hidden_layers) ** 0.5 if is_residual else std
        torch.nn.init.normal_(parameter, 0.0, scale, generator=generator)


def length_sorted_batches(pairs: Sequence[Pair], batch_size: int, rng: random.Random) -> list[list[Pair]]:
    """All pairs once, in shuffled batches of similar lengths (sorted within chunks of 50 batches)."""
    order = list(range(len(pairs)))
    rng.shuffle(order)
    batches = []
    for start in range(0, len(order), 50 * batch_size):
        chunk = sorted(order[start : start + 50 * batch_size], key=lambda i: (len(pairs[i][0]), len(pairs[i][1])))
        batches += [[pairs[i] for i in chunk[j : j + batch_size]] for j in range(0, len(chunk), batch_size)]
    rng.shuffle(batches)
    return batches


def train(
    model: OPT,
    pairs: Sequence[Pair],
    validation: Sequence[Pair],
    config: TrainConfig,
    folder: str | Path,
    report: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Trains in place; `folder` gets the weights of the lowest mean validation loss, `report` each log record."""
    schedules = [_schedule(decode, model, config.horizon) for decode in config.schedules]
    full = _schedule({"method": "full"}, model, config.horizon)
    validation = random.Random(0).sample(validation, min(config.validation_rows, len(validation)))
    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(
        _decay_groups(model, config.weight_decay), lr=config.learning_rate, betas=(0.9, 0.95), fused=True
    )
    steps_per_epoch = -(-len(pairs) // config.batch_size)
    total, full_steps = round(config.epochs * steps_per_epoch), round(config.full_depth_epochs * steps_per_epoch)
    best: dict[str, Any] = {}
    started, running, step, batches = time.monotonic(), 0.0, 0, list[list[Pair]]()
    model.train().requires_grad_(True)
    while step < total:
        batches = batches or length_sorted_batches(pairs, config.batch_size, rng)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * _lr_factor(step, total, config.warmup_steps)
        schedule = full if step < full_steps else rng.choice(schedules)
        loss = response_loss(model, teacher_batch(batches.pop(), model.config.pad_token_id), schedule)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        step += 1
        value = loss.item()
        running = value if step == 1 else 0.98 * running + 0.02 * value
        if step % config.validate_every == 0 or step == total:
            losses = validate(model.eval(), validation, config, schedules)
            model.train()
            record = {"step": step, "steps": total, "train_loss": running, "validation_loss": losses}
            record |= {"elapsed_s": round(time.monotonic() - started, 1), "epoch": step / steps_per_epoch}
            report(record)
            mean = sum(losses.values()) / len(losses)
            if step > full_steps and mean < best.get("mean", math.inf):
                best = record | {"mean": mean}
                _save(model, folder, config, best)
    if not best:  # nothing was validated behind the full-depth epochs
        _save(model, folder, config, best)
    model.eval().requires_grad_(False)
    return best


@torch.inference_mode()
def validate(model: OPT, pairs: Sequence[Pair], config: TrainConfig, schedules: Sequence[Schedule]) -> dict[str, float]:
    """Mean loss per response token in nats, per schedule."""
    batches = length_sorted_batches(pairs, config.batch_size, random.Random(0))
    losses = {}
    for decode, schedule in zip(config.schedules, schedules, strict=True):
        total = count = 0.0
        for batch in batches:
            num_tokens = sum(len(response) for _, response in batch)
            total += float(response_loss(model, teacher_batch(batch, model.config.pad_token_id), schedule)) * num_tokens
            count += num_tokens
        losses[" ".join(str(value) for value in decode.values())] = round(total / count, 4)
    return losses


def _schedule(decode: dict[str, Any], model: OPT, horizon: int) -> Schedule:
    return make_schedule(decode, num_layers=model.config.num_hidden_layers, max_new_tokens=horizon + 1)


def _lr_factor(step: int, total: int, warmup: int) -> float:
    return (step + 1) / warmup if step < warmup else max(0.02, (total - step) / max(total - warmup, 1))


def _decay_groups(model: OPT, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def _save(model: OPT, folder: str | Path, config: TrainConfig, record: dict[str, Any]) -> None:
    model.config = replace(model.config, skip_decode={"method": "skipdecode", "speedup": 2, "horizon": config.horizon})
    save_opt(model, folder, dtype=torch.bfloat16)
    (Path(folder) / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
