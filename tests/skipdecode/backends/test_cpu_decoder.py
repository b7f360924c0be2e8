"""Whole decoders on the CPU: all kernels, against the same decoder in parts and with plain torch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.measuring.bench import random_model
from skipdecode.backends import cpu_kernels
from skipdecode.checkpoint.weights import load_model, save_model
from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine import continuous_batch as continuous
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.families.qwen import Qwen3Config
from skipdecode.kv.static_cache import KVCache
from skipdecode.model import sampler
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import Linear
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.schedule import (
    ChosenLayers,
    FullDepth,
    Schedule,
    SkipDecode,
    SwiftKVPrefill,
    Unified,
    kv_owner_of_layers,
)
from tests.support.cpu_backends import Kind, backend, int8_backend, kind, nearest
from tests.support.examples import examples

__all__ = ["backend", "int8_backend", "kind"]  # fixtures


@pytest.fixture(scope="module")
def plain(checkpoint_factory: Callable[..., Path]) -> Callable[[str], Decoder]:
    return lambda style: load_model(checkpoint_factory(style))


def tokens_of(model: Decoder, lengths: list[int], num_new: int, schedule: Schedule) -> list[list[int]]:
    rng = torch.Generator().manual_seed(sum(lengths))
    prompts = [[2, *torch.randint(4, 320, (n - 1,), generator=rng).tolist()] for n in lengths]
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    return [c.tokens for c in generate(model, requests, schedule).completions]


@settings(max_examples=examples(12))
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
        patch.setattr(cpu_kernels, "is_available", lambda _: False)
        wanted = tokens_of(model, lengths, num_new, schedule)
        assert not model.is_packed
        packed = copy.deepcopy(model).pack()
        patch.setattr(Decoder, "max_prefill_tokens", at_once)  # in several parts
        assert tokens_of(packed, lengths, num_new, schedule) == wanted
    assert tokens_of(packed, lengths, num_new, schedule) == wanted


@pytest.mark.parametrize("place", [1, 7, 19])
def test_a_fixed_shape_gives_the_same_bits_at_every_place(
    plain: Callable[[str], Decoder], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 rows of 128 columns go through the model in parts, which must be of one size."""
    monkeypatch.setattr(Decoder, "max_prefill_tokens", 2048)
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
    schedule = SwiftKVPrefill(SkipDecode(6, 5, 3, 1, 9), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "is_available", lambda _: False)
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
    for is_available in (lambda _: False, cpu_kernels.is_available):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_kernels, "is_available", is_available)
            made.append([c.tokens for c in generate_continuous(model, requests, schedule, max_rows=3).completions])
    assert made[0] == made[1]
    assert made[0] == [c.tokens for c in generate(model, requests, schedule).completions]


def test_a_packed_model_is_neither_saved_nor_shared(plain: Callable[[str], Decoder], tmp_path: Path) -> None:
    packed = copy.deepcopy(plain("125m")).pack()
    assert packed.is_packed
    with pytest.raises(AssertionError, match="cannot be saved"):
        save_model(packed, tmp_path)
    with pytest.raises(AssertionError, match="cannot be shared"):
        packed.with_swiftkv(3)


CONFIG = OPTConfig(vocab_size=96, hidden_size=64, num_hidden_layers=6, ffn_dim=160, num_attention_heads=2)


LLAMA = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 160}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}


CONFIGS: dict[str, DecoderConfig] = {
    "opt": CONFIG,
    "llama": LlamaConfig(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA | {"head_dim": 64}),  # its heads together are wider than the model
}


@dataclass
class Run:
    name: str
    schedule: Schedule
    is_continuous: bool = False


def by_rows() -> Schedule:
    skip = {"mode": "row", "threshold": 0.9, "cold_start": 1, "cold_end": 1, "warmup_tokens": 2}
    return make_schedule({"method": "full", "ffn_skip": skip}, num_layers=6, max_new_tokens=12)


RUNS = [
    Run("full", FullDepth(6)),
    Run("skipdecode", SkipDecode(6, 5, 2, 1, 11)),
    Run("continuous", SkipDecode(6, 5, 2, 1, 11), is_continuous=True),
    Run("swiftkv", SwiftKVPrefill(SkipDecode(6, 5, 3, 1, 11), 2)),
    Run("by row", by_rows()),
]


