"""SwiftKV (arXiv 2410.03960) for OPT: the K/V of the upper layers come from one lower layer's state.

`norm(h_l)`, where h_l enters layer l, gives the keys and values of every layer from l on in one projection, so prompt
tokens stop there; AcrossKV lets g neighbouring layers share theirs. Queries of these layers are projections of their
own. The weights are distilled from the model itself; here they are only held and applied.

B rows, T columns, D width, H heads, K head dim, G groups.
"""

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.layer import LayerShape, Product, Prompts, StoreKernel
from skipdecode.config import OPTConfig, Quantization
from skipdecode.linear import Linear, Packed, pack, product


class Teacher(Protocol):
    """What is copied from a decoder layer (`skipdecode.model.Block`)."""

    attn_norm: nn.LayerNorm
    qkv: Linear


class Columns(Protocol):
    """Where K and V go (`skipdecode.cache.KVCache`)."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> object: ...


class Memory(Protocol):
    """K and V of every layer, [B, H, S, K] (`skipdecode.cache.KVCache`)."""

    k: list[Tensor]
    v: list[Tensor]


class SwiftKV(nn.Module):
    """What a SwiftKV checkpoint has beside the model: `norm`, a query projection per upper layer, fused K/V."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        assert config.swiftkv is not None
        shape, width, bias = config.swiftkv, config.hidden_size, config.enable_bias
        self.num_heads, self.first, self.group_size = config.num_attention_heads, shape.kv_layers, shape.group_size
        self.norm = nn.LayerNorm(width, elementwise_affine=config.layer_norm_elementwise_affine)
        self.q = nn.ModuleList(Linear(width, width, bias=bias) for _ in range(shape.num_shared(config)))
        self._num_groups = shape.num_groups(config)
        self._packed: list[Packed] = []  # the parts of `kv.weight`, one per group
        self._store_kernel: StoreKernel | None = None
        self.kv = nn.Linear(width, 2 * width * shape.num_groups(config), bias=bias)  # [group][K, V] along its rows

    @torch.no_grad()
    def copy_teacher(self, blocks: Sequence[Teacher]) -> None:
        """Where distillation starts: queries and norm as they are, K and V the mean over each group (paper, 3.2)."""
        self.norm.load_state_dict(blocks[self.first].attn_norm.state_dict())
        shared = blocks[self.first :]
        for query, block in zip(self.q, shared, strict=True):
            for name, own in query.named_parameters():
                own.copy_(getattr(block.qkv, name).chunk(3)[0])
        for name, own in self.kv.named_parameters():
            parts = [torch.cat(getattr(block.qkv, name).chunk(3)[1:]) for block in shared]  # K above V, as in `kv`
            groups = [parts[at : at + self.group_size] for at in range(0, len(parts), self.group_size)]
            own.copy_(torch.cat([torch.stack(group).mean(dim=0) for group in groups]))

    def pack(self, quantization: Quantization | None = None) -> None:
        """As `Linear.pack`, for K/V by group, since a step needs those of the layers it runs only."""
        packed = [pack(part, quantization) for part in self.kv.weight.chunk(self._num_groups)]
        if None not in packed:
            self._packed = [part for part in packed if part is not None]
            self.kv.register_parameter("weight", None)
            biases = [None] * self._num_groups if self.kv.bias is None else self.kv.bias.chunk(self._num_groups)
            products = [product(part, bias) for part, bias in zip(self._packed, biases, strict=True)]
            if None not in products:
                dim = self.kv.in_features // self.num_heads
                shape = LayerShape(self.num_heads, self.num_heads, dim, self.norm.eps)
                self._store_kernel = StoreKernel(shape, self.norm, cast(list[Product], products))

    def query(self, layer: int) -> Linear:
        """The query projection of `layer` >= first."""
        return cast(Linear, self.q[layer - self.first])

    def group(self, layer: int) -> int:
        return (layer - self.first) // self.group_size

    def leader(self, group: int) -> int:
        """The layer whose cache a group shares."""
        return self.first + group * self.group_size

    def project(self, h: Tensor, start: int = 0, end: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """h [B, T, D] entering layer l -> K and V [B, H, T, K] of groups start..end-1."""
        B, T, D = h.shape
        width = 2 * D
        rows = slice(start * width, None if end is None else end * width)
        bias = None if self.kv.bias is None else self.kv.bias[rows]
        x = self.norm(h)
        if self._packed:
            groups = range(start, len(self._packed) if end is None else end)
            biases = [None] * len(self._packed) if self.kv.bias is None else self.kv.bias.chunk(len(self._packed))
            kv = torch.cat([self._packed[group](x, biases[group]) for group in groups], dim=-1)
        else:
            kv = F.linear(x, self.kv.weight[rows], bias)
        kv = kv.view(B, T, -1, 2, self.num_heads, D // self.num_heads)
        return [tuple(group.permute(2, 0, 3, 1, 4).unbind(0)) for group in kv.unbind(2)]  # type: ignore[misc]

    def write(self, h: Tensor, cache: Columns, attn: Sequence[bool]) -> None:
        """Stores K and V of every group of which `attn` [L] runs a layer, from h [B, T, D]."""
        needed = self._needed(attn)
        starts = [group for group in needed if group - 1 not in needed]
        ends = [group + 1 for group in needed if group + 1 not in needed]
        for start, end in zip(starts, ends, strict=True):  # rows of the weight that lie together: one product
            for group, (k, v) in enumerate(self.project(h, start, end), start):
                cache.append(self.leader(group), k, v)

    def write_prompts(self, h: Tensor, prompts: Prompts, cache: Memory, attn: Sequence[bool]) -> None:
        """The same for whole prompts as one kernel, from h [N, D] into an empty cache."""
        assert self._store_kernel is not None, "weights that no kernel takes"
        leaders = {group: self.leader(group) for group in self._needed(attn)}
        self._store_kernel(h, prompts, {group: (cache.k[layer], cache.v[layer]) for group, layer in leaders.items()})

    def _needed(self, attn: Sequence[bool]) -> list[int]:
        """The groups of which `attn` runs a layer."""
        return sorted({self.group(layer) for layer in range(self.first, len(attn)) if attn[layer]})
