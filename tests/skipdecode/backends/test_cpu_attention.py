"""Attention by the compiled kernels, for one new token per row: against torch, and over shared prefixes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.backends import cpu_kernels
from skipdecode.backends.backend import SharedPrefix
from tests.support.cpu_backends import (
    DTYPES,
    TOLERANCE,
    backend,
    int8_backend,
    kind,
    num_threads,
    product_dtype,
)
from tests.support.cpu_llama_layers import EPSILON, rms, rotary_table, rotate
from tests.support.examples import examples

__all__ = ["backend", "int8_backend", "kind", "product_dtype"]  # fixtures


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
        made = cpu_kernels.attend(q, k, v, first, last, (new_k, new_v) if is_new else None)
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
        wanted.append(cpu_kernels.attend(q[one], *own, *bounds, (new_k[one], new_v[one])))
        wanted_k[part], wanted_v[part] = own
    order = torch.randperm(len(new), generator=rng)
    places, last = (torch.tensor(x)[order].contiguous() for x in zip(*new, strict=True))
    mixed = qkv[order]
    q, new_k, new_v = mixed.split([heads * dim, groups * dim, groups * dim], dim=1)
    with num_threads(threads):
        made = cpu_kernels.attend(q, k, v, torch.zeros_like(last), last, (new_k, new_v), slots=places)
    assert torch.equal(made, torch.cat(wanted)[order])
    assert torch.equal(k, wanted_k)
    assert torch.equal(v, wanted_v)


def test_weights_far_apart_do_not_overflow(backend: str) -> None:
    q = torch.full((1, 64), 50.0)
    k = torch.stack([torch.full((64,), x) for x in (-40.0, 40.0, 39.0)])[None, None].contiguous()
    v = torch.stack([torch.full((64,), x) for x in (1.0, 2.0, 3.0)])[None, None].contiguous()
    made = cpu_kernels.attend(q, k, v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(made, torch.full((1, 64), 2.0))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(60))
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
        made = cpu_kernels.attend(
            q, k, v, first, last, (new_k, new_v) if is_new else None,
            rotary_table=rotary_table(turning) if turning else None, **norms,
        )  # fmt: skip
    limit = 2 * TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))
    assert (made.float() - wanted.reshape(rows, -1)).abs().max() <= limit
    for held, exact in ((k, keys), (v, values)):
        assert torch.equal(held.isnan(), exact.isnan())
        assert (held.float() - exact).nan_to_num().abs().max() <= limit


def test_weights_of_grouped_heads_far_apart_do_not_overflow(backend: str) -> None:
    q = torch.full((1, 192), 50.0)
    k = torch.stack([torch.full((64,), x) for x in (-40.0, 40.0, 39.0)])[None, None].contiguous()
    v = torch.stack([torch.full((64,), x) for x in (1.0, 2.0, 3.0)])[None, None].contiguous()
    made = cpu_kernels.attend(q, k, v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(made, torch.full((1, 192), 2.0))


@given(
    heads=st.sampled_from([(4, 4), (6, 2), (3, 1), (8, 8)]),
    dim=st.sampled_from([20, 32, 64, 80]),
    lengths=st.lists(st.integers(0, 45).map(lambda n: 2 * n), min_size=1, max_size=3),
    of_row=st.lists(st.integers(-1, 2), min_size=1, max_size=7),
    capacity=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    threads=st.integers(1, 3),
    turns=st.booleans(),
)
@settings(max_examples=examples(25))
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_columns_are_columns(
    backend: str,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    lengths: list[int],
    of_row: list[int],
    capacity: int,
    seed: int,
    threads: int,
    turns: bool,
) -> None:
    torch.manual_seed(seed)
    H, G = heads
    rows, most = len(of_row), max(2, *lengths)
    which = torch.tensor(of_row).clamp(max=len(lengths) - 1)
    lengths_of = torch.tensor(lengths)
    counts = torch.where(which >= 0, lengths_of[which.clamp(min=0)], 0)
    k, v = (torch.randn(len(lengths), G, most, dim).to(dtype) for _ in "kv")
    own_k, own_v = (torch.randn(rows, G, capacity, dim).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    q, new_k, new_v = torch.randn(rows, (H + 2 * G) * dim).to(dtype).split([H * dim, G * dim, G * dim], dim=1)
    whole = torch.zeros(2, rows, G, most + capacity, dim, dtype=dtype)
    for row, head in enumerate(which.tolist()):
        n, own = int(counts[row]), slice(int(first[row]), int(last[row]) + 1)
        for at, (held, mine) in enumerate(((k, own_k), (v, own_v))):
            if n:
                whole[at, row, :, :n] = held[head, :, most - n :]
            whole[at, row, :, n : n + own.stop - own.start] = mine[row, :, own]
    where = torch.where(which >= 0, which * G * most + most - counts, 0)
    rotary_table = torch.randn(200, dim // 2 * 2) if turns else None
    keys = {"rotary_table": rotary_table}
    with num_threads(threads):
        wanted = cpu_kernels.attend(
            q, whole[0], whole[1], torch.zeros(rows, dtype=torch.int64), counts + last - first, (new_k, new_v), **keys
        )
        shared = SharedPrefix(k, v, where, counts)
        made = cpu_kernels.attend(q, own_k, own_v, first, last, (new_k, new_v), shared=shared, **keys)
    assert torch.equal(made, wanted)
    for row in range(rows):  # the new key lies where it belongs, turned to its place
        n = int(counts[row] + last[row] - first[row])
        assert torch.equal(own_k[row, :, last[row]], whole[0, row, :, n])


def test_wrong_shared_columns_are_refused(backend: str) -> None:
    q, at = torch.zeros(2, 32), torch.zeros(2, dtype=torch.int64)
    memory, held = torch.zeros(2, 1, 4, 32), torch.zeros(1, 1, 6, 32)
    for shared in (
        SharedPrefix(held, held, at[:1], at),
        SharedPrefix(held, held, at, at.int()),
        SharedPrefix(held.bfloat16(), held, at, at),
        SharedPrefix(held[:, :, ::2], held[:, :, ::2], at, at),
        SharedPrefix(torch.zeros(1, 2, 6, 32), torch.zeros(1, 2, 6, 32), at, at),
    ):
        with pytest.raises(AssertionError):
            cpu_kernels.attend(q, memory, memory, at, at, shared=shared)
