"""The attention function that transformers' layers call, which hands keys and values to a view of ours.

It is registered with transformers under ATTENTION. In place of a mask tensor, layers carry the model's own rule to it
(`Mask`), so that each view asks the rule about its own columns: windows and chunks are exact, whatever their kind.

B rows, T new tokens, H query heads, G key/value heads, K width of a head's keys, V of its values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
)

from skipdecode.kv.view import AttentionVariant, MaskRule, VariantView

ATTENTION = "skipdecode"
"""The `attn_implementation` of wrapped models."""

UNDERSTOOD = frozenset({
    "position_ids", "position_embeddings", "cache", "past_key_values", "cache_position", "use_cache",
    "output_attentions", "output_router_logits", "hidden_states", "is_causal", "dropout", "sliding_window",
    "layer_idx",
})  # fmt: skip
"""Arguments of attention that ask for nothing beside the mask and the variant."""


class Mask:
    """Stands where a mask of shape [B, 1, T, S] would."""

    ndim = 4
    shape = (0, 0, 0, 0)

    def __init__(self, rule: MaskRule) -> None:
        self.rule = rule


class Stored(Exception):
    """Ends a layer whose keys and values alone are wanted."""


@dataclass
class LayerCall:
    """What the layer that runs now hands to its attention."""

    view: VariantView
    number: int
    only_stores: bool
    is_stored: bool = False
    """Keys and values of the tokens are in the view already, and what attention makes of them is nothing."""
    module: nn.Module | None = None
    """The attention that has been called."""
    variant: AttentionVariant | None = None
    """What it does differently."""


_running: ContextVar[LayerCall] = ContextVar("running")


@contextmanager
def attending(view: VariantView, number: int, *, only_stores: bool, is_stored: bool = False) -> Iterator[LayerCall]:
    """Attention that runs meanwhile is that of layer `number`, and goes to `view`. `only_stores`: it stores keys and
    values, and raises `Stored`. `is_stored`: the view has them already."""
    call = LayerCall(view, number, only_stores, is_stored)
    token = _running.set(call)
    try:
        yield call
    finally:
        _running.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q [B, H, T, K], k [B, G, T, K], v [B, G, T, V] -> [B, T, H, V].

    ValueError names what this model's attention does that no view can.
    """
    call = _running.get()
    call.module = module
    unknown = sorted(name for name, asked in others.items() if asked is not None and name not in UNDERSTOOD)
    if unknown:
        raise ValueError(f"its attention takes {unknown[0]!r}, which is not supported")
    if not isinstance(attention_mask, Mask):
        raise ValueError("its attention has a mask of its own making")
    rule = attention_mask.rule
    if rule is bidirectional_mask_function:
        raise ValueError("its tokens attend to later ones, as in an encoder")
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    if num_heads != num_kv_heads * getattr(module, "num_key_value_groups", num_heads // num_kv_heads):
        raise ValueError(
            f"its attention has {num_heads} heads of queries and {num_kv_heads} of keys, which num_key_value_heads "
            "does not say"
        )
    if call.only_stores:
        call.view.store(call.number, key, value)
        raise Stored
    scale = query.shape[-1] ** -0.5
    asked = (softcap, s_aux, None if rule is causal_mask_function else rule)
    is_plain = asked == (None, None, None) and scaling in (None, scale) and key.shape == value.shape
    # on CPUs kernels take plain attention; those of GPUs are tested at the shapes of our families alone
    variant = None if is_plain and query.device.type == "cpu" else AttentionVariant(scaling or scale, *asked)
    call.variant = variant
    k, v = (None, None) if call.is_stored else (key, value)
    out = call.view.attend(call.number, query, k, v, variant)  # [B, H, T, V]
    return out.transpose(1, 2).contiguous(), None


def _mask_of(*_: Any, mask_function: Callable[..., Any] = causal_mask_function, **__: Any) -> Mask:
    """transformers' mask function, which keeps the rule and makes no mask."""
    return Mask(mask_function)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, _mask_of)
