"""Rounding to FP8 in Triton: keys and values on their way into a cache, and the inputs of products (`fp8`).

N rows, K numbers of each. Names in capitals are pointers, and constants at compile time.
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)
LEAST = tl.constexpr(1e-12)


@triton.jit
def as_stored(x, MEMORY):
    """x in the type that MEMORY has. In FP8 what is too large becomes the largest number, and NaN stays."""
    if MEMORY.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(MEMORY.dtype.element_ty)


@triton.jit
def rows_in_fp8_kernel(X, OUT, SCALES, row, K, BLOCK: tl.constexpr):
    """One row of X [N, K], divided by its scale."""
    n, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        x = tl.load(X + n * row + start + at, mask=start + at < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(tl.maximum(tl.max(tl.where(most == most, most, float("inf")), 0), LEAST), FP8_MAX)
    for start in range(0, K, BLOCK):
        x = tl.load(X + n * row + start + at, mask=start + at < K, other=0.0).to(tl.float32)
        tl.store(OUT + n * K + start + at, as_stored(tl.div_rn(x, scale), OUT), mask=start + at < K)
    tl.store(SCALES + n, scale)
