"""A decoder layer as one call of a kernel on AMX tiles: for one new column per row (`cpu_block.cpp`), and for prompts
(`cpu_prompt.cpp`).

B rows, T columns, N tokens of all prompts, D width.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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


class Prompts:
    """Left-padded prompts [B, T] laid one behind the other, without the padding: [N, ...]."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` [B, T] int64: -1 a padding column (`OPT.embed`)."""
        self._is_real = positions >= 0
        lengths = self._is_real.sum(dim=1)
        self.columns = positions.shape[1] - lengths
        """[B] int64: the column of each prompt's first token."""
        self.starts = F.pad(lengths.cumsum(dim=0), (1, 0))
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_columns, self.num_tokens = positions.shape[1], int(self.starts[-1])  # T, N

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x[self._is_real]

    def unpack(self, h: Tensor) -> Tensor:
        """[N, D] -> [B, T, D], zeros for padding."""
        return h.new_zeros(*self._is_real.shape, h.shape[1]).masked_scatter_(self._is_real[..., None], h)

    def last(self, h: Tensor) -> Tensor:
        """Of each prompt: [N, D] -> [B, D]."""
        return h[self.starts[1:] - 1]


class TileBlock:
    """A pre-norm decoder layer in bfloat16, as one call.

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
        self._step = cpu_kernels.function("block_tiles")
        self._read = cpu_kernels.function("prompt_tiles")

    def step(self, h: Tensor, columns: Columns | None, *, feeds: bool) -> Tensor:
        """h [B, 1, D] through attention (with `columns`) and the feed-forward block (where it `feeds`), in place."""
        rows = len(h)
        self._check_states(h, (rows, 1, self._width))
        memory: tuple[Any, ...] = (None, None, 0, None, None)
        if columns is not None:
            k, v, first, last = columns
            self._check_cache(rows, k, v)
            _check_indices(rows, first)
            _check_indices(rows, last)
            memory = (k.data_ptr(), v.data_ptr(), k.shape[2], first.data_ptr(), last.data_ptr())
        seconds = _pointer(TileBlock.seconds)
        self._step(
            self._reference, rows, h.data_ptr(), columns is not None, feeds, *memory, seconds, torch.get_num_threads()
        )
        return h

    def read(self, h: Tensor, prompts: Prompts, memory: tuple[Tensor, Tensor] | None, *, feeds: bool) -> Tensor:
        """As `step` for whole prompts, h [N, D]; `memory`: k, v [B, H, S, K], filled up to the prompts' ends."""
        self._prompt(h, prompts, memory, attends=memory is not None, feeds=feeds)
        return h

    def read_last(self, h: Tensor, prompts: Prompts, memory: tuple[Tensor, Tensor] | None, *, feeds: bool) -> Tensor:
        """As `read`, but only the last token of each prompt goes on behind the keys and values: [N, D] -> [B, 1, D]."""
        last = prompts.last(h)[:, None]
        if memory is None:
            return self.step(last, None, feeds=feeds)
        self._prompt(h, prompts, memory, stores=True)
        at = torch.full_like(prompts.columns, prompts.num_columns - 1)
        return self.step(last, Columns(*memory, prompts.columns, at), feeds=feeds)

    def _prompt(
        self,
        h: Tensor,
        prompts: Prompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        stores: bool = False,
        attends: bool = False,
        feeds: bool = False,
    ) -> None:
        rows = len(prompts.columns)
        self._check_states(h, (prompts.num_tokens, self._width))
        where: tuple[Any, ...] = (None, None, 0)
        if memory is not None:
            k, v = memory
            self._check_cache(rows, k, v)
            assert prompts.num_columns <= k.shape[2], "prompts longer than the cache"
            where = (k.data_ptr(), v.data_ptr(), k.shape[2])
        self._read(
            self._reference,
            rows,
            prompts.starts.data_ptr(),
            h.data_ptr(),
            stores,
            attends,
            feeds,
            *where,
            prompts.columns.data_ptr(),
            torch.get_num_threads(),
        )

    # wrong ones would be read as if they were right

    def _check_states(self, h: Tensor, shape: tuple[int, ...]) -> None:
        assert h.dtype == torch.bfloat16, h.dtype
        assert h.shape == shape, (h.shape, shape)
        assert h.is_contiguous(), h.stride()

    def _check_cache(self, rows: int, *memory: Tensor) -> None:
        for held in memory:
            assert held.dtype == torch.bfloat16, held.dtype
            assert held.is_contiguous(), held.stride()
            shape = (rows, self._block.heads, memory[0].shape[2], self._width // self._block.heads)
            assert held.shape == shape, (held.shape, shape)


def _check_indices(count: int, indices: Tensor) -> None:
    assert indices.dtype == torch.int64, indices.dtype
    assert indices.shape == (count,), (indices.shape, count)
    assert indices.is_contiguous(), indices.stride()


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.data_ptr()
