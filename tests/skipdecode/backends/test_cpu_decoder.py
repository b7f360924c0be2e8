"""The whole decoder on the CPU, as fast as it gets and as plain as it gets, which is held to Hugging Face elsewhere."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.backends import cpu_kernels as cpu
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.plan import ChosenLayers, FullDepth, Schedule, SkipDecode, SwiftPrefill, Unified
from tests.support.cpu_backends import backend

__all__ = ["backend"]  # a fixture


@pytest.fixture(scope="module")
def plain(checkpoint_factory: Callable[..., Path]) -> Callable[[str], Decoder]:
    return lambda style: load_model(checkpoint_factory(style))


def tokens_of(model: Decoder, lengths: list[int], num_new: int, schedule: Schedule) -> list[list[int]]:
    rng = torch.Generator().manual_seed(sum(lengths))
    prompts = [[2, *torch.randint(4, 320, (n - 1,), generator=rng).tolist()] for n in lengths]
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    return [c.tokens for c in generate(model, requests, schedule).completions]


@settings(max_examples=12)
@given(
    style=st.sampled_from(["125m", "350m", "1.3b"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    num_new=st.integers(1, 12),
    schedule=st.sampled_from([FullDepth(6), SkipDecode(6, 5, 2, 1, 9), Unified(6, 3), ChosenLayers(6, (1, 2, 5))]),
    at_once=st.integers(1, 200),
)
def test_every_fast_path_gives_the_tokens_of_the_plain_one(
    backend: str,
    plain: Callable[[str], Decoder],
    style: str,
    lengths: list[int],
    num_new: int,
    schedule: Schedule,
    at_once: int,
) -> None:
    model = plain(style)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "is_available", lambda _: False)
        wanted = tokens_of(model, lengths, num_new, schedule)
        assert not model.is_packed
        packed = copy.deepcopy(model).pack()
        patch.setattr(Decoder, "prompt_tokens", at_once)  # in several parts
        assert tokens_of(packed, lengths, num_new, schedule) == wanted
    assert tokens_of(packed, lengths, num_new, schedule) == wanted


@pytest.mark.parametrize("place", [1, 7, 19])
def test_a_fixed_shape_gives_the_same_bits_at_every_place(
    plain: Callable[[str], Decoder], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 rows of 128 columns go through the model in parts, which must be of one size."""
    monkeypatch.setattr(Decoder, "prompt_tokens", 2048)
    model = copy.deepcopy(plain("125m")).to(torch.bfloat16).pack()
    prompt, other = [2, *range(4, 100)], [2, 9, 8, 7]
    seen: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda _module, _args, out: seen.append(out.clone()))
    sampling = Sampling(max_new_tokens=2, ignore_eos=True)
    for at in (0, place):
        rows = [Request(str(i), prompt if i == at else other, sampling, top_logprobs=0) for i in range(20)]
        seen.clear()
        generate(model, rows, FullDepth(6), prompt_columns=128, batch_rows=20, compact=False)
        logits = torch.cat(seen[:-1])[at], seen[-1][at]
        wanted = logits if at == 0 else wanted  # noqa: F821
        assert len(seen) > 2, "one part"
        assert len({len(part) for part in seen[:-1]}) == 1, "parts of several sizes"
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(logits, wanted, strict=True))


@pytest.mark.parametrize("group_size", [1, 2])
def test_swiftkv_too(backend: str, plain: Callable[[str], Decoder], group_size: int) -> None:
    model = copy.deepcopy(plain("125m")).with_swiftkv(2, group_size)
    schedule = SwiftPrefill(SkipDecode(6, 5, 3, 1, 9), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "is_available", lambda _: False)
        wanted = tokens_of(model, [3, 9, 1, 14, 6], 11, schedule)
    assert tokens_of(model.pack(), [3, 9, 1, 14, 6], 11, schedule) == wanted


def test_rows_of_different_ages_too(backend: str, plain: Callable[[str], Decoder]) -> None:
    model, schedule = copy.deepcopy(plain("125m")).pack(), SkipDecode(6, 5, 2, 1, 9)
    prompts = [[2, *range(5, 5 + n)] for n in (3, 9, 1, 14, 6, 2, 8)]
    requests = [
        Request(str(i), prompt, Sampling(max_new_tokens=4 + 3 * (i % 3), ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    made = []
    for is_available in (lambda _: False, cpu.is_available):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu, "is_available", is_available)
            rows, _ = generate_continuous(model, requests, schedule, max_rows=3)
            made.append([row.tokens for row in rows])
    assert made[0] == made[1]
    assert made[0] == [c.tokens for c in generate(model, requests, schedule).completions]


def test_a_packed_model_is_neither_saved_nor_shared(plain: Callable[[str], Decoder], tmp_path: Path) -> None:
    packed = copy.deepcopy(plain("125m")).pack()
    assert packed.is_packed
    with pytest.raises(AssertionError, match="cannot be saved"):
        save_model(packed, tmp_path)
    with pytest.raises(AssertionError, match="cannot be shared"):
        packed.with_swiftkv(3)
