"""Weights of half the bytes, by which drafts are made: as the rounded ones in float32, and which layers have them."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.backends import choice, cpu, cpu_weights
from skipdecode.backends.compiled import CPU
from skipdecode.backends.heads import Columns
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.model.layer import Layer
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.plan import ChosenLayers
from skipdecode.speculative import draft_model as drafter
from skipdecode.speculative.draft_length import DraftLength
from skipdecode.speculative.generate import generate_lossless
from skipdecode.speculative.latency_model import Prices
from tests.support.cpu_backends import backend, num_threads, product_dtype, step_one
from tests.support.cuda_models import random_model, some_requests

__all__ = ["backend", "product_dtype"]  # fixtures


@given(
    rows=st.integers(1, 140),
    steps=st.integers(1, 9),
    outputs=st.integers(1, 110),
    seed=st.integers(0, 2**31),
    then=st.sampled_from(["nothing", "relu", "residual", "swiglu"]),
    threads=st.integers(1, 3),
)
def test_a_halved_weight_is_the_rounded_one(
    backend: str, rows: int, steps: int, outputs: int, seed: int, then: str, threads: int
) -> None:
    """Whatever the number of rows: a row has the same bits alone."""
    rng = torch.Generator().manual_seed(seed)
    outputs = (outputs + 31) // 32 * 32 if then == "swiglu" else outputs
    x, weight = (torch.randn(n, 32 * steps, generator=rng) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=rng)
    residual = torch.randn(rows, outputs, generator=rng) if then == "residual" else None
    wanted = F.linear(x, weight.bfloat16().float(), bias)
    if then == "swiglu":
        gate, other = wanted.chunk(2, dim=1)
        wanted, bias = F.silu(gate) * other, cpu_weights.interleave(bias)
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual
    halved = cpu_weights.halved(cpu_weights.pack(weight, gated=then == "swiglu"))
    activation: cpu.Activation = "relu" if then == "relu" else "swiglu" if then == "swiglu" else "none"
    with num_threads(threads):
        made = cpu.linear(x, halved, outputs, bias, activation=activation, residual=residual)
        last = None if residual is None else residual[-1:]
        alone = cpu.linear(x[-1:], halved, outputs, bias, activation=activation, residual=last)
        argmax = cpu.argmax_linear(x, halved, outputs)
        assert torch.equal(argmax, cpu.argmax(cpu.linear(x, halved, outputs, None)))
    torch.testing.assert_close(made, wanted, rtol=2e-5, atol=2e-4)
    assert torch.equal(alone[0], made[-1])


def test_a_weight_is_unpacked_as_it_was(backend: str) -> None:
    """Lines of pairs lie in a halved weight as they lie in one of bfloat16, which not every back end packs."""
    for outputs, inputs in ((1, 32), (33, 96), (64, 64)):
        weight = torch.randn(outputs, inputs)
        tiles = cpu_weights.halved(cpu_weights.pack(weight)).tiles
        made = cpu_weights.unpacked(tiles.view(*tiles.shape[:3], 512))
        assert torch.equal(made[:outputs], weight.bfloat16())
        assert not made[outputs:].any()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """As `Backend.narrowed` rounds it."""
    if weight.dtype == torch.float32:
        return weight.bfloat16().float()
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    return (weight.float() / scales).round() * scales


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_narrow_layer_is_the_rounded_one(product_dtype: torch.dtype, is_gated: bool, rows: int) -> None:
    """In one call, against its parts in float32; the layer that it was made of stays as it was."""
    dtype, width, heads, ffn = product_dtype, 96, 3, 64
    config = (
        LlamaConfig(8, hidden_size=width, intermediate_size=ffn, num_hidden_layers=1, num_attention_heads=heads)
        if is_gated
        else OPTConfig(8, hidden_size=width, ffn_dim=ffn, num_hidden_layers=1, num_attention_heads=heads)
    )
    torch.manual_seed(rows)
    layer = Layer(config).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5 if parameter.ndim == 1 else parameter.shape[1] ** -0.5)
    layer = layer.to(dtype)
    exact = copy.deepcopy(layer).float()
    for linear, other in zip(layer.linears, exact.linears, strict=True):
        other.weight.copy_(rounded(linear.weight))
        linear.pack()
    layer.fuse(None)
    narrow = layer.narrowed(None)
    has_none = dtype == torch.bfloat16 and choice.choose().no_int8 is not None
    assert (narrow is None) == has_none
    if narrow is None:
        return
    assert narrow.kernel is not None
    assert layer.kernel is not None
    h = torch.randn(rows, 1, width).to(dtype)
    before = step_one(layer.kernel, h.clone(), None, feeds=True)
    memory = [torch.zeros(rows, heads, 8, width // heads, dtype=dtype) for _ in "kv"]
    at = torch.zeros(rows, dtype=torch.int64)
    made = step_one(narrow.kernel, h.clone(), Columns(memory[0], memory[1], at, at), feeds=True)
    x = exact.attn_norm(h.float())  # of one column: what attends to nothing else has its own value
    value = exact.qkv(x)[..., 2 * width :]
    attended = exact.out_proj(value, residual=h.float())
    wanted = exact.feed(attended)
    error = (made.float() - wanted).abs().max() / wanted.abs().max()
    assert error < (2e-5 if dtype == torch.float32 else 4e-2)
    assert torch.equal(step_one(layer.kernel, h.clone(), None, feeds=True), before)


@pytest.mark.parametrize("num_fit", [0, 1, 2])
def test_copies_are_made_as_far_as_there_is_room(backend: str, num_fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it drafts run the model's own layers, and nobody asks again."""
    model = random_model("llama", layers=3).pack()
    nbytes = 2 * sum(linear.in_features * linear.out_features for linear in model.layers[0].linears)
    free = 4 * nbytes * num_fit - nbytes * max(num_fit - 1, 0)  # what is copied is no longer free
    monkeypatch.setattr(drafter, "available_bytes", lambda: free)
    assert model.drafter.prepare([0, 1, 2], with_head=False)
    own = [made is not layer for made, layer in zip(model.drafter.layers, model.layers, strict=True)]
    assert own == [i < num_fit for i in range(3)]
    assert not model.drafter.prepare([0, 1, 2], with_head=False)


