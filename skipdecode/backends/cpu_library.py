"""The compiled library of `cpp/` by ctypes: its functions with their signatures, and the structures that they take.

A structure holds addresses only: whoever makes one from tensors must keep these alive. What the functions compute is
described where they are called (`cpu_kernels`, `cpu_layers`, `cpu_weights`).
"""

import ctypes
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from skipdecode.backends import build, choice
from skipdecode.backends.backend import SharedPrefix

POINTER, INT, INT64, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Kind = torch.dtype | Literal["int8", "blocks_float32", "blocks_bfloat16"]
"""The element type in a function's name; `int8` is that of the weights, and `blocks_` precedes that of the rows."""
ARGUMENTS = {
    "step": [POINTER, INT64, INT64, POINTER, INT, INT, *[POINTER] * 8, INT],
    "prompt": [POINTER, INT64, *[POINTER] * 5, INT, INT, *[POINTER] * 2, INT64, POINTER, INT],
    "store": [*[POINTER] * 2, INT64, *[POINTER] * 3, INT64, *[POINTER] * 8, INT],
    "attend": [POINTER, INT64, *[POINTER] * 3, INT64, *[POINTER] * 2, INT64, *[POINTER] * 5, INT],
    "argmax": [INT64, INT64, POINTER, POINTER, INT],
    "mask": [INT64, INT64, POINTER, POINTER, INT],
    "draw": [INT64, INT64, *[POINTER] * 6, INT],
    "pack": [INT64, INT64, POINTER, POINTER],
    "linear": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT, POINTER, POINTER, INT],
    "linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 4, INT, POINTER, POINTER, INT],
    **{
        f"linear_blocks_{name}": [*[INT64] * 3, POINTER, INT64, POINTER, INT64, POINTER, INT, POINTER, POINTER, INT]
        for name in NAMES.values()
    },
    "argmax_linear": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 3, INT],
    "argmax_linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 5, INT],
    **{
        f"argmax_linear_blocks_{name}": [*[INT64] * 3, POINTER, INT64, POINTER, INT64, POINTER, POINTER, INT]
        for name in NAMES.values()
    },
}


def function(name: str, kind: Kind | None = None) -> Any:
    """A function of the back end's library with its argument types; that of `kind` where there are several."""
    return _function(choice.choose().name, name, kind)


@cache
def _function(backend: str, name: str, kind: Kind | None) -> Any:
    library = build.load(backend, choice.cpu_flags())
    whole = name if kind is None else f"{name}_{NAMES[kind] if isinstance(kind, torch.dtype) else kind}"
    found = getattr(library, whole)
    found.argtypes, found.restype = ARGUMENTS.get(whole) or ARGUMENTS[name], None
    return found


class SharedPrefixStruct(ctypes.Structure):
    """`Shared` of `cpp/heads.h`: a prefix whose keys and values several rows read."""

    _fields_ = [("k", POINTER), ("v", POINTER), ("capacity", INT64), ("where", POINTER), ("counts", POINTER)]


class HeadsStruct(ctypes.Structure):
    """`Heads` of `cpp/heads.h`: attention heads, their norms and rotary embedding."""

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
        ("window", INT64),
    ]


class NormStruct(ctypes.Structure):
    """`Norm` of `cpp/layer.h`: no weight stands for 1, no bias for 0."""

    _fields_ = [("weight", POINTER), ("bias", POINTER), ("is_rms", INT64)]


class ProductStruct(ctypes.Structure):
    """`Product` of `cpp/layer.h`, as `Product.struct` fills it."""

    _fields_ = [
        ("outputs", INT64),
        ("inputs", INT64),
        ("weight", POINTER),
        ("scales", POINTER),
        ("totals", POINTER),
        ("bias", POINTER),
        ("format", INT64),
    ]


class LayerStruct(ctypes.Structure):
    """`Block` of `cpp/layer.h`: a whole layer."""

    _fields_ = [
        ("heads", HeadsStruct),
        ("is_pre_norm", INT64),
        ("activation", INT64),
        ("attn_norm", NormStruct),
        ("qkv", ProductStruct),
        ("out", ProductStruct),
        ("ffn_norm", NormStruct),
        ("fc1", ProductStruct),
        ("fc2", ProductStruct),
        ("has_sublayer_norms", INT64),
        ("attn_out_norm", NormStruct),
        ("ffn_out_norm", NormStruct),
    ]


def shared_prefix_struct(shared: SharedPrefix, rows: int, like: Tensor) -> SharedPrefixStruct:
    """For `rows` rows whose own keys and values lie in memory `like` [.., G, .., K]."""
    for held in (shared.k, shared.v):
        assert held.is_contiguous(), held.stride()
        assert held.dtype == like.dtype, held.dtype
        assert held.shape == shared.k.shape, (held.shape, shared.k.shape)
        assert (held.shape[1], held.shape[3]) == (like.shape[1], like.shape[3]), (held.shape, like.shape)
    for numbers in (shared.offsets, shared.counts):
        assert numbers.dtype == torch.int64, numbers.dtype
        assert numbers.shape == (rows,), (numbers.shape, rows)
        assert numbers.is_contiguous(), numbers.stride()
    pointers = shared.offsets.data_ptr(), shared.counts.data_ptr()
    return SharedPrefixStruct(shared.k.data_ptr(), shared.v.data_ptr(), shared.k.shape[2], *pointers)


def heads_struct(
    count: int,
    groups: int,
    dim: int,
    *,
    rotary_table: Tensor | None = None,
    epsilon: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    window: int | None = None,
) -> HeadsStruct:
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
    assert window is None or window > 0, window
    return HeadsStruct(count, groups, dim, pointers[0], positions, rotary, epsilon, *pointers[1:], window or 0)


def check_types(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """AssertionError for one of another type, which would be read as if it were right."""
    for tensor in tensors:
        assert tensor is None or tensor.dtype == dtype, tensor.dtype


def pointer(tensor: Tensor | None) -> int | None:
    """Where the tensor begins, which must be contiguous; None: a null pointer."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
