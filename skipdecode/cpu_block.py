"""A decoder layer for one new column per row as one call of a kernel on AMX tiles (`cpu_block.cpp`).

B rows, D width.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode import cpu_kernels
from skipdecode.cpu_kernels import INT64, POINTER, Columns, Int8Weight


class _Norm(ctypes.Structure):
    _fields_ = [("weight", POINTER), ("bias", POINTER)]


class _Product(ctypes.Structure):
    _fields_ = [("outputs", INT64), ("inputs", INT64), ("weight", POINTER), ("scales", POINTER), ("bias", POINTER)]


class _Block(ctypes.Structure):
    _fields_ = [
        ("heads", INT64),
        ("epsilon", ctypes.c_double),
        ("attn_norm", _Norm),
        ("qkv", _Product),
        ("out", _Product),
        ("ffn_norm", _Norm),
        ("fc1", _Product),
        ("fc2", _Product),
    ]


@dataclass(frozen=True)
class Product:
    """A linear layer: its weight as `pack` or `pack_int8` gives it, its bias [outputs] or None."""

    packed: Tensor | Int8Weight
    outputs: int
    bias: Tensor | None

    def struct(self) -> _Product:
        if isinstance(self.packed, Int8Weight):
            tiles, scales, inputs = self.packed
        else:
            tiles, scales, inputs = self.packed, None, self.packed.shape[1] * 32
        return _Product(self.outputs, inputs, _pointer(tiles), _pointer(scales), _pointer(self.bias))


class TileBlock:
    """A pre-norm decoder layer in bfloat16 for one new column per row, as one call (`cpu_block.cpp`).

    The same as its parts one after the other (`linear`, `attend`, a layer norm), without the entries and the threads'
    forks between them.
    """

    STAGES = ("norms", "query, key, value", "attention", "attention output", "feed-forward")
    seconds: Tensor | None = None
    """[5] float64 by stage: what calls add their times to, while it is set (`actors.profile`)."""

    def __init__(
        self,
        heads: int,
        attn_norm: nn.LayerNorm,
        qkv: Product,
        out: Product,
        ffn_norm: nn.LayerNorm,
        fc1: Product,
        fc2: Product,
    ) -> None:
        self._held = (attn_norm, qkv, out, ffn_norm, fc1, fc2)  # what the pointers point to
        for tensor in (*attn_norm.parameters(), *ffn_norm.parameters(), *(p.bias for p in (qkv, out, fc1, fc2))):
            assert tensor is None or tensor.dtype == torch.bfloat16, tensor.dtype
        norms = [_Norm(_pointer(norm.weight), _pointer(norm.bias)) for norm in (attn_norm, ffn_norm)]
        self._width = out.outputs
        self._block = _Block(
            heads, attn_norm.eps, norms[0], qkv.struct(), out.struct(), norms[1], fc1.struct(), fc2.struct()
        )
        self._reference = ctypes.byref(self._block)
        self._call = cpu_kernels.function("block_tiles")

    def __call__(self, h: Tensor, columns: Columns | None, *, feeds: bool) -> Tensor:
        """h [B, 1, D] through attention (with `columns`) and the feed-forward block (where it `feeds`), in place."""
        rows = len(h)
        assert h.dtype == torch.bfloat16, h.dtype
        assert h.shape == (rows, 1, self._width), h.shape
        assert h.is_contiguous(), h.stride()
        memory: tuple[Any, ...] = (None, None, 0, None, None)
        if columns is not None:
            k, v, first, last = columns
            for held in (k, v):
                assert held.dtype == torch.bfloat16, held.dtype
                assert held.is_contiguous(), held.stride()
                assert held.shape == (rows, self._block.heads, k.shape[2], self._width // self._block.heads), held.shape
            for column in (first, last):
                assert column.dtype == torch.int64, column.dtype
                assert column.shape == (rows,), (column.shape, rows)
                assert column.is_contiguous(), column.stride()
            memory = (k.data_ptr(), v.data_ptr(), k.shape[2], first.data_ptr(), last.data_ptr())
        seconds = _pointer(TileBlock.seconds)
        self._call(
            self._reference, rows, h.data_ptr(), columns is not None, feeds, *memory, seconds, torch.get_num_threads()
        )
        return h


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
