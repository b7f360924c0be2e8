"""What attention reads, and how its heads are, as the compiled kernels take them (`cpp/heads.h`).

B rows, S columns, G heads of keys and values, K head dim, R rows of memory.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

POINTER, INT, INT64, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double


class Shared(ctypes.Structure):
    """Columns that several rows read before their own, as the kernels take them (`cpp/heads.h`)."""

    _fields_ = [("k", POINTER), ("v", POINTER), ("capacity", INT64), ("where", POINTER), ("counts", POINTER)]


class SharedColumns(NamedTuple):
    """Columns before a row's own, of which several rows read one copy: the head of their prompts."""

    k: Tensor
    """[R, G, S, K], contiguous."""
    v: Tensor
    where: Tensor
    """[B] int64: the row's first one, counted in columns of a group from the start of `k`: r G S + column."""
    counts: Tensor
    """[B] int64: how many; even."""

    def struct(self, rows: int, like: Tensor) -> Shared:
        """As kernels take it that run on memory `like` [.., G, .., K]."""
        for held in (self.k, self.v):
            assert held.is_contiguous(), held.stride()
            assert held.dtype == like.dtype, held.dtype
            assert held.shape == self.k.shape, (held.shape, self.k.shape)
            assert (held.shape[1], held.shape[3]) == (like.shape[1], like.shape[3]), (held.shape, like.shape)
        for numbers in (self.where, self.counts):
            assert numbers.dtype == torch.int64, numbers.dtype
            assert numbers.shape == (rows,), (numbers.shape, rows)
            assert numbers.is_contiguous(), numbers.stride()
        pointers = self.where.data_ptr(), self.counts.data_ptr()
        return Shared(self.k.data_ptr(), self.v.data_ptr(), self.k.shape[2], *pointers)


class Columns(NamedTuple):
    """Where one new column per row goes, and what it may attend to: as the arguments of `attend`. Where rows have
    `places`, k and v are those of all places, and rows of one place are several new columns of it."""

    k: Tensor
    v: Tensor
    first: Tensor
    last: Tensor
    places: Tensor | None = None
    shared: SharedColumns | None = None
    among: Tensor | None = None
    """[2, B] int64, where rows of a place lie side by side and are `most` at most: which of them each is, from 0 on,
    and how many there are. For back ends that read the memory of a place once for all of them."""
    most: int = 1


class Heads(ctypes.Structure):
    """Heads of attention, as the kernels take them (`cpp/heads.h`)."""

    _fields_ = [
        ("count", INT64),
        ("groups", INT64),
        ("dim", INT64),
        ("rotary_table", POINTER),
        ("positions", INT64),
        ("rotary", INT64),
        ("epsilon", DOUBLE),
        ("q_norm", POINTER),
        ("k_norm", POINTER),
    ]


def heads(
    count: int,
    groups: int,
    dim: int,
    *,
    rotary_table: Tensor | None = None,
    epsilon: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Heads:
    """`count` heads of queries over `groups` of keys and values, of `dim` numbers; the rest as in `attend`. The tensors
    are to live as long as what comes back."""
    assert 0 < groups <= count, (count, groups)
    assert count % groups == 0, (count, groups)
    positions, rotary = (0, 0) if rotary_table is None else rotary_table.shape
    assert rotary <= dim, (rotary, dim)
    assert rotary % 2 == 0, rotary
    if rotary_table is not None:
        assert rotary_table.dtype == torch.float32, rotary_table.dtype
        assert positions > 0, "no positions"
    for weight in (q_norm, k_norm):
        assert weight is None or weight.shape == (dim,), "a norm of other heads"
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (rotary_table, q_norm, k_norm)]
    assert all(tensor is None or tensor.is_contiguous() for tensor in (rotary_table, q_norm, k_norm)), "not contiguous"
    return Heads(count, groups, dim, pointers[0], positions, rotary, epsilon, *pointers[1:])
