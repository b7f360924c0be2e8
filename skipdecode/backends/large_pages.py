"""Memory in large pages, for weights and caches.

A step reads all weights, and in pages of 4 KiB waits for their addresses: products of 16 to 32 rows gain 9 to 19 %.
torch can ask for large pages too, but only for all it allocates and for tensors that fill some;
the weights of a small model do not. The cache of a batch gets the memory of the one before: the system clears what is
fresh, which took a sixth of the prompts' time on an AMD EPYC (2026-11-25).
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
KEPT = 2
"""Pieces: a batch may have a cache of its prompts and one of its answers, or another schedule runs in turns with it."""
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


def reusable_bytes() -> int:
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
    """Lends memory, and keeps what came back for the next to ask: KEPT pieces, the largest."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the end of a tensor may come in the middle of `lend`
        self._idle: list[mmap.mmap] = []  # rising in size

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._idle))

    def lend(self, size: int) -> memoryview:
        """Room for `size` bytes behind `_start`, until nobody holds the view any more."""
        least, memory = size + PAGE_BYTES, None
        with self._lock:
            fitting = [idle for idle in self._idle if least <= len(idle) <= MOST_SPARE * least]
            if fitting:
                memory = fitting[0]
                self._idle = [idle for idle in self._idle if idle is not memory]
            else:  # what would be much beside it is given up before it is asked for
                self._idle = [idle for idle in self._idle if MOST_SPARE * len(idle) <= least]
        memory = _map(size) if memory is None else memory
        view = memoryview(memory)
        weakref.finalize(view, self._take_back, memory).atexit = False
        return view

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:  # the smallest goes when this returns
            self._idle = sorted([*self._idle, memory], key=len)[-KEPT:]


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
