"""Rotary position embedding (arXiv 2104.09864) in Hugging Face's layout: elements i and i + r / 2 of a head form a
pair.

B rows, T columns, K head dim, r rotated elements of a head.
"""

import math

import torch
from torch import Tensor

from skipdecode.config.model import DecoderConfig
from skipdecode.config.rope import Rope

Rotation = Tensor
"""[B, 1, T, r] float32: the cosines and then the sines of each position."""


def rotary_table(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor | None:
    """[positions, r] float32: r / 2 cosines and r / 2 sines of every position; None for models without RoPE."""
    rope = config.rope
    if rope is None:
        return None
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(rope, config.head_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[r / 2] in radians per position."""
    r = int(head_dim * rope.share)
    plain = 1.0 / rope.theta ** (torch.arange(0, r, 2, dtype=torch.int64).float() / r)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones stay, those between are interpolated."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > context / low, plain / rope.factor, plain)
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    is_between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(is_between, between, slowed)


def rotation_at(table: Tensor | None, positions: Tensor) -> Rotation | None:
    """The rows of `table` (see `rotary_table`) at positions [B, T] int64; -1 is padding, for which any row will do."""
    return None if table is None else table[positions.clamp(min=0, max=len(table) - 1)][:, None]


def apply_rotary(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotates x [B, heads, T, K] in float32, rounded once."""
    if rotation is None:
        return x
    half = rotation.shape[-1] // 2
    cos, sin = rotation[..., :half], rotation[..., half:]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*(part.to(x.dtype) for part in parts), x[..., 2 * half :]], dim=-1)
