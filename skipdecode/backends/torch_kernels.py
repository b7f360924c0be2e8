"""`cuda_kernels.Kernels` in torch's operators, on any device: the reference for the Triton kernels.

It is plain and slow, and cannot be captured because `attend` reads its bounds on the host.

B rows, H query heads, G KV heads, S columns of the cache, K head dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, KVRange, PackedPrompts, SharedPrefix
from skipdecode.backends.cuda_kernels import Heads, Norm
from skipdecode.backends.flash_attention import reference_attention
from skipdecode.backends.fp8 import as_bytes, narrowed, rows_in_fp8, widened
from skipdecode.backends.rope import Rotation, apply_rotary, rotation_at
from skipdecode.backends.torch_sampling import likeliest, pick_by_sort
from skipdecode.config.model import FeedForwardKind


class TorchKernels:
    """Implements `cuda_kernels.Kernels`."""

    def attend(
        self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange
    ) -> Tensor:
        keys, values = memory_of(columns, len(q), heads)
        first, last = columns.first, columns.last.expand(len(q))
        slots = columns.slots if isinstance(columns, KVRange) else None
        rows = torch.arange(len(q), device=q.device) if slots is None else slots
        positions = last - first if columns.shared is None else last - first + columns.shared.counts
        rotation = rotation_at(heads.rotary_table, positions[:, None])
        if k is not None and v is not None:
            put(keys, rows, last, ready(heads, k, heads.k_norm, rotation)[:, :, 0])
            put(values, rows, last, v.reshape(len(q), heads.kv_heads, heads.head_dim))
        keys, values = widened(keys, q.dtype), widened(values, q.dtype)
        if slots is not None:
            keys, values = keys[slots], values[slots]
        at = torch.arange(keys.shape[2], device=q.device)
        sees = (at >= first[:, None]) & (at <= last[:, None])  # [B, S]
        if heads.window is not None:
            sees &= at > last[:, None] - heads.window
        if columns.shared is not None:
            *held, sees_before = prefixes_of(columns.shared, heads)
            before = [widened(own, q.dtype) for own in held]
            if heads.window is not None:
                at = torch.arange(sees_before.shape[1], device=q.device)
                sees_before &= at > positions[:, None] - heads.window
            keys, values = (torch.cat(both, dim=2) for both in zip(before, (keys, values), strict=True))
            sees = torch.cat([sees_before, sees], dim=1)
        seen = sees[:, None, :, None]
        keys, values = keys.masked_fill(~seen, 0), values.masked_fill(~seen, 0)  # other columns may hold anything
        out = F.scaled_dot_product_attention(
            ready(heads, q, heads.q_norm, rotation), keys, values, attn_mask=sees[:, None, None], enable_gqa=True
        )
        return out.flatten(1)

    def why_no_fp8(self, device: torch.device) -> None:
        return None

    def why_no_prompts(self, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        return None

    def store(
        self, heads: Heads, q: Tensor | None, k: Tensor, v: Tensor, prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor],
    ) -> tuple[Tensor | None, Tensor, Tensor]:  # fmt: skip
        keys, values, new = *memory, prompts.new
        rotation = rotation_at(heads.rotary_table, (new.columns - new.first)[:, None])
        own = ready(heads, k, heads.k_norm, rotation)[:, :, 0]
        own = put(keys, new.slots, new.columns, own)
        own_values = put(values, new.slots, new.columns, v.reshape(own.shape))
        return None if q is None else ready(heads, q, heads.q_norm, rotation)[:, :, 0], own, own_values

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, q_starts: Tensor, k_starts: Tensor, max_q: int, max_k: int,
        window: int | None = None,
    ) -> Tensor:  # fmt: skip
        return reference_attention(q, k, v, q_starts, k_starts, max_q, max_k, window)

    def add_norm(self, h: Tensor, y: Tensor | None, bias: Tensor | None, norm: Norm | None, *, is_pre: bool) -> Tensor:
        total = h if y is None else h + (y if bias is None else y + bias)
        normed = total if norm is None else normed_by(norm, total)
        if is_pre:
            if y is not None:
                h.copy_(total)
            return h if norm is None else normed
        return h.copy_(normed)

    def gate(self, y: Tensor, mlp: FeedForwardKind = "swiglu") -> Tensor:
        gate, other = y.chunk(2, dim=-1)
        return (F.silu(gate) if mlp == "swiglu" else F.gelu(gate, approximate="tanh")) * other

    def rows_in_fp8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return rows_in_fp8(x)

    def argmax(self, logits: Tensor) -> Tensor:
        return likeliest(logits)

    def draw(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        return pick_by_sort(logits.float(), temperature, top_k, top_p, uniform)


def ready(heads: Heads, x: Tensor, weight: Tensor | None, rotation: Rotation | None) -> Tensor:
    """Heads [B, heads K] after norm and rotary embedding: [B, heads, 1, K]."""
    x = x.reshape(len(x), -1, 1, heads.head_dim)
    return apply_rotary(x if weight is None else F.rms_norm(x, weight.shape, weight, heads.epsilon), rotation)


def put(memory: Tensor, rows: Tensor, columns: Tensor, x: Tensor) -> Tensor:
    """Stores x [N, G, K] in these rows and columns of `memory` [R, G, S, K], and returns it as that has it."""
    stored = narrowed(x, memory.dtype)
    as_bytes(memory)[rows, :, columns] = as_bytes(stored)
    return stored.to(x.dtype)


def normed_by(norm: Norm, x: Tensor) -> Tensor:
    """[..., D] -> [..., D]."""
    shape = x.shape[-1:]
    if norm.kind == "rms":
        return F.rms_norm(x, shape, norm.weight, norm.epsilon)
    return F.layer_norm(x, shape, norm.weight, norm.bias, norm.epsilon)


def prefixes_of(shared: SharedPrefix, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, G, P, K] of each row's shared prefix, and which of their columns it has, [B, P]. Waits for
    the device."""
    G, K = heads.kv_heads, heads.head_dim
    at = torch.arange(int(shared.counts.max()), device=shared.counts.device)
    has = at < shared.counts[:, None]
    lines = torch.where(has, shared.offsets[:, None] + at, 0)[:, None]  # [B, 1, P], in units of K
    found = []
    for number, memory in enumerate((shared.k, shared.v)):
        head = shared.k.shape[2] if shared.where is None else int(shared.where[3]) // K
        begin = 0 if shared.where is None else int(shared.where[number])
        own = as_bytes(memory).flatten()[begin:]
        own = own[: len(own) // K * K].view(-1, K)
        found.append(own[lines + head * torch.arange(G, device=at.device)[:, None]].view(memory.dtype))
    return found[0], found[1], has


def memory_of(columns: KVRange | GraphKVRange, num_rows: int, heads: Heads) -> tuple[Tensor, Tensor]:
    """Views [B, G, S, K] of keys and values; for a `GraphKVRange` as many columns as any row sees. Waits for the
    device."""
    if isinstance(columns, KVRange):
        return columns.k, columns.v
    k_at, v_at, row, head = columns.where.tolist()
    shape = (num_rows, heads.kv_heads, int(columns.last.max()) + 1, heads.head_dim)
    strides = (row, head, heads.head_dim, 1)
    return columns.memory.as_strided(shape, strides, k_at), columns.memory.as_strided(shape, strides, v_at)
