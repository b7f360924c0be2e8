"""Llama's layer as the kernels compute it, for a step and for prompts, against plain torch in float32."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skipdecode.backends.backend import KVRange, LayerShape, PackedPrompts
from skipdecode.backends.cpu_layers import KVStoreKernel, LayerKernel, Product
from tests.support.cpu_backends import kind, num_threads, product_dtype, read_last, step_one
from tests.support.cpu_llama_layers import POSITIONS, REAL, Kind, Layer, Norm, Spec, assert_close, rotary_table, specs

__all__ = ["kind", "product_dtype"]  # fixtures


def check_step(
    layer: Layer, rows: int, capacity: int, threads: int, *, is_new: bool, attends: bool, feeds: bool
) -> None:
    spec, dtype = layer.spec, layer.dtype
    h = torch.randn(rows, 1, spec.width).to(dtype)
    k, v = (torch.randn(rows, spec.groups, capacity, spec.dim).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    kernel = layer.kernel(only_queries=not is_new)
    keys = {"attends": attends, "feeds": feeds}
    wanted, wanted_k, wanted_v = layer.step(h[:, 0].float(), k.float(), v.float(), first, last, is_new=is_new, **keys)
    row = rows // 2
    one = KVRange(*(x[row : row + 1].clone() for x in (k, v, first, last)))
    with num_threads(threads):
        alone = step_one(kernel, h[row : row + 1].clone(), one if attends else None, feeds=feeds)
        made = step_one(kernel, h.clone(), KVRange(k, v, first, last) if attends else None, feeds=feeds)
    assert torch.equal(alone[0], made[row])
    assert_close(made[:, 0], wanted, dtype)
    assert_close(k, wanted_k, dtype)
    assert_close(v, wanted_v, dtype)


@settings(max_examples=60)
@given(
    spec=specs(),
    rows=st.integers(1, 40),
    capacity=st.integers(1, POSITIONS + 40),
    seed=st.integers(0, 2**31),
    does=st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
    is_new=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_step_is_the_layer(
    kind: Kind, spec: Spec, rows: int, capacity: int, seed: int, does: tuple[bool, bool], is_new: bool, threads: int
) -> None:
    """A row's bits are those it has alone. `is_new` False: keys and values are in the cache already (SwiftKV)."""
    torch.manual_seed(seed)
    attends, feeds = does
    check_step(Layer(spec, *kind), rows, capacity, threads, is_new=is_new, attends=attends, feeds=feeds)


@pytest.mark.parametrize("spec", REAL, ids=str)
def test_a_step_of_real_shapes(kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    for rows, capacity in ((1, 70), (13, 40)):
        check_step(Layer(spec, *kind), rows, capacity, 2, is_new=True, attends=True, feeds=True)


class Batch:
    """Prompts of these lengths with random states, and a cache full of NaN."""

    def __init__(self, lengths: list[int], layer: Layer, spare: int = 0) -> None:
        spec = layer.spec
        self.lengths, self.columns, self.dtype = lengths, max(lengths), layer.dtype
        self.pads = torch.tensor([self.columns - n for n in lengths])
        self.prompts = PackedPrompts((torch.arange(self.columns) - self.pads[:, None]).clamp(min=-1), self.pads)
        self.h = torch.randn(sum(lengths), spec.width).to(layer.dtype)
        shape = (len(lengths), spec.groups, self.columns + spare, spec.dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=layer.dtype) for _ in "kv")

    def span(self, row: int) -> slice:
        return slice(int(self.prompts.starts[row]), int(self.prompts.starts[row + 1]))

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        for row in range(len(self.lengths)):
            yield row, self.h[self.span(row)].float()

    def cached(self, row: int) -> tuple[Tensor, Tensor]:
        """A prompt's keys and values [T, G, K]."""
        own = slice(int(self.pads[row]), self.columns)
        return self.k[row, :, own].transpose(0, 1), self.v[row, :, own].transpose(0, 1)


