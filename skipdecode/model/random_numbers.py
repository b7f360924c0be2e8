"""The random numbers of a row, from a counter-based generator (Philox) keyed by seed and row id.

They never depend on neighbours, batch, worker or a retry.
"""

import hashlib

import numpy as np


def row_uniforms(seed: int, row_id: str, count: int) -> np.ndarray:
    """Uniform numbers [count], float32 in [0, 1): number k decides token y_k of the row."""
    digest = hashlib.blake2b(f"{seed}\0{row_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    raw = np.random.Philox(key=np.frombuffer(digest, dtype=np.uint64)).random_raw(count)
    return ((raw >> np.uint64(40)).astype(np.float64) * 2.0**-24).astype(np.float32)  # 24 bits: exact in float32
