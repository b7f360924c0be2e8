"""Several schedules over prompts that are run once: states, losses and gradients of one forced pass for each.

The named reference is `skipdecode.model.teacher_forcing`, which tests of its own hold against Hugging Face and
decoding.
"""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from skipdecode.config.model import DecoderConfig
from skipdecode.families.gemma3 import Gemma3Config
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.families.qwen import Qwen3Config
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import (
    IGNORE,
    TeacherBatch,
    teacher_batch,
    teacher_forced_logits,
    teacher_forced_states,
)
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from skipdecode.training.loss import ResponseLoss
from skipdecode.training.shared_prompt import SharedPromptForward
from tests.support.schedules import SCHEDULES

L = 6
SHAPE = {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": L, "num_attention_heads": 4}
CONFIGS: dict[str, DecoderConfig] = {
    "opt": OPTConfig(**SHAPE, ffn_dim=96),
    "llama": LlamaConfig(**SHAPE, intermediate_size=80, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma3, windows": Gemma3Config(
        **SHAPE,
        intermediate_size=80,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=3,
        layer_types=("sliding_attention", "full_attention") * 3,
    ),
    "qwen3": Qwen3Config(**SHAPE, intermediate_size=80, num_key_value_heads=1, head_dim=16),
}
PLAIN: list[Schedule] = [
    *SCHEDULES.values(),
    SkipBand(FullDepth(L), 1, (2, 4)),
    SkipBand(SkipDecode(L, 5, 2, 1, 4), 2, (0, 5)),
]
BY_ROW: list[Schedule] = [
    SkipSaturated(SkipDecode(L, 5, 2, 1, 4), 1, 0, 0, 0.7),
    SkipSaturated(FullDepth(L), 0, 1, 1, 0.9),
]
SWIFTKV: list[Schedule] = [SwiftKVPrefill(base, 2) for base in PLAIN[:2]]
LENGTHS = {"padded": [(4, 6), (1, 9), (7, 1), (3, 3)], "even": [(5, 4), (5, 2)], "one token": [(1, 3), (1, 1)]}


def made(kind: str, *, swiftkv: bool = False) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(CONFIGS[kind])
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return (model.with_swiftkv(2, 2) if swiftkv else model).double().requires_grad_(True)


def batch_of(lengths: str) -> TeacherBatch:
    generator = torch.Generator().manual_seed(len(lengths))

    def some(n: int) -> list[int]:
        return torch.randint(3, 64, (n,), generator=generator).tolist()

    return teacher_batch([(some(p), some(t)) for p, t in LENGTHS[lengths]], 1)


@torch.inference_mode()
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_blocks_that_rows_decide_on(kind: str, lengths: str) -> None:
    model, batch = made(kind, swiftkv=True), batch_of(lengths)
    schedules = [*BY_ROW, *(SwiftKVPrefill(base, 2) for base in BY_ROW)]
    found = SharedPromptForward(model, batch).states([*schedules, FullDepth(L)])
    for schedule, states in zip(schedules, found, strict=False):
        wanted = teacher_forced_states(model, batch, schedule)[batch.targets != IGNORE]
        assert torch.allclose(states[batch.targets != IGNORE], wanted, rtol=0, atol=1e-12)
    changed = [not torch.allclose(states, found[-1], atol=1e-3) for states in found[:-1]]
    assert all(changed) or lengths == "one token"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.grid
def test_states_and_gradients_are_those_of_a_pass_for_each(kind: str, lengths: str, recompute: bool) -> None:
    has_swiftkv = kind != "opt" or lengths == "padded"
    model, batch = made(kind, swiftkv=has_swiftkv), batch_of(lengths)
    schedules = [*PLAIN, *SWIFTKV] if has_swiftkv else PLAIN
    kept = batch.targets != IGNORE

    def gradients(states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        total = sum((i + 1) * state[kept].cos().sum() for i, state in enumerate(states))
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, list(model.parameters()), allow_unused=True))

    branches = SharedPromptForward(model, batch, recompute=recompute)
    states = branches.states(schedules)
    wanted = [teacher_forced_states(model, batch, schedule) for schedule in schedules]
    for state, other in zip(states, wanted, strict=True):
        torch.testing.assert_close(state[kept], other[kept], atol=1e-9, rtol=0)
    for grad, other in zip(gradients(states), gradients(wanted), strict=True):
        assert (grad is None) == (other is None) or not torch.count_nonzero(other if grad is None else grad)  # type: ignore[arg-type]
        if grad is not None and other is not None:
            scale = float(other.abs().max())  # rotations are in float32, whatever the rest is in
            torch.testing.assert_close(grad, other, atol=1e-6 * scale, rtol=1e-6)


def test_prompts_are_run_once_for_all_that_run_them_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = made("llama", swiftkv=True), []
    whole = SharedPromptForward._run_prompts
    monkeypatch.setattr(SharedPromptForward, "_run_prompts", lambda self, *of: ran.append(of) or whole(self, *of))
    branches = SharedPromptForward(model, batch_of("padded"))
    for schedule in (*PLAIN, *SWIFTKV):
        branches.states([schedule])
    with torch.no_grad():
        branches.states([FullDepth(L)])
    assert len(ran) == 2


def test_a_pass_without_gradients_is_not_lent_to_one_with_them() -> None:
    model, batch = made("llama"), batch_of("padded")
    branches = SharedPromptForward(model, batch)
    with torch.no_grad():
        branches.states(PLAIN[:1])
    grads = []
    for made_by in (branches, SharedPromptForward(model, batch)):
        (grad,) = torch.autograd.grad(made_by.states(PLAIN[1:2])[0].sum(), [model.layers[3].qkv.weight])
        grads.append(grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("distill", [0.0, 0.4])
def test_losses_of_all_are_those_of_each(distill: float) -> None:
    """And full depth, where it is among them, is its own teacher without another pass."""
    model, batch = made("llama"), batch_of("padded")
    loss = ResponseLoss(model, distill=distill, temperature=2.0, hidden=distill).train()
    each = torch.cat([loss(batch, schedule) for schedule in PLAIN])
    torch.testing.assert_close(loss(batch, *PLAIN), each)
    torch.testing.assert_close(loss(batch, *PLAIN[1:]), each[1:])


def test_the_mean_over_schedules_by_hand() -> None:
    model, batch = made("opt"), batch_of("padded")
    by_hand = []
    for schedule in PLAIN:
        logits = teacher_forced_logits(model, batch, schedule)
        by_hand.append(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"))
    torch.testing.assert_close(ResponseLoss(model)(batch, *PLAIN).float(), torch.stack(by_hand), atol=1e-3, rtol=1e-5)
