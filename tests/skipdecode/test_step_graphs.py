"""The logic of graphed steps, run on the CPU without a capture: one memory, tables of places, padded rows, compaction.

The CUDA back end with torch's operators as its kernels, against the decoder without graphs, which other tests hold
against Hugging Face; float32, tokens equal. Real captures are in `test_gpu`.
"""

import itertools
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generator import Generator, GeneratorConfig
from skipdecode import step_graphs
from skipdecode.batch_rows import ladder, rung_within
from skipdecode.captures import CudaCaptures
from skipdecode.cohort import COMPACT_AT, Cohort, kept_rows
from skipdecode.decoder import Decoder
from skipdecode.families import config_of
from skipdecode.ffn_skip import SkipAtRandom, SkipBand, SkipSaturated
from skipdecode.generate import Request, generate
from skipdecode.kv import view
from skipdecode.kv.padded import KVCache
from skipdecode.kv.pool import CachePool, PoolFull
from skipdecode.plan import ChosenLayers, EarlyExit, FullDepth, Schedule, SkipDecode, SwiftPrefill, Unified
from skipdecode.sampling import Sampling
from skipdecode.step_graphs import MAX_GRAPHS, StepGraphs, graphs_serve, plans_of
from skipdecode.weights import load_model
from tests.support.graphs import FakeCaptures, cpu_as_cuda
from tests.support.naive import random_prompts

L = 6
ROOM = 1 << 24
SCHEDULES: list[Schedule] = [
    FullDepth(L),
    SkipDecode(L, 5, 2, 1, 9),
    EarlyExit(L, 6, 1, 1, 14),
    Unified(L, 3),
    ChosenLayers(L, (1, 2, 5)),
    SkipBand(SkipDecode(L, 5, 2, 1, 9), 1, (2, 3)),
    SkipSaturated(SkipDecode(L, 5, 2, 1, 40), 20, 1, 1, 0.85),  # graphs first, then rows that decide
    SkipAtRandom(FullDepth(L), 1, 0, 0, 0.5, 3),
]
Ending = Callable[[str], Path]


def make_requests(lengths: list[int], num_new: int, *, seed: int = 3, **keys: float) -> list[Request]:
    sampling = Sampling(max_new_tokens=num_new, **keys)  # type: ignore[arg-type]
    return [Request(f"row-{i}", p, sampling) for i, p in enumerate(random_prompts(lengths, seed=seed))]


@pytest.fixture(autouse=True, scope="module")
def _as_cuda() -> Iterator[None]:
    with cpu_as_cuda():
        yield


@pytest.fixture(scope="module")
def model(ending_checkpoint: Ending) -> Decoder:
    return load_model(ending_checkpoint("125m")).pack()


def test_rungs() -> None:
    assert ladder(256) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert ladder(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20), "whoever says 20 rows gets a graph for 20"
    assert ladder(200)[-3:] == (128, 192, 200)
    assert ladder(200, has_midpoints=False)[-3:] == (64, 128, 200)
    assert [ladder(n) for n in (1, 2, 3)] == [(1,), (1, 2), (1, 2, 3)]
    assert all(rung_within(n) == max(rung for rung in ladder(256) if rung <= n) for n in range(1, 257))
    assert ladder(256, has_midpoints=False) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


SAMPLED = {"temperature": 1.0, "top_p": 0.9}


@pytest.mark.parametrize(
    ("style", "schedule", "keys"),
    [(style, SCHEDULES[1], {}) for style in ("125m", "350m", "1.3b")]
    + [("1.3b", SCHEDULES[1], SAMPLED)]
    + [("125m", schedule, {}) for schedule in SCHEDULES[2:]],
    ids=str,
)
def test_tokens_are_those_without_graphs(
    ending_checkpoint: Ending, style: str, schedule: Schedule, keys: dict[str, float]
) -> None:
    model = load_model(ending_checkpoint(style)).pack()
    graphs = StepGraphs(model, ROOM)
    small, large = ([3, 5, 1, 2, 4], 9), ([1, 9, 16, 2, 30], 40)
    for lengths, num_new in [small, large]:
        requests = make_requests(lengths, num_new, seed=len(lengths), **keys)
        wanted, made = generate(model, requests, schedule), generate(model, requests, schedule, graphs=graphs)
        assert made.completions == wanted.completions
        assert made.stats.decode_steps == wanted.stats.decode_steps
        with torch.inference_mode():
            graphs.pool.memory.fill_(torch.nan)  # no column that a row has not written may matter


