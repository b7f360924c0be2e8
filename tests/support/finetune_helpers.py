"""A toy task that the fine-tuning tests share: repeat the word after `say`; 6 layers learn it in seconds."""

import json
from pathlib import Path
from typing import Any

SHAPE = "model.shape={vocab_size: 300, hidden_size: 32, num_hidden_layers: 6, num_attention_heads: 2, ffn_dim: 64}"
WORDS = ("ab", "cd", "ef", "gh")


def write_pairs(path: Path, repeats: int = 64) -> Path:
    rows = [{"prompt": f"say {word}", "response": word * 2} for word in WORDS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * repeats))
    return path


def arguments(pairs: Path, output: Path, *more: str, **train: Any) -> list[str]:
    """Of `jobs.finetune`: 4 steps per epoch, float32, one thread, every step logged; `train` overrides its keys."""
    recipe = {"epochs": 6, "batch_size": 64, "learning_rate": 0.01, "warmup_steps": 10, "horizon": 7, "log_every": 1}
    recipe |= {"validate_every": 8, "checkpoint_every": 5, "precision": "float32"} | train
    data = f"data={{path: {pairs}, validation: {pairs}}}"
    keys = [f"train.{key}={json.dumps(value)}" for key, value in recipe.items()]
    return [SHAPE, data, *keys, "workers.threads=1", "output.dtype=float32", "-o", str(output), *more]


def log(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "training/log.jsonl").read_text().splitlines()]


def curve(output: Path) -> dict[int, float]:
    """Training loss by step; fails when a step is logged twice."""
    records = [record for record in log(output) if "train_loss" in record]
    losses = {record["step"]: record["train_loss"] for record in records}
    assert len(losses) == len(records)
    return losses


def validations(output: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: record["validation_loss"] for record in log(output) if "validation_loss" in record}
