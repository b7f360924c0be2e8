"""The kernels that `cuda_backend` calls between products and to choose tokens: what each of them computes.

`triton_kernels` implements them; `torch_kernels` is their reference in torch's operators.

B rows, N tokens of prompts, D width, H query heads, G KV heads, K head dim, F feed-forward width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, KVRange, PackedPrompts
from skipdecode.config.model import FeedForwardKind

PREFIX_ROWS = 16
"""Rows that read a shared prefix together: as many as a tensor core multiplies at once, where each has one query."""


@dataclass(frozen=True, eq=False)
class Heads:
    """Attention heads, with the norms and the rotary embedding of queries and keys."""

    heads: int
    """Query heads, a multiple of `kv_heads`."""
    kv_heads: int
    head_dim: int
    rotary_table: Tensor | None = None
    """See `LayerShape.rotary_table`. A row's new token is at position `last - first`, after those of
    a prefix that it shares."""
    q_norm: Tensor | None = None
    """[K], the weight of an RMS norm over each head, before the rotary embedding."""
    k_norm: Tensor | None = None
    epsilon: float = 0.0
    """The epsilon of these norms."""
    window: int | None = None
    """See `LayerShape.window`."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the layer's width; `rms` has no bias."""

    kind: Literal["layer", "rms"]
    epsilon: float
    weight: Tensor | None
    bias: Tensor | None


class Kernels(Protocol):
    """Kernels for bfloat16, float16 and float32, with sums in float32. Keys and values may be in FP8 instead.

    They never synchronise with the host, so they can be captured. They may be used on one stream at a time.
    """

    def attend(
        self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange
    ) -> Tensor:
        """Attention of one new token per row over its columns `first..last`, or the newest of them where `heads` has a
        window: q [B, H K] -> [B, H K].

        k, v [B, G K], rows of any stride, are normed, rotated and stored at `last` first; None: they are stored
        already. No other column is read, so the rest of the memory may hold anything. Where `columns` has `slots` and
        `query_index`, tokens of one slot are all stored before any of them attends. Where it has `shared` prefixes with
        their `groups`, rows attend to these, too.
        """

    def why_no_fp8(self, device: torch.device) -> str | None:
        """Why the kernels cannot read a cache in FP8 there; None if they can."""

    def why_no_prompts(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why `attend_packed` does not take such heads; None if it does."""

    def store(
        self, heads: Heads, q: Tensor | None, k: Tensor, v: Tensor, prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
        """Stores keys and values [N, G K], rows of any stride, of the new tokens of prompts in `memory`, k and v
        [R, G, S, K]. Returns queries [N, H, K] (None: none are given) and keys [N, G, K] after norms and rotary
        embedding, and values [N, G, K]. Where there are queries, which attend to them, keys and values are rounded as
        `memory` has them."""

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        """See `flash_attention.flash_attention`."""

    def add_norm(self, h: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None, *, is_pre: bool) -> Tensor:
        """The sum of h [B, D], y [B, D] and `bias` [D] (y and bias may be None), rounded to the type of h, and its
        norm.

        With `is_pre` h becomes the sum in place, and its norm is returned; otherwise h becomes the norm and is
        returned. Without a `norm` the sum is returned.
        """

    def gate(self, y: Tensor, mlp: FeedForwardKind = "swiglu") -> Tensor:
        """act(gate) * up of y = [gate; up], with SiLU or (`geglu`) GELU by tanh: [B, 2 F] -> [B, F]."""

    def rows_in_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `fp8.rows_in_fp8`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64; the lowest index where several are equal, NO_TOKEN where one is NaN or +inf."""

    def draw(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        """`torch_sampling.pick_by_sort` without a sort and without a float32 copy of the logits: [B] int64, NO_TOKEN
        where a logit is NaN or +inf.

        logits [B, V]; temperature float32 (0: greedy), top_k int64, top_p and uniform float32 are [B, 1], of any
        stride. Sums differ from torch's in their last bits, so a uniform within about 1e-6 of the edge between two
        tokens may choose the other one.
        """
