"""The interface between the decoder and whatever computes: one `Backend` per kind of device, here with torch's
operators.

Decoder, caches and sampler hold a back end (`skipdecode.backends.device`) and never ask which one it is. Where it has
nothing better than torch's operators it returns None, and the caller does the work in parts. A back end knows weights,
one layer, attention and logits; it knows nothing of plans, schedules and requests.

B rows, T columns, N tokens of all prompts, D width, H query heads, G KV heads, S columns of the cache, K head dim, V
vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.block_quantization import StoredBlocks
from skipdecode.backends.fp8 import why_no_fp8
from skipdecode.backends.pinned_copy import to_device
from skipdecode.backends.torch_sampling import likeliest, mask, pick_by_sort
from skipdecode.config.model import ON_CPUS, FeedForwardKind, Quantization

Activation = Literal["none", "relu", "swiglu", "geglu"]
"""What follows a product. `swiglu`: silu(gate) * up of its outputs [gate; up]; `geglu`: gelu(gate) * up, by tanh."""
GATED: tuple[Activation, ...] = ("swiglu", "geglu")


@dataclass(frozen=True, eq=False)
class LayerShape:
    """What a decoder layer computes, beside its weights."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Divides `heads`; heads / kv_heads neighbours share keys and values, as with Hugging Face's `repeat_kv`."""
    head_dim: int
    """heads * head_dim is a multiple of 32, and need not be the width."""
    epsilon: float
    """The epsilon of all norms."""
    is_pre_norm: bool = True
    """Norms before the sublayers, not after their residuals."""
    norm: Literal["layer", "rms"] = "layer"
    """`rms`: x / sqrt(mean(x^2) + epsilon) * weight, without a bias."""
    mlp: FeedForwardKind = "relu"
    """`swiglu`: fc2(silu(gate) * up), where fc1 makes [gate; up]; `geglu`: with GELU, by tanh."""
    rotary_table: Tensor | None = None
    """[positions, r] float32: r / 2 cosines, then r / 2 sines. Elements i and i + r / 2 of a query or key (i < r / 2)
    are rotated together (`rotate_half`); those from r on are not. Positions past the table use its last one. None: no
    rotary embedding."""
    window: int | None = None
    """How many of the newest columns, its own included, a token attends to; None: all."""

    @property
    def is_gated(self) -> bool:
        return self.mlp in GATED


class LayerNorms(NamedTuple):
    """The norms of a layer. Those of queries and keys are RMS norms over each head, before the rotary embedding; those
    of outputs come before the residual (Gemma). None: no such norm."""

    attn: nn.Module
    ffn: nn.Module
    q: nn.Module | None = None
    k: nn.Module | None = None
    attn_out: nn.Module | None = None
    ffn_out: nn.Module | None = None


class PackedSequences(NamedTuple):
    """Tokens of several prompts, one after the other, and where in the cache each is."""

    starts: Tensor
    """[B + 1] int32: prompt b has the tokens starts[b] to starts[b + 1] - 1."""
    longest: int
    """The most tokens of a prompt."""
    slots: Tensor
    """[N] int64: the row of the cache that a token belongs to."""
    first: Tensor
    """[N] int64: the column of the first token of its prompt."""
    columns: Tensor
    """[N] int64: its own column."""


class MergedTokens(NamedTuple):
    """Where N new tokens of prompts and P cached ones before them are in `PackedPrompts.seen`."""

    new: Tensor
    """[N] int64"""
    cached: Tensor
    """[P] int64"""
    rows: Tensor
    """[P] int64: the prompt of each cached one."""
    positions: Tensor
    """[P] int64: its position in that prompt."""


