"""Keys and values of one batch, allocated per layer.

The positions that run a layer are a prefix of the sequence, so layer `l` needs room for its first n_l columns only: a
deep schedule step costs no memory in the layers it skips. Rows are left-padded, so all rows write the same column.
Nothing here decides what runs; the model asks, the cache stores.

B rows, H heads, K head dim, S columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.config import OPTConfig


class KVCache:
    """k[l], v[l]: [B, H, capacity of layer l, K]; `length` columns are filled in every layer that still runs."""

    def __init__(self, k: list[Tensor], v: list[Tensor], num_pad: Tensor, *, is_masked: bool = False) -> None:
        self.k, self.v, self.is_masked = k, v, is_masked
        self.num_pad = num_pad  # [B] int64, columns of left padding
        self.length = 0
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
        dtype: torch.dtype,
        is_masked: bool = False,
    ) -> "KVCache":
        """Room for len(num_pad) rows; `capacities` [L] columns per layer (`generate.allocate_cache`)."""
        assert len(capacities) == config.num_hidden_layers, (len(capacities), config.num_hidden_layers)
        rows, heads, dim = len(num_pad), config.num_attention_heads, config.head_dim
        make = [
            torch.empty(rows, heads, columns, dim, dtype=dtype, device=num_pad.device)
            for columns in capacities
            for _ in "kv"
        ]
        return cls(make[0::2], make[1::2], num_pad, is_masked=is_masked)

    @property
    def nbytes(self) -> int:
        """Bytes held for K and V."""
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [B, H, T, K] behind the filled columns; gives back all of the layer's K and V, [B, H, S, K]."""
        start, end = self.length, self.length + k.shape[2]
        assert end <= self.k[layer].shape[2], f"layer {layer} has room for {self.k[layer].shape[2]} columns, got {end}"
        self.k[layer][:, :, start:end] = k
        self.v[layer][:, :, start:end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def keep(self, rows: Tensor) -> "KVCache":
        """A smaller cache of `rows` [R] int64 (indices, in the new order)."""
        k, v = [t[rows] for t in self.k], [t[rows] for t in self.v]
        cache = KVCache(k, v, self.num_pad[rows], is_masked=self.is_masked)
        cache.length = self.length
        return cache
