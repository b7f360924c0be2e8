"""Attention over a shared head and a row's own columns: the bits of these columns in one piece, on every back end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.backends import cpu_kernels as cpu
from skipdecode.backends.backend import SharedPrefix
from tests.support.cpu_backends import DTYPES, backend, num_threads

__all__ = ["backend"]  # fixtures


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
@settings(max_examples=25)
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
        wanted = cpu.attend(
            q, whole[0], whole[1], torch.zeros(rows, dtype=torch.int64), counts + last - first, (new_k, new_v), **keys
        )
        shared = SharedPrefix(k, v, where, counts)
        made = cpu.attend(q, own_k, own_v, first, last, (new_k, new_v), shared=shared, **keys)
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
            cpu.attend(q, memory, memory, at, at, shared=shared)