def check_prompts(layer: Layer, lengths: list[int], threads: int, *, feeds: bool = True) -> None:
    batch, kernel = Batch(lengths, layer, spare=2), layer.kernel()
    alone = Batch([lengths[-1]], layer)
    with num_threads(threads):
        made = kernel.read(batch.h.clone(), batch.prompts, (batch.k, batch.v), feeds=feeds)
        alone.h = batch.h[batch.span(len(lengths) - 1)].clone()
        made_alone = kernel.read(alone.h.clone(), alone.prompts, (alone.k, alone.v), feeds=feeds)
        own = [x[-1, :, batch.pads[-1] : batch.columns].clone() for x in (batch.k, batch.v)]
        last = read_last(kernel, batch.h.clone(), batch.prompts, (batch.k, batch.v), feeds=feeds)
    assert torch.equal(made_alone, made[batch.span(len(lengths) - 1)])
    assert torch.equal(torch.stack(own), torch.stack([alone.k[0], alone.v[0]]))
    for row, h in batch.rows():
        wanted, k, v = layer.read(h, feeds=feeds)
        assert_close(made[batch.span(row)], wanted, layer.dtype)
        assert_close(last[row, 0], wanted[-1], layer.dtype)
        for held, exact in zip(batch.cached(row), (k, v), strict=True):
            assert_close(held, exact, layer.dtype)


