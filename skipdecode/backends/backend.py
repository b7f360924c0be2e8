"""What the decoder asks of whatever computes: one `Backend` per kind of device, here that of torch's own operators.

The decoder, its caches and its sampler hold a back end (`skipdecode.backends.device`) and never ask which one it is or
what kernels it has: where it has nothing better than torch's operators it says None, and the work is done by parts.
A back end knows weights, one layer, one column of attention and logits. Plans, schedules and rows are none of its
business.

B rows, T columns, N tokens of all prompts, D width, H heads of queries, G of keys and values, S columns of memory, K
head dim, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.torch_sampling import pick_by_sort
from skipdecode.config.model import Quantization

Activation = Literal["none", "relu", "swiglu"]
"""What follows a product. `swiglu`: silu(gate) * up of its outputs [gate; up]."""


@dataclass(frozen=True, eq=False)
class LayerShape:
    """What a decoder layer is, beside its weights: how its heads share keys, what its norms and its feed-forward block
    compute, and where its queries and keys turn."""

    heads: int
    """Of queries."""
    kv_heads: int
    """Divides `heads`; heads / kv_heads neighbours share keys and values, as with Hugging Face's `repeat_kv`."""
    head_dim: int
    """heads * head_dim is a multiple of 32, and need not be the width."""
    epsilon: float
    """Of all norms."""
    is_pre_norm: bool = True
    """Norms before the sublayers, not behind their residuals."""
    norm: Literal["layer", "rms"] = "layer"
    """`rms`: x / sqrt(mean(x^2) + epsilon) * weight, no bias."""
    mlp: Literal["relu", "swiglu"] = "relu"
    """`swiglu`: fc2(silu(gate) * other), where fc1 makes [gate; other]."""
    rotary_table: Tensor | None = None
    """[positions, r] float32: r / 2 cosines, then r / 2 sines. Number i < r / 2 of a query or key and number i + r / 2
    are a point that its position turns (`rotate_half`); those from r on stay. Positions past the table are its last.
    None: nothing turns."""


class PackedPrompts:
    """Left-padded prompts [B, T] laid one behind the other, without the padding: [N, ...]."""

    def __init__(self, positions: Tensor, columns: Tensor, before: Tensor | None = None) -> None:
        """`positions` [B, T] int64: -1 a padding column (`Decoder.embed`). `columns` [B] int64: that of each prompt's
        first token. `before` [B] int64: tokens of each prompt that come before these, and whose K and V are there."""
        self._is_real = positions >= 0
        lengths = self._is_real.sum(dim=1)
        ends = lengths if before is None else lengths + before
        assert bool((positions[:, -1] == ends - 1).all() & (lengths > 0).all()), "left-padded, and none of them empty"
        self.before, self.columns = before, columns
        self.last_columns = columns + ends - 1
        """[B] int64: of each prompt's last token."""
        self.starts = F.pad(lengths.cumsum(dim=0), (1, 0))
        """[B + 1] int64: row b has the tokens starts[b] to starts[b + 1] - 1."""
        self.num_columns, self.num_tokens = int(self.last_columns.max()) + 1, int(self.starts[-1])  # S, N

    def __len__(self) -> int:
        return len(self.columns)

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]"""
        return x[self._is_real]

    def last(self, h: Tensor) -> Tensor:
        """The last token of each prompt: [N, D] -> [B, 1, D]."""
        return h[self.starts[1:] - 1][:, None]

    def pointers(self) -> tuple[int, int, int, int | None]:
        before = None if self.before is None else self.before.data_ptr()
        return len(self), self.starts.data_ptr(), self.columns.data_ptr(), before


class SharedPrefix(NamedTuple):
    """Columns before a row's own, of which several rows read one copy: the head of their prompts."""

    k: Tensor
    """[R, G, S, K], contiguous."""
    v: Tensor
    where: Tensor
    """[B] int64: the row's first one, counted in columns of a group from the start of `k`: r G S + column."""
    counts: Tensor
    """[B] int64: how many; even."""


class KVRange(NamedTuple):
    """Where one new column per row goes, and what it may attend to: as the arguments of `attend`. Where rows have
    `slots`, k and v are those of all places, and rows of one place are several new columns of it."""

    k: Tensor
    v: Tensor
    first: Tensor
    last: Tensor
    slots: Tensor | None = None
    shared: SharedPrefix | None = None
    query_index: Tensor | None = None
    """[2, B] int64, where tokens of one slot lie side by side: the index of each among them, and how many they are. For
    back ends that read the memory of a slot once for all its tokens."""
    max_queries: int = 1


