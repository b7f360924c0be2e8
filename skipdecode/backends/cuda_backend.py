"""The back end of CUDA devices: the kernels of decode steps and of prompts, and the order in which a layer calls them.

A layer is four cuBLAS products with three or four kernels between them (`cuda_kernels`): attention of the new token,
which also stores its key and value, and residual, bias and norm in one. An OPT layer is 7 kernels, a Llama layer 8.
Prompts without padding take the same way, with torch's flash attention behind a kernel that stores keys and values.
Where that cannot run, or takes no such type, prompts run in parts, by torch. What a kernel computes, CUDA graphs and
cache memory are elsewhere.

B rows, N tokens of prompts, D width, H query heads, G KV heads, K head dim, F feed-forward width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.backend import (
    Activation,
    Backend,
    DecodeAttention,
    FusedLayer,
    GraphKVRange,
    KVRange,
    LayerNorms,
    LayerShape,
    PackedPrompts,
    Product,
    SharedPrefix,
    activate,
)
from skipdecode.backends.block_quantization import StoredBlocks
from skipdecode.backends.cuda_fp8 import STEP, Fp8Product, Fp8Weight
from skipdecode.backends.cuda_kernels import PREFIX_ROWS, Heads, Kernels, Norm
from skipdecode.backends.fp8 import FP8, as_bytes, widened
from skipdecode.backends.torch_sampling import mask
from skipdecode.config.model import Quantization


@dataclass(eq=False)
class CudaWeight:
    """A plain weight [out, in], as cuBLAS takes it. Biases and ReLU are fused into the product's epilogue."""

    weight: Tensor
    kernels: Kernels

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor:
        if activation == "relu" and bias is not None:
            y = _relu(x, self.weight, bias)
        else:
            y = activate(F.linear(x, self.weight, bias), activation)
        return y if residual is None else residual + y

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, self.weight.t(), out=out)

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        logits = F.linear(x, self.weight)
        return self.kernels.argmax(logits if allowed is None else mask(logits, allowed))

    def ordered(self, bias: Tensor) -> Tensor:
        return bias

    def product(self, bias: Tensor | None) -> "CudaProduct":
        return CudaProduct(self.weight, bias)


@dataclass(frozen=True, eq=False)
class CudaProduct:
    """A linear layer: a weight [out, in] and a bias [out]."""

    weight: Tensor
    bias: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out]."""
        return F.linear(x, self.weight, self.bias)

    def relu(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).relu_() if self.bias is None else _relu(x, self.weight, self.bias)

    def without_bias(self, x: Tensor) -> Tensor:
        """[B, in] -> [B, out]; `Kernels.add_norm` adds the bias."""
        return F.linear(x, self.weight)

    def tail(self, start: int) -> "CudaProduct":
        """The part for the outputs from `start` on."""
        return CudaProduct(self.weight[start:], None if self.bias is None else self.bias[start:])


def _relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x W^T + b) [..., out] as one cuBLASLt kernel."""
    flat: Tensor = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
    return flat.view(*x.shape[:-1], weight.shape[0])


AnyProduct = CudaProduct | Fp8Product


class PromptRange(NamedTuple):
    """The cache of one layer, into which prompts are fed without padding."""

    k: Tensor
    """[R, G, S, K]"""
    v: Tensor
    prompts: PackedPrompts
    shared: SharedPrefix | None = None
    """What lies before the tokens that are given, where that is not in `k` and `v`."""


def attend_prompts(kernels: Kernels, heads: Heads, q: Tensor, k: Tensor, v: Tensor, columns: PromptRange) -> Tensor:
    """Attention of the new tokens of prompts, whose k and v [N, G K] are stored first: q [N, H K] -> [N, H K]."""
    keys, values, prompts, shared = columns
    new, seen = prompts.new, prompts.seen
    queries, k, v = kernels.store(heads, q, k, v, prompts, (keys, values))
    assert queries is not None
    if seen is not new and shared is not None:
        k, v = _behind_prefixes(shared, prompts, k, v)
    elif seen is not new:  # what came before lies in the cache alone
        found = (as_bytes(memory)[seen.slots, :, seen.columns].view(memory.dtype) for memory in (keys, values))
        k, v = (widened(own, q.dtype) for own in found)
    out = kernels.attend_packed(queries, k, v, new.starts, seen.starts, new.longest, seen.longest, heads.window)
    return out.flatten(1)


