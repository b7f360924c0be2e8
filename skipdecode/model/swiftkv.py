"""SwiftKV (arXiv 2410.03960): the K/V of the upper layers come from one lower layer's state.

`norm(h_l)`, where h_l enters layer l, is projected to the keys and values of every layer from l on, so that prompt
tokens stop there; with AcrossKV, g neighbouring layers share K/V. These layers have query projections of their own. The
weights are distilled from the model itself (`skipdecode.training`); this module holds and applies them.

B rows, T tokens, D width, G key/value heads, K head dim.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import FusedKVStore, PackedWeight
from skipdecode.backends.device import backend_on
from skipdecode.backends.rope import RotaryTables
from skipdecode.config.model import DecoderConfig, Quantization
from skipdecode.kv.view import KVView
from skipdecode.model.layer import Layer, kernel_shape, make_norm
from skipdecode.model.linear import Linear


class SwiftKV(nn.Module):
    """The weights that SwiftKV adds to a model: `norm`, a query projection per upper layer, and a fused K/V
    projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.swiftkv is not None
        shape, width, bias = config.swiftkv, config.hidden_size, config.qkv_bias
        self.config, self.first, self.group_size = config, shape.kv_layers, shape.group_size
        self.norm = make_norm(config, width)
        self.q = nn.ModuleList(Linear(width, config.q_dim, bias=bias) for _ in range(shape.num_shared(config)))
        self._num_groups = shape.num_groups(config)
        self._packed: list[PackedWeight] = []  # the parts of `kv.weight`, one per group
        self._store_kernel: FusedKVStore | None = None
        # [group][K, V] along its rows
        self.kv = nn.Linear(width, 2 * config.kv_dim * shape.num_groups(config), bias=bias)

    @torch.no_grad()
    def copy_teacher(self, blocks: Sequence[Layer]) -> None:
        """Initialises distillation: queries and norm as in the model, K and V the mean over each group (paper, 3.2)."""
        self.norm.load_state_dict(blocks[self.first].attn_norm.state_dict())
        shared = blocks[self.first :]
        for query, block in zip(self.q, shared, strict=True):
            for name, own in query.named_parameters():
                own.copy_(getattr(block.qkv, name)[: self.config.q_dim])
        for name, own in self.kv.named_parameters():
            parts = [getattr(block.qkv, name)[self.config.q_dim :] for block in shared]  # K above V, as in `kv`
            groups = [parts[at : at + self.group_size] for at in range(0, len(parts), self.group_size)]
            own.copy_(torch.cat([torch.stack(group).mean(dim=0) for group in groups]))

    def pack(self, quantization: Quantization | None, layers: Sequence[Layer], rotary_tables: RotaryTables) -> None:
        """Packs as `Linear.pack` does, K/V by group, since a step needs only those of the layers that it runs.

        `layers` and `rotary_tables` are the model's.
        """
        backend = backend_on(self.kv.weight.device)
        packed = [backend.pack(part, quantization) for part in self.kv.weight.chunk(self._num_groups)]
        if None in packed:
            return
        self._packed = [part for part in packed if part is not None]
        self.kv.register_parameter("weight", None)
        biases = [None] * self._num_groups if self.kv.bias is None else self.kv.bias.chunk(self._num_groups)
        products = [part.product(bias) for part, bias in zip(self._packed, biases, strict=True)]
        k_norms = [layers[self.leader(group)].k_norm for group in range(self._num_groups)]
        tables = [rotary_tables[self.leader(group)] for group in range(self._num_groups)]
        shape = kernel_shape(self.config, next((table for table in tables if table is not None), None))
        self._store_kernel = backend.fuse_kv_store(shape, self.norm, products, k_norms, tables)

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        """(object, method, stage of a decode step) for `actors.measuring.profile`."""
        return [(self, "write", "swiftkv"), *((query, "forward", "query, key, value") for query in self.q)]

    def query(self, layer: int) -> Linear:
        """The query projection of `layer` >= first."""
        return cast(Linear, self.q[layer - self.first])

    def group(self, layer: int) -> int:
        return (layer - self.first) // self.group_size

    def leader(self, group: int) -> int:
        """The layer that stores a group's K/V."""
        return self.first + group * self.group_size

    def state(self, h: Tensor, kv: KVView, layers: Sequence[Layer]) -> Tensor:
        """What h [B, T, D] entering layer l becomes before it is projected: [B, T, D]."""
        normed: Tensor = self.norm(h)
        return normed

    def teacher_kv(self, h: Tensor, kv: KVView, layers: Sequence[Layer], number: int) -> Tensor:
        """K, before norm and rotary embedding, and V of that layer's own: [B, T, outputs of a group]."""
        layer = layers[number]
        projected: Tensor = layer.qkv(layer.attn_norm(h))
        return projected[..., self.config.q_dim :]

    def project(self, h: Tensor, start: int = 0, end: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """h [B, T, D] entering layer l -> K, before norm and rotary embedding, and V [B, G, T, K] of groups
        start..end-1."""
        width = 2 * self.config.kv_dim
        rows = slice(start * width, None if end is None else end * width)
        bias = None if self.kv.bias is None else self.kv.bias[rows]
        x = self.norm(h)
        if self._packed:
            groups = range(start, len(self._packed) if end is None else end)
            biases = [None] * len(self._packed) if self.kv.bias is None else self.kv.bias.chunk(len(self._packed))
            kv = torch.cat([self._packed[group](x, biases[group]) for group in groups], dim=-1)
        else:
            kv = F.linear(x, self.kv.weight[rows], bias)
        kv = kv.view(*h.shape[:2], -1, 2, self.config.num_kv_heads, self.config.head_dim)  # [B, T, groups, 2, G, K]
        pairs = (group.permute(2, 0, 3, 1, 4).unbind(0) for group in kv.unbind(2))
        return [(k, v) for k, v in pairs]

    def write(self, h: Tensor, kv: KVView, attn: Sequence[bool], layers: Sequence[Layer]) -> None:
        """Stores K and V of every group with a layer that runs (`attn` [L]), from h [B, T, D] (or as `kv` has it)."""
        needed = sorted({self.group(layer) for layer in range(self.first, len(attn)) if attn[layer]})
        if self._store_kernel is not None and kv.stores_by_kernel:
            return kv.store_by_kernel(self._store_kernel, h, {group: self.leader(group) for group in needed})
        starts = [group for group in needed if group - 1 not in needed]
        ends = [group + 1 for group in needed if group + 1 not in needed]
        for start, end in zip(starts, ends, strict=True):  # adjacent groups are one product
            for group, (k, v) in enumerate(self.project(h, start, end), start):
                leader = self.leader(group)
                kv.store(leader, layers[leader].keys(k, kv, leader), v)
        return None


def hf_parts(module: str, config: DecoderConfig) -> list[tuple[str, int]]:
    """(Hugging Face name, rows) of the parts of our `module`; 0 rows for all. As in released checkpoints, a module has
    the name of what it replaces with the suffix `_swiftkv`."""
    assert config.swiftkv is not None
    first, size = config.swiftkv.kv_layers, config.swiftkv.group_size
    if module == "norm":
        return [("norm_swiftkv", 0)]
    if module == "kv":
        leaders = range(first, config.num_hidden_layers, size)
        return [(f"layers.{leader}.self_attn.{x}_proj_swiftkv", config.kv_dim) for leader in leaders for x in "kv"]
    return [(f"layers.{first + int(module.removeprefix('q.'))}.self_attn.q_proj_swiftkv", 0)]
