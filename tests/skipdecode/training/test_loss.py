"""Teacher-forced training under a schedule: HF's logits in one pass, gradients, and padding without effect.

That one pass equals cached decoding under any schedule is proved in test_generate.py.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import OPTForCausalLM

from actors.training.trainer import Hooks, init_weights, mean_loss, mean_losses, train
from actors.training.workers import Pair
from skipdecode.checkpoint.weights import load_model
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import IGNORE, ForcedView, teacher_batch, teacher_forced_logits
from skipdecode.schedules.ffn_skip import SkipSaturated
from skipdecode.schedules.from_config import listed_schedule
from skipdecode.schedules.layer_plan import LayerPlan
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from skipdecode.training.loss import ResponseLoss, response_loss
from tests.support.schedules import SCHEDULES
from tests.support.train_configs import make_config

STYLES = ["125m", "350m", "1.3b"]
L = 6
Factory = Callable[..., Path]


def random_pairs(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Pair]:
    rng = random.Random(seed)
    return [
        ([2] + [rng.randrange(4, 320) for _ in range(p - 1)], [rng.randrange(4, 320) for _ in range(t)])
        for p, t in lengths
    ]


PAIRS = random_pairs([(4, 6), (1, 9), (7, 1), (3, 3)])


def test_batch_by_hand() -> None:
    batch = teacher_batch([([2, 5, 6], [7, 8]), ([2], [9, 10, 11, 2])], pad_token_id=1)
    assert batch.prompt_columns == 3
    assert batch.num_pad.tolist() == [0, 2]
    assert batch.tokens.tolist() == [[2, 5, 6, 7, 1, 1], [1, 1, 2, 9, 10, 11]]
    assert batch.targets.tolist() == [[7, 8, IGNORE, IGNORE], [9, 10, 11, 2]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("lengths", [[(4, 6), (1, 9), (7, 1), (3, 3)], [(5, 4), (5, 4)], [(1, 1)]], ids=str)
def test_full_depth_is_hugging_face(
    checkpoint_factory: Factory,
    ours: Callable[[Path], Decoder],
    hf: Callable[[Path], OPTForCausalLM],
    style: str,
    lengths: list[tuple[int, int]],
) -> None:
    folder = checkpoint_factory(style)
    pairs = random_pairs(lengths)
    batch = teacher_batch(pairs, 1)
    logits = teacher_forced_logits(ours(folder), batch, FullDepth(L))
    assert logits.dtype == torch.float32
    losses = []
    for row, (prompt, response) in enumerate(pairs):  # HF gets each row alone, without any padding
        alone = hf(folder)(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits[row, : len(response)], alone, atol=1e-4, rtol=0)
        losses.append(F.cross_entropy(alone, torch.tensor(response), reduction="none"))
    loss = response_loss(ours(folder), batch, FullDepth(L))
    torch.testing.assert_close(loss, torch.cat(losses).mean(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_loss_is_invariant_to_padding(
    checkpoint_factory: Factory, ours: Callable[[Path], Decoder], style: str, schedule: Schedule
) -> None:
    """Rows together and rows alone: the mean over response tokens is the same, whatever the padding on either side."""
    model = ours(checkpoint_factory(style))
    together = response_loss(model, teacher_batch(PAIRS, 1), schedule)
    alone = [response_loss(model, teacher_batch([pair], 1), schedule) * len(pair[1]) for pair in PAIRS]
    torch.testing.assert_close(together, sum(alone) / sum(len(r) for _, r in PAIRS), atol=1e-5, rtol=1e-5)
    other_pad = response_loss(model, teacher_batch(PAIRS, 77), schedule)
    torch.testing.assert_close(together, other_pad, atol=1e-5, rtol=1e-5)


def trainable(folder: Path) -> Decoder:
    return load_model(folder).train().requires_grad_(True)


def masked_logits(model: Decoder, pair: Pair, schedule: Schedule) -> Tensor:
    """The definition for one row, the slow way: every layer on every column, and `where` keeps what the plan says."""
    prompt, response = pair
    tokens = torch.tensor([prompt + response[:-1]])
    h = model.embed(tokens, torch.arange(tokens.shape[1])[None])
    for i, block in enumerate(model.layers):
        runs = [True] * len(prompt) + [schedule.step(k).attn[i] for k in range(len(response) - 1)]
        mask = torch.tensor(runs)[None, :] & torch.ones(len(runs), len(runs), dtype=torch.bool).tril()
        mask |= torch.eye(len(runs), dtype=torch.bool)
        view = ForcedView(torch.arange(len(runs))[None], mask[None, None], (None,) * 99, [])
        x = block(h, view, i, attends=True, runs_ffn=True)
        h = torch.where(torch.tensor(runs)[None, :, None], x, h)
    return model.head(h[:, len(prompt) - 1 :])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_gradients_are_those_of_the_definition(checkpoint_factory: Factory, style: str, schedule: Schedule) -> None:
    """The prefix trick against masking after the fact: loss and every gradient."""
    folder = checkpoint_factory(style)
    cheap, slow = trainable(folder), trainable(folder)
    response_loss(cheap, teacher_batch(PAIRS, 1), schedule).backward()
    losses = [
        F.cross_entropy(masked_logits(slow, pair, schedule)[0], torch.tensor(pair[1]), reduction="sum")
        for pair in PAIRS
    ]
    (sum(losses) / sum(len(r) for _, r in PAIRS)).backward()
    for (name, a), b in zip(cheap.named_parameters(), slow.parameters(), strict=True):
        assert a.grad is not None, name
        assert a.grad.isfinite().all()
        scale = float(b.grad.abs().max())
        torch.testing.assert_close(
            a.grad, b.grad, atol=2e-5 * max(scale, 1.0), rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


class PromptOnly(FullDepth):
    """Layer 3 runs on the prompt and on no step."""

    def step(self, k: int) -> LayerPlan:
        return LayerPlan.of_layers([0, 1, 2, 4, 5], self.num_layers)


def test_a_layer_of_the_prompt_alone_learns_from_the_prompt_alone(tiny_checkpoint: Path) -> None:
    model = trainable(tiny_checkpoint)
    pair = random_pairs([(3, 6)])[0]
    columns: list[Tensor] = []
    model.layers[3].fc1.register_forward_hook(lambda _module, _args, out: columns.append(out))
    response_loss(model, teacher_batch([pair], 1), PromptOnly(L)).backward()
    (seen,) = columns
    assert seen.shape[1] == 3  # the prompt's columns and none of the five steps
    grad = model.layers[3].fc1.weight.grad
    assert grad is not None
    assert grad.isfinite().all()
    assert grad.abs().max() > 0  # through the logits of y_0, and through keys and values of later layers
    loss_of_steps = F.cross_entropy(
        teacher_forced_logits(model, teacher_batch([pair], 1), PromptOnly(L))[0, 1:], torch.tensor(pair[1][1:])
    )
    (grad,) = torch.autograd.grad(loss_of_steps, [model.layers[3].qkv.weight])
    assert grad.isfinite().all()
    assert grad.abs().max() > 0  # what a later column reads of the prompt


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_recomputation_changes_no_gradient(checkpoint_factory: Factory, style: str, schedule: Schedule) -> None:
    folder = checkpoint_factory(style)
    grads = []
    for recompute in (False, True):
        model = trainable(folder)
        ResponseLoss(model, recompute=recompute).train()(teacher_batch(PAIRS, 1), schedule).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("is_own", [True, False])
def test_distillation_by_hand(checkpoint_factory: Factory, temperature: float, is_own: bool) -> None:
    """(1 - a) * cross-entropy + a * T^2 * KL to the teacher's full depth, summed over the response tokens."""
    folder = checkpoint_factory("125m")
    schedule, share = SkipDecode(L, 5, 2, 1, 6), 0.3
    model = trainable(folder)
    teacher = model if is_own else trainable(folder)
    if not is_own:
        init_weights(teacher, 5)
    module = ResponseLoss(model, distill=share, temperature=temperature, teacher=None if is_own else teacher)
    loss = module.train()(teacher_batch(PAIRS, 1), schedule).sum()
    expected = torch.zeros(())
    for pair in PAIRS:  # each row alone, and masking after the fact
        logits = masked_logits(model, pair, schedule)[0]
        full = (masked_logits(teacher, pair, FullDepth(L))[0].detach() / temperature).softmax(-1)
        hard = F.cross_entropy(logits, torch.tensor(pair[1]), reduction="sum")
        divergence = (full * (full.log() - (logits / temperature).log_softmax(-1))).sum()
        expected = expected + (1 - share) * hard + share * temperature**2 * divergence
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-5)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    slow = torch.autograd.grad(expected, list(model.parameters()))
    for grad, other in zip(grads, slow, strict=True):  # and no gradient through full depth
        torch.testing.assert_close(grad, other, atol=2e-5 * max(float(other.abs().max()), 1.0), rtol=1e-3)