def test_a_model_goes_with_its_copies() -> None:
    """At once, without a collection: what is loaded is not looked at by any."""
    model = random_model("llama", layers=2).pack()
    model.drafter.prepare([0], with_head=True)
    layer = weakref.ref(model.drafter.layers[0])
    gc.disable()
    try:
        del model
        assert layer() is None
    finally:
        gc.enable()


def test_whole_numbers_are_those_of_the_whole_weight() -> None:
    """Though it is made of parts."""
    weight = torch.randn(32 * cpu_weights.PART + 40, 96).bfloat16()
    packed = cpu_weights.pack_int8(weight)
    scales = weight.float().abs().amax(dim=1) / 127
    assert torch.equal(packed.scales[: len(weight)], scales)
    tiles = packed.tiles.permute(0, 2, 4, 1, 3, 5).reshape(packed.tiles.shape[0] * 32, -1)
    assert torch.equal(tiles[: len(weight), :96], (weight.float() / scales[:, None]).round().to(torch.int8))
    assert torch.equal(packed.totals, tiles.sum(dim=1, dtype=torch.int32))
    assert not packed.scales[len(weight) :].any()


def test_copies_are_of_what_drafts_run(backend: str) -> None:
    """And drafts run them: by other weights these are refused, and rows stay what they are."""
    model = random_model("llama", layers=5).pack()
    made = model.drafter
    assert made.weight_itemsize == 2, "before any is made"
    schedule = Lossless(5, ChosenLayers(5, (0, 3)), 2)
    length = DraftLength(schedule, Prices.of(model))
    requests = some_requests(12)
    rows = generate_lossless(model, requests, schedule, length=length)
    narrow = [i for i, (own, other) in enumerate(zip(model.layers, made.layers, strict=True)) if own is not other]
    assert narrow == [0, 3]
    assert made.weight_itemsize == 2, "and behind"
    assert made.num_outputs == length.listed == model.config.vocab_size, "an untied head is copied, and priced so"
    assert not made.prepare([0, 3], with_head=True), "all there"
    kept = made.layers[3].fc2.packed
    assert kept is not None
    assert CPU.narrow_itemsize(kept) is None, "once is enough"
    for linear in made.layers[3].linears:
        packed = linear.packed
        assert packed is not None
        weight = packed.weight  # type: ignore[attr-defined]
        assert isinstance(weight, cpu_weights.HalfWeight)
        with torch.inference_mode():
            weight.tiles.mul_(-1)
    again = generate_lossless(model, requests, schedule, length=DraftLength(schedule, Prices.of(model)))
    assert [one.tokens for one in again.completions] == [one.tokens for one in rows.completions]
    assert again.stats.accepted_at != rows.stats.accepted_at  # type: ignore[attr-defined]