@settings(max_examples=30)
@given(
    spec=specs(),
    lengths=st.lists(st.integers(1, POSITIONS + 20), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    feeds=st.booleans(),
    threads=st.integers(1, 3),
)
def test_prompts_are_the_layer(
    kind: Kind, spec: Spec, lengths: list[int], seed: int, feeds: bool, threads: int
) -> None:
    """Also their last tokens alone. A prompt's bits are those it has alone."""
    torch.manual_seed(seed)
    check_prompts(Layer(spec, *kind), lengths, threads, feeds=feeds)


@pytest.mark.parametrize("spec", REAL, ids=str)
def test_prompts_of_real_shapes(kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    check_prompts(Layer(spec, *kind), [40, 3, 65], 2)


def test_many_tokens_each_thread_some(kind: Kind) -> None:
    """More tokens per thread than threads share; heads that share keys are one piece of work."""
    torch.manual_seed(0)
    layer = Layer(Spec(64, 6, 2, 32, 96, 32, has_head_norms=True), *kind)
    lengths = [301, 1, 290, 33, 130]
    batch, kernel = Batch(lengths, layer), layer.kernel()
    made = []
    for threads in (1, 2, 5, 16):
        with num_threads(threads):
            made.append(kernel.read(batch.h.clone(), batch.prompts, (batch.k, batch.v), feeds=True))
    assert all(torch.equal(made[0], other) for other in made[1:])
    for row, h in batch.rows():
        assert_close(made[0][batch.span(row)], layer.read(h)[0], layer.dtype)


@pytest.mark.parametrize("spec", REAL[:3], ids=str)
def test_a_prompt_and_steps_are_one_pass(kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    layer = Layer(spec, *kind)
    lengths, num_steps = [9, 30, 1], 5
    batch, kernel = Batch(lengths, layer, num_steps), layer.kernel()
    new = torch.randn(num_steps, 3, 1, spec.width).to(layer.dtype)
    read = kernel.read(batch.h.clone(), batch.prompts, (batch.k, batch.v), feeds=True)
    made = [[read[batch.span(row)]] for row in range(3)]
    for step in range(num_steps):
        last = torch.full((3,), batch.columns + step)
        out = step_one(kernel, new[step].clone(), KVRange(batch.k, batch.v, batch.prompts.columns, last), feeds=True)
        for row in range(3):
            made[row].append(out[row])
    for row, h in batch.rows():
        wanted, _, _ = layer.read(torch.cat([h, new[:, row, 0].float()]))
        assert_close(torch.cat(made[row]), wanted, layer.dtype)


@pytest.mark.parametrize("has_head_norms", [False, True])
def test_keys_of_several_layers_in_one_call(kind: Kind, has_head_norms: bool) -> None:
    """As SwiftKV has them: norm, product, norm of heads and rotation of each, and only where it is asked for."""
    torch.manual_seed(0)
    dtype, quantization = kind
    spec = Spec(96, 6, 2, 32, 64, 32, has_bias=True, has_head_norms=has_head_norms)
    layers = [Layer(spec, dtype, quantization) for _ in range(3)]
    for layer in layers:
        layer.norms["attn"] = layers[0].norms["attn"]
    store = KVStoreKernel(
        spec.shape(),
        layers[0].module("attn"),
        [layer.product("qkv").tail(6 * 32) for layer in layers],
        [layer.module("k") for layer in layers] if has_head_norms else None,
    )
    batch = Batch([5, 70, 1], layers[0])
    memory = {at: (batch.k.clone(), batch.v.clone()) for at in (2, 0)}
    with num_threads(2):
        store(batch.h, batch.prompts, memory)
    for at, (batch.k, batch.v) in memory.items():
        for row, h in batch.rows():
            _, k, v = layers[at].read(h, attends=False, feeds=False)
            for held, wanted in zip(batch.cached(row), (k, v), strict=True):
                assert_close(held, wanted, dtype)
            assert batch.k[row, :, : batch.pads[row]].isnan().all()


def test_positions_past_the_table_are_its_last(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(Spec(64, 4, 2, 32, 64, 32), product_dtype)
    kernel = layer.kernel()
    capacity = POSITIONS + 9
    k, v = (torch.randn(2, 2, capacity, 32).to(product_dtype) for _ in "kv")
    first, last = torch.tensor([0, 9]), torch.tensor([capacity - 1] * 2)
    h = torch.randn(1, 1, 64).expand(2, 1, 64).to(product_dtype).contiguous()
    step_one(kernel, h, KVRange(k, v, first, last), feeds=False)
    assert torch.equal(k[0, :, -1], k[1, :, -1])


def test_a_layer_of_wrong_parts_is_refused(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = Spec(64, 4, 2, 32, 64, 32)
    layer = Layer(spec, product_dtype)
    layer.kernel()
    shape = spec.shape()
    attn, q_norm = layer.module("attn"), Norm(torch.ones(32, dtype=product_dtype))
    assert attn is not None
    parts = [layer.product(name) for name in ("qkv", "out", "fc1", "fc2")]

    def build(shape: LayerShape, parts: list[Product], **norms: nn.Module) -> LayerKernel:
        return LayerKernel(shape, attn, *parts[:2], attn, *parts[2:], **norms)

    build(shape, parts, q_norm=q_norm, k_norm=q_norm)
    table = rotary_table(32)
    for wrong in (
        replace(shape, kv_heads=4), replace(shape, kv_heads=3), replace(shape, head_dim=16), replace(shape, mlp="relu"),
        replace(shape, rotary_table=table.double()), replace(shape, rotary_table=rotary_table(34)),
        replace(shape, rotary_table=table.T.contiguous().T), replace(shape, rotary_table=table[:, :31].contiguous()),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            build(wrong, parts)
    with pytest.raises(AssertionError):
        build(shape, [*parts[:2], replace(parts[2], is_gated=False), parts[3]])
    for norm in (Norm(torch.ones(16, dtype=product_dtype)), Norm(torch.ones(32).double())):
        with pytest.raises(AssertionError):
            build(shape, parts, k_norm=norm)
    with pytest.raises(AssertionError):
        KVStoreKernel(shape, attn, [parts[0]])
    kernel = build(shape, parts)
    k, at = torch.zeros(3, 2, 5, 32, dtype=product_dtype), torch.zeros(3, dtype=torch.int64)
    h = torch.zeros(3, 1, 64, dtype=product_dtype)
    step_one(kernel, h, KVRange(k, k.clone(), at, at), feeds=True)
    for held in (k[:, :1], k.repeat(1, 2, 1, 1), k[..., :16]):
        with pytest.raises(AssertionError):
            step_one(kernel, h, KVRange(held.contiguous(), held.contiguous(), at, at), feeds=True)
