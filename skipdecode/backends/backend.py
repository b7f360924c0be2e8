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
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipdecode.backends.cpu_kernels import Activation
from skipdecode.backends.heads import Columns, SharedColumns
from skipdecode.backends.layer_shape import LayerShape
from skipdecode.backends.prompts import Prompts
from skipdecode.backends.torch_sampling import pick_by_sort
from skipdecode.config.model import Quantization

__all__ = [
    "TORCH", "Activation", "Backend", "ColumnAttention", "Columns", "FusedLayer", "FusedStore", "LayerShape", "Packed",
    "Product", "Prompts", "SharedColumns", "TableColumns", "activate",
]  # fmt: skip


class TableColumns(NamedTuple):
    """As `Columns`, for a step that is captured once and replayed on batches of any length: the host knows addresses
    alone, and reads no number. For back ends with `reads_tables`."""

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


class Packed(Protocol):
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


class ColumnAttention(Protocol):
    """Attention of one new column per row, which reads no column but a row's own."""

    def __call__(self, q: Tensor, k: Tensor | None, v: Tensor | None, columns: "Columns | TableColumns") -> Tensor:
        """q [B, H, 1, K], k and v [B, G, 1, K] to be stored first (None: stored already) -> as q."""


class FusedStore(Protocol):
    """A norm, and keys and values of the tokens of prompts in one or several layers, as one call."""

    def __call__(self, h: Tensor, prompts: Prompts, memory: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """h [N, D] -> for each product that `memory` names k, v [B, G, S, K], filled up to the prompts' ends."""


class FusedLayer(Protocol):
    """A decoder layer as one call; in place."""

    @property
    def store(self) -> FusedStore | None:
        """Its keys and values alone; None where it makes none (SwiftKV's queries)."""

    def read(
        self,
        h: Tensor,
        prompts: Prompts,
        memory: tuple[Tensor, Tensor] | None,
        *,
        feeds: bool,
        shared: SharedColumns | None = None,
    ) -> Tensor:
        """h [N, D], prompts, through the layer; `memory`: k, v [B, G, S, K], filled up to the prompts' ends. `shared`:
        of the tokens `before` those given, where they are not in `memory`. Where the back end `takes_unpadded`."""


class Backend:
    """torch's operators, which serve on every device, and are the reference for all other back ends."""

    takes_places = False
    """`prepare_step` and `column_attention` take `Columns` with `places`: several new columns of a row."""
    wants_among = False
    """Of those, they want `Columns.among`."""
    takes_fewer = False
    """A step that is prepared for some rows serves fewer, too: the first ones of its columns."""
    has_matrix_units = False
    """Many columns cost a product little more than one (an order of magnitude is enough:
    `skipdecode.speculative.latency_model`)."""
    reads_tables = False
    """`prepare_step` and `column_attention` take `TableColumns`: captured steps read their bounds on the device."""

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
    ) -> Packed | None:
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
        columns: Sequence[Columns | TableColumns] | None,
        *,
        feeds: bool,
    ) -> Callable[[Tensor], Tensor]:
        """A call for h [B, 1, D] through layers that this back end fused, one behind the other, in place: attention of
        each over its `columns` (None: none attends), and its feed-forward block (where it `feeds`). It serves as long
        as the columns' memory; numbers in there, which column is the last among them, may change."""
        raise AssertionError("nothing is fused here")

    def fuse_store(
        self,
        shape: LayerShape,
        norm: nn.Module,
        products: Sequence[Product | None],
        k_norms: Sequence[nn.Module | None],
    ) -> FusedStore | None:
        """Keys and values of several layers from one state as one call; None: by parts."""
        return None

    def rows_to_try(self, most: int) -> list[int]:
        """Numbers of rows, up to `most`, that meet between them every kernel of a decode step: what is compiled when a
        model loads, and not while rows wait. None where nothing is compiled."""
        return []

    def column_attention(self, memory: Tensor) -> ColumnAttention | None:
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

    def takes_unpadded(self, layers: Sequence[FusedLayer | None], memory: Tensor) -> bool:
        """Whether prompts go through `layers` without their padding, into memory of this kind [B, G, S, K]. Else with
        it, and masked columns are read: their numbers must be finite."""
        return False

    def reads_shared(self, layers: Sequence[FusedLayer | None]) -> bool:
        """Whether attention of `layers` reads columns that several rows share where they lie (`SharedColumns`), for
        prompts that it `takes_unpadded` and for steps. Else every row needs a copy."""
        return False

    def keeps_bits(self, layers: Sequence[FusedLayer | None]) -> bool:
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

    def cache_memory(self, count: int, dtype: torch.dtype, device: torch.device, *, is_filled: bool) -> Tensor:
        """[count] numbers for keys and values: zeros where masked ones are read, for these must be finite.
        `is_filled`: nearly all of them will be written."""
        return torch.zeros(count, dtype=dtype, device=device)

    def filled_memory(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Memory whose numbers are written before they are read, nearly all of them."""
        return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def spare_bytes(self) -> int:
        """Memory held for the next `filled_memory`: free for it, and for nobody else."""
        return 0

    # --- for `skipdecode.cost.roofline`

    def vendors_products(self, weight: Tensor) -> list[Callable[[Tensor], Tensor]]:
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
