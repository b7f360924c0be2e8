"""Products with packed weights of every kind, against torch: bfloat16, float32, int8, and gated ones."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import skipdecode
from actors.measuring.bench import random_model
from skipdecode.backends import cpu_kernels, cpu_weights
from skipdecode.backends.backend import Activation
from skipdecode.backends.cpu_backend import check_int8
from skipdecode.backends.torch_sampling import NO_TOKEN, likeliest, mask
from skipdecode.families.opt import OPTConfig
from skipdecode.model.linear import Linear
from tests.support.cpu_backends import (
    DTYPES,
    TOLERANCE,
    Kind,
    backend,
    int8_backend,
    is_close,
    kind,
    nearest,
    nearest_int8,
    num_threads,
    product_dtype,
    some_allowed,
)
from tests.support.cpu_llama_layers import assert_close
from tests.support.examples import examples

__all__ = ["backend", "int8_backend", "kind", "product_dtype"]  # fixtures


ROOT = Path(skipdecode.__file__).parents[1]


@given(
    rows=st.integers(0, 140),
    steps=st.integers(1, 9),
    outputs=st.integers(1, 110),
    seed=st.integers(0, 2**31),
    then=st.sampled_from(["nothing", "relu", "residual"]),
    has_bias=st.booleans(),
    is_strided=st.booleans(),
    threads=st.integers(1, 3),
)
def test_products_are_those_of_torch(
    product_dtype: torch.dtype,
    rows: int,
    steps: int,
    outputs: int,
    seed: int,
    then: str,
    has_bias: bool,
    is_strided: bool,
    threads: int,
) -> None:
    dtype = product_dtype
    rng = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 32 * steps, generator=rng).to(dtype) for n in (rows, outputs))
    bias = torch.randn(outputs, generator=rng).to(dtype) if has_bias else None
    residual = torch.randn(rows, outputs, generator=rng).to(dtype) if then == "residual" else None
    wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual.float()
    if is_strided:  # the last column of several, as the head gets it
        x = torch.stack([x + 1, x], dim=1)[:, -1]
    with num_threads(threads):
        packed = cpu_weights.pack(weight)
        activation: Activation = "relu" if then == "relu" else "none"
        made = cpu_kernels.linear(x, packed, outputs, bias, activation=activation, residual=residual)
        alone = [
            cpu_kernels.linear(row[None], packed, outputs, bias, activation="relu" if then == "relu" else "none")
            for row in x[:2]
        ]
    assert made.shape == (rows, outputs)
    assert is_close(made, wanted)
    if residual is None:
        assert all(torch.equal(one[0], row) for one, row in zip(alone, made[:2], strict=True))


@given(
    rows=st.integers(1, 140),
    steps=st.integers(1, 4),
    outputs=st.integers(1, 300),
    seed=st.integers(0, 2**31),
    levels=st.sampled_from([2, 1000]),
    threads=st.integers(1, 3),
)
def test_the_likeliest_output_is_that_of_the_logits(
    kind: Kind, rows: int, steps: int, outputs: int, seed: int, levels: int, threads: int
) -> None:
    """The lowest of equals, of which few levels make many."""
    dtype, quantization = kind
    rng = torch.Generator().manual_seed(seed)
    x, weight = (torch.randint(-levels, levels, (n, 32 * steps), generator=rng).to(dtype) for n in (rows, outputs))
    pack = {"int8": cpu_weights.pack_int8, "int4": cpu_weights.pack_int4}.get(quantization or "", cpu_weights.pack)
    packed = pack(weight)
    with num_threads(threads):
        made = cpu_kernels.argmax_linear(x, packed, outputs)
        logits = cpu_kernels.linear(x, packed, outputs, None)
        assert torch.equal(made, cpu_kernels.argmax(logits))
        for share in (0.02, 0.6):
            allowed = some_allowed(rows, outputs, share, rng)
            made = cpu_kernels.argmax_linear(x, packed, outputs, allowed)
            assert torch.equal(made, likeliest(mask(logits.clone(), allowed)))


def test_the_likeliest_output_of_strange_numbers(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    weight = -torch.ones(70, 32, dtype=dtype)
    weight[5] = -0.5
    packed = cpu_weights.pack(weight)
    x = torch.ones(4, 32, dtype=dtype)
    x[1], x[2], x[3] = torch.nan, 3e38, -3e38
    made = cpu_kernels.argmax_linear(x, packed, 70).tolist()
    assert made[:2] == [5, NO_TOKEN]
    assert 0 <= made[2] < 70, "a token, whatever it is: below all there is"
    assert made[3] == NO_TOKEN, "an overflow"
    weight[40, 3] = torch.nan  # a weight that has flipped
    packed = cpu_weights.pack(weight)
    assert cpu_kernels.argmax_linear(x[:1], packed, 70).tolist() == [NO_TOKEN]
    allowed = torch.tensor([[1 << 31 | 1, 1 << 9, 0]]).to(torch.int32)  # outputs 0, 31 and 41
    assert cpu_kernels.argmax_linear(x[:1], packed, 70, allowed).tolist() == [0], "what is forbidden does not count"
    assert cpu_kernels.argmax_linear(x[:1], packed, 70, 0 * allowed).tolist() == [0], "a token, as of -inf alone"
    with pytest.raises(AssertionError):
        cpu_kernels.argmax_linear(x[:1], packed, 70, allowed[:, :2].contiguous())
    with pytest.raises(AssertionError):
        cpu_kernels.argmax_linear(x.double(), packed, 70)
    with pytest.raises(AssertionError):
        cpu_kernels.argmax_linear(x[:, :16], packed, 70)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    ("rows", "inputs", "then"), [(1100, 3072, "residual"), (2100, 96, "relu"), (1537, 2048 + 288, "nothing")]
)
def test_many_rows_go_through_in_parts(
    product_dtype: torch.dtype, rows: int, inputs: int, then: str, threads: int
) -> None:
    """More rows, and more inputs, than stay in the cache at once; each row's bits are those it has alone."""
    dtype = product_dtype
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (40, inputs), (40,)))
    residual = torch.randn(rows, 40).to(dtype) if then == "residual" else None
    packed = cpu_weights.pack(weight)
    with num_threads(threads):
        activation: Activation = "relu" if then == "relu" else "none"
        made = cpu_kernels.linear(x, packed, 40, bias, activation=activation, residual=residual)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual.float()
    # of float32: 3,072 numbers in one order, each sum rounded to 6e-8 of itself; torch adds them in several parts
    limit = max(TOLERANCE[dtype], 5e-6)
    assert (made.float() - wanted).abs().max() <= limit * wanted.abs().max()
    for row in (0, 255, 256, 600, rows - 1):
        own = None if residual is None else residual[row : row + 1]
        alone = cpu_kernels.linear(
            x[row : row + 1], packed, 40, bias, activation="relu" if then == "relu" else "none", residual=own
        )
        assert torch.equal(alone[0], made[row])


