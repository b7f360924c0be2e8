"""How much memory something takes, of Python and of Arrow."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

POOLS: list[pa.MemoryPool] = []  # tables live longer than the measurement


@contextmanager
def most_bytes(most: int) -> Iterator[None]:
    """Of Python and Arrow together, beyond what they had before."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    POOLS.append(pool)
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        yield
        taken = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert taken < most, f"{taken >> 20} MiB"