def test_hidden_states_by_hand(checkpoint_factory: Factory) -> None:
    """Beside the rest, so many times the squared difference of what enters the head, meaned over the width."""
    model = trainable(checkpoint_factory("125m"))
    batch, schedule = teacher_batch(PAIRS, 1), SkipDecode(L, 5, 2, 1, 6)
    plain = ResponseLoss(model, distill=0.3).train()(batch, schedule).sum()
    loss = ResponseLoss(model, distill=0.3, hidden=0.7).train()(batch, schedule).sum()
    seen: list[Tensor] = []
    hook = model.final_norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))  # type: ignore[union-attr]
    for chosen in (schedule, FullDepth(L)):
        teacher_forced_logits(model, batch, chosen)
    hook.remove()
    kept = batch.targets != IGNORE
    expected = ((seen[0] - seen[1]) ** 2).mean(-1)[kept].sum()
    torch.testing.assert_close(loss - plain, 0.7 * expected, atol=1e-4, rtol=1e-4)


def test_full_depth_and_validation_are_not_distilled(checkpoint_factory: Factory) -> None:
    model = trainable(checkpoint_factory("125m"))
    batch = teacher_batch(PAIRS, 1)
    tokens = sum(len(response) for _, response in PAIRS)
    for schedule, training in ((FullDepth(L), True), (SkipDecode(L, 5, 2, 1, 6), False)):
        loss = ResponseLoss(model, distill=0.7).train(training)(batch, schedule).sum()
        torch.testing.assert_close(loss / tokens, response_loss(model, batch, schedule), atol=1e-5, rtol=1e-5)


