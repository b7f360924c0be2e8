"""What the kernels between the products of a layer compute on a CUDA device, and those that choose tokens: `Kernels`.

Two sets serve: Triton's (`triton_launch`), and torch's operators (`cuda_reference`), which are their reference. Who
calls them is `cuda`; which of the two a process takes, `device` decides.

B rows, D width, H heads of queries, G of keys and values, K head dim, F feed-forward width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, KVRange


@dataclass(frozen=True, eq=False)
class Heads:
    """How heads share keys, and what becomes of a query or key before they meet."""

    heads: int
    """Of queries, a multiple of `kv_heads`."""
    kv_heads: int
    head_dim: int
    rotary_table: Tensor | None = None
    """As in `LayerShape`. A row's new column stands at position `last - first`."""
    q_norm: Tensor | None = None
    """[K], the weight of an RMS norm of each head, before it turns."""
    k_norm: Tensor | None = None
    epsilon: float = 0.0
    """Of these norms."""


@dataclass(frozen=True, eq=False)
class Norm:
    """Of a width; `rms` has no bias."""

    kind: Literal["layer", "rms"]
    epsilon: float
    weight: Tensor | None
    bias: Tensor | None


class Kernels(Protocol):
    """What is not a product. Types: bfloat16, float16 and float32; numbers are added up in float32.

    They read no number on the host, wait for nothing, and can be captured. One stream at a time.
    """

    def attend(
        self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange
    ) -> Tensor:
        """Attention of one new column per row over its columns `first..last`: q [B, H K] -> [B, H K].

        k, v [B, G K], rows of any stride: norms and turns them, stores them at `last` first, in place. None: they are
        stored. No column but these is read: memory around them may be anything, and needs no mask. Where `columns` has
        `slots` and `query_index`, rows of one place are several new columns of it: all are stored before any attends.
        """

    def add_norm(self, h: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None, *, is_pre: bool) -> Tensor:
        """h [B, D] plus y [B, D] plus `bias` [D] (None: not), rounded to the type of h; then its norm, from what was
        rounded.

        `is_pre`: h becomes the sum, in place, and the norm is given back. Else h becomes its norm, and is given back.
        `norm` None: the sum alone.
        """

    def gate(self, y: Tensor) -> Tensor:
        """silu(gate) * other of y = [gate; other] [B, 2 F] -> [B, F]."""

    def argmax(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64; the lowest index of equals."""

    def draw(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        """The choice of `skipdecode.model.sampler.pick`, without a sort and without a float32 copy: [B] int64.

        logits [B, V]; [B, 1] each: temperature float32 (0: greedy), top_k int64, top_p and uniform float32, rows of
        any stride. Sums of many numbers come out otherwise in their last bit: a uniform within about 1e-6 of the edge
        between two tokens may choose the other.
        """
