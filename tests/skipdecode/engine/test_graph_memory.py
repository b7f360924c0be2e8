"""The memory of graphed steps in one piece, and captures themselves, with torch's objects replaced."""

import gc
import itertools
import sys
from contextlib import nullcontext
from types import FrameType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skipdecode.engine.cuda_graphs import CudaGraphCapture
from skipdecode.kv.graph_cache import CachePool

# Memory in one piece


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5)), max_size=40))
def test_pool_parts_never_overlap_and_come_back(asked: list[tuple[int, int]]) -> None:
    pool = CachePool(4096, torch.float32, torch.device("cpu"))  # 1,024 numbers
    parts = []
    for count, drop in asked:
        if pool.has_room(-(-count // 16) * 16):
            parts.append(pool.take(count))
        if drop < len(parts):
            del parts[drop]
        spans = sorted((part.start, part.end) for part in parts)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert all(start % 16 == 0 for start, _ in spans)
        assert pool.free_bytes == 4096 - 4 * sum(end - start for start, end in spans)
    parts.clear()
    assert pool.free_bytes == 4096
    assert pool.take(1024).nbytes == 4096


@pytest.mark.parametrize("line", range(8))
def test_a_part_may_be_dropped_within_any_line(line: int) -> None:
    """The collector of cycles runs where something is allocated, and so does another thread's last reference."""
    pool = CachePool(4096, torch.float32, torch.device("cpu"))
    parts = [pool.take(128) for _ in range(8)]
    del parts[5], parts[1]  # gaps before, between and behind what comes back
    left = iter(range(line))

    def trace(frame: FrameType, event: str, _argument: object) -> object:
        is_there = frame.f_code.co_filename == CachePool.take.__code__.co_filename and event == "line"
        if is_there and next(left, None) is None and len(parts) == 6:
            sys.settrace(None)
            del parts[0]
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        parts.append(pool.take(100))
        parts.append(pool.take(128))
    finally:
        sys.settrace(None)
    spans = sorted((part.start, part.end) for part in parts)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert pool.free_bytes == 4096 - 4 * sum(end - start for start, end in spans)
    parts.clear()
    assert pool.take(1024).nbytes == 4096


# Captures themselves, with torch's objects replaced


class FakeGraph:
    """`torch.cuda.graph` and `CUDAGraph`: capturing moves to a stream of its own, and stays there where it fails."""

    fails = False

    def __init__(self, cuda: "FakeCuda", pool: object, stream: object) -> None:
        self.cuda, self.pool, self.stream = cuda, pool, stream

    def __enter__(self) -> None:
        self.cuda.here = self.stream

    def __exit__(self, *_: object) -> None:
        if self.fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.cuda.here = "main"


class FakeCuda:
    """What `CudaGraphCapture` asks of torch.cuda."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here: object = "main"
        self.num_streams, self.pools = 0, iter((0, number) for number in range(1, 9))
        self.used: list[tuple[object, object]] = []
        for name in ("Stream", "current_stream", "set_stream", "CUDAGraph", "graph", "graph_pool_handle", "device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name.lower()))

    def device(self, _device: torch.device) -> object:
        return nullcontext()

    def stream(self, _device: torch.device) -> str:
        self.num_streams += 1
        return f"stream {self.num_streams}"

    def current_stream(self, _device: torch.device) -> object:
        return self.here

    def set_stream(self, stream: object) -> None:
        self.here = stream

    def cudagraph(self) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: None)

    def graph_pool_handle(self) -> tuple[int, int]:
        return next(self.pools)

    def graph(self, _graph: object, *, pool: object, stream: object, capture_error_mode: str) -> FakeGraph:
        assert capture_error_mode == "thread_local"
        self.used.append((pool, stream))
        return FakeGraph(self, pool, stream)


def test_one_stream_and_one_pool_until_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library keeps a workspace for each stream it meets; a pool must not outlive its graphs."""
    cuda = FakeCuda(monkeypatch)
    captures = CudaGraphCapture(torch.device("cuda"))
    for _ in range(3):
        captures.capture(lambda: None)
    captures.forget()
    captures.capture(lambda: None)
    assert cuda.used == [((0, 1), "stream 1")] * 3 + [((0, 2), "stream 1")]
    assert cuda.num_streams == 1


def test_what_others_hold_is_not_counted_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker on the same device loads its model meanwhile; only the graphs' own pool counts."""
    FakeCuda(monkeypatch)
    captures, own, free = CudaGraphCapture(torch.device("cuda")), 0, iter(range(70 << 30, 0, -(1 << 30)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free), 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 8 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 8 << 30)

    def snapshot() -> list[dict[str, object]]:
        sizes = [((0, 0), 8 << 30), ((0, 1), own), ((0, 2), 5)]
        return [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", snapshot)

    def cannot() -> list[dict[str, object]]:
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    before = captures.held_bytes()
    captures.capture(lambda: None)
    own = 20 << 20
    assert captures.held_bytes() - before == own
    monkeypatch.setattr(torch.cuda, "memory_snapshot", cannot)
    assert captures.held_bytes() == 0
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"pool": (0, 1), "size": 5}])
    assert captures.held_bytes() == 0, "another torch's format costs a figure, and no batch"
    captures.forget()
    assert captures.held_bytes() == 0


def test_a_failed_capture_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(FakeGraph, "fails", True)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphCapture(torch.device("cuda", 0)).capture(lambda: None)
    assert cuda.here == "main"


class FakeAllocator:
    """torch's allocator: pools in which a capture is under way, as `torch.cuda.graph` leaves them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: set[object] = set()
        self.released: list[object] = []
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self.release, raising=False)

    def end(self, device: int, pool: object) -> None:
        assert device == 0
        if pool not in self.under_way:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.under_way.remove(pool)

    def release(self, device: int, pool: object) -> None:
        assert device == 0
        self.released.append(pool)


def test_a_failed_capture_is_over_for_the_allocator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would put off what is freed for good. The next capture has another pool; graphs keep theirs."""
    cuda, allocator = FakeCuda(monkeypatch), FakeAllocator(monkeypatch)
    captures = CudaGraphCapture(torch.device("cuda", 0))
    captures.capture(lambda: None)
    monkeypatch.setattr(FakeGraph, "fails", True)
    allocator.under_way = {(0, 1)}
    with pytest.raises(RuntimeError, match="during capture"):
        captures.capture(lambda: None)
    assert (allocator.under_way, allocator.released) == (set(), [(0, 1)])
    with pytest.raises(RuntimeError, match="during capture"):  # where torch has ended it itself
        captures.capture(lambda: None)
    assert allocator.released == [(0, 1)]
    monkeypatch.setattr(FakeGraph, "fails", False)
    captures.capture(lambda: None)
    assert [pool for pool, _ in cuda.used] == [(0, 1), (0, 1), (0, 2), (0, 3)]
    sizes = [((0, 0), 50), ((0, 1), 3), ((0, 3), 4)]
    snapshot = [{"segment_pool_id": pool, "total_size": size} for pool, size in sizes]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    assert captures.held_bytes() == 7


def test_no_cycles_are_collected_within_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    captures, seen = CudaGraphCapture(torch.device("cuda", 0)), list[bool]()
    captures.capture(lambda: seen.append(gc.isenabled()))
    with pytest.raises(ZeroDivisionError):
        captures.capture(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert seen == [False]
    assert gc.isenabled()
