"""Capturing work as a CUDA graph, and doing it again; for tests without a device, the same work done again.

One stream serves every warm-up and every capture: libraries keep a workspace for each stream that they meet (cuBLAS 32
MiB on Hopper). All graphs share one memory pool, since they replay one after another. A pool is gone with its last
graph: `forget` drops it, and the next capture makes another.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

Work = Callable[[], None]
"""Launches kernels on fixed memory; nothing in it depends on the host."""


class GraphCapture(Protocol):
    """How work is captured."""

    def warm_up(self, work: Work) -> None:
        """Does the work once: what libraries set up at their first call must not be captured."""

    def capture(self, work: Work) -> Work:
        """The work as one launch, without doing it. Raises what capturing raises."""

    def forget(self) -> None:
        """All graphs are gone."""

    def held_bytes(self) -> int:
        """Bytes of device memory that graphs hold for what they compute. Not what the driver keeps of each."""


class CudaGraphCapture:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def warm_up(self, work: Work) -> None:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # where it fails in the middle, it is done again here
            here.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        here = torch.cuda.current_stream(self._device)
        try:  # thread_local: other threads of a worker copy their own things meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
        finally:  # a capture that fails at its end leaves its own stream behind
            with torch.cuda.device(self._device):  # to set a stream is to set its device, too
                torch.cuda.set_stream(here)
        return graph.replay

    def forget(self) -> None:
        self._pool = None

    def held_bytes(self) -> int:
        # By torch's own books, of the graphs' pool alone: what is free on the device changes with other processes, and
        # torch's sums leave out a pool's memory between replays.
        if self._pool is None:
            return 0
        try:
            segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        except RuntimeError:  # torch's other allocator (cudaMallocAsync) keeps no such books
            return 0
        return sum(int(one["total_size"]) for one in segments if tuple(one["segment_pool_id"]) == tuple(self._pool))


class Repeats:
    """Does the work again and again, where nothing can be captured."""

    def warm_up(self, work: Work) -> None:
        work()

    def capture(self, work: Work) -> Work:
        return work

    def forget(self) -> None: ...

    def held_bytes(self) -> int:
        return 0


def graph_capture_on(device: torch.device) -> GraphCapture:
    return CudaGraphCapture(device) if device.type == "cuda" else Repeats()
