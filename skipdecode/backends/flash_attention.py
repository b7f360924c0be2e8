"""Attention of sequences that lie one after the other without padding: torch's flash attention, and what it computes in
torch's plain operators.

`torch.ops.aten._flash_attention_forward` is what `torch.nn.attention.varlen` (torch 2.10 and later) calls. Its
arguments up to the window are the same since torch 2.6; groups of query heads that share a KV head need no copies.

B sequences, N queries and M keys of all of them, H query heads, G KV heads, K head dim.
"""

from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

TYPES = (torch.bfloat16, torch.float16)
"""The types that it takes."""
MAX_HEAD_DIM, HEAD_STEP = 256, 8
_POSITIONAL = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
               "return_debug_mask")  # fmt: skip
_NAMED = {"scale", "window_size_left", "window_size_right"}


@cache
def missing() -> str | None:
    """Why this build of torch has no such attention; None if it has one. Whether it runs on a device is not tried."""
    packet = getattr(torch.ops.aten, "_flash_attention_forward", None)
    if packet is None:
        return f"torch {torch.__version__} has no operator aten::_flash_attention_forward"
    names = [argument.name for argument in packet.default._schema.arguments]
    if tuple(names[: len(_POSITIONAL)]) != _POSITIONAL or not set(names) >= _NAMED:
        return f"aten::_flash_attention_forward of torch {torch.__version__} takes other arguments: {', '.join(names)}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without flash attention"
    return None


def misfit(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why it does not take such heads; None if it does."""
    if dtype not in TYPES:
        return f"torch's flash attention takes bfloat16 and float16, and this is {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_STEP:
        return (
            f"torch's flash attention takes heads of up to {MAX_HEAD_DIM} in steps of {HEAD_STEP}, and these have "
            f"{head_dim}"
        )
    return None


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of q [N, H, K] over k and v [M, G, K]: [N, H, K].

    Sequence b has the queries q_starts[b] to q_starts[b + 1] - 1 and the keys by `k_starts` likewise ([B + 1] int32),
    and its queries are the last ones of its keys. `max_q`, `max_k`: the most of a sequence. `window`: how many of the
    newest keys, its own included, a query attends to; None: all.
    """
    left, right = (None, None) if window is None else (window - 1, 0)
    made: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, q_starts, k_starts, max_q, max_k, 0.0, window is None, False,
        scale=q.shape[2] ** -0.5, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip
    return made


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """`flash_attention` for every type and device, one sequence after the other. Waits for the device."""
    made = q.new_empty(q.shape)
    spans = zip(pairwise(q_starts.tolist()), pairwise(k_starts.tolist()), strict=True)
    for (start, end), (first, last) in spans:
        T, S = end - start, last - first
        assert 0 < T <= max_q, (T, max_q)
        assert T <= S <= max_k, (T, S, max_k)
        sees = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        if window is not None:
            sees = sees.triu(S - T - window + 1)
        own, keys, values = (x.transpose(0, 1)[None] for x in (q[start:end], k[first:last], v[first:last]))
        out = F.scaled_dot_product_attention(own, keys, values, attn_mask=sees, enable_gqa=True)
        made[start:end] = out[0].transpose(0, 1)
    return made
