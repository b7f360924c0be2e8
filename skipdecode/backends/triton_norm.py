"""Triton kernels for residual, bias and norm in one, and for the gate of feed-forward blocks (`cuda_kernels.Kernels`).

`triton_kernels` launches them. B rows, D width, F feed-forward width. Names in capitals are pointers, and constants at
compile time.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    STATES, ADDED, ADDED_BIAS, WEIGHT, BIAS, OUT, row, added_row, out_row, epsilon,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_ADDED_BIAS: tl.constexpr,
    STORES_SUM: tl.constexpr, NORM: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row: states + (added + its bias), rounded, and the norm of the rounded sum in float32."""
    b, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_in = d < D
    x = tl.load(STATES + b * row + d, mask=is_in, other=0.0)
    dtype = x.dtype
    if HAS_ADDED:
        added = tl.load(ADDED + b * added_row + d, mask=is_in, other=0.0).to(tl.float32)
        if HAS_ADDED_BIAS:  # rounded, as a product with its bias is
            added = (added + tl.load(ADDED_BIAS + d, mask=is_in, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        x = (x.to(tl.float32) + added).to(dtype)
    if STORES_SUM:
        tl.store(STATES + b * row + d, x, mask=is_in)
    if NORM != "none":
        x = x.to(tl.float32)
        if NORM == "layer":
            x = tl.where(is_in, x - tl.sum(x, 0) / D, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / D + epsilon)
        if HAS_WEIGHT:
            x = x * tl.load(WEIGHT + d, mask=is_in, other=0.0).to(tl.float32)
        if HAS_BIAS:
            x = x + tl.load(BIAS + d, mask=is_in, other=0.0).to(tl.float32)
        tl.store(OUT + b * out_row + d, x.to(dtype), mask=is_in)


@triton.jit
def gate_kernel(Y, OUT, row, F, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) * up of [gate; up]; act(gate) is rounded as by torch's operator. GELU by tanh: x (1 + tanh(u)) / 2 =
    x / (1 + e^-2u), where u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    b, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = f < F
    gate = tl.load(Y + b * row + f, mask=is_in, other=0.0)
    other = tl.load(Y + b * row + F + f, mask=is_in, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    u = x
    if IS_GELU:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    x = (x / (1.0 + tl.exp(-u))).to(gate.dtype).to(tl.float32)
    tl.store(OUT + b * F + f, (x * other).to(gate.dtype), mask=is_in)
