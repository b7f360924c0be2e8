"""Rotary position embedding (arXiv 2104.09864) in Hugging Face's layout: elements i and i + r / 2 of a head form a
pair.

B rows, T columns, K head dim, r rotated elements of a head.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from skipdecode.config.model import DecoderConfig
from skipdecode.config.rope import Rope

Rotation = Tensor
"""[B, 1, T, r] float32: the cosines and then the sines of each position."""


RotaryTables = Sequence[Tensor | None]
"""[L] the table (`rotary_table`) of each layer, None for one without rotary positions. Layers of one kind share it."""


def rotary_tables(config: DecoderConfig, device: torch.device | str = "cpu") -> RotaryTables:
    ropes = [config.layer_rope(layer) for layer in range(config.num_hidden_layers)]
    made = {rope: None if rope is None else rotary_table(rope, config, device) for rope in dict.fromkeys(ropes)}
    return tuple(made[rope] for rope in ropes)


def rotary_table(rope: Rope, config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor:
    """[positions, r] float32: r / 2 cosines and r / 2 sines of every position."""
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    turns, factor = frequencies(rope, config.head_dim, config.max_position_embeddings)
    angles = torch.outer(positions, turns)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * factor).to(device)


def frequencies(rope: Rope, head_dim: int, context: int) -> tuple[Tensor, float]:
    """[r / 2] in radians per position, and the factor of all cosines and sines. `context`: the most positions.

    Scalings are computed by transformers, so that they are what the model was made for.
    """
    r = int(head_dim * rope.share)
    if rope.scaling == "default":
        return 1.0 / rope.theta ** (torch.arange(0, r, 2, dtype=torch.int64).float() / r), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes a second to import

    parameters = {"rope_type": rope.scaling, "rope_theta": rope.theta, "partial_rotary_factor": rope.share}
    parameters |= {name: list(v) if isinstance(v, tuple) else v for name, v in rope.parameters}
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=context,
        rope_parameters=parameters,
        standardize_rope_params=lambda: None,
    )
    made: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rope.scaling](cast(Any, config), torch.device("cpu"))
    return made


def rotation_at(table: Tensor | None, positions: Tensor) -> Rotation | None:
    """The rows of `table` (see `rotary_table`) at positions [B, T] int64; -1 is padding, for which any row will do."""
    return None if table is None else table[positions.clamp(min=0, max=len(table) - 1)][:, None]


class Rotations:
    """The rotary embedding of the tokens of one pass, by layer; layers that share a table share its rows."""

    def __init__(self, tables: RotaryTables, positions: Tensor) -> None:
        """`positions` [B, T] int64, -1 for padding."""
        self._tables, self._positions = tables, positions
        self._made: dict[int, Rotation | None] = {}

    def __getitem__(self, layer: int) -> Rotation | None:
        table = self._tables[layer]
        if id(table) not in self._made:
            self._made[id(table)] = rotation_at(table, self._positions)
        return self._made[id(table)]


def apply_rotary(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotates x [B, heads, T, K] in float32, rounded once."""
    if rotation is None:
        return x
    half = rotation.shape[-1] // 2
    cos, sin = rotation[..., :half], rotation[..., half:]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([*(part.to(x.dtype) for part in parts), x[..., 2 * half :]], dim=-1)
