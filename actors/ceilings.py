"""Measures the ceilings of a device for the cost model (`skipdecode.cost.roofline`), which itself runs nothing."""

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from skipdecode.backends.device import backend_on
from skipdecode.cost.roofline import Ceilings


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """Measures the ceilings of a device in about a second: a matrix product, a read of more memory than caches hold,
    and a chain of tiny calls.

    It uses torch's own routines whatever kernels decode here, so that a slow kernel does not lower its own ceiling. The
    product is the fastest one that torch has for `dtype`, or on a CPU for float32, which some CPUs multiply faster than
    bfloat16. int8 weights have no ceiling of their own.
    """
    kind = getattr(torch, dtype)
    is_cuda = device.startswith("cuda")
    n = 8192 if is_cuda else 1024

    def timed(fn: Callable[[], object], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            if is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            fn()
            if is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return median(times[1:])

    with torch.inference_mode():
        matmul_s = math.inf
        for number in {kind} if is_cuda else {kind, torch.float32}:
            x, weight = (torch.randn(rows, n, device=device).to(number) for rows in (2 * n, n))
            products = backend_on(x.device).library_matmuls(weight)
            matmul_s = min(matmul_s, *(timed(partial(product, x), 6) for product in products))
        source = torch.ones(1 << 28 if is_cuda else 1 << 26, dtype=torch.float32, device=device)
        read_s = timed(source.sum, 6)
        small = torch.ones(1, 64, device=device, dtype=kind)

        def chain() -> None:
            for _ in range(200):
                small.add(1.0)

        call_s = timed(chain, 8) / 200
    return Ceilings(4.0 * n**3 / matmul_s, source.nbytes / read_s, call_s)
