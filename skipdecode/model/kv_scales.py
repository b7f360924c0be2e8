"""Scales of keys and values for a cache in FP8, which are part of the weights.

Each layer and KV head has one scale for its keys and one for its values. FP8 is as exact for small numbers as for large
ones, so all that a scale has to do is to keep numbers between the ends of its range, which lie 15 powers of two apart:
a scale for each token would make nothing more exact, and take memory and a kernel's time. These scales follow from the
weights. Behind a norm a state of width D is at most sqrt(D) long before the norm's weight, so no key and no value can
be larger than its projection makes of that (Cauchy-Schwarz): none is ever cut off, whatever the prompts are, and no
data has to be collected.

A scale is a power of two, and is multiplied into the projections: keys and values come out divided by theirs, queries
and the rows' results multiplied. In bfloat16 and float32 that rounds nothing, so the model computes what it did.

D width, G KV heads, K head dim.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from skipdecode.backends.fp8 import FP8_MAX
from skipdecode.config.model import DecoderConfig
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear
from skipdecode.model.swiftkv import SwiftKV


class _Projection(NamedTuple):
    """Keys and values of a layer, or of a group of layers under SwiftKV."""

    norm: nn.Module
    weight: Tensor
    """[2 G K, D], keys above values."""
    bias: Tensor | None


def why_no_scales(config: DecoderConfig) -> str | None:
    """Why keys and values of such a model have no bound; None if they have."""
    return None if config.is_pre_norm else "its layers have no norm before attention (do_layer_norm_before)"


@torch.no_grad()
def scale_keys_and_values(config: DecoderConfig, layers: Sequence[Layer], swiftkv: SwiftKV | None) -> None:
    """Multiplies the scales into the weights of these layers, the model's. Weights that other models share stay as
    they are."""
    for group, shared in _groups(layers, swiftkv):
        projections = [
            _Projection(layer.attn_norm, layer.qkv.weight[config.q_dim :], _rows(layer.qkv.bias, config.q_dim))
            for layer in group
        ]
        if swiftkv is not None and shared is not None:
            rows = slice(2 * config.kv_dim * shared, 2 * config.kv_dim * (shared + 1))
            bias = None if swiftkv.kv.bias is None else swiftkv.kv.bias[rows]
            projections.append(_Projection(swiftkv.norm, swiftkv.kv.weight[rows], bias))
        bounds = torch.stack([_bounds(config, one) for one in projections]).amax(dim=0)  # [2, G]
        for layer in group:
            if layer.k_norm is not None:
                bounds[0] = bounds[0].maximum(_normed_bound(config, layer.k_norm))
        if config.rope is not None:
            bounds[0] *= 2**0.5  # both numbers of a pair may turn into one
        # [G] each
        keys, values = torch.exp2(torch.where(bounds > 0, bounds / FP8_MAX, 1.0).log2().ceil()).unbind()
        for number, layer in enumerate(group):
            _scale_layer(config, layer, keys, values)
            if swiftkv is not None and shared is not None and layer.q_norm is None:
                query = swiftkv.query(swiftkv.leader(shared) + number)
                _multiply(query, _by_query_head(config, keys))
        if swiftkv is not None and shared is not None:
            of_keys = torch.ones_like(keys) if group[0].k_norm is not None else 1 / keys
            _multiply(swiftkv.kv, torch.cat([of_keys, 1 / values]).repeat_interleave(config.head_dim), rows)


def _groups(layers: Sequence[Layer], swiftkv: SwiftKV | None) -> Iterator[tuple[Sequence[Layer], int | None]]:
    """Layers whose keys and values have the same scales: each by itself, or those of a group of SwiftKV, with its
    number."""
    first, size = (len(layers), 1) if swiftkv is None else (swiftkv.first, swiftkv.group_size)
    for layer in layers[:first]:
        yield [layer], None
    for number, at in enumerate(range(first, len(layers), size)):
        yield layers[at : at + size], number


def _bounds(config: DecoderConfig, projection: _Projection) -> Tensor:
    """[2, G] float32: what no number of a head's keys and of its values is larger than, before norm and rotary
    embedding; 0 for keys that have a norm."""
    norm, weight, bias = projection
    weight, scale = weight.float(), getattr(norm, "weight", None)
    lengths = (weight if scale is None else weight * scale.float()).norm(dim=1) * config.hidden_size**0.5  # [2 G K]
    if (shift := getattr(norm, "bias", None)) is not None:
        lengths = lengths + (weight @ shift.float()).abs()
    if bias is not None:
        lengths = lengths + bias.float().abs()
    bounds: Tensor = lengths.view(2, config.num_kv_heads, config.head_dim).amax(dim=2)
    return bounds * torch.tensor([[0.0 if config.has_qk_norm else 1.0], [1.0]], device=bounds.device)


def _normed_bound(config: DecoderConfig, norm: nn.Module) -> Tensor:
    """What no number of a key is larger than behind an RMS norm over its head."""
    assert isinstance(norm.weight, Tensor)
    most: Tensor = norm.weight.float().abs().max() * config.head_dim**0.5
    return most


def _scale_layer(config: DecoderConfig, layer: Layer, keys: Tensor, values: Tensor) -> None:
    """`keys`, `values` [G]: the scales."""
    queries, of_keys = _by_query_head(config, keys), (1 / keys).repeat_interleave(config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:  # all heads have the same bound, and so the same scale
        _multiply_norm(layer.q_norm, keys[0])
        _multiply_norm(layer.k_norm, 1 / keys[0])
        queries, of_keys = torch.ones_like(queries), torch.ones_like(of_keys)
    of_values = (1 / values).repeat_interleave(config.head_dim)
    _multiply(layer.qkv, torch.cat([queries, of_keys, of_values]))
    weight = layer.out_proj.weight
    made = (weight * _by_query_head(config, values)).to(weight.dtype)
    layer.out_proj.weight = nn.Parameter(made, requires_grad=False)


def _multiply_norm(norm: nn.RMSNorm, scale: Tensor) -> None:
    norm.weight = nn.Parameter((norm.weight * scale).to(norm.weight.dtype), requires_grad=False)


def _by_query_head(config: DecoderConfig, scales: Tensor) -> Tensor:
    """[G] -> [H K]: of every number of the query heads that share a KV head."""
    return scales.repeat_interleave(config.q_dim // config.num_kv_heads)


def _multiply(linear: Linear | nn.Linear, scales: Tensor, rows: slice = slice(None)) -> None:
    """Multiplies these outputs of a linear layer by powers of two; its old tensors stay as they are."""
    for name in ("weight", "bias"):
        if (own := getattr(linear, name)) is not None:
            made = own.detach().clone()
            made[rows] *= (scales if name == "bias" else scales[:, None]).to(own.dtype)
            setattr(linear, name, nn.Parameter(made, requires_grad=False))


def _rows(bias: Tensor | None, start: int) -> Tensor | None:
    return None if bias is None else bias[start:]