class GraphKVRange(NamedTuple):
    """As `KVRange`, for a step that is captured once and replayed on batches of any length: the host knows addresses
    alone, and reads no number. For back ends with `supports_graph_capture`."""

    memory: Tensor
    """[numbers], one behind the other; keys and values of all layers may lie in it."""
    where: Tensor
    """[4] int64 on the device: where in `memory` K begins, where V begins, and how many numbers lie from row to row and
    from head to head of both, whose columns lie side by side. Multiples of 16."""
    first: Tensor
    """[B] int64: a row's first column."""
    last: Tensor
    """[B] int64: the column that a row writes, the last one it sees; or one number, expanded."""


class Product(Protocol):
    """A linear layer for kernels that do more than its product (`Backend.fuse`)."""

    @property
    def inputs(self) -> int: ...
    @property
    def outputs(self) -> int: ...
    @property
    def bias(self) -> Tensor | None: ...


class PackedWeight(Protocol):
    """A packed weight [out, in], to be called as `Linear` is: [..., in] -> [..., out]."""

    def __call__(
        self, x: Tensor, bias: Tensor | None, *, activation: Activation = "none", residual: Tensor | None = None
    ) -> Tensor: ...

    def into(self, x: Tensor, out: Tensor) -> Tensor:
        """[B, in] -> `out` [B, out], whose memory is there, without a bias; gives it back."""

    def argmax(self, x: Tensor) -> Tensor:
        """The output that is largest, without a bias, the lower of two that are equal: [B, in] -> [B] int64."""

    def ordered(self, bias: Tensor) -> Tensor:
        """A bias [out] in the order in which the weight's outputs are packed."""

    def product(self, bias: Tensor | None) -> Product | None:
        """For a kernel that does more than this product (`Backend.fuse`); None where there is no such kernel."""


class DecodeAttention(Protocol):
    """Attention of one new column per row, which reads no column but a row's own."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, columns: "KVRange | GraphKVRange") -> Tensor:
        """q [B, H, 1, K], k and v [B, G, 1, K] to be stored first (None: stored already) -> as q."""


class FusedKVStore(Protocol):
    """A norm, and keys and values of the tokens of prompts in one or several layers, as one call."""

    def __call__(self, h: Tensor, prompts: PackedPrompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """h [N, D] -> for each product that `memory` names k, v [B, G, S, K], filled up to the prompts' ends."""


class FusedLayer(Protocol):
    """A decoder layer as one call; in place."""

    @property
    def store(self) -> FusedKVStore | None:
        """Its keys and values alone; None where it makes none (SwiftKV's queries)."""

    def read(
        self,
        h: Tensor,
        prompts: PackedPrompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        feeds: bool,
        shared: SharedPrefix | None = None,
    ) -> Tensor:
        """Runs packed prompts h [N, D] through the layer, in place. `memory`: k, v [B, G, S, K], filled up to the
        prompts' ends. `shared`: keys and values of the tokens before those given, where they are not in `memory`. Only
        where the back end `supports_packed_prompts`."""


