"""Llama's layer as the kernels compute it, against plain torch in float32: RMS norms, heads that share keys, rotation,
SwiGLU, norms of heads. Written here from the definitions; nothing of the decoder is used but what packs weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skipdecode.backends import cpu, cpu_weights
from skipdecode.backends.compiled import check_int8
from skipdecode.backends.heads import Columns
from skipdecode.backends.layer import LayerKernel, StoreKernel
from skipdecode.backends.layer_parts import Product
from skipdecode.backends.layer_shape import LayerShape
from skipdecode.backends.prompts import Prompts
from skipdecode.config import Quantization
from skipdecode.linear import Linear, pack, product
from tests.support.cpu_backends import (
    DTYPES,
    TOLERANCE,
    backend,
    int8_backend,
    kind,
    num_threads,
    product_dtype,
    read_last,
    step_one,
)

__all__ = ["backend", "int8_backend", "kind", "product_dtype"]  # fixtures

Kind = tuple[torch.dtype, Quantization | None]
EPSILON = 1e-5
POSITIONS = 80


@dataclass(frozen=True)
class Spec:
    """A layer: width D, H and G heads of K, F numbers in between, r that turn."""

    width: int
    heads: int
    groups: int
    dim: int
    ffn: int = 64
    rotary: int = 0
    has_bias: bool = False
    has_head_norms: bool = False
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "relu"] = "swiglu"
    is_pre: bool = True
    has_norm_bias: bool = field(default=False, kw_only=True)

    def shape(self) -> LayerShape:
        table = rotations(self.rotary) if self.rotary else None
        return LayerShape(
            self.heads, self.groups, self.dim, EPSILON, self.is_pre, norm=self.norm, mlp=self.mlp, rotations=table
        )


def rotations(rotary: int) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -(torch.arange(0, rotary, 2) / rotary)
    return torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()


def rotate(x: Tensor, positions: Tensor, rotary: int) -> Tensor:
    """x [..., K] at `positions` [...], as Hugging Face does it: x cos + rotate_half(x) sin."""
    if not rotary:
        return x
    angles = rotations(rotary)[positions.clamp(max=POSITIONS - 1)]
    cos, sin = (torch.cat([half, half], dim=-1) for half in angles.chunk(2, dim=-1))
    turning, rest = x[..., :rotary], x[..., rotary:]
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + EPSILON) * weight


class Norm(nn.Module):
    """A weight, and no attribute `bias`, as Hugging Face's RMS norms have it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