@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_any_shapes_in_any_order_with_any_looks(model: Decoder, data: st.DataObject) -> None:
    """One set of graphs through batches of all shapes; tokens are looked at late, behind the newest steps."""
    graphs = StepGraphs(model, ROOM, max_rows=16)
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=9))
        num_new = data.draw(st.integers(1, 50))
        schedule = data.draw(st.sampled_from([*SCHEDULES[:3], SkipDecode(L, 6, 2, 2, max(num_new - 1, 1))]))
        requests = make_requests(lengths, num_new)
        is_fixed = data.draw(st.booleans())
        fixed = {"prompt_columns": 70, "batch_rows": 10, "compact_at": 0.0} if is_fixed else {}
        looks = {"check_every": data.draw(st.integers(1, 9)), "looks_behind": data.draw(st.integers(0, 2))}
        cohort = Cohort(model, requests, schedule, graphs=graphs, **fixed, **looks)  # type: ignore[arg-type]
        cohort.prefill()
        while not cohort.is_done:
            cohort.step()
        wanted = generate(model, requests, schedule).completions
        assert [row.tokens for row in cohort.rows] == [completion.tokens for completion in wanted]


def test_cohorts_take_turns(model: Decoder) -> None:
    """Several live in one memory, one step each, as an endpoint has them."""
    graphs, schedule = StepGraphs(model, ROOM), SkipDecode(L, 5, 2, 1, 19)
    batches = [make_requests([n, 2 * n, 1], 20, seed=n, temperature=t) for n, t in [(3, 0.0), (9, 1.0), (20, 0.0)]]
    cohorts = [Cohort(model, batch, schedule, graphs=graphs, check_every=1, looks_behind=1) for batch in batches]
    for cohort in cohorts:
        cohort.prefill()
    while not all(cohort.is_done for cohort in cohorts):
        for cohort in cohorts:
            if not cohort.is_done:
                cohort.step()
    for cohort, batch in zip(cohorts, batches, strict=True):
        assert [row.tokens for row in cohort.rows] == [c.tokens for c in generate(model, batch, schedule).completions]


@pytest.mark.parametrize("group_size", [1, 3])
def test_swiftkv(tiny_checkpoint: Path, group_size: int) -> None:
    model = load_model(tiny_checkpoint).with_swiftkv(3, group_size).pack()
    schedule, graphs = SwiftPrefill(SkipDecode(L, 5, 2, 1, 9), 3), StepGraphs(model, ROOM)
    requests = make_requests([5, 40, 1], 20)
    for _ in range(2):
        made = generate(model, requests, schedule, graphs=graphs)
        assert made.completions == generate(model, requests, schedule).completions


# Which graphs there are, and when they are made


def test_all_graphs_are_captured_at_load(model: Decoder) -> None:
    """No batch of any length, size or place captures another one, and none is lost when one fails."""
    schedule, captures = SkipDecode(L, 5, 2, 1, 69), FakeCaptures()
    graphs = StepGraphs(model, ROOM, max_rows=16, captures=captures)
    plans = plans_of([schedule, FullDepth(L)], 70)
    assert [plan.num_layers_run for plan in plans] == [6, 5, 4, 3, 2]
    graphs.capture_all(plans)
    assert captures.captures == graphs.num_captured == graphs.num_graphs == 5 * len(ladder(16))
    assert captures.replays == 0
    for lengths, num_new in [([4] * 4, 70), ([60, 3, 9], 20), ([1] * 11, 5), ([7], 70)]:
        for each in (schedule, FullDepth(L)):
            requests = make_requests(lengths, num_new)
            made = generate(model, requests, each, graphs=graphs)
            assert made.completions == generate(model, requests, each).completions
    assert captures.captures == graphs.num_captured
    assert captures.warm_ups == captures.captures
    assert graphs.num_late == 0
    assert captures.replays > 100


