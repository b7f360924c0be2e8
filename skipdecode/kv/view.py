"""The interface through which the layer loop reads and writes keys and values, whatever store is behind it.

A view is made for one forward call: it knows which tokens are new, their positions, and what each may attend to.

B rows, T new tokens, S columns visible, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import FusedKVStore, FusedLayer, GraphKVRange, KVRange
from skipdecode.backends.device import backend_on
from skipdecode.backends.rope import RotaryTables, Rotations

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' `mask_function`: whether the query at one position attends to the key at another. Takes row, head,
query position and key position, int64 tensors that broadcast, and gives bool."""


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """What a layer's attention does differently from softmax(q k^T / sqrt(K)) v under a causal mask."""

    scale: float
    """The factor of the scores, in place of 1 / sqrt(K)."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) (Gemma 2)."""
    sinks: Tensor | None = None
    """[H] a score of each head that takes its share of the softmax and has no value (gpt-oss)."""
    rule: MaskRule | None = None
    """None: causal. Padding is masked whatever it says."""
    window: int | None = None
    """Set where it is nothing but `sliding_window`, which kernels take, too."""


@cache
def sliding_window(window: int, head_dim: int) -> AttentionVariant:
    """Each token attends to the `window` newest ones, itself included. One object for all layers that have it, whose
    masks are made once."""

    def rule(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - window)

    return AttentionVariant(head_dim**-0.5, rule=rule, window=window)


class KVView(Protocol):
    """Keys and values for the new tokens of one forward call. Layers are given by number."""

    has_kernels: bool
    """True if `run_fused` is supported, for layers that are one kernel."""
    stores_by_kernel: bool
    """True if `store_by_kernel` is supported."""

    @property
    def rotations(self) -> Rotations:
        """The rotary embedding of the new tokens, by layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        """Stores K and V [B, G, T, K] of the new tokens (None if they are stored already), then attends:
        q [B, H, T, K] -> [B, H, T, K]. Every view takes a `sliding_window`, and `VariantView` any variant."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores K and V [B, G, T, K] of the new tokens."""

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        """Runs `layers` one after the other as kernels: attention, feed-forward, or both of each. Works in place.

        The view calls the kernels because it owns the cache: only it knows the addresses that they read and write.
        """

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        """Stores K and V of the new tokens by one kernel; `layers` maps its products to the layers that store them."""

    def part(self, where: slice) -> Self:
        """The view of some rows, or of some tokens in a teacher-forced pass."""

    def last(self, h: Tensor) -> tuple[Tensor, "KVView"]:
        """The states [B, 1, D] of the last new token, whose K and V are stored already, and a view of it."""


def kernels_take(variant: AttentionVariant | None) -> bool:
    return variant is None or variant.window is not None


def window_of(variant: AttentionVariant | None) -> int | None:
    return None if variant is None else variant.window


class VariantView(KVView, Protocol):
    """A view whose attention takes any variant, and that says where its tokens are, as layers of transformers need."""

    @property
    def positions(self) -> Tensor:
        """[B, T] int64 positions of the new tokens in their rows, -1 for padding. The same tensor in each call."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: AttentionVariant | None = None
    ) -> Tensor:
        """As in `KVView`; V may be wider or narrower than K, and so the result [B, H, T, width of V]."""


class MovableView(KVView, Protocol):
    """A view for layers on several devices."""

    def on(self, device: torch.device, tables: RotaryTables) -> "MovableView":
        """The view for layers on that device, which also has `tables`."""


class StepView:
    """Base of the views of decode steps, where a layer's kernel takes the `columns` of the rows."""

    stores_by_kernel = False

    def columns(self, layer: int) -> KVRange | GraphKVRange:
        """What the new token of every row attends to in that layer, and where its K/V go."""
        raise NotImplementedError

    def run_fused(
        self, kernels: Sequence[FusedLayer], h: Tensor, layers: Sequence[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        columns = [self.columns(layer) for layer in layers] if attends else None
        return backend_on(h.device).prepare_step(kernels, len(h), columns, runs_ffn=runs_ffn)(h)

    def store_by_kernel(self, kernel: FusedKVStore, h: Tensor, layers: Mapping[int, int]) -> None:
        raise AssertionError("a kernel for prompts, in a decode step")


def attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, variant: AttentionVariant | None = None
) -> Tensor:
    """Queries [B, H, T, K] over keys and values [B, G, S, K] -> [B, H, T, K]. Without a mask it is causal; `mask` has
    the rule of `variant` already."""
    if variant is not None and (variant.softcap is not None or variant.sinks is not None):
        return _attention_by_scores(q, keys, values, mask, variant)
    scale = None if variant is None else variant.scale
    is_causal, has_groups = mask is None and q.shape[2] > 1, q.shape[1] != keys.shape[1]
    device = q.device.type
    if device == "cuda" and has_groups and wants_all_heads(q.dtype, has_mask=mask is not None):
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        has_groups = False
    attend = partial(
        F.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=has_groups
    )
    if device == "cpu" and torch.is_autocast_enabled(device):  # its bfloat16 backward pass doubles a training step
        with torch.autocast(device, enabled=False):
            return attend(q.float(), keys.float(), values.float())
    return attend(q, keys, values)


def _attention_by_scores(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, variant: AttentionVariant
) -> Tensor:
    """`attention` with all scores in memory, for what torch's kernels have no argument for."""
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
    scores = q @ keys.transpose(2, 3) * variant.scale  # [B, H, T, S]
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if mask is None:
        mask = causal_mask(q.shape[2], keys.shape[2], q.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    if variant.sinks is not None:
        sinks = variant.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return shares[..., : keys.shape[2]] @ values


def allowed_by(rule: MaskRule, positions: Tensor, num_new: int) -> Tensor:
    """[B, 1, T, S] bool: what the last `num_new` of the columns with `positions` [B, S] attend to by `rule` alone."""
    zero = torch.zeros(1, dtype=torch.int64, device=positions.device)  # no rule here tells rows or heads apart
    return rule(zero, zero, positions[:, None, -num_new:, None], positions[:, None, None])


def wants_all_heads(dtype: torch.dtype, *, has_mask: bool) -> bool:
    """True if keys and values must be repeated for every query head on a GPU (grouped-query attention).

    torch's flash attention supports groups, but neither masks nor float32; its memory-efficient attention supports
    both, but no groups. What is left if neither applies materialises all scores, [B, H, T, S] in float32: gigabytes.
    """
    return has_mask or dtype == torch.float32


def causal_mask(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: the last `num_new` of `total` columns attend to themselves and everything before."""
    return torch.ones(num_new, total, dtype=torch.bool, device=device).tril(total - num_new)


def diagonal(num_new: int, total: int, device: torch.device) -> Tensor:
    """[T, S] bool: every column attends to itself, so that the softmax of a padding column is not NaN."""
    return torch.eye(total, dtype=torch.bool, device=device)[total - num_new :]
