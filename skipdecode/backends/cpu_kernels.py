"""The compiled CPU kernels as functions of tensors: decode attention, products with packed weights, choice of tokens.

They exist because torch's attention for one query reads the cache at a third of memory bandwidth, its products of few
rows read weights at half of it or less, its argmax of bfloat16 logits takes as long as the LM head, and a top-p draw
nearly as long as a small model's step. Where the back end is `torch`, nothing here is called. Whole layers in one call
are in `cpu_layers`.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from skipdecode.backends import choice
from skipdecode.backends.backend import GATED, Activation, SharedPrefix
from skipdecode.backends.cpu_library import NAMES, function, heads_struct, shared_prefix_struct
from skipdecode.backends.cpu_weights import GATES, Weight, operand_of


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
    rotary_table: Tensor | None = None,
    epsilon: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    slots: Tensor | None = None,
    shared: SharedPrefix | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per row over the columns first..last: q [B, H K] -> [B, H K], heads side by side.

    k, v [B, G, S, K], contiguous: the cache; each of its G heads serves H / G neighbours of q. `first`, `last` [B]
    int64, both included. `new`: the key and value [B, G K] of column `last`, stored before they are attended to; q and
    `new` may be slices of one tensor [B, (H + 2 G) K]. `q_norm`, `k_norm` [K]: weights of an RMS norm over each head of
    q and of the new key, after which `rotary_table` [positions, r] float32 (`LayerShape`) rotates them by their
    position, last - first plus the length of a shared prefix. `slots` [B] int64: the row of k and v [R, G, S, K] that a
    token belongs to; tokens of one slot are all stored before any of them attends. `shared`: a prefix before a row's
    own columns. `window`: how many of the newest columns are attended to; None: all. The result is undefined for NaN
    and infinity.
    """
    B, (_, G, S, K) = len(q), k.shape
    H = q.shape[1] // K
    _check_attention(q, k, v, new, [weight for weight in (q_norm, k_norm) if weight is not None])
    assert len(k) == B or slots is not None, (q.shape, k.shape)
    for columns in (first, last, *(() if slots is None else (slots,))):
        assert columns.dtype == torch.int64, columns.dtype
        assert columns.shape == (B,), (columns.shape, B)
        assert columns.is_contiguous(), columns.stride()
    new_k, new_v = (None, None) if new is None else new
    out = q.new_empty(B, H * K)
    shape = heads_struct(
        H, G, K, rotary_table=rotary_table, epsilon=epsilon, q_norm=q_norm, k_norm=k_norm, window=window
    )
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
        None if slots is None else slots.data_ptr(),
        None if shared is None else ctypes.byref(shared_prefix_struct(shared, B, k)),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _check_attention(
    q: Tensor, k: Tensor, v: Tensor, new: tuple[Tensor, Tensor] | None, norms: Sequence[Tensor]
) -> None:
    """Checks everything that a kernel would otherwise misread."""
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


def draw(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """`torch_sampling.pick_by_sort` up to rounding: [B, V] logits and [B, 1] parameters -> [B] int64."""
    B, V = logits.shape
    given = [logits, temperature, top_k, top_p, uniform]
    for tensor, dtype in zip(given[1:], (torch.float32, torch.int64, torch.float32, torch.float32), strict=True):
        assert tensor.dtype == dtype, (tensor.dtype, dtype)
        assert tensor.shape == (B, 1), (tensor.shape, B)
    given = [tensor.contiguous() for tensor in given]
    out = torch.empty(B, dtype=torch.int64)
    pointers = [tensor.data_ptr() for tensor in (*given, out)]
    function("draw", logits.dtype)(B, V, *pointers, torch.get_num_threads())
    return out


def linear(
    x: Tensor,
    packed: Weight,
    outputs: int,
    bias: Tensor | None,
    *,
    activation: Activation = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T + bias, then the activation or plus `residual`: [..., in] -> [..., outputs], all of one type.

    `packed`: W, of x's type; or of int8 beside bfloat16. Sums in float32, rounded once; for int8
    sums of whole numbers, x as 16 bits times a scale per row. Gated activations take a weight packed as `gated` and a
    bias like it (`interleave`), and give [..., outputs / 2].
    """
    assert activation == "none" or residual is None, "one of the two"
    assert activation not in GATED or outputs % (2 * GATES) == 0, outputs
    weight = operand_of(packed, outputs)
    inputs = weight.inputs
    assert x.shape[-1] == inputs, (x.shape, inputs)
    assert x.dtype == weight.rows, (x.dtype, weight.kind)
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs // 2 if activation in GATED else outputs)
    if residual is not None:
        assert residual.shape == out.shape, (residual.shape, out.shape)
        residual = residual.contiguous()
    for tensor in (bias, residual):
        assert tensor is None or tensor.dtype == x.dtype, tensor.dtype
    assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous()), "a bias of another layer"
    function("linear", weight.kind)(
        len(rows),
        outputs,
        inputs,
        rows.data_ptr(),
        rows.stride(0),
        *weight.pointers,
        None if bias is None else bias.data_ptr(),
        EPILOGUE[activation] if residual is None else EPILOGUE["residual"],
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def mask(logits: Tensor, allowed: Tensor) -> Tensor:
    """`torch_sampling.mask`, in place: [B, V] and [B, ceil(V / 32)] int32 -> the logits."""
    assert logits.is_contiguous(), logits.stride()
    _check_allowed(allowed, *logits.shape)
    function("mask", logits.dtype)(*logits.shape, allowed.data_ptr(), logits.data_ptr(), torch.get_num_threads())
    return logits


def _check_allowed(allowed: Tensor, rows: int, outputs: int) -> None:
    """Whether these are bits of `rows` times `outputs`."""
    assert allowed.dtype == torch.int32, allowed.dtype
    assert allowed.shape == (rows, -(-outputs // 32)), (allowed.shape, rows, outputs)
    assert allowed.is_contiguous(), allowed.stride()


def argmax_linear(x: Tensor, packed: Weight, outputs: int, allowed: Tensor | None = None) -> Tensor:
    """`argmax(linear(x, packed, outputs, None))` without the logits in between: [B, in] -> [B] int64. `allowed`
    [B, ceil(outputs / 32)] int32: masks them before (`mask`)."""
    weight = operand_of(packed, outputs)
    assert x.dtype == weight.rows, (x.dtype, weight.kind)
    assert x.shape[1] == weight.inputs, (x.shape, weight.inputs)
    x = x if x.stride(1) == 1 else x.contiguous()
    if allowed is not None:
        _check_allowed(allowed, len(x), outputs)
    out = torch.empty(len(x), dtype=torch.int64)
    function("argmax_linear", weight.kind)(
        len(x),
        outputs,
        weight.inputs,
        x.data_ptr(),
        x.stride(0),
        *weight.pointers,
        None if allowed is None else allowed.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


EPILOGUE = {"none": 0, "relu": 1, "residual": 2, "swiglu": 3, "geglu": 4}
"""The values of `Epilogue` in `cpp/gemm.h`."""
