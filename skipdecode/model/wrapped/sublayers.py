"""The parts of a layer of transformers that FFN-SkipLLM tells apart: its attention and its feed-forward block.

A part is left out by giving zeros in place of what its modules make. Whether a layer then does nothing else, and
whether its two parts one after the other are the layer, is found by running the layer around stand-ins: neither
attention nor products run, so that costs nothing but norms, with random weights in place of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.config.wrapped import Sublayers
from skipdecode.model.wrapped.hollow_model import Arguments

Instead = Callable[[Tensor], Tensor]
"""What stands for a module: its input to what it makes."""
MOST_OUTPUTS = 3
"""A module gives states alone, or first of as many: weights of attention, or a router's logits, follow."""
ROWS, TOKENS = 5, 2  # more rows than outputs, since a tensor can be unpacked, too
MOST_VALUES = 1 << 24  # that stand-ins may take memory for, since config.json alone has said how wide a layer is


def find_sublayers(layer: nn.Module, attention: nn.Module, arguments: Arguments, width: int) -> Sublayers:
    """Of a layer on the meta device, whose attention is in `attention`; its other parts become random weights on the
    CPU. `arguments`: what the layer is given beside states of that width.

    ValueError says why one of its parts cannot be left out.
    """
    own = next((name for name, child in layer.named_children() if attention in set(child.modules())), None)
    if own is None:
        raise ValueError("its attention is no module of its own")
    blocks = [name for name, child in layer.named_children() if name != own and _has_products(child)]
    if not blocks:
        raise ValueError("its feed-forward block is no module of its own")
    rest = [child for name, child in layer.named_children() if name not in (own, *blocks)]
    values = sum(tensor.numel() for one in rest for tensor in (*one.parameters(), *one.buffers()))
    if values + ROWS * TOKENS * width > MOST_VALUES:
        raise ValueError(f"its norms have {values} values for states of {width}")
    with torch.device("cpu"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        for child in rest:
            _fill(child, recurse=True)
        _fill(layer, recurse=False)
        h = torch.randn(ROWS, TOKENS, width)
    layer.eval()
    for outputs in product(range(1, MOST_OUTPUTS + 1), repeat=2):
        found = Sublayers(own, tuple(blocks), *outputs)
        try:
            skipped = _around(layer, found, h, arguments, torch.zeros_like, torch.zeros_like)
        except (TypeError, ValueError):  # it unpacks another number
            continue
        break
    else:
        raise ValueError("its parts make other things than states")
    if not torch.equal(skipped, h):
        raise ValueError("it does more than add its attention and its feed-forward block to the states")
    whole = _around(layer, found, h, arguments, torch.sin, torch.cos)
    attended = _around(layer, found, h, arguments, torch.sin, torch.zeros_like)
    if not torch.equal(whole, _around(layer, found, attended, arguments, torch.zeros_like, torch.cos)):
        raise ValueError("its feed-forward block does not come behind its attention, but beside it")
    return found


@contextmanager
def leaving_out(layer: nn.Module, parts: Sublayers, *, attention: bool, feed_forward: bool) -> Iterator[None]:
    """Meanwhile these parts of the layer give zeros."""
    with ExitStack() as stack:
        if attention:
            _replace(stack, layer.get_submodule(parts.attention), torch.zeros_like, parts.attention_outputs)
        for name in parts.feed_forward if feed_forward else ():
            _replace(stack, layer.get_submodule(name), torch.zeros_like, parts.feed_forward_outputs)
        yield


def _around(
    layer: nn.Module, parts: Sublayers, h: Tensor, arguments: Arguments, attention: Instead, feed: Instead
) -> Tensor:
    """What the layer makes of h [B, T, D] with these in place of its parts."""
    with ExitStack() as stack:
        _replace(stack, layer.get_submodule(parts.attention), attention, parts.attention_outputs)
        for name in parts.feed_forward:
            _replace(stack, layer.get_submodule(name), feed, parts.feed_forward_outputs)
        made = layer(h, *arguments.positional, **arguments.named)
    states: Tensor = made[0] if isinstance(made, tuple) else made
    return states


def _replace(stack: ExitStack, module: nn.Module, instead: Instead, num_outputs: int) -> None:
    """Until `stack` closes, calls of the module go to `instead`, whose result is the first of `num_outputs`."""

    def forward(h: Tensor | None = None, *_: Any, **named: Any) -> Any:
        h = named["hidden_states"] if h is None else h
        if isinstance(module, nn.Linear) and module.in_features != module.out_features:
            h = h[..., :1].expand(*h.shape[:-1], module.out_features)
        made = instead(h)
        return made if num_outputs == 1 else (made, *[None] * (num_outputs - 1))

    before = module.__dict__.get("forward")
    module.forward = forward

    def restore() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    stack.callback(restore)


def _has_products(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _fill(module: nn.Module, *, recurse: bool) -> None:
    """Random weights on the CPU in place of those on the meta device."""
    for one in module.modules() if recurse else [module]:
        for name, parameter in one.named_parameters(recurse=False):
            setattr(one, name, nn.Parameter(torch.randn(parameter.shape), requires_grad=False))
        for name, buffer in one.named_buffers(recurse=False):
            setattr(one, name, torch.randn(buffer.shape))
