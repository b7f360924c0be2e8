"""Rotary positions (arXiv 2104.09864), as Hugging Face lays them out: number i of a head turns with number i + r / 2.

B rows, T columns, K head dim, r of its numbers that turn.
"""

import math

import torch
from torch import Tensor

from skipdecode.config.model import DecoderConfig
from skipdecode.config.rope import Rope

Rotation = Tensor
"""[B, 1, T, r] float32: cosines, then sines, of each position."""


def rotary_table(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor | None:
    """[positions, r] float32, r / 2 cosines and as many sines of every position; None where nothing turns."""
    rope = config.rope
    if rope is None:
        return None
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, frequencies(rope, config.head_dim))
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(device)


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[r / 2] radians per position."""
    r = int(head_dim * rope.share)
    plain = 1.0 / rope.theta ** (torch.arange(0, r, 2, dtype=torch.int64).float() / r)
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Slow ones are slowed down by `factor`, fast ones stay, those between go over smoothly (Llama 3.1)."""
    context, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slowed = torch.where(wavelengths > context / low, plain / rope.factor, plain)
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * slowed / rope.factor + smooth * slowed
    is_between = ~(wavelengths < context / high) & ~(wavelengths > context / low)
    return torch.where(is_between, between, slowed)


def rotation_at(table: Tensor | None, positions: Tensor) -> Rotation | None:
    """Of positions [B, T] int64 (-1: padding, anything will do); `table` as `rotary_table` gives it."""
    return None if table is None else table[positions.clamp(min=0, max=len(table) - 1)][:, None]


def apply_rotary(x: Tensor, rotation: Rotation | None) -> Tensor:
    """x [B, heads, T, K] at its positions, in float32, rounded once."""
    if rotation is None:
        return x
    half = rotation.shape[-1] // 2
    cos, sin = rotation[..., :half], rotation[..., half:]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*(part.to(x.dtype) for part in parts), x[..., 2 * half :]], dim=-1)
