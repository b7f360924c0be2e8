"""Kernels with the weights of a layer of transformers (`Backend.fuse`), of the whole layer or of a half."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from skipdecode.backends.backend import FusedLayer, LayerNorms, LayerShape
from skipdecode.config.model import FeedForwardKind, Quantization
from skipdecode.model.linear import Linear
from skipdecode.model.wrapped.norms import Norm
from skipdecode.model.wrapped.wiring import Attention, FeedForward, Wiring

IDLE = 32
"""Width of what does not run."""


class Fused(NamedTuple):
    """The kernels of a layer: one of the whole layer, or of a half, which runs nothing else."""

    layer: FusedLayer | None = None
    attention: FusedLayer | None = None
    feed_forward: FusedLayer | None = None
    linears: tuple[str, ...] = ()
    """Names of the linear layers that are in them."""


class Block(nn.Module):
    """A gated feed-forward block, in place of transformers' own."""

    def __init__(self, fc1: Linear, fc2: Linear, kind: FeedForwardKind) -> None:
        super().__init__()
        self.fc1, self.fc2, self.kind = fc1, fc2, kind

    def forward(self, hidden_states: Tensor) -> Tensor:
        made: Tensor = self.fc2(self.fc1(hidden_states, activation=self.kind))
        return made


class Half(NamedTuple):
    """A half of a layer as two packed linear layers: `first` has all projections, or gate and up projection."""

    first: Linear
    second: Linear


@contextmanager
def swapped(layer: nn.Module, instead: Mapping[str, nn.Module]) -> Iterator[None]:
    """Meanwhile the layer has these modules by their names."""
    own = {name: layer.get_submodule(name) for name in instead}
    for name, module in instead.items():
        replace_module(layer, name, module)
    try:
        yield
    finally:
        for name, module in own.items():
            replace_module(layer, name, module)


def replace_module(layer: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    layer.get_submodule(parent)._modules[last] = module


def half_of(
    own: Attention | FeedForward,
    modules: Mapping[str, nn.Module],
    quantization: Quantization | None,
    *,
    is_gated: bool,
) -> Half:
    """Its weights packed; those of `modules` stay as they are."""
    *first, second = (cast(nn.Linear, modules[name]) for name in own.linears)
    return Half(_joined(first, quantization, is_gated=is_gated), _joined([second], quantization))


def _joined(linears: Sequence[nn.Linear], quantization: Quantization | None, *, is_gated: bool = False) -> Linear:
    """One packed linear layer with the outputs of all, one after the other."""
    weights = [linear.weight.detach() for linear in linears]
    made = Linear(
        weights[0].shape[1], sum(map(len, weights)), bias=False, device=torch.device("meta"), is_gated=is_gated
    )
    made.weight = nn.Parameter(weights[0] if len(weights) == 1 else torch.cat(weights), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        biases = [
            weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach()
            for linear, weight in zip(linears, weights, strict=True)
        ]
        made.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    made.pack(quantization)
    return made.eval()


def kernel_of(
    shape: LayerShape,
    norms: Mapping[str, nn.Module],
    attention: tuple[Attention, Half] | None,
    feed_forward: tuple[FeedForward, Half] | None,
    idle: Callable[[int], Half],
) -> FusedLayer | None:
    """A kernel of the halves that there are. For one that is missing it has `idle` (`idle_half`)."""
    one, first = attention or (None, idle(3))
    two, second = feed_forward or (None, idle(1))
    blank = Norm(shape.norm, shape.epsilon)
    has_out_norms = any(own is not None and own.out_norm is not None for own in (one, two))
    out_norm = blank if has_out_norms else None
    made = LayerNorms(blank, blank, attn_out=out_norm, ffn_out=out_norm)
    if one is None:
        shape = replace(shape, heads=1, kv_heads=1, head_dim=IDLE, rotary_table=None, window=None)
    else:
        q, k = (norms[name] for name in one.head_norms) if one.head_norms else (None, None)
        made = made._replace(attn=norms[one.norm], q=q, k=k, attn_out=norms[one.out_norm] if one.out_norm else None)
    if two is None:
        shape = replace(shape, mlp="relu")
    else:
        made = made._replace(ffn=norms[two.norm], ffn_out=norms[two.out_norm] if two.out_norm else None)
    products = [linear.product() for linear in (*first, *second)]
    return second.second.backend.fuse(shape, made, products)


def idle_half(width: int, dtype: torch.dtype, quantization: Quantization | None, parts: int) -> Half:
    """For half of a kernel, which must not run it: small, and of the type of the other half. `parts`: 3 for queries,
    keys and values."""
    inner = nn.Linear(width, parts * IDLE, bias=False, dtype=dtype)
    outer = nn.Linear(IDLE, width, bias=False, dtype=dtype)
    return Half(_joined([inner], quantization), _joined([outer], quantization))


def pack_halves(
    layer: nn.Module,
    wiring: Wiring,
    shape: LayerShape,
    dtype: torch.dtype,
    kv: int,
    quantization: Quantization | None,
) -> Fused:
    """Kernels with the weights of the layer, whose linear layers become parts of theirs. `kv`: outputs of the keys,
    and of the values."""
    modules = dict(layer.named_modules())
    attention, feed_forward, instead = None, None, dict[str, nn.Module]()
    if (one := wiring.attention) is not None:
        half = half_of(one, modules, quantization, is_gated=False)
        names, sizes = one.projections, [half.first.out_features - 2 * kv, kv, kv]
        parts = [half.first] if len(names) == 1 else _split(half.first, sizes)
        if parts is not None:
            attention = one, half
            instead |= dict(zip(names, parts, strict=True)) | {one.out: half.second}
    if (two := wiring.feed_forward) is not None:
        half = half_of(two, modules, quantization, is_gated=bool(two.block))
        feed_forward = two, half
        instead |= (
            {two.block: Block(*half, shape.mlp)} if two.block else {two.inner[0]: half.first, two.out: half.second}
        )
    halves = [own for own in (attention, feed_forward) if own is not None]
    if not halves:
        return Fused()
    width = halves[0][1].second.out_features
    kernel = kernel_of(shape, wiring.norms, attention, feed_forward, partial(idle_half, width, dtype, quantization))
    if kernel is None:
        return Fused()
    for name, module in instead.items():
        replace_module(layer, name, module)
    linears = tuple(name for own, _ in halves for name in own.linears)
    for name in linears:
        modules[name].register_parameter("weight", None)  # its memory goes, whoever has the module
    if len(halves) == 2:
        return Fused(layer=kernel, linears=linears)
    return Fused(**{"attention" if attention else "feed_forward": kernel}, linears=linears)


def _split(joined: Linear, sizes: Sequence[int]) -> list[Linear] | None:
    """Linear layers with so many of its outputs each, in the same memory; None where the back end has no such parts."""
    parts = None if joined.packed is None else joined.backend.split(joined.packed, sizes)
    if parts is None:
        return None
    biases = [None] * len(sizes) if joined.bias is None else torch.split(joined.bias, list(sizes))
    made = []
    for packed, size, bias in zip(parts, sizes, biases, strict=True):
        own = Linear(joined.in_features, size, bias=False, device=torch.device("meta"))
        own.register_parameter("weight", None)
        own.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        own.packed, own.backend = packed, joined.backend
        made.append(own.eval())
    return made
