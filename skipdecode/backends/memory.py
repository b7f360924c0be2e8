"""Memory in large pages, for weights: a step reads all of them, and in pages of 4 KiB waits for their addresses.

Products of 16 to 32 rows gain 9 to 19 % (`benchmarks/LOG.md`). torch can ask for large pages too, but only for all it
allocates and for tensors that fill some; the weights of a small model do not.
"""

import contextlib
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 1 << 21
LINE_BYTES = 64
SLAB_BYTES = 16 * PAGE_BYTES
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def large_pages(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors side by side in memory of their own; in ordinary memory where they do not fill a page."""
    if sum(math.prod(shape) for shape in shapes) * dtype.itemsize < PAGE_BYTES:
        return [torch.empty(shape, dtype=dtype) for shape in shapes]
    pages = LargePages(sum(_in_lines(math.prod(shape) * dtype.itemsize) for shape in shapes))
    return [pages.empty(shape, dtype) for shape in shapes]


def _in_lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


class LargePages:
    """Tensors cut one behind the other from slabs of large pages. A slab lives as long as one of its tensors."""

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._slab: mmap.mmap | None = None
        self._next = self._end = 0  # bytes of the slab

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """On a line of the cache; what it holds is any number. Ordinary memory where there are no large pages."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if _ADVICE is None or size == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            if self._slab is None or self._end - self._next < size:
                self._begin(max(size, self._slab_bytes))
            assert self._slab is not None
            at, self._next = self._next, self._next + _in_lines(size)
            return torch.frombuffer(self._slab, dtype=dtype, count=count, offset=at).view(shape)

    def _begin(self, size: int) -> None:
        """A slab with room for `size` bytes that begins where a page does."""
        assert _ADVICE is not None
        end = (-(-size // PAGE_BYTES) + 1) * PAGE_BYTES
        try:
            slab = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{end} bytes for weights or a cache: {error}") from error
        with contextlib.suppress(OSError):  # a system without them
            slab.madvise(_ADVICE)
        start = -torch.frombuffer(slab, dtype=torch.uint8).data_ptr() % PAGE_BYTES
        self._slab, self._next, self._end = slab, start, end
