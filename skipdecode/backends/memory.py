"""Memory in large pages, for weights and caches.

A step reads all weights, and in pages of 4 KiB waits for their addresses: products of 16 to 32 rows gain 9 to 19 %
(`benchmarks/LOG.md`). torch can ask for large pages too, but only for all it allocates and for tensors that fill some;
the weights of a small model do not. The cache of a batch gets the memory of the one before: the system clears what is
fresh, which took a sixth of the prompts' time on an AMD EPYC (2026-11-25, the same log).
"""

import contextlib
import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE_BYTES = 1 << 21
LINE_BYTES = 64
SLAB_BYTES = 16 * PAGE_BYTES
MOST_SPARE = 4
"""Times what is asked for that memory may have and still be lent."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def large_pages(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Tensors side by side in memory of their own, perhaps that of tensors that are gone: what they hold is any number.
    In ordinary memory where they do not fill a page."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    needed = sum(_in_lines(size) for size in sizes)
    if _ADVICE is None or needed < PAGE_BYTES:
        return [torch.empty(shape, dtype=dtype) for shape in shapes]
    pages, at = _SPARE.lend(needed), 0
    tensors = []
    for shape, size in zip(shapes, sizes, strict=True):
        tensors.append(_cut(pages, at, shape, dtype))
        at += _in_lines(size)
    return tensors


def spare_bytes() -> int:
    """Memory that this process holds for the next tensors of `large_pages`: free for them, and for nobody else."""
    return _SPARE.nbytes


def _cut(memory: mmap.mmap | memoryview, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor `at` so many bytes behind the first page's begin; it keeps `memory`."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=_start(memory) + at).view(shape)


def _start(memory: mmap.mmap | memoryview) -> int:
    """Bytes before its first large page."""
    return -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE_BYTES


def _map(size: int) -> mmap.mmap:
    """Large pages with room for `size` bytes behind `_start`."""
    assert _ADVICE is not None
    end = (-(-size // PAGE_BYTES) + 1) * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{end} bytes for weights or a cache: {error}") from error
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(_ADVICE)
    return memory


class _Spare:
    """Lends memory, and keeps the largest that came back for the next to ask."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a tensor may come in the middle of `lend`
        self._idle: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        idle = self._idle
        return 0 if idle is None else len(idle)

    def lend(self, size: int) -> memoryview:
        """Room for `size` bytes behind `_start`, until nobody holds the view any more."""
        with self._lock:
            memory, self._idle = self._idle, None
        if memory is None or not size + PAGE_BYTES <= len(memory) <= MOST_SPARE * (size + PAGE_BYTES):
            memory = None  # given up before more is asked for
            memory = _map(size)
        view = memoryview(memory)
        weakref.finalize(view, self._take_back, memory).atexit = False
        return view

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            if self._idle is None or len(self._idle) < len(memory):
                self._idle, memory = memory, self._idle  # the smaller one goes when this returns


_SPARE = _Spare()


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
        size = math.prod(shape) * dtype.itemsize
        if _ADVICE is None or size == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            if self._slab is None or self._end - self._next < size:
                self._end = max(size, self._slab_bytes)
                self._slab, self._next = _map(self._end), 0
            at, self._next = self._next, self._next + _in_lines(size)
            return _cut(self._slab, at, shape, dtype)