def test_what_is_not_a_number_stays_so(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    packed = cpu_weights.pack(torch.ones(3, 32, dtype=dtype))
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 5] = torch.nan
    for activation in ("none", "relu"):
        made = cpu_kernels.linear(x, packed, 3, None, activation=activation)
        assert made.isnan().tolist() == [[False] * 3, [True] * 3]


def test_a_wrong_operand_is_refused(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    packed, x = cpu_weights.pack(torch.ones(3, 32, dtype=dtype)), torch.ones(2, 32, dtype=dtype)
    for keys in (
        {"x": x[:, :16]}, {"x": x.double()}, {"outputs": 40}, {"bias": torch.ones(4, dtype=dtype)},
        {"residual": torch.ones(3, dtype=dtype)}, {"activation": "relu", "residual": torch.ones(2, 3).to(dtype)},
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            cpu_kernels.linear(**({"x": x, "packed": packed, "outputs": 3, "bias": None} | keys))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        cpu_weights.pack(torch.ones(3, 30, dtype=dtype))


def test_loading_leaves_the_arithmetic_of_the_process_alone() -> None:
    """Some flags of a compiler flush subnormal numbers to zero in every library of the process."""
    code = (
        "import torch; from skipdecode.backends import choice, cpu_kernels;"
        "assert choice.choose().name != 'torch'; cpu_kernels.argmax(torch.ones(2, 3));"
        "import numpy as np; x = np.float32(1e-40); assert x * np.float32(1.0) != 0, 'flushed'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), out=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_a_packed_layer_is_the_layer(dtype: torch.dtype, rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.inference_mode():
        layer = Linear(width, out, bias=bool(seed % 2)).to(dtype)
        x, residual = torch.randn(rows, 1, width).to(dtype), torch.randn(rows, 1, out).to(dtype)
        wanted = [layer(x), layer(x, activation="relu"), layer(x, residual=residual)]
        layer.pack()
        assert layer.packed is not None or not torch.backends.mkldnn.is_available() or dtype == torch.bfloat16
        for one, other in zip(
            wanted, [layer(x), layer(x, activation="relu"), layer(x, residual=residual)], strict=True
        ):
            assert one.dtype == other.dtype
            assert (one.float() - other.float()).abs().max() <= TOLERANCE[dtype] * max(1, float(one.abs().max()))


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


@settings(max_examples=examples(40))
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
        weight = nearest(weight, quantization)
    gate, other = F.linear(x.float(), weight, bias).chunk(2, dim=1)
    wanted = gate * torch.sigmoid(gate) * other
    layer.pack(quantization)
    assert layer.product() is not None
    with num_threads(threads):
        made = layer(x, activation="swiglu")
        alone = [layer(row[None], activation="swiglu")[0] for row in x[:2]]
    assert made.shape == plain.shape == wanted.shape == (rows, 16 * gates)
    assert all(torch.equal(one, row) for one, row in zip(alone, made[:2], strict=True))
    if rows and quantization != "int4":  # whose inputs are rounded to 8 bits: test_cpu_blocks
        assert_close(made, wanted, dtype)
        if not quantization:
            assert_close(plain, wanted, dtype)


def test_many_gated_rows(kind: Kind) -> None:
    torch.manual_seed(0)
    dtype, quantization = kind
    layer = Linear(2048 + 96, 96, is_gated=True).to(dtype).requires_grad_(False)
    x, weight, bias = torch.randn(1100, 2048 + 96).to(dtype), layer.weight.float(), layer.bias.float()
    if quantization:
        weight = nearest(weight, quantization)
    gate, other = F.linear(x.float(), weight, bias).chunk(2, dim=1)
    layer.pack(quantization)
    for threads in (1, 2, 8):
        with num_threads(threads):
            made = layer(x, activation="swiglu")
            assert_close(made, F.silu(gate) * other, torch.bfloat16 if quantization == "int4" else dtype)


def test_gates_of_any_size(product_dtype: torch.dtype) -> None:
    """From far below to far above what an exponential can be of."""
    gates = torch.tensor([-1e30, -1000.0, -100.0, -88.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 88.0, 100.0, 1e30])
    x = torch.zeros(len(gates) + 1, 32)
    x[:-1, 0], x[:, 1], x[-1, 0] = gates, 1.0, torch.nan
    weight = torch.zeros(32, 32)
    weight[:16, 0], weight[16:, 1] = 1.0, 2.0
    x = x.to(product_dtype)
    made = cpu_kernels.linear(x, cpu_weights.pack(weight.to(product_dtype), gated=True), 32, None, activation="swiglu")
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


@given(
    rows=st.integers(0, 140),
    steps=st.integers(1, 9),
    outputs=st.integers(1, 110),
    seed=st.integers(0, 2**31),
    then=st.sampled_from(["nothing", "relu", "residual"]),
    has_bias=st.booleans(),
    is_strided=st.booleans(),
    outlier=st.sampled_from([1.0, 100.0]),
    threads=st.integers(1, 3),
)
def test_int8_products_are_those_of_the_whole_numbers(
    int8_backend: str,
    rows: int,
    steps: int,
    outputs: int,
    seed: int,
    then: str,
    has_bias: bool,
    is_strided: bool,
    outlier: float,
    threads: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 32 * steps, generator=rng).bfloat16() for n in (rows, outputs))
    x[:, :1] *= outlier
    bias = torch.randn(outputs, generator=rng).bfloat16() if has_bias else None
    residual = torch.randn(rows, outputs, generator=rng).bfloat16() if then == "residual" else None
    numbers, scales = nearest_int8(weight)
    wanted = x.double() @ (numbers * scales).T + (0 if bias is None else bias.double())
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual.double()
    # half a step of a row's 16 bits in each input, half a unit in the last place of bfloat16
    steps_of_rows = x.double().abs().amax(dim=1, keepdim=True) / 32767 / 2 if rows else 0.0
    limit = steps_of_rows * (numbers.abs() * scales).sum(dim=1) + wanted.abs() / 256 + 1e-5
    if is_strided:
        x = torch.stack([x + 1, x], dim=1)[:, -1]
    packed = cpu_weights.pack_int8(weight)
    activation: Activation = "relu" if then == "relu" else "none"
    with num_threads(threads):
        made = cpu_kernels.linear(x, packed, outputs, bias, activation=activation, residual=residual)
    assert made.shape == (rows, outputs)
    assert torch.all((made.double() - wanted).abs() <= limit)
    if residual is None:
        for row in range(min(rows, 2)):
            alone = cpu_kernels.linear(x[row : row + 1], packed, outputs, bias, activation=activation)
            assert torch.equal(alone[0], made[row])


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(1100, 3072), (600, 96), (70, 20000), (40, 32 * 2048)])
def test_many_rows_and_inputs_go_through_in_parts(int8_backend: str, rows: int, inputs: int, threads: int) -> None:
    """More than stays in the caches at once, and the most inputs there may be; a row's bits are those it has alone."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((rows, inputs), (70, inputs), (70,)))
    numbers, scales = nearest_int8(weight)
    packed = cpu_weights.pack_int8(weight)
    with num_threads(threads):
        made = cpu_kernels.linear(x, packed, 70, bias)
    wanted = x.double() @ (numbers * scales).T + bias.double()
    assert (made.double() - wanted).abs().max() <= wanted.abs().max() / 256
    for row in (0, 15, 16, rows - 1):
        assert torch.equal(cpu_kernels.linear(x[row : row + 1], packed, 70, bias)[0], made[row])


def test_sums_of_the_largest_numbers_fit(int8_backend: str) -> None:
    """The most inputs, every byte at its limit."""
    x, weight = torch.ones(2, 1 << 16).bfloat16(), torch.ones(3, 1 << 16).bfloat16()
    x[1] = -1
    made = cpu_kernels.linear(x, cpu_weights.pack_int8(weight), 3, None)
    assert made.tolist() == [[65536.0] * 3, [-65536.0] * 3]
    with pytest.raises(AssertionError, match="32 bits"):
        cpu_weights.pack_int8(torch.ones(1, (1 << 16) + 32))


def test_zeros_and_what_is_not_a_number(int8_backend: str) -> None:
    weight = torch.ones(3, 96).bfloat16()
    weight[1] = 0
    packed = cpu_weights.pack_int8(weight)
    x = torch.ones(5, 96).bfloat16()
    x[1], x[2], x[3, 5], x[4, 7] = 0, 1e-40, torch.nan, torch.inf
    made = cpu_kernels.linear(x, packed, 3, None)
    assert made[0].tolist() == [96.0, 0.0, 96.0]
    assert made[1:3].tolist() == [[0.0] * 3] * 2
    assert made[3:].isnan().all()
    assert cpu_kernels.argmax_linear(x, packed, 3).tolist() == [0, 0, 0, NO_TOKEN, NO_TOKEN]


def test_a_wrong_int8_operand_is_refused(int8_backend: str) -> None:
    packed = cpu_weights.pack_int8(torch.ones(3, 96))
    for wrong in (torch.ones(2, 96), torch.ones(2, 128).bfloat16(), torch.ones(2, 32).bfloat16()):
        with pytest.raises(AssertionError):
            cpu_kernels.linear(wrong, packed, 3, None)
    with pytest.raises(AssertionError):
        cpu_kernels.linear(torch.ones(2, 96).bfloat16(), packed, 33, None)


def test_int8_weights_where_they_cannot_be() -> None:
    config = OPTConfig(vocab_size=64, hidden_size=48, num_hidden_layers=1, ffn_dim=64, num_attention_heads=2)
    model = random_model(config, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"quantization: int8 weights are for bfloat16.*float32 on cpu"):
        model.pack("int8")
    with pytest.raises(
        ValueError, match=r"quantization: (int8 weights need inputs in a multiple of 32|no int8 weights here)"
    ):
        model.bfloat16().pack("int8")
    assert not model.is_packed
