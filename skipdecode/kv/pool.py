"""Memory for the keys and values of all batches on a device: one piece, taken once, so that addresses stay good.

CUDA graphs know addresses. So batches come and go within this memory, and no graph is lost. First fit; a batch gives
its part back when nothing refers to it any more. Layout within a part is `skipdecode.kv.graphed`'s. One thread takes;
any may drop what was taken.
"""

from bisect import insort
from collections import deque

import torch
from torch import Tensor

from skipdecode.cost.batch_sizes import ALIGNMENT


class PoolFull(RuntimeError):
    """There is no room for such a batch now."""


class CachePool:
    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        count = max(ALIGNMENT, num_bytes // dtype.itemsize // ALIGNMENT * ALIGNMENT)
        self.memory: Tensor = torch.zeros(ALIGNMENT, dtype=dtype, device=device).new_empty(count)
        self._gaps: list[tuple[int, int]] = [(0, count)]  # [start, end), rising, none beside another
        # The last reference may go on any thread, and within any line here that allocates (the collector of cycles): a
        # lock would wait for itself. So what comes back waits in a queue, whose `append` nothing can interrupt.
        self._returned: deque[tuple[int, int]] = deque()

    @property
    def nbytes(self) -> int:
        return self.memory.numel() * self.memory.element_size()

    @property
    def free_bytes(self) -> int:
        """Of all gaps together."""
        return sum(end - start for start, end in self._free()) * self.memory.element_size()

    def has_room(self, count: int) -> bool:
        """For so many numbers in one piece."""
        return any(end - start >= count for start, end in self._free())

    def take(self, count: int) -> "PoolPart":
        """Room for `count` numbers; PoolFull where there is no gap of that size."""
        count = -(-count // ALIGNMENT) * ALIGNMENT
        for at, (start, end) in enumerate(self._free()):
            if end - start >= count:
                self._gaps[at : at + 1] = [(start + count, end)] if end - start > count else []
                return PoolPart(self, start, start + count)
        size = self.memory.element_size()
        raise PoolFull(
            f"keys and values of the batch take {count * size} bytes, and of {self.nbytes} for all batches no gap is "
            "as large; use fewer rows (actors.batch_size), more memory (actors.memory_share) or more GPUs "
            "(actors.num_gpus)"
        )

    def give_back(self, start: int, end: int) -> None:
        """From any thread."""
        self._returned.append((start, end))

    def _free(self) -> list[tuple[int, int]]:
        """The gaps, with all that came back until now."""
        while self._returned:
            insort(self._gaps, self._returned.popleft())
            merged: list[tuple[int, int]] = []
            for gap in self._gaps:
                if merged and merged[-1][1] == gap[0]:
                    merged[-1] = (merged[-1][0], gap[1])
                else:
                    merged.append(gap)
            self._gaps = merged
        return self._gaps


class PoolPart:
    """Numbers start..end-1 of the pool, until nobody refers to it."""

    def __init__(self, pool: CachePool, start: int, end: int) -> None:
        self._pool, self.start, self.end = pool, start, end

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self._pool.memory.element_size()

    def __del__(self) -> None:
        self._pool.give_back(self.start, self.end)
