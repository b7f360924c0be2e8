"""The compiled CPU kernels against torch's operators, over any shapes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import skipdecode
from skipdecode.backends import cpu_kernels as cpu
from skipdecode.backends import cpu_weights
from skipdecode.config.model import Quantization
from skipdecode.model.linear import Linear
from tests.support.cpu_backends import DTYPES, TOLERANCE, backend, kind, num_threads, product_dtype

__all__ = ["backend", "kind", "product_dtype"]  # fixtures

Kind = tuple[torch.dtype, Quantization | None]

ROOT = Path(skipdecode.__file__).parents[1]
# Rounding of the result, and sums in another order: of the result, and of one.
CLOSE = {torch.float32: (2e-6, 1e-4), torch.bfloat16: (2**-8, 1e-4)}


def is_close(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    relative, absolute = CLOSE[made.dtype]
    return bool(torch.all((made.float() - wanted).abs() <= relative * wanted.abs() + absolute))


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 16, 64, 80, 128]),
    capacity=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    is_new=st.booleans(),
    threads=st.integers(1, 3),
)
def test_attention_is_that_of_torch(
    backend: str,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    dim: int,
    capacity: int,
    seed: int,
    is_new: bool,
    threads: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(rows, heads, capacity, dim, generator=rng).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,), generator=rng)
    first = (torch.rand(rows, generator=rng) * (last + 1)).long()
    qkv = torch.randn(rows, 3 * heads * dim, generator=rng).to(dtype)
    q, new_k, new_v = qkv.chunk(3, dim=-1)
    wanted_k, wanted_v = k.clone(), v.clone()
    if is_new:
        for cache, new in ((wanted_k, new_k), (wanted_v, new_v)):
            cache[torch.arange(rows), :, last] = new.view(rows, heads, dim)
    columns = torch.arange(capacity)
    mask = (columns >= first[:, None]) & (columns <= last[:, None])
    query = q.reshape(rows, heads, 1, dim)
    wanted = F.scaled_dot_product_attention(
        query.float(), wanted_k.float(), wanted_v.float(), attn_mask=mask[:, None, None]
    )
    with num_threads(threads):
        made = cpu.attend(q, k, v, first, last, (new_k, new_v) if is_new else None)
    assert torch.equal(k, wanted_k)  # only the new column was written
    assert torch.equal(v, wanted_v)
    difference = (made.float() - wanted.reshape(rows, -1)).abs().max()
    assert difference <= TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (4, 2)])
@given(
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    dim=st.sampled_from([3, 32, 64]),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 3),
)
def test_several_columns_of_a_row_are_as_one_after_the_other(
    backend: str, dtype: torch.dtype, heads: int, groups: int, counts: list[int], dim: int, seed: int, threads: int
) -> None:
    """Bit for bit, whatever their order, and nothing else is written."""
    rng = torch.Generator().manual_seed(seed)
    at = torch.randperm(len(counts) + 1, generator=rng)[: len(counts)].tolist()  # a row of the cache has no columns
    k, v = (torch.randn(len(counts) + 1, groups, 40, dim, generator=rng).to(dtype) for _ in "kv")
    begins = torch.randint(0, 30, (len(counts),), generator=rng).tolist()
    new = [(place, begin + i) for place, begin, n in zip(at, begins, counts, strict=True) for i in range(n)]
    qkv = torch.randn(len(new), (heads + 2 * groups) * dim, generator=rng).to(dtype)
    q, new_k, new_v = qkv.split([heads * dim, groups * dim, groups * dim], dim=1)
    wanted_k, wanted_v = k.clone(), v.clone()
    wanted = []
    for n, (place, column) in enumerate(new):
        one, part = slice(n, n + 1), slice(place, place + 1)
        own = wanted_k[part].clone(), wanted_v[part].clone()
        bounds = torch.tensor([0]), torch.tensor([column])
        wanted.append(cpu.attend(q[one], *own, *bounds, (new_k[one], new_v[one])))
        wanted_k[part], wanted_v[part] = own
    order = torch.randperm(len(new), generator=rng)
    places, last = (torch.tensor(x)[order].contiguous() for x in zip(*new, strict=True))
    mixed = qkv[order]
    q, new_k, new_v = mixed.split([heads * dim, groups * dim, groups * dim], dim=1)
    with num_threads(threads):
        made = cpu.attend(q, k, v, torch.zeros_like(last), last, (new_k, new_v), slots=places)
    assert torch.equal(made, torch.cat(wanted)[order])
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


def test_weights_far_apart_do_not_overflow(backend: str) -> None:
    q = torch.full((1, 64), 50.0)
    k = torch.stack([torch.full((64,), x) for x in (-40.0, 40.0, 39.0)])[None, None].contiguous()
    v = torch.stack([torch.full((64,), x) for x in (1.0, 2.0, 3.0)])[None, None].contiguous()
    made = cpu.attend(q, k, v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(made, torch.full((1, 64), 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 7), size=st.integers(1, 1300), seed=st.integers(0, 2**31), levels=st.integers(1, 60))
def test_argmax_is_the_lowest_of_the_largest(
    backend: str, dtype: torch.dtype, rows: int, size: int, seed: int, levels: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randint(-levels, levels + 1, (rows, size), generator=rng) / 8 - levels / 16).to(dtype)  # many ties
    wanted = np.argmax(x.float().numpy(), axis=1)  # numpy promises the first
    assert cpu.argmax(x).tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_strange_numbers(backend: str, dtype: torch.dtype) -> None:
    infinity = float("inf")
    rows = [[-0.0, 0.0, -1.0], [-infinity, -3.0, -2.0], [1.0, infinity, 2.0], [-3.0, -2.0, -4.0]]
    assert cpu.argmax(torch.tensor(rows, dtype=dtype)).tolist() == [0, 2, 1, 1]


def test_argmax_of_nothing_but_nan_or_minus_infinity_is_a_token(backend: str) -> None:
    for value in ("nan", "-inf"):
        assert cpu.argmax(torch.full((2, 1300), float(value))).tolist() == [0, 0]


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
        made = cpu.linear(x, packed, outputs, bias, activation="relu" if then == "relu" else "none", residual=residual)
        alone = [
            cpu.linear(row[None], packed, outputs, bias, activation="relu" if then == "relu" else "none")
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
    packed = cpu_weights.pack_int8(weight) if quantization else cpu_weights.pack(weight)
    with num_threads(threads):
        made = cpu.argmax_linear(x, packed, outputs)
    assert torch.equal(made, cpu.argmax(cpu.linear(x, packed, outputs, None)))


def test_the_likeliest_output_of_strange_numbers(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    weight = -torch.ones(70, 32, dtype=dtype)
    weight[5] = -0.5
    packed = cpu_weights.pack(weight)
    x = torch.ones(3, 32, dtype=dtype)
    x[1], x[2] = torch.nan, 3e38
    made = cpu.argmax_linear(x, packed, 70).tolist()
    assert made[:2] == [5, 0]
    assert 0 <= made[2] < 70, "a token, whatever it is: below all there is"
    with pytest.raises(AssertionError):
        cpu.argmax_linear(x.double(), packed, 70)
    with pytest.raises(AssertionError):
        cpu.argmax_linear(x[:, :16], packed, 70)


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
        made = cpu.linear(x, packed, 40, bias, activation="relu" if then == "relu" else "none", residual=residual)
    wanted = F.linear(x.float(), weight.float(), bias.float())
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual.float()
    # of float32: 3,072 numbers in one order, each sum rounded to 6e-8 of itself; torch adds them in several parts
    limit = max(TOLERANCE[dtype], 5e-6)
    assert (made.float() - wanted).abs().max() <= limit * wanted.abs().max()
    for row in (0, 255, 256, 600, rows - 1):
        own = None if residual is None else residual[row : row + 1]
        alone = cpu.linear(
            x[row : row + 1], packed, 40, bias, activation="relu" if then == "relu" else "none", residual=own
        )
        assert torch.equal(alone[0], made[row])


def test_what_is_not_a_number_stays_so(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    packed = cpu_weights.pack(torch.ones(3, 32, dtype=dtype))
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 5] = torch.nan
    for activation in ("none", "relu"):
        made = cpu.linear(x, packed, 3, None, activation=activation)
        assert made.isnan().tolist() == [[False] * 3, [True] * 3]


def test_a_wrong_operand_is_refused(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    packed, x = cpu_weights.pack(torch.ones(3, 32, dtype=dtype)), torch.ones(2, 32, dtype=dtype)
    for keys in (
        {"x": x[:, :16]}, {"x": x.double()}, {"outputs": 40}, {"bias": torch.ones(4, dtype=dtype)},
        {"residual": torch.ones(3, dtype=dtype)}, {"activation": "relu", "residual": torch.ones(2, 3).to(dtype)},
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            cpu.linear(**({"x": x, "packed": packed, "outputs": 3, "bias": None} | keys))  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        cpu_weights.pack(torch.ones(3, 30, dtype=dtype))


@pytest.mark.process
def test_loading_leaves_the_arithmetic_of_the_process_alone() -> None:
    """Some flags of a compiler flush subnormal numbers to zero in every library of the process."""
    code = (
        "import torch; from skipdecode.backends import choice, cpu;"
        "assert choice.choose().name != 'torch'; cpu.argmax(torch.ones(2, 3));"
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