class PackedPrompts:
    """Left-padded prompts [B, T] packed one after the other without their padding, [N, ...]; or only their ends, if
    earlier tokens are in a cache already."""

    def __init__(
        self,
        positions: Tensor,
        columns: Tensor,
        num_cached: Sequence[int] | None = None,
        slots: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """`positions` [B, T] int64, -1 at padding (`Decoder.embed`). `columns` [B] int64: the cache column of each
        prompt's first token. `num_cached` [B]: how many tokens of each prompt have their K and V cached already.
        `slots` [B] int64: the row of the cache that each prompt has; None if the cache has these rows alone, in their
        order. `lengths` [B]: how many tokens of each prompt are given; None: they are read from the device."""
        device, is_real = positions.device, positions >= 0
        lengths = is_real.sum(dim=1).tolist() if lengths is None else list(lengths)
        assert min(lengths) > 0, "a prompt without tokens"
        self._lengths, self._num_cached = lengths, list(num_cached or [0] * len(lengths))
        self.num_cached = None if num_cached is None else to_device(self._num_cached, device)
        """[B] int64"""
        self.columns, self.slots = columns, slots
        starts = np.cumsum([0, *lengths])
        self.starts = to_device(starts, device)
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_tokens = int(starts[-1])  # N
        own = self.starts[1:] - self.starts[:-1]
        ends = own if self.num_cached is None else own + self.num_cached
        if device.type == "cpu":
            is_padded_left = (positions[:, -1] == ends - 1) & (is_real.sum(dim=1) == own)
            assert bool(is_padded_left.all()), "left-padded, and none of them empty"
        self.last_columns = columns + ends - 1
        """[B] int64: the column of each prompt's last token."""
        T = positions.shape[1]
        index = [np.arange((row + 1) * T - n, (row + 1) * T) for row, n in enumerate(lengths)]
        self._index = to_device(np.concatenate(index), device)

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def num_columns(self) -> int:
        """S, the columns up to the last token. Waits for the device."""
        return int(self.last_columns.max()) + 1

    @cached_property
    def new(self) -> PackedSequences:
        """The tokens that are given."""
        return self._sequences(self._lengths, self.starts, self.num_cached)

    @cached_property
    def seen(self) -> PackedSequences:
        """What they attend to: themselves (`new`), and the tokens before them."""
        if not any(self._num_cached):
            return self.new
        counts = [n + cached for n, cached in zip(self._lengths, self._num_cached, strict=True)]
        return self._sequences(counts, to_device(np.cumsum([0, *counts]), self.columns.device), None)

    @cached_property
    def merged(self) -> MergedTokens:
        """Where the tokens given and the cached ones are among all (`seen`)."""
        lengths, cached = np.array(self._lengths), np.array(self._num_cached)
        total_cached = np.cumsum(cached)
        rows = np.arange(len(lengths)).repeat(cached)
        positions = np.arange(cached.sum()) - (total_cached - cached).repeat(cached)
        starts = np.cumsum(lengths + cached) - lengths - cached
        lines = np.stack([starts.repeat(cached) + positions, rows, positions])
        new = np.arange(lengths.sum()) + total_cached.repeat(lengths)
        return MergedTokens(to_device(new, self.columns.device), *to_device(lines, self.columns.device))

    def _sequences(self, counts: Sequence[int], starts: Tensor, num_cached: Tensor | None) -> PackedSequences:
        """So many tokens of each prompt, behind `num_cached` others."""
        device, total = starts.device, sum(counts)
        rows = torch.arange(len(counts), device=device).repeat_interleave(starts[1:] - starts[:-1], output_size=total)
        first = self.columns[rows]
        columns = first + torch.arange(total, device=device) - starts[rows]
        if num_cached is not None:
            columns = columns + num_cached[rows]
        slots = rows if self.slots is None else self.slots[rows]
        return PackedSequences(starts.to(torch.int32), max(counts), slots, first, columns)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x.flatten(0, 1).index_select(0, self._index)

    def last(self, h: Tensor) -> Tensor:
        """The states of each prompt's last token: [N, D] -> [B, 1, D]."""
        return h[self.starts[1:] - 1][:, None]

    def pointers(self) -> tuple[int | None, ...]:
        """The number of rows, and the addresses of starts, columns, `num_cached` and `slots` for compiled kernels."""
        num_cached, slots = (None if own is None else own.data_ptr() for own in (self.num_cached, self.slots))
        return len(self), self.starts.data_ptr(), self.columns.data_ptr(), num_cached, slots


class PrefixGroups(NamedTuple):
    """The rows of a step that read a shared prefix together, on the device (`prefix_groups`).

    Those of a whole batch serve a step of its last rows too, where `numbers` do not begin with 0.
    """

    rows: Tensor
    """[N] int64: rows of the batch with a prefix, those of a group one after the other."""
    starts: Tensor
    """[N] int64: where each group begins in `rows`."""
    sizes: Tensor
    """[N] int64: the rows of each group; 0 behind the last one."""
    numbers: Tensor
    """[B] int64, consecutive: what the rows of the step are in `rows`."""


def prefix_groups(places: Sequence[tuple[int, int]], most: int) -> np.ndarray[Any, Any]:
    """Lines `rows`, `starts` and `sizes` of `PrefixGroups`: [3, N] int64 on the host. `places` [N]: offset and length
    of each row's prefix as in `SharedPrefix`; `most`: rows of a group."""
    by_prefix: dict[int, list[int]] = {}
    for row, (offset, length) in enumerate(places):
        if length:
            by_prefix.setdefault(offset, []).append(row)
    groups = np.zeros((3, len(places)), dtype=np.int64)
    start = number = 0
    for rows in by_prefix.values():
        groups[0, start : start + len(rows)] = rows
        for at in range(0, len(rows), most):
            groups[1:, number] = start + at, min(most, len(rows) - at)
            number += 1
        start += len(rows)
    return groups


class SharedPrefix(NamedTuple):
    """Keys and values before a row's own, of which several rows read one copy: a prefix that their prompts share."""

    k: Tensor
    """[R, G, S, K], contiguous."""
    v: Tensor
    offsets: Tensor
    """[B] int64: where a row's prefix begins in `k`, as r G S + column, in units of K elements."""
    counts: Tensor
    """[B] int64: the length of a row's prefix; even."""
    groups: PrefixGroups | None = None
    """Where the back end has `prefix_group_rows`, in decode steps."""
    where: Tensor | None = None
    """As in `GraphKVRange`, of whose `memory` `k` and `v` are then the whole."""


class KVRange(NamedTuple):
    """The cache of one layer in a decode step, and per new token which column it writes and which it attends to.

    Without `slots`, row b has one new token and the memory k[b], v[b]. With `slots`, the B "rows" are tokens, and those
    of one slot are several new tokens of it, all of which are stored before any of them attends.
    """

    k: Tensor
    """[B, G, S, K] or, with slots, [R, G, S, K]."""
    v: Tensor
    first: Tensor
    """[B] int64: the first column that it attends to."""
    last: Tensor
    """[B] int64: the column that it writes, and the last one that it attends to."""
    slots: Tensor | None = None
    """[B] int64: the row of k and v that a token belongs to."""
    shared: SharedPrefix | None = None
    query_index: Tensor | None = None
    """[2, B] int64, if tokens of one slot are adjacent: the index of each within its slot, and the number of tokens in
    that slot. For back ends that read the memory of a slot once for all its tokens."""
    max_queries: int = 1
    """The most tokens that a slot has."""


class GraphKVRange(NamedTuple):
    """A `KVRange` for a step that is captured once and replayed on batches of any length: the host knows only addresses
    and reads no values. For back ends with `supports_graph_capture`."""

    memory: Tensor
    """[elements], in which keys and values of all layers may lie."""
    where: Tensor
    """[4] int64 on the device: where K begins in `memory`, where V begins, and the strides of a row and of a head, in
    elements; columns of a head are contiguous. Multiples of 16."""
    first: Tensor
    """[B] int64: a row's first column."""
    last: Tensor
    """[B] int64: the column that a row writes, the last one that it attends to; or one number, expanded."""
    shared: SharedPrefix | None = None


class Product(Protocol):
    """A linear layer as part of a fused kernel (`Backend.fuse`)."""

    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...


class PackedWeight(Protocol):
    """A weight [out, in] in the back end's layout. Called as `Linear` is: [..., in] -> [..., out]."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor: ...

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the product of x [B, in], without a bias, to `out` [B, out], and returns it."""

    def argmax(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The index of the largest output, without a bias, the lower of two equal ones; NO_TOKEN where one is NaN or
        +inf: [B, in] -> [B] int64. `allowed` [B, ceil(out / 32)] int32: bits of the outputs that count
        (`Backend.mask`)."""

    def ordered(self, bias: Tensor) -> Tensor:
        """A bias [out], in the order in which the weight's outputs are packed."""

    def product(self, bias: Tensor | None) -> Product | None:
        """This weight and a bias for `Backend.fuse`; None where no fused kernel takes it."""


class DecodeAttention(Protocol):
    """Attention of one new token per row, which reads only the columns of its row."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        columns: "KVRange | GraphKVRange",
        *,
        window: int | None = None,
    ) -> Tensor:
        """q [B, H, 1, K], and k and v [B, G, 1, K], which are stored first (None: stored already) -> [B, H, 1, K].
        `window` as in `LayerShape`."""


class FusedKVStore(Protocol):
    """Stores the keys and values of prompts for one or several layers, the norm included, in one call."""

    def __call__(self, h: Tensor, prompts: PackedPrompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """From h [N, D], fills k and v [B, G, S, K] of each layer in `memory` up to the prompts' ends."""


class FusedLayer(Protocol):
    """A decoder layer as one call that works in place."""

    @property
    def store(self) -> FusedKVStore | None:
        """Stores only its keys and values; None for a layer that makes none (SwiftKV's upper layers)."""

    def run_prompts(
        self,
        h: Tensor,
        prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        runs_ffn: bool,
        shared: SharedPrefix | None = None,
    ) -> Tensor:
        """Runs packed prompts h [N, D] through the layer, in place. `memory`: k, v [B, G, S, K], filled up to the
        prompts' ends. `shared`: keys and values of the tokens before those given, where they are not in `memory`. Only
        where the back end `supports_packed_prompts`."""


class Backend:
    """torch's operators, which run on every device and are the reference for all other back ends."""

    supports_multi_token_rows = False
    """`prepare_step` and `decode_attention` take `KVRange.slots`, that is, several new tokens of a row."""
    needs_query_index = False
    """With slots they also need `KVRange.query_index`."""
    prefix_group_rows: int | None = None
    """How many rows read a shared prefix together in a decode step, if that needs `SharedPrefix.groups`; None: each
    reads it by itself, and finds it in a core's cache behind the row before."""
    accepts_fewer_rows = False
    """A step prepared for some rows also runs fewer, the first ones of its KV range."""
    has_matrix_units = False
    """Multiplying many tokens costs little more than one token (a rough answer is enough for
    `skipdecode.speculative.latency_model`)."""
    has_host_memory = False
    """The host reads what this back end computes at no cost, so that prompts can be packed by lengths that were not
    given (`PackedPrompts`)."""
    supports_graph_capture = False
    """`prepare_step` and `decode_attention` take `GraphKVRange`, so that captured steps read their bounds on the
    device."""

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """The type that `dtype: auto` stands for."""
        return "bfloat16"

    @property
    def why_slow(self) -> str | None:
        """Why decoding is slower than it could be here, for people; None if it is not."""
        return None

    def why_no_fp8(self, device: torch.device) -> str | None:
        """Why keys and values cannot be stored in FP8 on that device; None if they can."""
        return why_no_fp8(device)

    def pack(
        self,
        weight: Tensor,
        quantization: Quantization | None = None,
        *,
        is_gated: bool = False,
        blocks: StoredBlocks | None = None,
    ) -> PackedWeight | None:
        """The weight [out, in] in this back end's layout, or None where that gains nothing. `is_gated`: for `GATED`.
        `blocks`: for int4, those of `weight`, whose own values are not read then. ValueError where the quantization is
        not supported (`check`)."""
        self.check(weight, quantization, is_gated=is_gated)
        return None

    def split(self, packed: PackedWeight, sizes: Sequence[int]) -> Sequence[PackedWeight] | None:
        """The parts of a packed weight for so many outputs each, in the same memory; None where there are none."""
        return None

    def check(self, weight: Tensor, quantization: Quantization | None, *, is_gated: bool = False) -> None:
        """ValueError where `pack` cannot quantize this weight."""
        if quantization is not None:
            kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
            where = "CPUs" if quantization in ON_CPUS else "GPUs with our kernels"
            types = "float32 and bfloat16" if quantization == "int4" else "bfloat16"
            raise ValueError(f"quantization: {quantization} weights are for {types} on {where}, and this is {kind}")

    def fuse(
        self,
        shape: LayerShape,
        norms: LayerNorms,
        products: Sequence[Product | None],
    ) -> FusedLayer | None:
        """A layer as one call, from its norms and the products qkv (or only queries), out, fc1 and fc2. None where it
        has to run in parts."""
        return None

    def prepare_step(
        self,
        layers: Sequence[FusedLayer],
        rows: int,
        columns: Sequence[KVRange | GraphKVRange] | None,
        *,
        runs_ffn: bool,
    ) -> Callable[[Tensor], Tensor]:
        """A call that takes h [B, 1, D] through fused layers in place: attention of each over its `columns` (None:
        skipped) and its feed-forward block (if `runs_ffn`). It stays valid as long as the memory of `columns`, whose
        contents, the last column for instance, may change between calls."""
        raise AssertionError("this back end fuses no layers")

    def fuse_kv_store(
        self,
        shape: LayerShape,
        norm: nn.Module,
        products: Sequence[Product | None],
        k_norms: Sequence[nn.Module | None],
        tables: Sequence[Tensor | None],
    ) -> FusedKVStore | None:
        """Stores keys and values of several layers from one state in one call; None where that has to run in parts.

        `k_norms`, `tables`: of each layer, the norm of its keys and its `rotary_table`.
        """
        return None

    def warm_up_batch_sizes(self, most: int) -> list[int]:
        """Batch sizes up to `most` that together use every kernel of a decode step, so that these can be compiled when
        a model loads. Empty where nothing is compiled."""
        return []

    def decode_attention(self, memory: Tensor) -> DecodeAttention | None:
        """Decode attention over a cache like `memory` [B, G, S, K], on which fused layers run, too. None where torch's
        masked attention has to do it (`skipdecode.kv.view.attention`), as it has whenever a gradient is needed."""
        return None

    # --- prefill; `layers` [L]: what `fuse` returned for each layer

    def max_prefill_tokens(self, layers: Sequence[FusedLayer | None], device: torch.device) -> int:
        """How many prompt tokens go through `layers` at once. On a CPU few enough that their states are small beside
        the cache, and enough that oneDNN does not split the products badly (at 512 to 1024 it does, for OPT-125m's
        width). A GPU needs thousands to be busy; their states take what the cache leaves of its memory."""
        return 1 << 16 if device.type == "cuda" else 2048

    def supports_packed_prompts(self, layers: Sequence[FusedLayer | None], memory: Tensor) -> bool:
        """Whether prompts go through `layers` without padding, into a cache like `memory` [B, G, S, K]. With padding,
        masked columns are read too, so what they hold must be finite."""
        return False

    def why_padded(self, layers: Sequence[FusedLayer | None], dtype: torch.dtype, device: torch.device) -> str | None:
        """Why prompts of this type go through `layers` with padding on a device of this back end, which without it
        takes less time; None if they have none, or if this back end knows no other way."""
        return None

    def supports_shared_prefix(self, layers: Sequence[FusedLayer | None]) -> bool:
        """Whether attention of `layers` can read one copy of a `SharedPrefix` for several rows, in packed prompts and
        in decode steps. Otherwise every row needs a copy."""
        return False

    def is_batch_invariant(self, layers: Sequence[FusedLayer | None]) -> bool:
        """Whether the outputs of `layers` for a token are the same, bit by bit, whatever else is in the batch. torch's
        products are not: the order of their sums depends on the shape."""
        return False

    def argmax(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64; the lower index where two are equal, NO_TOKEN where one is NaN or +inf."""
        return likeliest(logits)

    def mask(self, logits: Tensor, allowed: Tensor) -> Tensor:
        """Makes logits [B, V] -inf, in place, where the bit in `allowed` [B, ceil(V / 32)] int32 is 0: the logits."""
        return mask(logits, allowed)

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
        """Samples one token per row from logits [B, V] of any type with [B, 1] parameters
        (`torch_sampling.pick_by_sort`)."""
        return pick_by_sort(logits.float(), temperature, top_k, top_p, uniform, cuts=cuts)

    def allocate_cache(self, count: int, dtype: torch.dtype, device: torch.device, *, is_filled: bool) -> Tensor:
        """[count] elements for keys and values; zeros where masked ones are read, since these must be finite.
        `is_filled`: nearly all of them will be written."""
        return torch.zeros(count, dtype=dtype, device=device)

    def allocate_buffers(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Uninitialised tensors, nearly all of whose elements will be written."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def reusable_bytes(self) -> int:
        """Bytes that are kept for the next `allocate_buffers`, and are not available to anything else."""
        return 0

    # --- for `skipdecode.cost.roofline`

    def library_matmuls(self, weight: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """Functions x [R, in] -> x W^T [R, out], one for each library of torch that can multiply; none uses our
        kernels."""
        return [lambda x: x @ weight.T]

    # --- for `actors.measuring.profile`

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        """(owner, attribute, stage) of each function that is a stage of a decode step, for the profiler to wrap."""
        return []

    @contextmanager
    def timed_layers(self) -> Iterator[dict[str, float]]:
        """Yields a dict that holds, when the block has ended, the seconds by stage within fused layers that ran in
        it."""
        yield {}


TORCH = Backend()


def activate(y: Tensor, activation: Activation) -> Tensor:
    """[..., out] -> [..., out], or [..., out / 2] where it is gated."""
    if activation in GATED:
        gate, other = y.chunk(2, dim=-1)
        return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * other
    return F.relu(y) if activation == "relu" else y
