"""Keys and values of one batch, allocated per layer.

The positions that run a layer are a prefix of the sequence, so layer `l` needs room for its first n_l columns only: a
deep schedule step costs no memory in the layers it skips. Rows are left-padded, so all rows write the same column.
Nothing here decides what runs; the model asks, the cache stores.

B rows, H heads, K head dim, S columns.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from skipdecode.backends import cpu
from skipdecode.backends.cpu import Columns
from skipdecode.config import OPTConfig


class KVCache:
    """k[l], v[l]: [B, H, capacity of layer l, K]; `length` columns are filled in every layer that still runs.

    `owners` [L]: whose memory a layer's K and V are; its own, unless neighbours share theirs (AcrossKV).
    """

    def __init__(
        self, k: list[Tensor], v: list[Tensor], num_pad: Tensor, owners: Sequence[int], *, is_masked: bool = False
    ) -> None:
        self.k, self.v, self.owners, self.is_masked = k, v, owners, is_masked
        self.num_pad = num_pad  # [B] int64, columns of left padding
        self.length = 0
        self._last: tuple[int, Tensor] | None = None  # `length`, and [B] of it
        columns = torch.arange(max(t.shape[2] for t in k), device=num_pad.device)
        # None when no row is padded: attention then needs no mask. `is_masked` asks for one all the same, so that the
        # choice of a kernel, and with it the last bit, does not depend on the company a row is in.
        has_mask = is_masked or bool(num_pad.any())
        self.valid: Tensor | None = columns >= num_pad[:, None] if has_mask else None  # [B, S]

    @classmethod
    def allocate(
        cls,
        config: OPTConfig,
        *,
        num_pad: Tensor,
        capacities: Sequence[int],
        owners: Sequence[int] | None = None,
        dtype: torch.dtype,
        is_masked: bool = False,
    ) -> "KVCache":
        """Room for len(num_pad) rows; `capacities` [L] columns per layer (`generate.allocate_cache`).

        `owners`: None when no layers share; those that do have the capacity of their owner.
        """
        owners = range(len(capacities)) if owners is None else owners
        assert len(capacities) == len(owners) == config.num_hidden_layers, (len(capacities), config.num_hidden_layers)
        rows, heads, dim = len(num_pad), config.num_attention_heads, config.head_dim

        def make(columns: int) -> Tensor:
            return torch.empty(rows, heads, columns, dim, dtype=dtype, device=num_pad.device)

        own = {owner: (make(capacities[owner]), make(capacities[owner])) for owner in sorted(set(owners))}
        k, v = [own[owner][0] for owner in owners], [own[owner][1] for owner in owners]
        return cls(k, v, num_pad, owners, is_masked=is_masked)

    @property
    def nbytes(self) -> int:
        """Bytes held for K and V; what layers share counts once."""
        own = [t for owner in set(self.owners) for t in (self.k[owner], self.v[owner])]
        return sum(t.numel() * t.element_size() for t in own)

    @property
    def can_attend(self) -> bool:
        """Whether `cpu.attend` is there for this device and type."""
        return cpu.is_available(self.k[0])

    def columns(self, layer: int) -> Columns:
        """Memory, first and last column of every row for one new column per row (`cpu.attend`)."""
        assert self.length < self.k[layer].shape[2], f"layer {layer} has room for {self.k[layer].shape[2]} columns"
        if self._last is None or self._last[0] != self.length:  # once per step, not once per layer
            self._last = (self.length, torch.full_like(self.num_pad, self.length))
        return Columns(self.k[layer], self.v[layer], self.num_pad, self._last[1])

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [B, H, T, K] behind the filled columns; gives back all of the layer's K and V, [B, H, S, K]."""
        start, end = self.length, self.length + k.shape[2]
        assert end <= self.k[layer].shape[2], f"layer {layer} has room for {self.k[layer].shape[2]} columns, got {end}"
        self.k[layer][:, :, start:end] = k
        self.v[layer][:, :, start:end] = v
        return self.read(layer, k.shape[2])

    def read(self, layer: int, num_new: int) -> tuple[Tensor, Tensor]:
        """The layer's K and V with `num_new` columns stored behind the filled ones: [B, H, S, K] each."""
        end = self.length + num_new
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def mask(self, num_new: int) -> Tensor | None:
        """[B, 1, T, S] bool for `num_new` columns behind the filled ones; None when causality alone says it all."""
        if self.valid is None:
            # `is_causal` aligns queries with the first keys, so it serves a prompt from column 0 and nothing else
            assert num_new == 1 or self.length == 0, "several columns behind a filled cache are not supported"
            return None
        total = self.length + num_new
        valid = self.valid[:, None, None, :total]  # [B, 1, 1, S]
        if num_new == 1:
            return valid
        return valid & causal_mask(num_new, total, self.num_pad.device) | diagonal(num_new, total, self.num_pad.device)

    def view(self, start: int, end: int) -> Self:
        """The rows start..end-1, in the same memory, with a `length` of its own."""
        return self._of(slice(start, end), slice(start, end))

    def at(self, length: int) -> Self:
        """The same memory, of which `length` columns count as filled."""
        cache = self.view(0, len(self.num_pad))
        cache.length = length
        return cache

    def keep(self, rows: Tensor) -> Self:
        """A smaller cache of `rows` [R] int64 (indices, in the new order)."""
        return self._of(rows, rows)

    def _of(self, rows: Tensor | slice, pads: Tensor | slice) -> Self:
        """Of `rows` of the memory, with the padding of the rows `pads`."""
        own = {owner: (self.k[owner][rows], self.v[owner][rows]) for owner in set(self.owners)}
        k, v = [own[owner][0] for owner in self.owners], [own[owner][1] for owner in self.owners]
        cache = type(self)(k, v, self.num_pad[pads], self.owners, is_masked=self.is_masked)
        cache.length = self.length
        return cache


def causal_mask(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: the last `num_new` of `total` columns attend to themselves and to what came before."""
    return torch.ones(num_new, total, dtype=torch.bool, device=device).tril(total - num_new)


def diagonal(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: every column attends to itself, so that a padding column's softmax is not empty (NaN)."""
    return torch.eye(total, dtype=torch.bool, device=device)[total - num_new :]