def _behind_prefixes(shared: SharedPrefix, prompts: PackedPrompts, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values of shared prefixes, with those of the tokens that are given, [N, G, K], behind them."""
    new, cached, rows, positions = prompts.merged
    size = shared.k.shape[1] * shared.k.shape[2]
    place = shared.offsets[rows]
    prefix, column = place // size, place % size + positions
    found = []
    for own, memory in ((k, shared.k), (v, shared.v)):
        seen = own.new_empty(len(new) + len(cached), *own.shape[1:])
        seen[new] = own
        seen[cached] = widened(as_bytes(memory)[prefix, :, column].view(memory.dtype), own.dtype)
        found.append(seen)
    return found


class CudaKVStore:
    """Stores the keys and values of prompts for one or several layers (`FusedKVStore`)."""

    def __init__(
        self, kernels: Kernels, norm: Norm | None, products: Sequence[AnyProduct], heads: Sequence[Heads]
    ) -> None:
        """`norm`: of the states; None: they are taken as they are. `products`, `heads`: of each layer, its projection
        D -> 2 G K, keys above values, and its heads."""
        self._kernels, self._norm, self._products, self._heads = kernels, norm, products, heads

    def __call__(self, h: Tensor, prompts: PackedPrompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        x = h if self._norm is None else self._kernels.add_norm(h, None, None, self._norm, is_pre=True)
        for layer, own in memory.items():
            k, v = self._products[layer](x).chunk(2, dim=-1)
            self._kernels.store(self._heads[layer], None, k, v, prompts, own)


class CudaLayer:
    """A decoder layer for one new token per row, or for packed prompts. `attention` and `feed` take normed states and
    leave the residual and the last bias to the next norm."""

    def __init__(
        self,
        kernels: Kernels,
        shape: LayerShape,
        norms: LayerNorms,
        products: Sequence[AnyProduct],
    ) -> None:
        self._qkv, self._out, self._fc1, self._fc2 = products
        self._kernels, self._mlp, self.is_pre_norm = kernels, shape.mlp, shape.is_pre_norm
        self.attn_norm, self.ffn_norm = _norm(shape, norms.attn), _norm(shape, norms.ffn)
        self._out_norms = [None if norm is None else _norm(shape, norm) for norm in (norms.attn_out, norms.ffn_out)]
        products_and_norms = zip((self._out, self._fc2), self._out_norms, strict=True)
        self.out_bias, self.fc2_bias = (one.bias if norm is None else None for one, norm in products_and_norms)
        sizes, weights = (shape.heads, shape.kv_heads, shape.head_dim), (_weight(norms.q), _weight(norms.k))
        self._heads = Heads(*sizes, shape.rotary_table, *weights, epsilon=shape.epsilon, window=shape.window)
        queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        assert self._qkv.outputs in (queries, queries + 2 * kv), (self._qkv.outputs, queries, kv)
        self._sizes = [queries] if self._qkv.outputs == queries else [queries, kv, kv]
        self.store: CudaKVStore | None = None
        if len(self._sizes) == 3:
            first = self.attn_norm if shape.is_pre_norm else None
            self.store = CudaKVStore(kernels, first, [self._qkv.tail(queries)], [self._heads])

    @property
    def head_dim(self) -> int:
        return self._heads.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The type of states."""
        return self._qkv.dtype

    @property
    def device(self) -> torch.device:
        return self._qkv.weight.device

    def attention(self, x: Tensor, columns: KVRange | GraphKVRange | PromptRange) -> Tensor:
        """Normed states [B, D] -> [B, D], without `out_bias`."""
        parts = torch.split(self._qkv(x), self._sizes, dim=-1)
        k, v = parts[1:] if len(parts) == 3 else (None, None)
        if isinstance(columns, PromptRange):
            assert k is not None, "keys and values of prompts are stored as they are fed"
            assert v is not None
            y = attend_prompts(self._kernels, self._heads, parts[0], k, v, columns)
        else:
            y = self._kernels.attend(self._heads, parts[0], k, v, columns)
        return self._last(self._out, y, self._out_norms[0])

    def feed(self, x: Tensor) -> Tensor:
        """Normed states [B, D] -> [B, D], without `fc2_bias`."""
        y = self._fc1.relu(x) if self._mlp == "relu" else self._kernels.gate(self._fc1(x), self._mlp)
        return self._last(self._fc2, y, self._out_norms[1])

    def _last(self, product: AnyProduct, y: Tensor, norm: Norm | None) -> Tensor:
        """A sublayer's last product, without its bias, or with it through the norm of its output."""
        made = product.without_bias(y) if norm is None else product(y)
        return made if norm is None else self._kernels.add_norm(made, None, None, norm, is_pre=True)

    def run_prompts(
        self,
        h: Tensor,
        prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        runs_ffn: bool,
        shared: SharedPrefix | None = None,
    ) -> Tensor:
        assert len(h) == prompts.num_tokens, (len(h), prompts.num_tokens)
        columns = None if memory is None else [PromptRange(*memory, prompts, shared)]
        return _run(self._kernels, [self], columns, h, runs_ffn=runs_ffn)


class CudaBackend(Backend):
    """`Backend` for CUDA devices, or for any device that `kernels` run on."""

    supports_multi_token_rows = needs_query_index = True
    supports_graph_capture = True
    prefix_group_rows = PREFIX_ROWS

    def __init__(
        self, kernels: Kernels, *, no_packed_prompts: str | None = None, no_shared_prefixes: str | None = None
    ) -> None:
        """`no_packed_prompts`: why no prompts are fed without padding in this process; None: some are.
        `no_shared_prefixes`: likewise of prefixes that are read in place."""
        self.kernels, self._no_packed_prompts = kernels, no_packed_prompts
        self._no_shared_prefixes = no_shared_prefixes

    def pack(
        self,
        weight: Tensor,
        quantization: Quantization | None = None,
        *,
        is_gated: bool = False,
        blocks: StoredBlocks | None = None,
    ) -> CudaWeight | Fp8Weight:
        self.check(weight, quantization, is_gated=is_gated)
        if quantization == "fp8":
            return Fp8Weight.of(weight.detach(), self.kernels)
        return CudaWeight(weight.detach(), self.kernels)

    def check(self, weight: Tensor, quantization: Quantization | None, *, is_gated: bool = False) -> None:
        if quantization != "fp8":
            super().check(weight, quantization)
            return
        problem = self.why_no_fp8(weight.device)
        if problem is None and weight.device.type == "cuda" and weight.dtype != torch.bfloat16:
            problem = f"this is {str(weight.dtype).removeprefix('torch.')}, and fp8 products give bfloat16"
        if problem is None and (inputs := weight.shape[1]) % STEP:
            problem = f"inputs come in multiples of {STEP}, and these are {inputs}"
        if problem is not None:
            raise ValueError(f"quantization: no fp8 weights here: {problem}")

    def fuse(
        self,
        shape: LayerShape,
        norms: LayerNorms,
        products: Sequence[Product | None],
    ) -> CudaLayer | None:
        if None in products:
            return None
        return CudaLayer(self.kernels, shape, norms, cast(Sequence[AnyProduct], products))

    def prepare_step(
        self,
        layers: Sequence[FusedLayer],
        rows: int,
        columns: Sequence[KVRange | GraphKVRange] | None,
        *,
        runs_ffn: bool,
    ) -> Callable[[Tensor], Tensor]:
        return partial(_run, self.kernels, cast(Sequence[CudaLayer], layers), columns, runs_ffn=runs_ffn)

    def fuse_kv_store(
        self,
        shape: LayerShape,
        norm: nn.Module,
        products: Sequence[Product | None],
        k_norms: Sequence[nn.Module | None],
        tables: Sequence[Tensor | None],
    ) -> CudaKVStore | None:
        if None in products:
            return None
        sizes = shape.heads, shape.kv_heads, shape.head_dim
        heads = [
            Heads(*sizes, table, None, _weight(k_norm), epsilon=shape.epsilon)
            for table, k_norm in zip(tables, k_norms, strict=True)
        ]
        return CudaKVStore(self.kernels, _norm(shape, norm), cast(Sequence[AnyProduct], products), heads)

    def why_no_fp8(self, device: torch.device) -> str | None:
        return self.kernels.why_no_fp8(device)

    def supports_packed_prompts(self, layers: Sequence[FusedLayer | None], memory: Tensor) -> bool:
        if not _are_kernels(layers) or self.decode_attention(memory) is None:
            return False
        dtype = cast(CudaLayer, layers[0]).dtype if memory.dtype == FP8 else memory.dtype
        return self.why_padded(layers, dtype, memory.device) is None

    def why_padded(self, layers: Sequence[FusedLayer | None], dtype: torch.dtype, device: torch.device) -> str | None:
        if not _are_kernels(layers):
            return None
        dims = {layer.head_dim for layer in cast(Sequence[CudaLayer], layers)}
        misfits = [self.kernels.why_no_prompts(dim, dtype, device) for dim in sorted(dims)]
        return next((why for why in misfits if why is not None), self._no_packed_prompts)

    def supports_shared_prefix(self, layers: Sequence[FusedLayer | None]) -> bool:
        """The prompts behind a prefix are fed without padding, too."""
        if self._no_shared_prefixes is not None or not _are_kernels(layers):
            return False
        first = cast(CudaLayer, layers[0])
        return self.why_padded(layers, first.dtype, first.device) is None

    def warm_up_batch_sizes(self, most: int) -> list[int]:
        """Powers of two and `most`: the number of programs per row changes there (`triton_kernels.splits_for`)."""
        return [*(1 << n for n in range((most - 1).bit_length())), most]

    def decode_attention(self, memory: Tensor) -> DecodeAttention | None:
        """None where a gradient is needed."""
        return None if torch.is_grad_enabled() else self._decode_attention

    def _decode_attention(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        columns: KVRange | GraphKVRange,
        *,
        window: int | None = None,
    ) -> Tensor:
        """q [B, H, 1, K], k and v [B, G, 1, K], after norms and rotary embedding -> [B, H, 1, K]."""
        heads, kv_heads, head_dim = q.shape[1], (q if k is None else k).shape[1], q.shape[3]
        if isinstance(columns, KVRange):
            kv_heads = columns.k.shape[1]
        else:
            assert k is not None, "without keys the number of KV heads is unknown"
        flat = [None if x is None else x[:, :, 0].flatten(1) for x in (q, k, v)]  # [B, heads K]
        assert flat[0] is not None
        shape = Heads(heads, kv_heads, head_dim, window=window)
        return self.kernels.attend(shape, flat[0], flat[1], flat[2], columns).view(q.shape)

    def argmax(self, logits: Tensor) -> Tensor:
        return self.kernels.argmax(logits)

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
        *,
        cuts: bool = True,
    ) -> Tensor:
        return self.kernels.draw(logits, temperature, top_k, top_p, uniform)

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        return [
            (self.kernels, "attend", "attention"),
            (self.kernels, "add_norm", "norms"),
            (CudaLayer, "attention", "products of attention"),
            (CudaLayer, "feed", "feed-forward"),
        ]


