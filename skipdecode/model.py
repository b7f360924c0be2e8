"""OPT with one forward: which sublayers run is data (`LayerPlan`), never a second code path.

Numerically it is Hugging Face `OPTForCausalLM` (eval mode), 350m's post-norm and embedding projections included. Query,
key and value projections are fused into one. Training reuses the same blocks without a cache (`skipdecode.train`).

B rows, T new columns, S columns visible, H heads, K head dim, D width, E embedding width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends import cpu
from skipdecode.backends.cpu import Columns
from skipdecode.backends.layer import LayerKernel, LayerShape, Product, Prompts
from skipdecode.cache import KVCache
from skipdecode.config import POSITION_OFFSET, OPTConfig, Quantization, SwiftKVConfig
from skipdecode.ffn_rows import RowFFNs
from skipdecode.linear import Linear, Packed, check_int8, pack
from skipdecode.plan import LayerPlan
from skipdecode.sampler import likeliest
from skipdecode.swiftkv import SwiftKV

Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes the new K and V [B, H, T, K], gives all that may be attended to [B, H, S, K]."""


class HasColumns(Protocol):
    """A cache whose memory the kernels for one new column per row take (`KVCache.columns`)."""

    def columns(self, layer: int) -> Columns: ...


class Block(nn.Module):
    """One decoder layer: attention and feed-forward as two calls, since a plan may skip either."""

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        width, bias, affine = config.hidden_size, config.enable_bias, config.layer_norm_elementwise_affine
        self.num_heads = config.num_attention_heads
        self.is_pre_norm = config.do_layer_norm_before
        self.attn_norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.qkv = Linear(width, 3 * width, bias=bias)
        self.out_proj = Linear(width, width, bias=bias)
        self.ffn_norm = nn.LayerNorm(width, elementwise_affine=affine)
        self.fc1 = Linear(width, config.ffn_dim, bias=bias)
        self.fc2 = Linear(config.ffn_dim, width, bias=bias)
        self.kernel: LayerKernel | None = None
        self.query_kernel: LayerKernel | None = None

    def fuse(self, query: Linear | None = None) -> None:
        """`step` and `read` as one kernel each, where its products are the kernels' own; `query` as in `step`."""
        linears = (self.qkv, self.out_proj, self.fc1, self.fc2, *([] if query is None else [query]))
        products = [linear.product() for linear in linears]
        if None not in products:
            qkv, out, fc1, fc2, *queries = cast(list[Product], products)

            def kernel(first: Product) -> LayerKernel:
                dim = out.outputs // self.num_heads
                shape = LayerShape(self.num_heads, self.num_heads, dim, self.attn_norm.eps, self.is_pre_norm)
                return LayerKernel(shape, self.attn_norm, first, out, self.ffn_norm, fc1, fc2)

            self.kernel = kernel(qkv)
            self.query_kernel = kernel(queries[0]) if queries else None

    def attend(self, h: Tensor, store: Store, mask: Tensor | None, *, only_last: bool = False) -> Tensor:
        """h [B, T, D] -> [B, T, D]. `mask` [B, 1, T, S] bool, True = may attend; None: causal, no padding.

        `only_last`: keys and values of all columns, and only the last one goes on, [B, 1, D].
        """
        B, T, D = h.shape
        x = self.attn_norm(h) if self.is_pre_norm else h
        qkv = self.qkv(x).view(B, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, H, T, K]
        keys, values = store(k, v)
        if only_last:
            h, q, mask = h[:, -1:], q[:, :, -1:], None if mask is None else mask[:, :, -1:]
        return self._add_attention(h, attention(q, keys, values, mask).transpose(1, 2).reshape(h.shape))

    def step(
        self,
        h: Tensor,
        cache: HasColumns,
        layer: int,
        *,
        attends: bool = True,
        feeds: bool = True,
        query: Linear | None = None,
    ) -> Tensor:
        """`attend`, `feed` or both for the one column behind those in `cache`: h [B, 1, D] -> [B, 1, D], the same
        memory where that is one kernel. `query`: K and V of that column are in `cache` already, and the query comes
        from this projection (SwiftKV)."""
        kernel = self.kernel if query is None or not attends else self.query_kernel
        if kernel is not None and (attends or feeds):
            return kernel.step(h, cache.columns(layer) if attends else None, feeds=feeds)
        if attends:
            x = self.attn_norm(h) if self.is_pre_norm else h
            if query is not None:
                out = cpu.attend(query(x)[:, 0], *cache.columns(layer))
            else:
                q, k, v = self.qkv(x)[:, 0].chunk(3, dim=-1)  # each [B, D]
                out = cpu.attend(q, *cache.columns(layer), (k, v))
            h = self._add_attention(h, out[:, None])
        return self.feed(h) if feeds else h

    def read(
        self, h: Tensor, prompts: Prompts, cache: KVCache, layer: int, *, attends: bool, feeds: bool, only_last: bool
    ) -> Tensor:
        """`attend`, `feed` or both for whole prompts, as one kernel into an empty cache: h [N, D] -> [N, D], the same
        memory; with `only_last` -> [B, 1, D]."""
        assert self.kernel is not None, "a layer that is not one kernel"
        read = self.kernel.read_last if only_last else self.kernel.read
        return read(h, prompts, (cache.k[layer], cache.v[layer]) if attends else None, feeds=feeds)

    def attend_to(self, h: Tensor, query: nn.Module, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over K and V [B, H, S, K] from elsewhere, with a query projection from elsewhere (SwiftKV)."""
        B, T, D = h.shape
        q = query(self.attn_norm(h)).view(B, T, self.num_heads, D // self.num_heads).transpose(1, 2)  # [B, H, T, K]
        return self._add_attention(h, attention(q, keys, values, mask).transpose(1, 2).reshape(h.shape))

    def _add_attention(self, h: Tensor, out: Tensor) -> Tensor:
        h = self.out_proj(out, residual=h)
        return h if self.is_pre_norm else self.attn_norm(h)

    def feed(self, h: Tensor) -> Tensor:
        """The feed-forward block: [B, T, D] -> [B, T, D]."""
        return self.settle(self.add_feed(h))

    def add_feed(self, h: Tensor) -> Tensor:
        """h + FFN(norm(h)): the state whose likeness to h says whether the block was needed (`ffn_rows`)."""
        x = self.ffn_norm(h) if self.is_pre_norm else h
        added: Tensor = self.fc2(self.fc1(x, activation="relu"), residual=h)
        return added

    def settle(self, h: Tensor) -> Tensor:
        """350m's norm behind the block."""
        return h if self.is_pre_norm else self.ffn_norm(h)

    def forward(self, h: Tensor, store: Store, mask: Tensor | None) -> Tensor:
        """The whole layer: [B, T, D] -> [B, T, D]; the call that FSDP gathers the layer's weights for."""
        return self.feed(self.attend(h, store, mask))


class OPT(nn.Module):
    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.config = config
        width, embed = config.hidden_size, config.embed_dim
        self.embed_tokens = nn.Embedding(config.vocab_size, embed)  # tied to the head
        self.embed_positions = nn.Embedding(config.max_position_embeddings + POSITION_OFFSET, width)
        self.project_in = nn.Linear(embed, width, bias=False) if embed != width else None
        self.project_out = nn.Linear(width, embed, bias=False) if embed != width else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.final_norm = (
            nn.LayerNorm(width, elementwise_affine=config.layer_norm_elementwise_affine)
            if config.has_final_norm
            else None
        )
        has_shared = config.swiftkv is not None and config.swiftkv.num_shared(config) > 0
        self.swift = SwiftKV(config) if has_shared else None
        self._packed_head: Packed | None = None
        self.quantization: Quantization | None = None
        """Of the packed weights."""

    def pack(self, quantization: Quantization | None = None) -> "OPT":
        """For decoding on a CPU: weights as its matrix units read them (`skipdecode.linear`). Gives back itself.

        From then on the model is for decoding: it cannot be trained, saved, copied or converted. The head is a packed
        copy of the embedding, which stays. Elsewhere nothing happens, and `quantization` is a ValueError.
        """
        if self.is_packed:
            assert quantization == self.quantization, "packed already"
            return self
        if quantization == "int8":  # all of them first: half a model is of no use
            check_int8(self.embed_tokens.weight)
            for module in self.modules():
                if isinstance(module, Linear):
                    check_int8(module.weight)
        self._packed_head = pack(self.embed_tokens.weight, quantization)
        for module in self.modules():
            if isinstance(module, Linear | SwiftKV):
                module.pack(quantization)
        for i, block in enumerate(self.layers):
            block.fuse(self.swift.query(i) if self.swift is not None and i >= self.swift.first else None)
        self.quantization = quantization
        return self

    def with_swiftkv(self, kv_layers: int, group_size: int = 1) -> "OPT":
        """A model that shares these weights and has those of SwiftKV beside them, taken from these (`copy_teacher`)."""
        other = self._with(SwiftKVConfig(kv_layers, group_size))
        if other.swift is not None:
            other.swift.to(dtype=self.dtype).to_empty(device=self.device)
            other.swift.copy_teacher(self.layers)
        return other

    def without_swiftkv(self) -> "OPT":
        """A model that shares these weights, but for those of SwiftKV."""
        return self._with(None)

    def _with(self, shape: SwiftKVConfig | None) -> "OPT":
        """This model with room for SwiftKV's weights of that shape, and none of its own."""
        assert not self.is_packed, "packed weights cannot be shared"
        with torch.device("meta"):
            other = OPT(replace(self.config, swiftkv=shape))
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("swift.")}
        other.load_state_dict(own, strict=False, assign=True)
        return other.eval().requires_grad_(False)

    @property
    def is_packed(self) -> bool:
        return any(isinstance(module, Linear) and module.packed is not None for module in self.modules())

    @property
    def is_fused(self) -> bool:
        """Whether every layer is one kernel (`backends.layer`)."""
        return all(block.kernel is not None for block in self.layers)

    @property
    def weight_itemsize(self) -> int:
        """Bytes that a product reads per weight."""
        return 1 if self.quantization == "int8" else self.dtype.itemsize

    @property
    def layers(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions [...] int64 -> [..., D]. Position 0 is the first real token, -1 a padding column."""
        h: Tensor = self.embed_tokens(tokens)
        if self.project_in is not None:
            h = self.project_in(h)
        positioned: Tensor = h + self.embed_positions(positions + POSITION_OFFSET)
        return positioned

    def head(self, h: Tensor) -> Tensor:
        """Final norm and tied head: [..., D] -> logits [..., V]."""
        x = self._head_states(h)
        if self._packed_head is not None:
            return self._packed_head(x, None)
        logits: Tensor = F.linear(x, self.embed_tokens.weight)
        return logits

    def likeliest(self, h: Tensor) -> Tensor:
        """The likeliest token by the logits of `head`, the lower one of equals: [B, D] -> [B] int64. Where a kernel can
        do without them they are not written."""
        if self._packed_head is not None:
            return self._packed_head.likeliest(self._head_states(h))
        return likeliest(self.head(h))

    def _head_states(self, h: Tensor) -> Tensor:
        """[..., D] -> what the embeddings are compared with, [..., E]."""
        if self.final_norm is not None:
            h = self.final_norm(h)
        if self.project_out is not None:
            h = self.project_out(h)
        return h

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        plan: LayerPlan,
        rows: RowFFNs | None = None,
        *,
        only_likeliest: bool = False,
    ) -> Tensor:
        """Feeds T columns behind those in `cache` and fills it: [B, T] int64 -> logits of the last, [B, V].

        `rows` decides on the blocks in `plan.by_row`. `only_likeliest`: the likeliest token instead, [B] int64.
        """
        T = tokens.shape[1]
        has_kernels = cache.can_attend and not torch.is_grad_enabled()  # they have no gradient
        is_prompt = T > 1 and cache.length == 0 and not plan.by_row
        # behind the last layer's keys and values only the last column of a prompt is of use
        top = max(plan.layers, default=None) if is_prompt else None
        prompts = Prompts(positions) if is_prompt and has_kernels and self.is_fused else None
        if prompts is not None:
            tokens, positions = prompts.pack(tokens), prompts.pack(positions)  # then h is [N, D]
        h = self.embed(tokens, positions)
        newest = cache if T == 1 and has_kernels else None  # where a kernel for one column goes on
        mask = cache.mask(T) if newest is None and prompts is None else None
        has_shared = False  # K/V of the layers from plan.kv_layers on are written
        for i, block in enumerate(self.layers):
            is_by_row = bool(plan.by_row) and plan.by_row[i]
            attends, feeds, query = plan.attn[i], plan.ffn[i] and not is_by_row, None
            if attends and plan.kv_layers is not None and i >= plan.kv_layers:
                assert self.swift is not None, "a plan for SwiftKV, and a model without"
                if not has_shared and prompts is not None:
                    self.swift.write_prompts(h, prompts, cache, plan.attn)
                    h, prompts, newest = prompts.last(h), None, cache.at(T - 1)
                elif not has_shared:
                    self.swift.write(h, cache, plan.attn)
                    h, mask = h[:, -1:], mask if mask is None else mask[:, :, -1:]
                has_shared, query = True, self.swift.query(i)
                if newest is None:
                    h, attends = block.attend_to(h, query, *cache.read(i, T), mask), False
            if newest is not None:
                h = block.step(h, newest, i, attends=attends, feeds=feeds, query=query)
            elif prompts is None:
                h = block.attend(h, partial(cache.append, i), mask, only_last=i == top) if attends else h
                h = block.feed(h[:, -1:] if i == top else h) if feeds else h
            elif attends or feeds:
                h = block.read(h, prompts, cache, i, attends=attends, feeds=feeds, only_last=i == top)
                prompts = None if i == top else prompts  # then h is [B, 1, D]
            if is_by_row:
                assert rows is not None, "the plan leaves blocks to the rows, and nothing decides for them"
                h = rows.feed(i, block, h)
        cache.length += T
        last = (h if prompts is None else prompts.last(h))[:, -1]
        return self.likeliest(last) if only_likeliest else self.head(last)


def attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, T, K] queries over [B, H, S, K] keys and values -> [B, H, T, K]; mask None: causal, no padding."""
    is_causal = mask is None and q.shape[2] > 1
    device = q.device.type
    if device == "cpu" and torch.is_autocast_enabled(device):  # its bfloat16 backward pass doubles a training step
        with torch.autocast(device, enabled=False):
            q, keys, values = q.float(), keys.float(), values.float()
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=is_causal)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=is_causal)
