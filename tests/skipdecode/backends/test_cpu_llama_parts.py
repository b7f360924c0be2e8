"""Parts of Llama's layer as the kernels compute them: attention by heads that share keys, and SwiGLU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from skipdecode.backends import cpu_kernels as cpu
from skipdecode.backends import cpu_weights
from skipdecode.backends.cpu_backend import check_int8
from skipdecode.model.linear import Linear
from tests.support.cpu_backends import DTYPES, TOLERANCE, backend, int8_backend, kind, num_threads, product_dtype
from tests.support.cpu_llama_layers import EPSILON, Kind, assert_close, rms, rotary_table, rotate

__all__ = ["backend", "int8_backend", "kind", "product_dtype"]  # fixtures


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
            rotary_table=rotary_table(turning) if turning else None, **norms,
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
