"""Data-sheet figures of GPUs: dense products (no sparsity) and memory as sold. No torch.

How much of them a kernel reaches is up to the cost model (`skipdecode.cost.predict`).
"""

from dataclasses import dataclass

MEMORY_SHARE = 0.85
"""Share of a GPU's memory for weights and caches. The rest holds activations of prompts, logits, graphs and CUDA
itself."""


@dataclass(frozen=True)
class GPU:
    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: float
    """bfloat16 products on tensor cores, dense."""
    price_per_hour: float
    """Dollars for one of them, on demand; a round figure, to be replaced by yours."""
    source: str
    has_fp8: bool = True
    """Whether it multiplies FP8 (compute capability 8.9 and later)."""


# Prices: round figures of what several clouds asked on demand in 2025; they differ by a factor of two and fall.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("l4", 24 * 10**9, 300e9, 121e12, 0.8, "NVIDIA L4 data sheet (242 TFLOP/s with sparsity)"),
        GPU("a100-40", 40 * 10**9, 1555e9, 312e12, 1.5, "NVIDIA A100 data sheet, 40 GB SXM", has_fp8=False),
        GPU("a100", 80 * 10**9, 2039e9, 312e12, 2.0, "NVIDIA A100 data sheet, 80 GB SXM", has_fp8=False),
        GPU("h100", 80 * 10**9, 3350e9, 989e12, 3.0, "NVIDIA H100 data sheet, SXM (1,979 TFLOP/s with sparsity)"),
        GPU("h200", 141 * 10**9, 4800e9, 989e12, 3.5, "NVIDIA H200 data sheet, SXM (1,979 TFLOP/s with sparsity)"),
    )
}


def gpu_named(name: str) -> GPU:
    """The specification of a GPU by its name; ValueError lists the known ones."""
    if name.lower() not in GPUS:
        raise ValueError(f"no GPU {name!r} is known here; use one of {', '.join(GPUS)}")
    return GPUS[name.lower()]
