"""The layer loop: `LayerRanges` says which sublayers run on which rows or tokens.

The loop serves static batches (a layer runs on all rows or on none), continuous batches (on the last rows, which are at
the earliest steps) and teacher-forced passes (on the first tokens): the tokens that run a layer are contiguous.
Embedding and LM head are in `decoder`, a layer in `layer`, keys and values in `skipdecode.kv`.

B rows, T new tokens, N tokens of packed prompts, D width.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skipdecode.backends.backend import FusedLayer
from skipdecode.backends.rope import RotaryTables
from skipdecode.kv.view import KVView, MovableView
from skipdecode.model.ffn_executor import ALL_ROWS, FFNExecutor
from skipdecode.model.layer import Layer
from skipdecode.model.pipeline_parallel import Placement, cut, finish, launching_on
from skipdecode.model.swiftkv import SwiftKV
from skipdecode.schedules.layer_ranges import ALL, LayerRanges


class LayerStack(Protocol):
    """The part of `skipdecode.model.decoder.Decoder` that the loop uses."""

    @property
    def placement(self) -> Placement | None:
        """The device of each layer, if they are on several."""

    @property
    def layers(self) -> list[Layer]: ...
    @property
    def swiftkv(self) -> SwiftKV | None:
        """SwiftKV's weights, in a model that has them."""

    def rotary_tables_on(self, device: torch.device) -> RotaryTables:
        """The rotary tables of all layers on a device."""


def run_layers(
    model: LayerStack,
    h: Tensor,
    kv: KVView,
    ranges: LayerRanges,
    *,
    ffns: FFNExecutor = ALL_ROWS,
    recompute: bool = False,
) -> tuple[Tensor, KVView]:
    """Runs h [B, T, D] (or packed [N, D]) through the layers; returns the states before the LM head, and the view of
    the tokens that are left.

    `ffns` runs deferred feed-forward blocks. `recompute`: keep only the inputs of layers for the backward pass
    (activation checkpointing). Kernels that work in place overwrite h.
    """
    if model.placement is None:
        return _run(model, ranges.groups, h, kv, ranges, ffns=ffns, recompute=recompute)
    return finish(run_placed(model, model.placement, h, cast(MovableView, kv), ranges, recompute=recompute))


def run_placed(
    model: LayerStack, placement: Placement, h: Tensor, kv: MovableView, ranges: LayerRanges, *, recompute: bool = False
) -> Generator[None, None, tuple[Tensor, KVView]]:
    """`run_layers` over several devices, with the pauses that `in_phases` expects. States return to the first device;
    the view is that of the last layer."""
    assert not ranges.deferred_ffns, "deferred feed-forward blocks need all layers on one device"
    assert ranges.swiftkv_from is None, "SwiftKV needs all layers on one device"
    at = 0
    groups = groupby(cut(ranges.groups, placement.of_layer), key=lambda group: placement.of_layer[group[0]])
    for number, here in groups:
        device = placement.devices[number]
        if number != at:
            h, kv, at = h.to(device, non_blocking=True), kv.on(device, model.rotary_tables_on(device)), number
        yield
        with launching_on(device):
            h, left = _run(model, tuple(here), h, kv, ranges, recompute=recompute)
        kv = cast(MovableView, left)
        yield
    return h.to(placement.devices[0], non_blocking=True), kv


def _run(
    model: LayerStack, groups: Sequence[Sequence[int]], h: Tensor, kv: KVView, ranges: LayerRanges, *,
    ffns: FFNExecutor = ALL_ROWS, recompute: bool = False,
) -> tuple[Tensor, KVView]:  # fmt: skip
    """Runs some groups of layers on one device, as `run_layers`."""
    upper_kv_written: slice | None = None  # SwiftKV: the tokens whose upper-layer K/V are written already
    layers = model.layers
    for group in groups:
        i = group[0]
        attn, ffn = ranges.attn[i], ranges.ffn[i]
        is_upper = attn is not None and ranges.swiftkv_from is not None and i >= ranges.swiftkv_from
        if is_upper and (new := ranges.entering(i, upper_kv_written)) is not None:
            assert model.swiftkv is not None, "the plan uses SwiftKV, and the model has no SwiftKV weights"
            part = h if new == ALL else h[new]
            model.swiftkv.write(part, kv.part(new), ranges.layers_of(new), layers)
            upper_kv_written = attn
        if i == ranges.last_token_from:
            if attn is not None and not is_upper:
                layers[i].store(h, kv, i)
            h, kv = kv.last(h)
        call = layer_call(recompute=recompute)
        ffn_with_attn = ffn is not None and ffn == attn and not (ranges.deferred_ffns and ranges.deferred_ffns[i])
        if attn is not None:
            queries = model.swiftkv if is_upper else None
            run = partial(_run_group, layers, group, kv.part(attn), runs_ffn=ffn_with_attn, queries=queries, call=call)
            h = _replace_part(h, attn, ranges.axis, run)
        if ffn is not None and not ffn_with_attn:
            run_ffn = partial(call, layers[i], kv=kv.part(ffn), number=i, attends=False, runs_ffn=True)
            h = _replace_part(h, ffn, ranges.axis, partial(ffns.run, i, layers[i], run_ffn))
    return h, kv


def layer_call(*, recompute: bool) -> Callable[..., Tensor]:
    """A function that calls `Layer.forward`; with `recompute` it keeps only the input for the backward pass."""
    return partial(checkpoint, use_reentrant=False) if recompute else _call


def _call(layer: Layer, h: Tensor, **how: Any) -> Tensor:
    made: Tensor = layer(h, **how)
    return made


def _run_group(
    layers: Sequence[Layer], group: Sequence[int], kv: KVView, h: Tensor, *,
    runs_ffn: bool, queries: SwiftKV | None, call: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Runs the attention of a group of layers, and their feed-forward if `runs_ffn`. `queries`: SwiftKV's query
    projections, None for the layers' own."""
    if kv.has_kernels:
        fused = [layers[i].kernel if queries is None else layers[i].query_kernel for i in group]
        if None not in fused:
            return kv.run_fused(cast(list[FusedLayer], fused), h, group, attends=True, runs_ffn=runs_ffn)
    for i in group:
        query = None if queries is None else queries.query(i)
        h = call(layers[i], h, kv=kv, number=i, attends=True, runs_ffn=runs_ffn, query=query)
    return h


def _replace_part(h: Tensor, part: slice, axis: int, run: Callable[[Tensor], Tensor]) -> Tensor:
    """h with one part of it, rows or tokens by `axis`, replaced by `run` of that part."""
    if part == ALL:
        return run(h)
    if axis == 1:
        # not in place, since the backward pass needs the old states
        new, end = run(h[:, part]), part.stop
        return new if end == h.shape[1] else torch.cat([new, h[:, end:]], dim=1)
    if not part.start:
        return run(h)
    new = run(h[part])
    if new.data_ptr() != h[part].data_ptr():  # unless a kernel worked in place
        h[part] = new
    return h
