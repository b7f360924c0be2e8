"""The compiled choice of tokens: draws against their definition in float64, argmax against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.backends import cpu_kernels
from skipdecode.backends.torch_sampling import NO_TOKEN, mask
from tests.support.cpu_backends import DTYPES, backend, kind, num_threads, product_dtype, some_allowed
from tests.support.examples import examples

__all__ = ["backend", "kind", "product_dtype"]  # fixtures

NEAR = 2e-6  # of an edge of the distribution function, or of top-p: rounding may fall to either side


def kept(p: Tensor, top_k: int, top_p: float) -> tuple[Tensor, bool]:
    """Which of the tokens of p [V] float64 top-k and top-p leave; whether that is certain."""
    ordered, tokens = p.sort(descending=True, stable=True)
    ordered = ordered[:top_k] / ordered[:top_k].sum()
    before = ordered.cumsum(-1) - ordered
    stays = (before < top_p) | (top_p >= 1)
    stays[0] = True
    is_certain = bool(top_p in (0.0, 1.0) or ((before - top_p).abs() > NEAR).all())
    return torch.zeros(len(p), dtype=torch.bool).index_fill(0, tokens[: len(ordered)][stays], True), is_certain


def drawn(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> tuple[int, bool]:
    """The token of a row [V], and whether it is certain."""
    if temperature == 0:
        return int(logits.argmax()), True
    p = (logits.double() / temperature).softmax(-1)
    stays, is_certain = kept(p, top_k, top_p)
    cdf = p.masked_fill(~stays, 0.0).cumsum(-1)
    cdf = cdf / cdf[-1].clone()
    token = int((cdf > uniform).long().argmax())
    edges = cdf[stays]
    return token, is_certain and bool(((edges[:-1] - uniform).abs() > NEAR).all())


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 2**31),
    vocab=st.one_of(st.integers(1, 40), st.sampled_from([511, 512, 513, 1040, 5003])),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-3, 0.3, 0.8, 1.0, 5.0, 1e9]),
            st.sampled_from([2**62, 1, 2, 7, 40, 600]),
            st.sampled_from([1.0, 0.0, 0.21, 0.53, 0.9, 0.97]),
            st.one_of(st.floats(0, 1 - 2**-24, width=32), st.sampled_from([0.0, 1 - 2**-24])),
        ),
        min_size=1,
        max_size=7,
    ),
    spread=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    step=st.sampled_from([None, 0.5]),
    threads=st.integers(1, 3),
)
def test_a_token_is_the_one_of_its_definition(
    backend: str,
    dtype: torch.dtype,
    seed: int,
    vocab: int,
    rows: list[tuple[float, int, float, float]],
    spread: float,
    step: float | None,
    threads: int,
) -> None:
    """With `step` among ties, of which the lower ones come first."""
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed)) * spread
    logits = (logits if step is None else (logits / step).round() * step).to(dtype)
    columns = zip(*rows, strict=True)
    types = (torch.float32, torch.int64, torch.float32, torch.float32)
    given_ones = [torch.tensor(own, dtype=type_)[:, None] for own, type_ in zip(columns, types, strict=True)]
    with num_threads(threads):
        made = cpu_kernels.draw(logits, *given_ones).tolist()
    for row, (token, one) in enumerate(zip(made, rows, strict=True)):
        wanted, is_certain = drawn(logits[row].float(), *one)
        assert 0 <= token < vocab
        if is_certain:
            assert token == wanted, (row, one)
        alone = cpu_kernels.draw(logits[row : row + 1], *[own[row : row + 1] for own in given_ones])
        assert alone.tolist() == [token], "whatever its company"


@pytest.mark.slow
def test_an_even_sweep_gives_each_token_its_share(backend: str) -> None:
    """Of a large vocabulary, whose sums are long: as often as it is likely, by 40,000 numbers."""
    logits = torch.randn(1, 49152, generator=torch.Generator().manual_seed(1)) * 3
    count, chunk = 40_000, 2_000
    uniforms = (torch.arange(count) / count).float()[:, None]
    ones = torch.ones(chunk, 1)
    made = torch.cat(
        [
            cpu_kernels.draw(logits.expand(chunk, -1).contiguous(), ones, (2**62 * ones).long(), ones, own.contiguous())
            for own in uniforms.split(chunk)
        ]
    )
    counts = made.bincount(minlength=49152).double() / count
    torch.testing.assert_close(counts, logits[0].double().softmax(-1), atol=2.01 / count, rtol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("top_k", [2**62, 3])
def test_what_is_no_number_ends_no_process(backend: str, value: float, top_k: int) -> None:
    logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(1))
    one = torch.ones(3, 1)
    given_ones = (one, torch.full((3, 1), top_k), 0.9 * one, 0.5 * one)
    beside = cpu_kernels.draw(logits, *given_ones)
    logits[0], logits[1, ::2] = value, value
    made = cpu_kernels.draw(logits, *given_ones)
    assert made[2] == beside[2]
    if value == -torch.inf:
        assert 0 <= made[0] < 1300
        assert made[1] % 2 == 1, "what is excluded is not drawn"
    else:
        assert made[:2].tolist() == [NO_TOKEN, NO_TOKEN]


def test_tokens_that_are_excluded_are_never_drawn(backend: str) -> None:
    """By the smallest number, and by the largest, either."""
    logits = torch.full((2, 700), -torch.inf)
    logits[:, [5, 600]] = 1.0
    one = torch.ones(2, 1)
    ends = torch.tensor([[0.0], [1 - 2**-24]])
    assert cpu_kernels.draw(logits, one, (2**62 * one).long(), one, ends).tolist() == [5, 600]


def test_where_all_weigh_alike_the_largest_stay(backend: str) -> None:
    """At a huge temperature weights are equal, and logits are not."""
    logits = torch.randn(1, 5003, generator=torch.Generator().manual_seed(1)).expand(64, -1).contiguous()
    one, numbers = torch.ones(64, 1), torch.arange(64)[:, None] / 64
    made = cpu_kernels.draw(logits, 1e9 * one, (5 * one).long(), one, numbers.float().contiguous())
    assert set(made.tolist()) == set(logits[0].topk(5).indices.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 7), size=st.integers(1, 1300), seed=st.integers(0, 2**31), levels=st.integers(1, 60))
def test_argmax_is_the_lowest_of_the_largest(
    backend: str, dtype: torch.dtype, rows: int, size: int, seed: int, levels: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randint(-levels, levels + 1, (rows, size), generator=rng) / 8 - levels / 16).to(dtype)  # many ties
    wanted = np.argmax(x.float().numpy(), axis=1)  # numpy promises the first
    assert cpu_kernels.argmax(x).tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 7),
    size=st.integers(1, 1300),
    seed=st.integers(0, 2**31),
    share=st.sampled_from([0, 0.1, 0.9, 1]),
)
def test_a_mask_is_that_of_its_bits(
    backend: str, dtype: torch.dtype, rows: int, size: int, seed: int, share: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=rng).to(dtype)
    logits[0, 0] = torch.nan
    allowed = some_allowed(rows, size, share, rng)
    bits = allowed.tolist()
    wanted = torch.tensor([[bits[row][i // 32] >> i % 32 & 1 for i in range(size)] for row in range(rows)])
    wanted = torch.where(wanted.bool(), logits, -torch.inf)
    reference = mask(logits.clone(), allowed)
    assert torch.equal(reference.nan_to_num(nan=7, neginf=9), wanted.nan_to_num(nan=7, neginf=9))
    made = cpu_kernels.mask(logits, allowed)
    assert made is logits, "in place"
    assert torch.equal(made.nan_to_num(nan=7, neginf=9), wanted.nan_to_num(nan=7, neginf=9))


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_strange_numbers(backend: str, dtype: torch.dtype) -> None:
    infinity = float("inf")
    rows = [[-0.0, 0.0, -1.0], [-infinity, -3.0, -2.0], [1.0, infinity, 2.0], [-3.0, -2.0, -4.0]]
    assert cpu_kernels.argmax(torch.tensor(rows, dtype=dtype)).tolist() == [0, 2, NO_TOKEN, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_with_a_nan_has_no_token(backend: str, dtype: torch.dtype) -> None:
    """One among many, of either sign, wherever it is."""
    for at in (0, 700, 1299):
        logits = torch.randn(3, 1300, generator=torch.Generator().manual_seed(at)).to(dtype)
        logits[0, at], logits[2, at] = torch.nan, -torch.tensor(torch.nan)
        beside = int(logits[1].argmax())
        assert cpu_kernels.argmax(logits).tolist() == [NO_TOKEN, beside, NO_TOKEN]


def test_argmax_of_nothing_but_minus_infinity_is_a_token(backend: str) -> None:
    assert cpu_kernels.argmax(torch.full((2, 1300), -torch.inf)).tolist() == [0, 0]