class Backend:
    """torch's operators, which serve on every device, and are the reference for all other back ends."""

    supports_multi_token_rows = False
    """`prepare_step` and `decode_attention` take `KVRange` with `slots`: several new columns of a row."""
    needs_query_index = False
    """Of those, they want `KVRange.query_index`."""
    accepts_fewer_rows = False
    """A step that is prepared for some rows serves fewer, too: the first ones of its columns."""
    has_matrix_units = False
    """Many columns cost a product little more than one (an order of magnitude is enough:
    `skipdecode.speculative.latency_model`)."""
    supports_graph_capture = False
    """`prepare_step` and `decode_attention` take `GraphKVRange`: captured steps read their bounds on the device."""

    @property
    def dtype(self) -> Literal["bfloat16", "float32"]:
        """What `dtype: auto` takes."""
        return "bfloat16"

    @property
    def why_slow(self) -> str | None:
        """For people: why decoding is slower than it could be here; None: it is not."""
        return None

    def pack(
        self, weight: Tensor, quantization: Quantization | None = None, *, is_gated: bool = False
    ) -> PackedWeight | None:
        """The weight [out, in] as this back end reads it; None where that is no gain. `is_gated`: for `swiglu`.

        ValueError where there are no weights of that quantization (`check`).
        """
        self.check(weight, quantization, is_gated=is_gated)
        return None

    def check(self, weight: Tensor, quantization: Quantization | None, *, is_gated: bool = False) -> None:
        """ValueError where `pack` has no weight of that quantization in place of this one."""
        if quantization is not None:
            kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
            raise ValueError(f"quantization: {quantization} weights are for bfloat16 on CPUs, and this is {kind}")

    def fuse(
        self,
        shape: LayerShape,
        norms: tuple[nn.Module, nn.Module],
        products: Sequence[Product | None],
        *,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
    ) -> FusedLayer | None:
        """A layer as one call: norms of attention and feed-forward, products qkv (or queries alone), out, fc1, fc2.

        None: run it by parts.
        """
        return None

    def prepare_step(
        self,
        layers: Sequence[FusedLayer],
        rows: int,
        columns: Sequence[KVRange | GraphKVRange] | None,
        *,
        feeds: bool,
    ) -> Callable[[Tensor], Tensor]:
        """A call for h [B, 1, D] through layers that this back end fused, one behind the other, in place: attention of
        each over its `columns` (None: none attends), and its feed-forward block (where it `feeds`). It serves as long
        as the columns' memory; numbers in there, which column is the last among them, may change."""
        raise AssertionError("nothing is fused here")

    def fuse_kv_store(
        self,
        shape: LayerShape,
        norm: nn.Module,
        products: Sequence[Product | None],
        k_norms: Sequence[nn.Module | None],
    ) -> FusedKVStore | None:
        """Keys and values of several layers from one state as one call; None: by parts."""
        return None

    def warm_up_batch_sizes(self, most: int) -> list[int]:
        """Numbers of rows, up to `most`, that meet between them every kernel of a decode step: what is compiled when a
        model loads, and not while rows wait. None where nothing is compiled."""
        return []

    def decode_attention(self, memory: Tensor) -> DecodeAttention | None:
        """Attention over memory of this kind [B, G, S, K], on which fused layers run, too.

        None: torch's reads it (`skipdecode.kv.view.attention`), all columns that any row sees behind a mask. Also where
        a gradient is wanted.
        """
        return None

    # --- how prompts are fed; `layers` [L]: what `fuse` gave for each

    def prompt_tokens(self, layers: Sequence[FusedLayer | None], device: torch.device) -> int:
        """Tokens of prompts that go through `layers` on `device` at once. On a CPU few enough that their states are
        small beside the cache, and enough that oneDNN does not split the products badly (at 512 to 1024 it does, for
        OPT-125m's width). On a GPU thousands keep it busy, and their states come out of what caches leave."""
        return 1 << 16 if device.type == "cuda" else 2048

    def supports_packed_prompts(self, layers: Sequence[FusedLayer | None], memory: Tensor) -> bool:
        """Whether prompts go through `layers` without their padding, into memory of this kind [B, G, S, K]. Else with
        it, and masked columns are read: their numbers must be finite."""
        return False

    def supports_shared_prefix(self, layers: Sequence[FusedLayer | None]) -> bool:
        """Whether attention of `layers` reads columns that several rows share where they lie (`SharedPrefix`), for
        prompts that it `supports_packed_prompts` and for steps. Else every row needs a copy."""
        return False

    def is_batch_invariant(self, layers: Sequence[FusedLayer | None]) -> bool:
        """Whether `layers` make the same of a token, bit by bit, whatever is fed beside it: other rows, or more columns
        of its own. What torch brings chooses its sums by the shape."""
        return False

    def argmax(self, logits: Tensor) -> Tensor:
        """[B, V] -> [B] int64; the lower index where two are equal."""
        return logits.argmax(dim=-1)

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
        """One token per row from logits [B, V] of any type and [B, 1] parameters, as `torch_sampling.pick_by_sort`."""
        return pick_by_sort(logits.float(), temperature, top_k, top_p, uniform, cuts=cuts)

    def allocate_cache(self, count: int, dtype: torch.dtype, device: torch.device, *, is_filled: bool) -> Tensor:
        """[count] numbers for keys and values: zeros where masked ones are read, for these must be finite.
        `is_filled`: nearly all of them will be written."""
        return torch.zeros(count, dtype=dtype, device=device)

    def allocate_buffers(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Memory whose numbers are written before they are read, nearly all of them."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def reusable_bytes(self) -> int:
        """Memory held for the next `allocate_buffers`: free for it, and for nobody else."""
        return 0

    # --- for `skipdecode.cost.roofline`

    def library_matmuls(self, weight: Tensor) -> list[Callable[[Tensor], Tensor]]:
        """x [R, in] -> x W^T [R, out] by the libraries that torch brings, in every way they have; no kernel of ours."""
        return [lambda x: x @ weight.T]

    # --- for `actors.measuring.profile`

    def timed_calls(self) -> list[tuple[Any, str, str]]:
        """Calls of its own that are a stage of a decode step: owner, name, stage."""
        return []

    @contextmanager
    def timed_layers(self) -> Iterator[dict[str, float]]:
        """Seconds by stage within fused layers that ran in the block; filled at its end."""
        yield {}


TORCH = Backend()


def activate(y: Tensor, activation: Activation) -> Tensor:
    """[..., out] -> [..., out], or [..., out / 2] for `swiglu`."""
    if activation == "swiglu":
        gate, other = y.chunk(2, dim=-1)
        return F.silu(gate) * other
    return F.relu(y) if activation == "relu" else y
