"""Graphed steps when something goes wrong: captures that fail, no room, more rows than graphs. On the CPU."""

import pytest
import torch

from skipdecode.engine.cuda_graphs import CudaGraphs, graphs_serve, plans_of
from skipdecode.engine.generate import generate
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.kv.graph_cache import PoolFull
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth, SkipDecode
from tests.support.graphs import ROOM, FakeCaptures, L, as_cuda, make_requests, model

__all__ = ["as_cuda", "model"]  # fixtures


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("CUDA error: out of memory")]
)
def test_a_device_without_room_for_another_graph_keeps_those_there_are(model: Decoder, error: Exception) -> None:
    captures, schedule = FakeCaptures(), SkipDecode(L, 5, 2, 1, 19)
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=captures)
    graphs.capture_all(plans_of([FullDepth(L)], 20))
    captures.fails = error
    graphs.capture_all(plans_of([schedule], 20))
    assert (graphs.num_graphs, captures.forgotten, captures.captures) == (4, 0, 5)
    assert "4 graphs in 0.00 GiB, full (the device has no memory for another; CUDA" in graphs.describe()
    requests = make_requests([5, 2, 9], 20)
    for each in (schedule, FullDepth(L)):
        assert generate(model, requests, each, graphs=graphs).completions == generate(model, requests, each).completions
    assert captures.replays == 19


def test_steps_without_graphs_are_rehearsed_at_load(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for numbers of rows, and a batch must not wait for that."""
    graphs, seen = CudaGraphs(model, ROOM, max_rows=8, captures=FakeCaptures(RuntimeError("no"))), []
    step = graphs._step
    monkeypatch.setattr(graphs, "_step", lambda plan, rows, *rest: (seen.append(rows), step(plan, rows, *rest)))
    graphs.capture_all(plans_of([SkipDecode(L, 5, 2, 1, 19)], 20))
    assert graphs.num_graphs == 0
    assert set(seen) == set(graphs.rungs)


def test_no_room_for_a_rehearsal_does_not_end_loading(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = FakeCaptures()
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=captures)

    def no_room(_work: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(captures, "warm_up", no_room)
    graphs.capture_all(plans_of([FullDepth(L)], 20))
    assert "0 graphs in 0.00 GiB, full (the device has no memory" in graphs.describe()
    requests = make_requests([5, 2, 9], 20)
    made = generate(model, requests, FullDepth(L), graphs=graphs)
    assert made.completions == generate(model, requests, FullDepth(L)).completions


def test_a_capture_that_fails_leaves_steps_without_graphs(model: Decoder) -> None:
    """One kernel that cannot be captured costs speed, and no row; the report names it."""
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    captures = FakeCaptures(error)
    graphs, schedule = CudaGraphs(model, ROOM, captures=captures), SkipDecode(L, 5, 2, 1, 19)
    graphs.capture_all(plans_of([schedule], 20))
    assert captures.captures == 2, "once more, and not again and again"
    assert captures.forgotten == 1, "a pool whose graphs are gone would be used again"
    requests = make_requests([5, 2, 9], 20)
    made = generate(model, requests, schedule, graphs=graphs)
    assert made.completions == generate(model, requests, schedule).completions
    assert captures.captures == 2
    assert graphs.num_graphs == 0
    assert "operation not permitted" in graphs.describe()


UNLUCKY = RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_a_capture_that_fails_by_chance_is_tried_again(model: Decoder) -> None:
    captures, schedule = FakeCaptures(UNLUCKY, fails_at=[3]), SkipDecode(L, 5, 2, 1, 19)
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=captures)
    graphs.capture_all(plans_of([schedule], 20))
    assert graphs.num_graphs == captures.captures - 1 == 4 * 4
    assert graphs.failure is None
    assert captures.forgotten == 0


def test_graphs_stay_when_a_later_capture_fails(model: Decoder) -> None:
    """One of many: today's graphs are as good as before, and steps without one run kernel by kernel."""
    captures, schedule = FakeCaptures(UNLUCKY, fails_at=[9, 10]), SkipDecode(L, 5, 2, 1, 19)
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=captures)
    graphs.capture_all(plans_of([schedule], 20))
    assert (graphs.num_graphs, captures.captures, captures.forgotten) == (8, 10, 0)
    assert graphs.describe().startswith(f"8 graphs in 0.00 GiB, no more (RuntimeError: {UNLUCKY}), ")
    for lengths in ([5, 2, 9, 4], [5]):  # of four rows each plan has a graph, of one none
        requests, before = make_requests(lengths, 20), captures.replays
        made = generate(model, requests, schedule, graphs=graphs)
        assert made.completions == generate(model, requests, schedule).completions
        assert (captures.replays > before) == (len(lengths) == 4)


