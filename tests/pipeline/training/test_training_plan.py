"""What is settled before a fine-tuning starts, without Ray: the warm-up of a training that has few steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from actors.training.recipe import learning_rate
from pipeline.config.job import build_config
from pipeline.training.config import FinetuneConfig
from pipeline.training.training_plan import PlannedTraining, plan_training

SHAPE = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2, "ffn_dim": 64}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """40 of them."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {n}", "response": str(n)}) + "\n" for n in range(40)))
    return path


def plan(pairs: Path, notes: list[str], if_exists: str = "fail", **train: Any) -> PlannedTraining:
    tree = {
        "model": {"shape": SHAPE},
        "data": {"path": str(pairs), "validation": str(pairs)},
        "train": {"epochs": 1} | train,
        "output": {"path": str(pairs.parent / "model"), "if_exists": if_exists},
    }
    return plan_training(build_config(FinetuneConfig, tree), notes.append)


def rates(planned: PlannedTraining) -> list[float]:
    steps = planned.num_steps
    return [learning_rate(step, steps, planned.train) for step in range(steps)]


@pytest.mark.parametrize(("batch_size", "steps", "settled"), [(64, 1, 1), (20, 2, 1), (4, 10, 1), (1, 40, 4)])
def test_few_pairs_reach_the_peak(pairs: Path, batch_size: int, steps: int, settled: int) -> None:
    notes: list[str] = []
    planned = plan(pairs, notes, batch_size=batch_size)
    assert planned.num_steps == steps
    assert rates(planned)[settled - 1] == max(rates(planned)) == planned.config.train.learning_rate
    assert [log for log in notes if "warmup" in log] == [
        f"train.warmup_steps: 300 lowered to {settled} of {steps} steps, so that the peak learning rate is reached, "
        "and falls again"
    ]
    assert planned.fingerprint["train.warmup_steps"] == 300, "what was asked for is what a resumed run must agree in"


@pytest.mark.parametrize("asked", [1, 4, 39])
def test_a_warm_up_that_has_room_stays(pairs: Path, asked: int) -> None:
    notes: list[str] = []
    planned = plan(pairs, notes, batch_size=1, warmup_steps=asked)
    assert planned.train.warmup_steps == asked
    assert max(rates(planned)) == planned.config.train.learning_rate
    assert not any("warmup" in log for log in notes)


def test_a_resumed_run_keeps_its_own(pairs: Path) -> None:
    """Even where this version would settle it otherwise."""
    notes: list[str] = []
    planned = plan(pairs, notes, batch_size=1)
    state: Any = {"version": "1.0.0", "state": "interrupted", "fingerprint": planned.fingerprint, "config": {}}
    state["warmup_steps"] = 7
    planned.folder.write_state(state)
    again = plan(pairs, notes, "resume", batch_size=1)
    assert again.train.warmup_steps == 7
    assert again.fingerprint == planned.fingerprint
