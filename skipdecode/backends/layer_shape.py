"""What a decoder layer is, beside its weights: what a back end asks before it takes one as a single call."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerShape:
    """What a decoder layer is, beside its weights: how its heads share keys, what its norms and its feed-forward block
    compute, and where its queries and keys turn."""

    heads: int
    """Of queries."""
    kv_heads: int
    """Divides `heads`; heads / kv_heads neighbours share keys and values, as with Hugging Face's `repeat_kv`."""
    head_dim: int
    """heads * head_dim is a multiple of 32, and need not be the width."""
    epsilon: float
    """Of all norms."""
    is_pre_norm: bool = True
    """Norms before the sublayers, not behind their residuals."""
    norm: Literal["layer", "rms"] = "layer"
    """`rms`: x / sqrt(mean(x^2) + epsilon) * weight, no bias."""
    mlp: Literal["relu", "swiglu"] = "relu"
    """`swiglu`: fc2(silu(gate) * other), where fc1 makes [gate; other]."""
    rotary_table: Tensor | None = None
    """[positions, r] float32: r / 2 cosines, then r / 2 sines. Number i < r / 2 of a query or key and number i + r / 2
    are a point that its position turns (`rotate_half`); those from r on stay. Positions past the table are its last.
    None: nothing turns."""
