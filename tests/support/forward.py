"""A forward pass under one plan, without the loops around it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.layer_plan import LayerPlan


def left_pad(prompts: Sequence[Sequence[int]], columns: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens [B, P], attention mask [B, P], padding [B])."""
    width = columns or max(len(p) for p in prompts)
    tokens = torch.tensor([[1] * (width - len(p)) + list(p) for p in prompts])
    num_pad = torch.tensor([width - len(p) for p in prompts])
    return tokens, (torch.arange(width) >= num_pad[:, None]).long(), num_pad


def feed(
    model: Decoder, tokens: Tensor, num_pad: Tensor, plan: LayerPlan, capacity: int = 64
) -> tuple[Tensor, KVCache]:
    """Logits [B, V] of the last column, and the filled cache."""
    capacities = [capacity] * model.config.num_hidden_layers
    cache = KVCache.allocate(model.config, num_pad=num_pad, capacities=capacities, dtype=model.kv_dtype)
    positions = (torch.arange(tokens.shape[1]) - num_pad[:, None]).clamp(min=-1)
    with torch.inference_mode():
        return model(tokens, positions, cache, plan), cache