def test_a_capture_that_fails_late_does_its_step_once(model: Decoder) -> None:
    captures, schedule = FakeCaptures(), SkipDecode(L, 5, 2, 1, 19)
    graphs, requests = CudaGraphs(model, ROOM, captures=captures), make_requests([5, 2, 9], 20)
    static = StaticBatch(model, requests, schedule, graphs=graphs)
    static.prefill()
    static.step()
    captures.fails = RuntimeError("out of luck")
    while not static.is_done:
        static.step()
    assert [row.tokens for row in static.rows] == [c.tokens for c in generate(model, requests, schedule).completions]
    assert graphs.failure == "RuntimeError: out of luck"


def test_a_kernel_that_fails_in_its_first_run_leaves_steps_without_graphs(model: Decoder) -> None:
    """At load and in a batch: what needs no graph goes on, and the report names the error."""
    schedule, requests = SkipDecode(L, 5, 2, 1, 5), make_requests([5, 2], 6)
    for at_load in (True, False):
        captures = FakeCaptures()
        graphs = CudaGraphs(model, ROOM, max_rows=8, captures=captures)

        def broken(_work: object) -> None:
            raise RuntimeError("PassManager::run failed")

        captures.warm_up = broken  # type: ignore[method-assign]
        if at_load:
            graphs.capture_all(plans_of([schedule], 20))
        made = generate(model, requests, schedule, graphs=graphs)
        assert made.completions == generate(model, requests, schedule).completions
        assert captures.captures == 0
        assert graphs.describe() == "no graphs (RuntimeError: PassManager::run failed)"


def test_a_step_that_fails_without_graphs_too_is_the_batches_own(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading says so, and goes on."""
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    monkeypatch.setattr(graphs, "_step", lambda *_: 1 / 0)
    graphs.capture_all(plans_of([FullDepth(L)], 20))
    assert graphs.failure == "ZeroDivisionError: division by zero"
    with pytest.raises(ZeroDivisionError):
        generate(model, make_requests([5, 2], 20), FullDepth(L), graphs=graphs)


def test_memory_is_that_of_the_batches_that_live(model: Decoder) -> None:
    graphs = CudaGraphs(model, 1 << 22)
    before = graphs.pool.free_bytes
    requests = make_requests([3, 9, 1, 5], 60)
    static = StaticBatch(model, requests, FullDepth(L), graphs=graphs)
    column = 2 * L * model.config.hidden_size * 4
    columns = -(-(9 + 59) // 16) * 16
    assert static.cache_bytes == before - graphs.pool.free_bytes == 4 * columns * column
    many = make_requests([9] * 200, 60)
    for _ in range(2):  # what cannot be had takes nothing
        with pytest.raises(PoolFull, match=r"actors\.memory_share"):
            StaticBatch(model, many, FullDepth(L), graphs=graphs)
        assert before - graphs.pool.free_bytes == static.cache_bytes
    del static
    assert graphs.pool.free_bytes == before


def test_more_rows_than_graphs_have(model: Decoder) -> None:
    graphs, requests = CudaGraphs(model, ROOM, max_rows=4), make_requests([3, 9, 1, 5, 8, 2], 30)
    made = generate(model, requests, FullDepth(L), graphs=graphs)
    assert made.completions == generate(model, requests, FullDepth(L)).completions


def test_for_gpus_only(model: Decoder) -> None:
    assert not graphs_serve(model)
    plain = KVCache.allocate(model.config, num_pad=torch.tensor([0]), capacities=[4] * L, dtype=torch.float32)
    with pytest.raises(AssertionError, match="was not allocated here"):
        CudaGraphs(model, ROOM)(torch.tensor([5]), plain, FullDepth(L).step(0))