def logits_of(model: Decoder, run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of every forward call, in order."""
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        seen.append(logits.float().clone())
        return 4 + (torch.arange(len(logits)) + 7 * len(seen)) % 80

    for module in (sampler, continuous):
        monkeypatch.setattr(module, "argmax", choose)
    requests = [
        Request(
            str(i), [2, *range(5, 5 + n)], Sampling(max_new_tokens=4 + 4 * (i % 3), ignore_eos=True), top_logprobs=0
        )
        for i, n in enumerate((3, 19, 1, 14, 6, 2, 33, 8, 40, 5))
    ]
    if run.is_continuous:
        generate_continuous(model, requests, run.schedule, max_rows=4)
    else:
        generate(model, requests, run.schedule)
    return seen


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
@pytest.mark.grid
def test_layers_in_one_call_are_the_decoder_of_parts(
    kind: Kind, run: Run, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same weights in float32, plain: as near as layers made of their parts in that type are."""
    dtype, quantization = kind
    model = random_model(CONFIGS[family], device="cpu", dtype=torch.float32)
    if isinstance(run.schedule, SwiftKVPrefill):
        model = model.with_swiftkv(2, 2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim == 1 else 0.1)
    model = model.to(dtype)
    exact = copy.deepcopy(model).float()
    if quantization:
        for module in exact.modules():  # the embedding as well, for the head; what it embeds stays
            if isinstance(module, Linear):
                module.weight.copy_(nearest(module.weight, quantization))
        if exact.swiftkv is not None:
            exact.swiftkv.kv.weight.copy_(nearest(exact.swiftkv.kv.weight, quantization))
        head = nearest(exact.head_weight, quantization, is_head=True)
        monkeypatch.setattr(exact, "head", lambda h: exact.final_norm(h) @ head.T)  # type: ignore[misc]
    model.pack(quantization)
    fused = logits_of(model, run, monkeypatch)
    assert all(block.kernel is not None for block in model.layers)
    for block in model.layers:
        block.kernel = block.query_kernel = None
    parts = logits_of(model, run, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_kernels, "is_available", lambda _: False)
        wanted = logits_of(exact, run, patch)
    assert len(fused) == len(parts) == len(wanted) > 8
    top = max(float(logits.abs().max()) for logits in wanted)
    for ours, apart, true in zip(fused, parts, wanted, strict=True):
        assert ours.shape == apart.shape == true.shape
        # inputs of 8 bits: half of 1/127 of the largest of 32 in every product of six layers
        limit = (0.1 if quantization == "int4" else 0.02 if dtype == torch.bfloat16 else 1e-4) * top
        assert (apart - true).abs().max() <= limit
        assert (ours - true).abs().max() <= limit


@pytest.mark.parametrize("is_continuous", [False, True])
def test_tokens_without_logits_are_those_with(kind: Kind, is_continuous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits for nobody, for all, and for some, who are gone before the others."""
    dtype, quantization = kind
    model = random_model(CONFIG, device="cpu", dtype=dtype).pack(quantization)
    made = []
    for asking in ([], range(5), [0, 3]):
        requests = [
            Request(str(i), [2, *range(5, 5 + n)], Sampling(max_new_tokens=5 + 5 * (i % 3), ignore_eos=True),
                    top_logprobs=0 if i in asking else None)
            for i, n in enumerate((3, 19, 1, 14, 40))
        ]  # fmt: skip
        with monkeypatch.context() as patch:
            if not asking:
                patch.setattr(model, "head", lambda h: 1 / 0)
            if is_continuous:
                result = generate_continuous(model, requests, FullDepth(6), max_rows=3)
                made.append([c.tokens for c in result.completions])
            else:
                made.append([c.tokens for c in generate(model, requests, FullDepth(6)).completions])
    assert made[0] == made[1] == made[2]
    assert len({tuple(tokens) for tokens in made[0]}) > 1


@pytest.mark.parametrize(
    ("kv_layers", "group_size", "lengths"), [(0, 1, (3, 9)), (5, 1, (8, 2)), (2, 2, (1, 1)), (3, 3, (30, 600))]
)
def test_swiftkv_prompts_of_any_shape(kind: Kind, kv_layers: int, group_size: int, lengths: tuple[int, ...]) -> None:
    """Prompts and one step against the parts: layers as calls of their own."""
    dtype, quantization = kind
    torch.manual_seed(0)
    model = random_model(CONFIG, device="cpu", dtype=torch.float32).with_swiftkv(kv_layers, group_size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim == 1 else 0.1)
    model = model.to(dtype).pack(quantization)
    columns, num_pad = max(lengths), torch.tensor([max(lengths) - n for n in lengths])
    tokens, positions = torch.randint(4, 90, (2, columns)), (torch.arange(columns) - num_pad[:, None]).clamp(min=-1)
    plan = SwiftKVPrefill(FullDepth(6), kv_layers).prefill()
    kv_owner = kv_owner_of_layers(SwiftKVPrefill(FullDepth(6), kv_layers), group_size)
    seen = []
    for is_fused in (True, False):
        for block in model.layers:
            if not is_fused:
                block.kernel = block.query_kernel = None
        cache = KVCache.allocate(CONFIG, num_pad=num_pad, capacities=[columns + 1] * 6, kv_owner=kv_owner, dtype=dtype)
        with torch.inference_mode():
            first = model(tokens, positions, cache, plan)
            seen.append((first, model(tokens[:, :1], positions[:, -1:] + 1, cache, plan)))
    for ours, parts in zip(*seen, strict=True):
        assert (ours.float() - parts.float()).abs().max() <= 0.02 * float(parts.float().abs().max())