Columns = KVRange | GraphKVRange | PromptRange
Sublayer = tuple[Norm, Tensor | None, Callable[[Tensor], Tensor]]
"""A sublayer: its norm, the bias that is left to the next norm, and its function of normed states."""


def _are_kernels(layers: Sequence[FusedLayer | None]) -> bool:
    return all(isinstance(layer, CudaLayer) for layer in layers)


def _run(
    kernels: Kernels, layers: Sequence[CudaLayer], columns: Sequence[Columns] | None, h: Tensor, *, runs_ffn: bool
) -> Tensor:
    """Takes h [B, 1, D] or [N, D] through the layers in place."""
    states = h.view(len(h), -1)
    pending: Tensor | None = None  # a sublayer's output, which the next norm adds to the states with `bias`
    bias: Tensor | None = None
    for norm, its_bias, run in _sublayers(layers, columns, runs_ffn=runs_ffn):
        if layers[0].is_pre_norm:
            x = kernels.add_norm(states, pending, bias, norm, is_pre=True)
            pending, bias = run(x), its_bias
        else:
            kernels.add_norm(states, run(states), its_bias, norm, is_pre=False)
    if pending is not None:
        kernels.add_norm(states, pending, bias, None, is_pre=True)
    return h


def _sublayers(layers: Sequence[CudaLayer], columns: Sequence[Columns] | None, *, runs_ffn: bool) -> list[Sublayer]:
    sublayers: list[Sublayer] = []
    for number, layer in enumerate(layers):
        if columns is not None:
            at = columns[number]
            sublayers.append((layer.attn_norm, layer.out_bias, lambda x, layer=layer, at=at: layer.attention(x, at)))  # type: ignore[misc]
        if runs_ffn:
            sublayers.append((layer.ffn_norm, layer.fc2_bias, layer.feed))
    return sublayers


def _norm(shape: LayerShape, norm: nn.Module) -> Norm:
    bias = cast(Tensor | None, getattr(norm, "bias", None))
    return Norm(shape.norm, shape.epsilon, _weight(norm), bias)


def _weight(norm: nn.Module | None) -> Tensor | None:
    return cast(Tensor | None, getattr(norm, "weight", None))
