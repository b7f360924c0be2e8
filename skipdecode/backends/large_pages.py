"""Memory in large pages, for weights and caches.

A decode step reads all weights, and with pages of 4 KiB it waits for address translation: products of 16 to 32 rows
gain 9 to 19 % with large ones. torch can ask for large pages too, but only for all its memory and only for tensors
that fill some, which a small model's weights do not. A batch's cache reuses the memory of the batch before, because the
system zeroes fresh pages, which took a sixth of the prefill on an AMD EPYC (2026-11-25).
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
"""A spare piece is reused if it is at most so many times as large as needed."""
KEPT = 2
"""Spare pieces kept: a batch may have one cache for prompts and one for answers, or alternate with another schedule."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # only on Linux


def large_pages(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised tensors side by side in one piece of memory, perhaps a reused one; in ordinary memory where they do
    not fill a page."""
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
    """Bytes that are kept for the next `large_pages`, and are not available to anything else."""
    return _SPARE.nbytes


def _cut(memory: mmap.mmap | memoryview, at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor at byte `at` after the beginning of the first large page; it keeps `memory` alive."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=_start(memory) + at).view(shape)


def _start(memory: mmap.mmap | memoryview) -> int:
    """Bytes before the first large page of `memory`."""
    return -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE_BYTES


def _map(size: int) -> mmap.mmap:
    """Maps large pages for `size` bytes after `_start`."""
    assert _ADVICE is not None
    end = (-(-size // PAGE_BYTES) + 1) * PAGE_BYTES
    try:
        memory = mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{end} bytes for weights or a cache: {error}") from error
    with contextlib.suppress(OSError):  # not available on this system
        memory.madvise(_ADVICE)
    return memory


class _Spare:
    """Lends pieces of memory, and keeps the KEPT largest that came back for reuse."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tensor may be freed in the middle of `lend`
        self._idle: list[mmap.mmap] = []  # by size

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._idle))

    def lend(self, size: int) -> memoryview:
        """A view with `size` bytes after `_start`; the memory comes back when the view is freed."""
        least, memory = size + PAGE_BYTES, None
        with self._lock:
            fitting = [idle for idle in self._idle if least <= len(idle) <= MOST_SPARE * least]
            if fitting:
                memory = fitting[0]
                self._idle = [idle for idle in self._idle if idle is not memory]
            else:  # free small spare pieces before more is allocated
                self._idle = [idle for idle in self._idle if MOST_SPARE * len(idle) <= least]
        memory = _map(size) if memory is None else memory
        view = memoryview(memory)
        weakref.finalize(view, self._take_back, memory).atexit = False
        return view

    def _take_back(self, memory: mmap.mmap) -> None:
        with self._lock:  # the smallest is freed when this returns
            self._idle = sorted([*self._idle, memory], key=len)[-KEPT:]


_SPARE = _Spare()


def _in_lines(size: int) -> int:
    return -(-size // LINE_BYTES) * LINE_BYTES


class LargePages:
    """Allocates tensors one after the other from slabs of large pages. A slab lives as long as any of its tensors."""

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._slab: mmap.mmap | None = None
        self._next = self._end = 0  # bytes of the slab

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, aligned to a cache line; in ordinary memory where there are no large pages."""
        size = math.prod(shape) * dtype.itemsize
        if _ADVICE is None or size == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            if self._slab is None or self._end - self._next < size:
                self._end = max(size, self._slab_bytes)
                self._slab, self._next = _map(self._end), 0
            at, self._next = self._next, self._next + _in_lines(size)
            return _cut(self._slab, at, shape, dtype)
