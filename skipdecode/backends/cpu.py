"""The compiled CPU kernels of `cpp/`, called by ctypes: attention of one column, products with packed weights, argmax.

torch's attention for one query reads the cache at a third of memory bandwidth, its products of few rows read weights at
half of it or less, and its argmax of bfloat16 logits takes as long as the matrix product before it. Where the back end
is `torch` (`skipdecode.backends.choice`), nothing here is called and torch's operators do the same work.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skipdecode.backends import build, choice
from skipdecode.backends.heads import INT, INT64, POINTER, SharedColumns, heads
from skipdecode.backends.memory import LargePages

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
Activation = Literal["none", "relu", "swiglu"]
"""What follows on a product. `swiglu`: of outputs [gate; other], silu(gate) * other."""
GATES = 16
"""Gates that lie together in a packed weight, before as many of what they let through (`interleave`)."""
_WEIGHTS = LargePages()


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take tensors of this kind, on this machine."""
    return tensor.device.type == "cpu" and tensor.dtype in NAMES and choice.choose().name != "torch"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    new: tuple[Tensor, Tensor] | None = None,
    *,
    rotations: Tensor | None = None,
    epsilon: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    places: Tensor | None = None,
    shared: SharedColumns | None = None,
) -> Tensor:
    """Attention of one query per row over its columns first..last: q [B, H K] -> [B, H K], heads side by side.

    k, v [B, G, S, K], contiguous: the cache, each of its G heads for H / G neighbours among those of q. `first`, `last`
    [B] int64, both included. `new`: key and value [B, G K] of column `last`, stored before it is attended to; q and
    `new` may be columns of one tensor [B, (H + 2 G) K]. `q_norm`, `k_norm` [K]: weights of an RMS norm over each head
    of q and of the new key; then `rotations` [positions, r] float32 (`LayerShape`) turns them by their place, which is
    last - first behind what is shared. Finite numbers only: what becomes of NaN and infinities is not defined. `places`
    [B] int64: the row of k and v [R, G, S, K] that each row has; those that have one together are several new columns
    of it, all of which are stored before any of them attends. `shared`: columns before a row's own.
    """
    B, (_, G, S, K) = len(q), k.shape
    H = q.shape[1] // K
    _check_attention(q, k, v, new, [weight for weight in (q_norm, k_norm) if weight is not None])
    assert len(k) == B or places is not None, (q.shape, k.shape)
    for columns in (first, last, *(() if places is None else (places,))):
        assert columns.dtype == torch.int64, columns.dtype
        assert columns.shape == (B,), (columns.shape, B)
        assert columns.is_contiguous(), columns.stride()
    new_k, new_v = (None, None) if new is None else new
    out = q.new_empty(B, H * K)
    shape = heads(H, G, K, rotations=rotations, epsilon=epsilon, q_norm=q_norm, k_norm=k_norm)
    function("attend", q.dtype)(
        ctypes.byref(shape),
        B,
        q.data_ptr(),
        None if new_k is None else new_k.data_ptr(),
        None if new_v is None else new_v.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        v.data_ptr(),
        S,
        first.data_ptr(),
        last.data_ptr(),
        None if places is None else places.data_ptr(),
        None if shared is None else ctypes.byref(shared.struct(B, k)),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, new: tuple[Tensor, Tensor] | None, norms: Sequence[Tensor]
) -> None:
    """Wrong ones would be read as if they were right."""
    B, (_, G, _, K) = len(q), k.shape
    for held in (k, v):
        assert held.is_contiguous(), held.stride()
        assert held.shape == k.shape, (held.shape, k.shape)
    assert q.shape == (B, q.shape[1] // K * K), (q.shape, k.shape)
    for tensor in new or ():
        assert tensor.shape == (B, G * K), (tensor.shape, k.shape)
    for tensor in (q, *(new or ())):
        assert tensor.stride() == (q.stride(0), 1), (tensor.stride(), q.stride())
    assert len({tensor.dtype for tensor in (q, k, v, *(new or ()), *norms)}) == 1, "types differ"


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest value, the lowest where several are equal (NaN aside): [B, V] -> [B] int64."""
    logits = logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    function("argmax", logits.dtype)(*logits.shape, logits.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


def multiplies(dtype: torch.dtype) -> bool:
    """Whether the back end has products of its own for weights of this type."""
    name = choice.choose().name
    has_bfloat16 = name == "amx" or (name == "avx512" and "avx512_bf16" in choice.cpu_flags())
    return name != "torch" and (dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16))


def interleave(gated: Tensor) -> Tensor:
    """[2 F, ...], the gates above what they let through -> as the kernels want them: 16 gates, 16 others, and so on."""
    assert len(gated) % (2 * GATES) == 0, gated.shape
    return gated.reshape(2, -1, GATES, *gated.shape[1:]).transpose(0, 1).reshape(gated.shape)


def pack(weight: Tensor, *, gated: bool = False) -> Tensor:
    """A weight [out, in], in a multiple of 32, in the order in which `linear` reads it.

    Of each 32 outputs and 32 inputs two tiles of 16 outputs: lines of 64 bytes, four bytes of each output. `gated`:
    for `swiglu`, gates above what they let through, each in a multiple of 16.
    """
    weight = interleave(weight.detach()) if gated else weight
    outputs, inputs = weight.shape
    assert multiplies(weight.dtype), weight.dtype
    assert inputs % 32 == 0, inputs
    weight = weight.detach().contiguous()
    packed = _WEIGHTS.empty((-(-outputs // 32), inputs // 32, 2, 512), weight.dtype)
    function("pack", weight.dtype)(outputs, inputs, weight.data_ptr(), packed.data_ptr())
    return packed


class Int8Weight(NamedTuple):
    """A weight [out, in] as whole numbers in [-127, 127] times a scale per output, packed (`pack_int8`)."""

    tiles: Tensor
    """[out / 32, in / 64, 2, 16, 16, 4] int8."""
    scales: Tensor
    """[out] float32, filled up to a multiple of 32."""
    totals: Tensor
    """[out] int32 likewise: the sum of each output's whole numbers."""
    inputs: int


Weight = Tensor | Int8Weight
"""As `pack` or `pack_int8` gives it."""


def pack_int8(weight: Tensor, *, gated: bool = False) -> Int8Weight:
    """The whole numbers nearest to a weight [out, in], in a multiple of 32, the largest of an output being 127; `gated`
    as in `pack`."""
    weight = interleave(weight.detach()) if gated else weight
    outputs, inputs = weight.shape
    assert choice.int8_misfit(inputs) is None, choice.int8_misfit(inputs)
    weight = F.pad(weight.detach().float(), (0, -inputs % 64, 0, -outputs % 32))
    scales = weight.abs().amax(dim=1) / 127.0
    whole = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    tiles = whole.view(-1, 2, 16, whole.shape[1] // 64, 16, 4).permute(0, 3, 1, 4, 2, 5)
    packed = _WEIGHTS.empty(tuple(tiles.shape), torch.int8).copy_(tiles)
    return Int8Weight(packed, scales, whole.sum(dim=1, dtype=torch.int32), inputs)


def linear(
    x: Tensor,
    packed: Tensor | Int8Weight,
    outputs: int,
    bias: Tensor | None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T + bias, then the activation or plus `residual`: [..., in] -> [..., outputs], all of one type.

    `packed`: W as `pack` or `pack_int8` gives it. Sums in float32, rounded once; for int8, which goes with bfloat16,
    sums of whole numbers, x as 16 bits times a scale per row. `swiglu` takes a weight packed as `gated` and a bias
    like it (`interleave`), and gives [..., outputs / 2].
    """
    assert activation == "none" or residual is None, "one of the two"
    assert activation != "swiglu" or outputs % (2 * GATES) == 0, outputs
    is_int8 = isinstance(packed, Int8Weight)
    tiles, inputs = (packed.tiles, packed.inputs) if isinstance(packed, Int8Weight) else (packed, packed.shape[1] * 32)
    assert x.shape[-1] == inputs, (x.shape, inputs)
    assert tiles.shape[0] == -(-outputs // 32), (outputs, tiles.shape)
    assert x.dtype == (torch.bfloat16 if is_int8 else tiles.dtype), (x.dtype, tiles.dtype)
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs // 2 if activation == "swiglu" else outputs)
    if residual is not None:
        assert residual.shape == out.shape, (residual.shape, out.shape)
        residual = residual.contiguous()
    for tensor in (bias, residual):
        assert tensor is None or tensor.dtype == x.dtype, tensor.dtype
    assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous()), "a bias of another layer"
    (function("linear_int8") if is_int8 else function("linear", x.dtype))(
        len(rows),
        outputs,
        inputs,
        rows.data_ptr(),
        rows.stride(0),
        tiles.data_ptr(),
        *([packed.scales.data_ptr(), packed.totals.data_ptr()] if isinstance(packed, Int8Weight) else []),
        None if bias is None else bias.data_ptr(),
        THEN[activation] if residual is None else THEN["residual"],
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def argmax_linear(x: Tensor, packed: Tensor | Int8Weight, outputs: int) -> Tensor:
    """`argmax(linear(x, packed, outputs, None))` without the logits in between: [B, in] -> [B] int64."""
    is_int8 = isinstance(packed, Int8Weight)
    tiles, inputs = (packed.tiles, packed.inputs) if isinstance(packed, Int8Weight) else (packed, packed.shape[1] * 32)
    assert x.dtype == (torch.bfloat16 if is_int8 else tiles.dtype), (x.dtype, tiles.dtype)
    assert x.shape[1] == inputs, (x.shape, inputs)
    assert tiles.shape[0] == -(-outputs // 32), (outputs, tiles.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), dtype=torch.int64)
    (function("argmax_linear_int8") if is_int8 else function("argmax_linear", x.dtype))(
        len(x),
        outputs,
        inputs,
        x.data_ptr(),
        x.stride(0),
        tiles.data_ptr(),
        *([packed.scales.data_ptr(), packed.totals.data_ptr()] if isinstance(packed, Int8Weight) else []),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


THEN = {"none": 0, "relu": 1, "residual": 2, "swiglu": 3}
"""As `Then` in `cpp/gemm.h`."""
ARGUMENTS = {
    "step": [POINTER, INT64, INT64, POINTER, INT, INT, *[POINTER] * 8, INT],
    "prompt": [POINTER, INT64, *[POINTER] * 4, INT, INT, *[POINTER] * 2, INT64, POINTER, INT],
    "store": [*[POINTER] * 2, INT64, *[POINTER] * 2, INT64, *[POINTER] * 7, INT],
    "attend": [POINTER, INT64, *[POINTER] * 3, INT64, *[POINTER] * 2, INT64, *[POINTER] * 5, INT],
    "argmax": [INT64, INT64, POINTER, POINTER, INT],
    "pack": [INT64, INT64, POINTER, POINTER],
    "linear": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT, POINTER, POINTER, INT],
    "argmax_linear": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT],
    "argmax_linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 4, INT],
    "linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 4, INT, POINTER, POINTER, INT],
}


def function(name: str, dtype: torch.dtype | None = None) -> Any:
    """A function of the back end's library with its argument types; that of `dtype` where there are several."""
    return _function(choice.choose().name, name, dtype)


@cache
def _function(backend: str, name: str, dtype: torch.dtype | None) -> Any:
    library = build.load(backend, choice.cpu_flags())
    found = getattr(library, name if dtype is None else f"{name}_{NAMES[dtype]}")
    found.argtypes, found.restype = ARGUMENTS[name], None
    return found
