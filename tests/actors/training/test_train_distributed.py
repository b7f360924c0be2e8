"""The training loop in several processes (gloo, CPU): the same loss curve whatever the workers, and across a resume."""

import os
import random
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from actors.training.recipe import TrainConfig
from actors.training.state import load_state, model_of, save_state
from actors.training.trainer import Hooks, init_weights, train
from actors.training.workers import Pair
from skipdecode.families.opt import OPTConfig
from skipdecode.families.qwen import Qwen3Config
from skipdecode.model.decoder import Decoder
from tests.support.train_configs import make_config

SHAPE = OPTConfig(vocab_size=24, hidden_size=32, num_hidden_layers=4, ffn_dim=64, num_attention_heads=2, init_std=0.08)
QWEN3 = Qwen3Config(vocab_size=24, hidden_size=32, num_hidden_layers=4, intermediate_size=48, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, init_std=0.08)  # fmt: skip
# a batch is shared by two workers in two micro-batches: never evenly
RECIPE: dict[str, Any] = asdict(
    make_config(epochs=3.0, batch_size=15, log_every=1, validate_every=6, checkpoint_every=5, validation_rows=9)
)
NUM_STEPS = 15  # 64 pairs: the last batch of an epoch has 4


def make_pairs() -> list[Pair]:
    rng = random.Random(1)
    tokens = [rng.randrange(4, 24) for _ in range(64)]
    return [([2] + [token] * rng.randint(1, 3) + [3], [token] * rng.randint(1, 4) + [2]) for token in tokens]


Curve = list[tuple[int, float]]


# what is added to a model for SwiftKV, taught by the model; and everything at once, taught by a frozen copy
SWIFTKV = {"trainable": "swiftkv", "schedules": ({"method": "full", "prefill": "swiftkv"},)}
JOINT = {"trainable": "all", "schedules": (*RECIPE["schedules"], {"speedup": 2, "prefill": "swiftkv"})}
NEVER = {"trainable": "all", "schedules": SWIFTKV["schedules"]}  # the upper layers' own K and V have no gradient, ever


def run(changes: dict[str, Any], folder: Path, resume: dict[str, Any] | None = None) -> Curve:
    """One worker's part of a training; checkpoints and the best weights go to `folder`.

    With `schedules` under SwiftKV the model gets its weights, and a teacher if all is trained. `shape` is its own, and
    `num_short` says how many prompts have one token.
    """
    torch.set_num_threads(1)
    start = changes.get("shape", SHAPE)
    recipe = {key: value for key, value in (RECIPE | changes).items() if key not in ("shape", "num_short")}
    model, teacher = Decoder(start), None
    init_weights(model, 0)
    if any("prefill" in entry for entry in changes.get("schedules", ())):
        teacher = Decoder(start).requires_grad_(False)
        init_weights(teacher, 3)
        model, teacher = model.with_swiftkv(2, 1), teacher if changes["trainable"] == "all" else None
    shape = model.config
    found: Curve = []

    def write(state: dict[str, Any], record: dict[str, Any]) -> None:
        if state:
            save_state(state, folder / f"{record['step']}.pt")

    def keep(weights: dict[str, Any], record: dict[str, Any]) -> None:
        if weights:
            torch.save(model_of(weights, shape).state_dict(), folder / "best.pt")

    def log(record: dict[str, Any]) -> None:
        if "fitted" not in record:  # of these there is one for each batch, whose size depends on the number of workers
            found.append((record["step"], record.get("train_loss", record.get("mean"))))

    hooks = Hooks(log, keep, write)
    pairs = make_pairs()
    if num_short := changes.get("num_short"):  # prompts of one token, of eight
        pairs = [(prompt[:1] if i < num_short else prompt, response) for i, (prompt, response) in enumerate(pairs[:8])]
    train(model, pairs, pairs[:16], TrainConfig(**recipe), hooks, resume, teacher)
    return found


def worker(rank: int, port: int, changes: dict[str, Any], folder: Path, resume: Path | None) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = run(changes, folder, None if resume is None else load_state(resume))
    if rank == 0:
        torch.save(found, folder / "curve.pt")
    dist.destroy_process_group()


def run_two(changes: dict[str, Any], folder: Path, resume: Path | None = None) -> Curve:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(exist_ok=True)
    mp.spawn(worker, (port, changes, folder, resume), nprocs=2)
    found: Curve = torch.load(folder / "curve.pt")
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Curve]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, run({}, folder)


def assert_close(found: Curve, expected: Curve) -> None:
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=1e-5)


def test_the_curve_has_every_step(alone: tuple[Path, Curve]) -> None:
    steps = [step for step, _ in alone[1]]
    assert steps == sorted([*range(1, NUM_STEPS + 1), 6, 12, NUM_STEPS])  # and a validation behind these
    assert alone[1][-1][1] < 0.8 * alone[1][0][1]


def test_accumulation_changes_nothing(alone: tuple[Path, Curve], tmp_path: Path) -> None:
    assert_close(run({"accumulate": 4, "recompute": True}, tmp_path), alone[1])