def test_a_step_of_all_schedules_has_the_mean_of_their_losses(checkpoint_factory: Factory) -> None:
    """Not the loss of one of them: by hand, of the first step, for which the weights are as they were."""
    model = trainable(checkpoint_factory("125m"))
    given = (
        {"method": "full"},
        {"method": "unified", "layers": 2},
        {"method": "early_exit", "max_layers": 3, "min_layers": 1},
    )
    config = make_config(schedules=given, draw="all", horizon=9, batch_size=len(PAIRS), epochs=1, log_every=1)
    each = [
        response_loss(model, teacher_batch(PAIRS, 1), listed_schedule(model.config, one, config.horizon + 1)).item()
        for one in given
    ]
    records: list[dict[str, Any]] = []
    train(model, PAIRS, PAIRS, config, Hooks(records.append, lambda *_: None, lambda *_: None))
    assert records[0]["train_loss"] == pytest.approx(sum(each) / 3, abs=1e-4)
    assert min(abs(records[0]["train_loss"] - one) for one in each) > 1e-3


def test_blocks_by_row_have_a_mean_loss(checkpoint_factory: Factory, ours: Callable[[Path], Decoder]) -> None:
    """`evaluate` measures the loss of dynamic feed-forward blocks, though no training uses them."""
    model, schedule = ours(checkpoint_factory("125m")), SkipSaturated(FullDepth(L), 1, 1, 1, -1.0)
    ordered = sorted(PAIRS, key=lambda pair: (len(pair[0]), len(pair[1])))
    wanted = response_loss(model, teacher_batch(ordered, 1), schedule).item()
    assert mean_loss(model, PAIRS, schedule, len(PAIRS)) == pytest.approx(wanted, abs=1e-5)
    full = mean_loss(model, PAIRS, FullDepth(L), len(PAIRS))
    assert full != pytest.approx(wanted, abs=1e-3)
    together = mean_losses(model, PAIRS, [FullDepth(L), schedule], len(PAIRS))
    assert together == pytest.approx([full, wanted], abs=1e-5)


@pytest.mark.parametrize("distill", [0.0, 0.5])
def test_autocast_is_near_float32(checkpoint_factory: Factory, distill: float) -> None:
    model = trainable(checkpoint_factory("125m"))
    module = ResponseLoss(model, distill=distill).train()
    batch, schedule = teacher_batch(PAIRS, 1), SkipDecode(L, 5, 2, 1, 6)
    exact = module(batch, schedule).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(batch, schedule).sum()
    assert loss.dtype == torch.float32
    assert 0 < abs(loss.item() / exact.item() - 1) < 0.03
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