class Layer:
    """Random weights; as a kernel, and as a plain computation in float32 with the same weights."""

    def __init__(self, spec: Spec, dtype: torch.dtype, quantization: Quantization | None = None) -> None:
        self.spec, self.dtype, self.quantization = spec, dtype, quantization
        D, H, G, K = spec.width, spec.heads, spec.groups, spec.dim
        inner = spec.ffn * (2 if spec.mlp == "swiglu" else 1)
        self.sizes = {"qkv": ((H + 2 * G) * K, D), "out": (D, H * K), "fc1": (inner, D), "fc2": (D, spec.ffn)}
        self.weights = {n: (torch.randn(size) * size[1] ** -0.5).to(dtype) for n, size in self.sizes.items()}
        biased = [*(["qkv", "fc1"] if spec.has_bias else [])]
        self.biases = {name: (torch.randn(self.sizes[name][0]) * 0.5).to(dtype) for name in biased}
        names = [("attn", D), ("ffn", D), *([("q", K), ("k", K)] if spec.has_head_norms else [])]
        self.norms = {name: (1 + 0.3 * torch.randn(size)).to(dtype) for name, size in names}
        self.norm_bias = (0.3 * torch.randn(D)).to(dtype) if spec.has_norm_bias else None

    def product(self, name: str, rows: int | None = None) -> Product:
        gated = name == "fc1" and self.spec.mlp == "swiglu"
        bias = self.biases.get(name)
        if bias is not None and gated:
            bias = cpu_weights.interleave(bias)
        packed = pack(self.weights[name][:rows], self.quantization, is_gated=gated)
        made = product(packed, bias if bias is None else bias[:rows])
        assert made is not None
        return made

    def module(self, name: str) -> nn.Module | None:
        if name not in self.norms:
            return None
        norm = Norm(self.norms[name])
        if self.norm_bias is not None and name in ("attn", "ffn"):
            norm.bias = nn.Parameter(self.norm_bias, requires_grad=False)
        return norm

    def kernel(self, *, only_queries: bool = False) -> LayerKernel:
        queries = self.spec.heads * self.spec.dim
        attn, ffn = self.module("attn"), self.module("ffn")
        assert attn is not None
        assert ffn is not None
        parts = [self.product("qkv", queries if only_queries else None)]
        parts += [self.product(name) for name in ("out", "fc1", "fc2")]
        head_norms = {"q_norm": self.module("q"), "k_norm": self.module("k")}
        return LayerKernel(self.spec.shape(), attn, *parts[:2], ffn, *parts[2:], **head_norms)

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[name].float(), self.biases.get(name)
        if self.quantization:
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            weight = (weight / scales).round() * scales
        return F.linear(x, weight, None if bias is None else bias.float())

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.norms[name].float(), None if self.norm_bias is None else self.norm_bias.float()
        if self.spec.norm == "rms" or name in "qk":
            return rms(x, weight)
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)

    def queries_keys_values(self, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [T, D] at positions [T] -> [T, H, K], [T, G, K], [T, G, K]"""
        spec = self.spec
        x = self.linear("qkv", self.norm("attn", h) if spec.is_pre else h).view(len(h), -1, spec.dim)
        q, k, v = x.split([spec.heads, spec.groups, spec.groups], dim=1)
        if spec.has_head_norms:
            q, k = self.norm("q", q), self.norm("k", k)
        return *(rotate(part, positions[:, None].expand(part.shape[:2]), spec.rotary) for part in (q, k)), v

    def attend(self, h: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [T, H, K] over k, v [T or 1, S, G, K], mask [T, S] -> [T, D]"""
        k, v = (x.repeat_interleave(self.spec.heads // self.spec.groups, dim=2) for x in (k, v))
        scores = torch.einsum("thk,tshk->ths", q, k.expand(len(q), -1, -1, -1)) * self.spec.dim**-0.5
        weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
        out = torch.einsum("ths,tshk->thk", weights, v.expand(len(q), -1, -1, -1)).flatten(1)
        h = h + self.linear("out", out)
        return h if self.spec.is_pre else self.norm("attn", h)

    def feed(self, h: Tensor) -> Tensor:
        x = self.linear("fc1", self.norm("ffn", h) if self.spec.is_pre else h)
        if self.spec.mlp == "swiglu":
            gate, other = x.chunk(2, dim=-1)
            x = gate / (1 + torch.exp(-gate)) * other
        else:
            x = x.relu()
        h = h + self.linear("fc2", x)
        return h if self.spec.is_pre else self.norm("ffn", h)

    def read(self, h: Tensor, *, attends: bool = True, feeds: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """A prompt h [T, D] -> [T, D], and its keys and values [T, G, K]."""
        q, k, v = self.queries_keys_values(h, torch.arange(len(h)))
        if attends:
            h = self.attend(h, q, k[None], v[None], torch.ones(len(h), len(h), dtype=torch.bool).tril())
        return self.feed(h) if feeds else h, k, v

    def step(
        self, h: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, is_new: bool, attends: bool, feeds: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, D], k, v [B, G, S, K] -> [B, D], and the cache with the new column."""
        if attends:
            q, new_k, new_v = self.queries_keys_values(h, last - first)
            k, v = k.clone(), v.clone()
            if is_new:
                k[torch.arange(len(h)), :, last], v[torch.arange(len(h)), :, last] = new_k, new_v
            columns = torch.arange(k.shape[2])
            mask = (columns >= first[:, None]) & (columns <= last[:, None])
            h = self.attend(h, q, k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.feed(h) if feeds else h, k, v


REAL = [
    Spec(576, 9, 3, 64, 1536, 64),  # SmolLM2-135M
    Spec(128, 4, 4, 32, 352, 32),  # a demo model
    Spec(1024, 16, 8, 128, 96, 128, has_head_norms=True),  # Qwen3-0.6B: heads wider than the model
    Spec(512, 8, 1, 64, 96, 64, has_bias=True),  # Qwen2's biases
    Spec(96, 12, 4, 96, 96, 24, norm="layer", mlp="relu", has_bias=True, has_norm_bias=True),  # StableLM's parts
    Spec(160, 20, 1, 80, 32, 80),  # more queries than registers hold
]
SMALL = [
    (32, 1, 1, 32), (64, 6, 2, 16), (96, 3, 1, 32), (64, 8, 1, 64), (32, 4, 2, 80), (64, 2, 1, 128), (64, 8, 2, 12),
    (160, 9, 3, 32), (96, 2, 2, 96), (64, 14, 2, 48), (128, 32, 4, 7), (32, 4, 4, 24),
]  # fmt: skip


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    width, heads, groups, dim = draw(st.sampled_from(SMALL))
    rotary = draw(st.sampled_from([0, dim // 2 * 2, dim // 4 * 2, 2]))
    flags = [draw(st.booleans()) for _ in range(3)]
    norm: Literal["rms", "layer"] = draw(st.sampled_from(["rms", "rms", "layer"]))
    mlp: Literal["swiglu", "relu"] = draw(st.sampled_from(["swiglu", "swiglu", "relu"]))
    ffn = draw(st.sampled_from([32, 64, 96, 160]))
    has_norm_bias = norm == "layer" and draw(st.booleans())
    bias, head_norms, is_post = flags
    return Spec(width, heads, groups, dim, ffn, rotary, bias, head_norms, norm, mlp, not is_post,
                has_norm_bias=has_norm_bias)  # fmt: skip


LIMIT = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # of the largest number, as in test_cpu_block.py


def assert_close(made: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert made.shape == wanted.shape
    difference, limit = (made.float() - wanted).abs().max(), LIMIT[dtype] * float(wanted.abs().max())
    assert difference <= limit, (float(difference), limit)


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
    one = Columns(*(x[row : row + 1].clone() for x in (k, v, first, last)))
    with num_threads(threads):
        alone = step_one(kernel, h[row : row + 1].clone(), one if attends else None, feeds=feeds)
        made = step_one(kernel, h.clone(), Columns(k, v, first, last) if attends else None, feeds=feeds)
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
        self.prompts = Prompts((torch.arange(self.columns) - self.pads[:, None]).clamp(min=-1))
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
        out = step_one(kernel, new[step].clone(), Columns(batch.k, batch.v, batch.prompts.columns, last), feeds=True)
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
    store = StoreKernel(
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
    step_one(kernel, h, Columns(k, v, first, last), feeds=False)
    assert torch.equal(k[0, :, -1], k[1, :, -1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([(2, 1), (3, 1), (6, 2), (8, 1), (9, 3), (10, 1), (34, 2), (3, 3)]),
    dim=st.sampled_from([1, 3, 16, 32, 40, 64, 80, 96, 128, 160]),
    capacity=st.integers(1, 150),
    seed=st.integers(0, 2**31),
    rotary=st.sampled_from([0.0, 0.25, 1.0]),
    has_norms=st.booleans(),
    is_new=st.booleans(),
    threads=st.integers(1, 3),
)
def test_attention_by_itself(
    backend: str,
    dtype: torch.dtype,
    rows: int,
    heads: tuple[int, int],
    dim: int,
    capacity: int,
    seed: int,
    rotary: float,
    has_norms: bool,
    is_new: bool,
    threads: int,
) -> None:
    """What lies outside a row's columns is not looked at."""
    torch.manual_seed(seed)
    H, G = heads
    turning = int(dim * rotary) // 2 * 2
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    qkv = torch.randn(rows, (H + 2 * G) * dim).to(dtype)
    q, new_k, new_v = qkv.split([H * dim, G * dim, G * dim], dim=-1)
    q_norm, k_norm = ((1 + 0.3 * torch.randn(dim)).to(dtype) for _ in "qk")
    columns = torch.arange(capacity)
    mask = (columns >= first[:, None]) & (columns <= last[:, None])
    k, v = (torch.randn(rows, G, capacity, dim).masked_fill(~mask[:, None, :, None], torch.nan).to(dtype) for _ in "kv")
    at = (last - first)[:, None]
    query, key = q.float().view(rows, H, dim), new_k.float().view(rows, G, dim)
    if has_norms:
        query, key = rms(query, q_norm.float()), rms(key, k_norm.float())
    query, key = (rotate(x, at.expand(x.shape[:2]), turning) for x in (query, key))
    keys, values = k.float(), v.float()
    if is_new:
        keys[torch.arange(rows), :, last] = key
        values[torch.arange(rows), :, last] = new_v.float().view(rows, G, dim)
    wanted = F.scaled_dot_product_attention(
        query[:, :, None],
        keys.nan_to_num().repeat_interleave(H // G, dim=1),
        values.nan_to_num().repeat_interleave(H // G, dim=1),
        attn_mask=mask[:, None, None],
    )
    norms = {"q_norm": q_norm, "k_norm": k_norm, "epsilon": EPSILON} if has_norms else {}
    with num_threads(threads):
        made = cpu.attend(
            q, k, v, first, last, (new_k, new_v) if is_new else None,
            rotations=rotations(turning) if turning else None, **norms,
        )  # fmt: skip
    limit = 2 * TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
    assert (made.float() - wanted.reshape(rows, -1)).abs().max() <= limit
    for held, exact in ((k, keys), (v, values)):
        assert torch.equal(held.isnan(), exact.isnan())
        assert (held.float() - exact).nan_to_num().abs().max() <= limit


def test_weights_far_apart_do_not_overflow(backend: str) -> None:
    q = torch.full((1, 192), 50.0)
    k = torch.stack([torch.full((64,), x) for x in (-40.0, 40.0, 39.0)])[None, None].contiguous()
    v = torch.stack([torch.full((64,), x) for x in (1.0, 2.0, 3.0)])[None, None].contiguous()
    made = cpu.attend(q, k, v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(made, torch.full((1, 192), 2.0))


# SwiGLU as a product by itself


@settings(max_examples=40)
@given(
    rows=st.integers(0, 70),
    steps=st.integers(1, 5),
    gates=st.integers(1, 7),
    seed=st.integers(0, 2**31),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_gated_products(kind: Kind, rows: int, steps: int, gates: int, seed: int, has_bias: bool, threads: int) -> None:
    """As a layer: packed, and before."""
    torch.manual_seed(seed)
    dtype, quantization = kind
    layer = Linear(32 * steps, 32 * gates, bias=has_bias, is_gated=True).requires_grad_(False)
    nn.init.normal_(layer.weight, 0.0, 2 * (32 * steps) ** -0.5)
    layer = layer.to(dtype)
    x = torch.randn(rows, 32 * steps).to(dtype)
    plain = layer(x, activation="swiglu")
    weight, bias = layer.weight.float(), None if layer.bias is None else layer.bias.float()
    if quantization:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        weight = (weight / scales).round() * scales
    gate, other = F.linear(x.float(), weight, bias).chunk(2, dim=1)
    wanted = gate * torch.sigmoid(gate) * other
    layer.pack(quantization)
    assert layer.product() is not None
    with num_threads(threads):
        made = layer(x, activation="swiglu")
        alone = [layer(row[None], activation="swiglu")[0] for row in x[:2]]
    assert made.shape == plain.shape == wanted.shape == (rows, 16 * gates)
    assert all(torch.equal(one, row) for one, row in zip(alone, made[:2], strict=True))
    if rows:
        assert_close(made, wanted, dtype)
        if not quantization:
            assert_close(plain, wanted, dtype)


def test_many_gated_rows(kind: Kind) -> None:
    torch.manual_seed(0)
    dtype, quantization = kind
    layer = Linear(2048 + 96, 96, is_gated=True).to(dtype).requires_grad_(False)
    x, weight, bias = torch.randn(1100, 2048 + 96).to(dtype), layer.weight.float(), layer.bias.float()
    if quantization:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        weight = (weight / scales).round() * scales
    gate, other = F.linear(x.float(), weight, bias).chunk(2, dim=1)
    layer.pack(quantization)
    for threads in (1, 2, 8):
        with num_threads(threads):
            assert_close(layer(x, activation="swiglu"), F.silu(gate) * other, dtype)


def test_gates_of_any_size(product_dtype: torch.dtype) -> None:
    """From far below to far above what an exponential can be of."""
    gates = torch.tensor([-1e30, -1000.0, -100.0, -88.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 88.0, 100.0, 1e30])
    x = torch.zeros(len(gates) + 1, 32)
    x[:-1, 0], x[:, 1], x[-1, 0] = gates, 1.0, torch.nan
    weight = torch.zeros(32, 32)
    weight[:16, 0], weight[16:, 1] = 1.0, 2.0
    x = x.to(product_dtype)
    made = cpu.linear(x, cpu_weights.pack(weight.to(product_dtype), gated=True), 32, None, activation="swiglu")
    wanted = 2 * F.silu(x[:-1, :1].double()).expand(-1, 16)
    relative = 2**-8 if product_dtype == torch.bfloat16 else 1e-6
    assert torch.all((made[:-1] - wanted).abs() <= relative * wanted.abs() + 1e-37 * x[:-1, :1].abs())
    assert made[-1].isnan().all()


def test_gates_that_no_kernel_takes(product_dtype: torch.dtype) -> None:
    """The layer is what it was."""
    torch.manual_seed(0)
    layer = Linear(64, 40, is_gated=True).to(product_dtype).requires_grad_(False)
    x = torch.randn(3, 64).to(product_dtype)
    wanted = layer(x, activation="swiglu")
    layer.pack()
    assert layer.product() is None
    assert_close(layer(x, activation="swiglu"), wanted.float(), torch.bfloat16)
    with pytest.raises(AssertionError):
        cpu_weights.pack(torch.ones(40, 64, dtype=product_dtype), gated=True)
    with pytest.raises(AssertionError):
        layer(x)
    with pytest.raises(AssertionError):
        Linear(64, 64)(x.float(), activation="swiglu")


def test_int8_gates_that_no_kernel_takes(int8_backend: str) -> None:
    with pytest.raises(ValueError, match="gates in a multiple of 16, and these are 20"):
        check_int8(torch.ones(40, 64).bfloat16(), is_gated=True)


def test_gates_are_interleaved() -> None:
    made = cpu_weights.interleave(torch.arange(96)).tolist()
    assert made == [*range(16), *range(48, 64), *range(16, 32), *range(64, 80), *range(32, 48), *range(80, 96)]


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
    table = rotations(32)
    for wrong in (
        replace(shape, kv_heads=4), replace(shape, kv_heads=3), replace(shape, head_dim=16), replace(shape, mlp="relu"),
        replace(shape, rotations=table.double()), replace(shape, rotations=rotations(34)),
        replace(shape, rotations=table.T.contiguous().T), replace(shape, rotations=table[:, :31].contiguous()),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            build(wrong, parts)
    with pytest.raises(AssertionError):
        build(shape, [*parts[:2], replace(parts[2], is_gated=False), parts[3]])
    for norm in (Norm(torch.ones(16, dtype=product_dtype)), Norm(torch.ones(32).double())):
        with pytest.raises(AssertionError):
            build(shape, parts, k_norm=norm)
    with pytest.raises(AssertionError):
        StoreKernel(shape, attn, [parts[0]])
    kernel = build(shape, parts)
    k, at = torch.zeros(3, 2, 5, 32, dtype=product_dtype), torch.zeros(3, dtype=torch.int64)
    h = torch.zeros(3, 1, 64, dtype=product_dtype)
    step_one(kernel, h, Columns(k, k.clone(), at, at), feeds=True)
    for held in (k[:, :1], k.repeat(1, 2, 1, 1), k[..., :16]):
        with pytest.raises(AssertionError):
            step_one(kernel, h, Columns(held.contiguous(), held.contiguous(), at, at), feeds=True)