def test_a_resume_changes_nothing(alone: tuple[Path, Curve], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run({"log_every": 3}, tmp_path / "whole")
    found = run({"log_every": 3}, tmp_path, load_state(tmp_path / "whole/5.pt"))
    assert found == [point for point in whole if point[0] > 5]  # the mean of steps 4 to 6 too: 4 and 5 were before
    best, before = (torch.load(folder / "best.pt") for folder in (tmp_path, alone[0]))
    assert all(torch.equal(best[name], before[name]) for name in before)


def test_the_best_weights_are_kept_again_when_the_stop_came_before_they_were_written(
    alone: tuple[Path, Curve], tmp_path: Path
) -> None:
    folder, curve = alone
    means = {step: loss for (step, loss), (before, _) in zip(curve[1:], curve[:-1], strict=True) if step == before}
    best = min(means, key=lambda step: means[step])
    state = load_state(folder / f"{best}.pt")  # every best validation is a checkpoint, whatever checkpoint_every says
    assert state["best"]["step"] == best
    run({}, tmp_path, state)
    kept, before = (torch.load(path / "best.pt") for path in (tmp_path, folder))
    assert all(torch.equal(kept[name], before[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_workers_change_nothing_where_a_step_takes_all_schedules(tmp_path: Path, parallel: str) -> None:
    every: dict[str, Any] = {"draw": "all", "distill": 0.5}
    whole = run(every, tmp_path)
    assert whole[-1][1] < 0.9 * whole[0][1]
    assert_close(run(every | {"accumulate": 4, "recompute": True}, tmp_path), whole)
    assert_close(run_two(every | {"parallel": parallel, "accumulate": 2}, tmp_path / "two"), whole)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_workers_make_the_same_calls_where_one_has_prompts_of_one_token(tmp_path: Path) -> None:
    """Else they wait for each other for good: a batch of two pairs, short and long, is one worker's and the other's."""
    odd: dict[str, Any] = {"draw": "all", "num_short": 3, "batch_size": 2, "epochs": 1.0, "validation_rows": 8}
    assert_close(run_two(odd | {"parallel": "fsdp"}, tmp_path / "two"), run(odd, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_workers_change_nothing(alone: tuple[Path, Curve], tmp_path: Path, parallel: str) -> None:
    changes = {"parallel": parallel, "accumulate": 2}
    assert_close(run_two(changes, tmp_path / "two"), alone[1])
    # the checkpoint of two workers serves two, and one
    again = run_two(changes, tmp_path / "again", tmp_path / "two/5.pt")
    assert_close(again, [point for point in alone[1] if point[0] > 5])
    assert_close(run({}, tmp_path, load_state(tmp_path / "two/5.pt")), [point for point in alone[1] if point[0] > 5])


@pytest.mark.parametrize(
    "changes",
    [
        SWIFTKV | {"distill": 1.0, "hidden": 0.5},
        pytest.param(JOINT | {"distill": 0.5}, marks=pytest.mark.slow),
        NEVER,
        SWIFTKV | {"distill": 1.0, "fit_pairs": 40},
    ],
    ids=["swiftkv", "joint", "never", "fitted"],
)
def test_distillation_on_two_workers_and_resumed_is_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """Weights that some steps, or all, leave out have no gradient then, and no optimiser state."""
    early = tmp_path / "early"
    early.mkdir()
    alone = run(changes, tmp_path)
    assert run(changes | {"checkpoint_every": 1}, early) == alone
    (tmp_path / "again").mkdir()
    for step in (1, 5):  # behind the first, most schedules have not been drawn
        resumed = run(changes | {"checkpoint_every": 1}, tmp_path / "again", load_state(early / f"{step}.pt"))
        assert resumed == [point for point in alone if point[0] > step]
    if "distill" in changes and changes["trainable"] == "all":  # a second of work, and many of starting processes
        assert_close(run_two(changes | {"accumulate": 2}, tmp_path / "two", early / "5.pt"), alone[-len(resumed) :])
    best, start = torch.load(tmp_path / "best.pt"), Decoder(SHAPE)
    init_weights(start, 0)
    same = {name for name, value in start.state_dict().items() if torch.equal(best[name], value)}
    if changes["trainable"] == "swiftkv":
        assert same == set(start.state_dict()), "the model itself is frozen"
        assert any(name.startswith("swiftkv.") for name in best.keys() - same)
    elif changes is not NEVER:
        assert not same


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [SWIFTKV | {"distill": 1.0, "fit_pairs": 41}, JOINT | {"distill": 0.5}, JOINT | {"distill": 0.5, "shape": QWEN3}],
    ids=["fitted", "joint", "joint, norms of keys"],
)
def test_swiftkv_under_fsdp(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its layers go through the same call as all others, so that their weights are gathered; norms of keys too. What
    begins by least squares sees the pairs of both workers."""
    assert_close(run_two(changes | {"parallel": "fsdp", "accumulate": 2}, tmp_path / "two"), run(changes, tmp_path))


@pytest.mark.slow
def test_fsdp_with_everything_on(tmp_path: Path) -> None:
    """Distillation, recomputation and autocast under FSDP: near the same on one worker."""
    changes = {"distill": 0.5, "recompute": True, "precision": "bfloat16", "accumulate": 2}
    expected = run(changes, tmp_path)
    found = run_two(changes | {"parallel": "fsdp"}, tmp_path / "two")
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], abs=0.02)