@pytest.mark.parametrize("layers", [24, 32])
def test_160_batches_ask_for_at_most_210_graphs(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 new tokens at 2x, each batch at full depth too, as a worker with a baseline captures and decodes them; row
    counts as `Cohort` has them (`kept_rows`). Steps themselves are left out."""
    monkeypatch.setattr(StepGraphs, "_step", lambda *_: None)
    sizes = {"vocab_size": 8, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 1, "num_hidden_layers": layers}
    config = config_of({"model_type": "opt", "max_position_embeddings": 2048} | sizes)
    worker = object.__new__(Generator)
    worker.config = GeneratorConfig("nobody's", {"method": "skipdecode", "speedup": 2}, baseline_fraction=0.05)
    worker.full = FullDepth(layers)
    worker.model = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32)  # type: ignore[assignment]
    worker.graphs = graphs = StepGraphs(worker.model, 1 << 28, captures=FakeCaptures())
    worker._capture()
    assert 100 < graphs.num_captured == graphs.num_graphs <= 210
    rng, schedule, asked = random.Random(layers), worker.schedule(512), set()
    pads, caches = torch.zeros(256, dtype=torch.int64), {}
    for _ in range(160):
        mean, count = rng.choice([40, 150, 400]), rng.randint(1, 256)
        ends = sorted(min(512, 1 + int(rng.expovariate(1 / mean))) for _ in range(count))
        for each in (schedule, worker.full):
            size, before = len(ends), None
            for k in range(ends[-1] - 1):
                if before != (each.step(k), size):  # the steps between ask for the same
                    before = plan, _ = each.step(k), size
                    asked.add((plan, graphs.rows_for(size)))
                    if size not in caches:
                        caches[size] = graphs.allocate(pads[:size], [1] * layers, [0] * layers)
                    graphs(pads[:size], caches[size], plan)
                running = len(ends) - bisect_right(ends, k + 1)
                size = kept_rows(size, running, COMPACT_AT, graphs)
    assert graphs.num_late == 0
    assert 100 < len(asked) <= graphs.num_graphs
    assert graphs.full is graphs.failure is None


def test_compaction_asks_for_rungs(model: Decoder) -> None:
    """The row counts of real batches are those that the count above takes for granted."""
    graphs, seen = StepGraphs(model, ROOM), set()
    step = graphs._step
    graphs._step = lambda plan, rows: (seen.add(rows), step(plan, rows))[1]  # type: ignore[assignment,func-returns-value]
    requests = make_requests([3, 9, 1, 5, 12, 7, 2, 8, 10, 4, 6] * 2, 60)
    wanted = generate(model, requests, FullDepth(L))
    stats = generate(model, requests, FullDepth(L), graphs=graphs).stats
    assert len(set(stats.batch_rows)) >= 3, "the case has lost its point: no compaction"
    assert seen <= set(ladder(256))
    assert stats.batch_rows[0] == wanted.stats.batch_rows[0] == 22
    assert set(stats.batch_rows) - {22} <= set(ladder(256))


def test_no_attention_of_torch_in_the_loop(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps attend by the back end's kernel alone: a plan of cuDNN or another library, kept by shape, cannot come up.
    And where prompts, or steps without kernels, do call torch's attention, cuDNN is not among its choices."""
    graphs, called = StepGraphs(model, ROOM), []
    cohort = Cohort(model, make_requests([5, 9, 2], 40), SkipDecode(L, 5, 2, 1, 39), graphs=graphs)
    cohort.prefill()
    monkeypatch.setattr(view.F, "scaled_dot_product_attention", lambda *a, **k: called.append(a) or a[0])
    monkeypatch.setattr("skipdecode.kv.padded.attention", lambda *a: called.append(a) or a[0])
    attends = "skipdecode.backends.cuda_reference.TorchKernels.attend"
    monkeypatch.setattr(attends, lambda _self, _heads, q, *_: q)
    while not cohort.is_done:
        cohort.step()
    assert not called
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_more_plans_than_graphs_lose_the_midpoints(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 40)
    graphs = StepGraphs(model, ROOM, max_rows=64, captures=FakeCaptures())
    graphs.capture_all(plans_of([SkipDecode(L, 6, 2, 1, 59)], 60))
    assert graphs.rungs == (1, 2, 4, 8, 16, 32, 64)
    assert graphs.num_graphs == 5 * 7 <= 40 < 5 * len(ladder(64))
    assert graphs.rows_for(5) == 8


def test_graphs_are_bounded(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 3)
    schedule, graphs, requests = SkipDecode(L, 6, 1, 1, 59), StepGraphs(model, ROOM), make_requests([4, 40], 60)
    wanted = generate(model, requests, schedule).completions
    for _ in range(2):
        assert generate(model, requests, schedule, graphs=graphs).completions == wanted
        assert graphs.num_captured == graphs.num_graphs == 3 < MAX_GRAPHS, "captured again and again"
    assert ", full (256 are the most that are kept)" in graphs.describe()


def test_as_many_graphs_as_there_may_be_are_no_lack(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 4)
    graphs = StepGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    graphs.capture_all(plans_of([FullDepth(L)], 9))
    assert (graphs.num_graphs, graphs.full) == (4, None)


def test_graphs_of_other_plans_give_way_at_load(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another configuration of the same model, as a sweep has many."""
    monkeypatch.setattr(step_graphs, "MAX_GRAPHS", 8)
    graphs = StepGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    for depth in (6, 5, 4, 3):
        graphs.capture_all(plans_of([Unified(L, depth)], 9))
        assert graphs.num_graphs == (4 if depth == 6 else 8)
        assert generate(model, make_requests([4, 2], 5), Unified(L, depth), graphs=graphs).completions
    assert (graphs.num_captured, graphs.num_late, graphs.full) == (16, 0, None)


def test_graphs_take_so_much_memory_and_no_more(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the bound steps run kernel by kernel, with the same tokens."""
    monkeypatch.setattr(step_graphs, "MAX_GRAPH_BYTES", 1000)
    graphs = StepGraphs(model, ROOM, max_rows=8, captures=FakeCaptures(graph_bytes=300))
    graphs.capture_all(plans_of([FullDepth(L), SkipDecode(L, 5, 2, 1, 19)], 20))
    assert graphs.num_graphs == 4
    assert graphs.graph_bytes == 1200
    assert ", full (all of them may take" in graphs.describe()
    requests = make_requests([5, 2, 9], 20)
    schedule = SkipDecode(L, 5, 2, 1, 19)
    made = generate(model, requests, schedule, graphs=graphs)
    assert made.completions == generate(model, requests, schedule).completions
    assert graphs.num_graphs == 4


def test_a_late_graph_counts_too(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "MAX_GRAPH_BYTES", 1000)
    graphs, requests = StepGraphs(model, ROOM, captures=FakeCaptures(graph_bytes=400)), make_requests([5, 2], 40)
    for schedule in (FullDepth(L), SkipDecode(L, 5, 2, 1, 39)):
        assert generate(model, requests, schedule, graphs=graphs).completions
    assert (graphs.num_graphs, graphs.num_late, graphs.graph_bytes) == (3, 3, 1200)


# When something goes wrong


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried"), RuntimeError("CUDA error: out of memory")]
)
def test_a_device_without_room_for_another_graph_keeps_those_there_are(model: Decoder, error: Exception) -> None:
    captures, schedule = FakeCaptures(), SkipDecode(L, 5, 2, 1, 19)
    graphs = StepGraphs(model, ROOM, max_rows=4, captures=captures)
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
    graphs, seen = StepGraphs(model, ROOM, max_rows=8, captures=FakeCaptures(RuntimeError("no"))), []
    step = graphs._step
    monkeypatch.setattr(graphs, "_step", lambda plan, rows: (seen.append(rows), step(plan, rows)))
    graphs.capture_all(plans_of([SkipDecode(L, 5, 2, 1, 19)], 20))
    assert graphs.num_graphs == 0
    assert set(seen) == set(graphs.rungs)


def test_no_room_for_a_rehearsal_does_not_end_loading(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = FakeCaptures()
    graphs = StepGraphs(model, ROOM, max_rows=4, captures=captures)

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
    graphs, schedule = StepGraphs(model, ROOM, captures=captures), SkipDecode(L, 5, 2, 1, 19)
    graphs.capture_all(plans_of([schedule], 20))
    assert captures.captures == 1, "it tries again and again"
    assert captures.forgotten == 1, "a pool whose graphs are gone would be used again"
    requests = make_requests([5, 2, 9], 20)
    made = generate(model, requests, schedule, graphs=graphs)
    assert made.completions == generate(model, requests, schedule).completions
    assert captures.captures == 1
    assert graphs.num_graphs == 0
    assert "operation not permitted" in graphs.describe()


def test_a_capture_that_fails_late_does_its_step_once(model: Decoder) -> None:
    captures, schedule = FakeCaptures(), SkipDecode(L, 5, 2, 1, 19)
    graphs, requests = StepGraphs(model, ROOM, captures=captures), make_requests([5, 2, 9], 20)
    cohort = Cohort(model, requests, schedule, graphs=graphs)
    cohort.prefill()
    cohort.step()
    captures.fails = RuntimeError("out of luck")
    while not cohort.is_done:
        cohort.step()
    assert [row.tokens for row in cohort.rows] == [c.tokens for c in generate(model, requests, schedule).completions]
    assert graphs.failure == "RuntimeError: out of luck"


def test_a_kernel_that_fails_in_its_first_run_leaves_steps_without_graphs(model: Decoder) -> None:
    """At load and in a batch: what needs no graph goes on, and the report names the error."""
    schedule, requests = SkipDecode(L, 5, 2, 1, 5), make_requests([5, 2], 6)
    for at_load in (True, False):
        captures = FakeCaptures()
        graphs = StepGraphs(model, ROOM, max_rows=8, captures=captures)

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
    graphs = StepGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    monkeypatch.setattr(graphs, "_step", lambda *_: 1 / 0)
    graphs.capture_all(plans_of([FullDepth(L)], 20))
    assert graphs.failure == "ZeroDivisionError: division by zero"
    with pytest.raises(ZeroDivisionError):
        generate(model, make_requests([5, 2], 20), FullDepth(L), graphs=graphs)


def test_memory_is_that_of_the_batches_that_live(model: Decoder) -> None:
    graphs = StepGraphs(model, 1 << 22)
    before = graphs.pool.free_bytes
    requests = make_requests([3, 9, 1, 5], 60)
    cohort = Cohort(model, requests, FullDepth(L), graphs=graphs)
    column = 2 * L * model.config.hidden_size * 4
    columns = -(-(9 + 59) // 16) * 16
    assert cohort.cache_bytes == before - graphs.pool.free_bytes == 4 * columns * column
    many = make_requests([9] * 200, 60)
    for _ in range(2):  # what cannot be had takes nothing
        with pytest.raises(PoolFull, match=r"actors\.memory_share"):
            Cohort(model, many, FullDepth(L), graphs=graphs)
        assert before - graphs.pool.free_bytes == cohort.cache_bytes
    del cohort
    assert graphs.pool.free_bytes == before


def test_more_rows_than_graphs_have(model: Decoder) -> None:
    graphs, requests = StepGraphs(model, ROOM, max_rows=4), make_requests([3, 9, 1, 5, 8, 2], 30)
    made = generate(model, requests, FullDepth(L), graphs=graphs)
    assert made.completions == generate(model, requests, FullDepth(L)).completions


def test_for_gpus_only(model: Decoder) -> None:
    assert not graphs_serve(model)
    plain = KVCache.allocate(model.config, num_pad=torch.tensor([0]), capacities=[4] * L, dtype=torch.float32)
    with pytest.raises(AssertionError, match="from elsewhere"):
        StepGraphs(model, ROOM)(torch.tensor([5]), plain, FullDepth(L).step(0))


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
    """What `CudaCaptures` asks of torch.cuda."""

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
    captures = CudaCaptures(torch.device("cuda"))
    for _ in range(3):
        captures.capture(lambda: None)
    captures.forget()
    captures.capture(lambda: None)
    assert cuda.used == [((0, 1), "stream 1")] * 3 + [((0, 2), "stream 1")]
    assert cuda.num_streams == 1


def test_what_others_hold_is_not_counted_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker on the same device loads its model meanwhile; only the graphs' own pool counts."""
    FakeCuda(monkeypatch)
    captures, own, free = CudaCaptures(torch.device("cuda")), 0, iter(range(70 << 30, 0, -(1 << 30)))
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
    captures.forget()
    assert captures.held_bytes() == 0


def test_a_failed_capture_gives_the_stream_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(FakeGraph, "fails", True)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaCaptures(torch.device("cuda")).capture(lambda: None)
    assert cuda.here == "main"
