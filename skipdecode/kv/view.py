"""What the layer loop sees of keys and values: one interface, whatever memory is behind it.

A view is made for one forward call: it knows which columns are new, where they stand, and what each may attend to.

B rows, T new columns, S columns visible, H heads of queries, G of keys and values, K head dim.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import FusedKVStore, FusedLayer, GraphKVRange, KVRange
from skipdecode.backends.device import backend_on
from skipdecode.backends.rope import Rotation


class KVView(Protocol):
    """Keys and values of the tokens in question. Layers are named by their numbers."""

    has_kernels: bool
    """`run` serves, for layers that are one kernel."""
    stores_by_kernel: bool
    """`store_by_kernel` serves."""

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of the new columns; None: positions are in the embedding."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """Stores K and V [B, G, T, K] of the new columns (None: they are there), then attends: q [B, H, T, K], the same
        back."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """K and V [B, G, T, K] of the new columns."""

    def run(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, feeds: bool
    ) -> Tensor:
        """Layers one behind the other, or one block of each, as kernels; in place."""

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        """K and V of the new columns as one kernel: of each of its products in the layer that `layers` gives."""

    def part(self, where: slice) -> Self:
        """Of these rows, or columns in a teacher-forced pass."""

    def last(self, h: Tensor) -> tuple[Tensor, "KVView"]:
        """The last of the new columns alone, whose K and V are there: its states [B, 1, D], and a view of it."""


class MovableView(KVView, Protocol):
    """Of layers on several devices."""

    def on(self, device: torch.device, table: Tensor | None) -> "MovableView":
        """For the layers on that device, where `table` (`rope.rotary_table`) is, too."""


class StepView:
    """What the views of decode steps have in common: a layer's kernel takes the `columns` of the rows."""

    stores_by_kernel = False

    def columns(self, layer: int) -> KVRange | GraphKVRange:
        """What the new column of every row attends to in that layer, and where it goes."""
        raise NotImplementedError

    def run(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, feeds: bool
    ) -> Tensor:
        columns = [self.columns(layer) for layer in layers] if attends else None
        return backend_on(h.device).prepare_step(kernels, len(h), columns, feeds=feeds)(h)

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        raise AssertionError("a kernel for prompts, and one column")


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, T, K] queries over [B, G, S, K] keys and values -> [B, H, T, K]; mask None: causal, no padding."""
    is_causal, has_groups = mask is None and q.shape[2] > 1, q.shape[1] != keys.shape[1]
    device = q.device.type
    if device == "cuda" and has_groups and wants_all_heads(q.dtype, has_mask=mask is not None):
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        has_groups = False
    attend = partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, enable_gqa=has_groups)
    if device == "cpu" and torch.is_autocast_enabled(device):  # its bfloat16 backward pass doubles a training step
        with torch.autocast(device, enabled=False):
            return attend(q.float(), keys.float(), values.float())
    return attend(q, keys, values)


def wants_all_heads(dtype: torch.dtype, *, has_mask: bool) -> bool:
    """Whether queries in groups get a copy of keys and values each, on a GPU.

    torch's flash attention takes groups, and neither masks nor float32. Its memory-efficient one takes both, and no
    groups. What is left where neither serves keeps all scores, [B, H, T, S] in float32: gigabytes.
    """
    return has_mask or dtype == torch.float32


def causal_mask(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: the last `num_new` of `total` columns attend to themselves and to what came before."""
    return torch.ones(num_new, total, dtype=torch.bool, device=device).tril(total - num_new)


def diagonal(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: every column attends to itself, so that a padding column's softmax is not empty (NaN)."""
    return torch.eye(total, dtype=torch.bool, device=device)[total - num_new :]
