"""The logic of graphed steps, run on the CPU without a capture: one memory, tables of places, padded rows, compaction.

The CUDA back end with torch's operators as its kernels, against the decoder without graphs, which other tests hold
against Hugging Face; float32, tokens equal. Real captures are in `test_gpu`.
"""

import random
from bisect import bisect_right
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from skipdecode.checkpoint.weights import load_model
from skipdecode.cost.batch_sizes import ladder, rung_within
from skipdecode.engine import cuda_graphs as cuda_graphs
from skipdecode.engine.cuda_graphs import MAX_GRAPHS, CudaGraphs, plans_of
from skipdecode.engine.generate import generate
from skipdecode.engine.static_batch import COMPACT_AT, StaticBatch, kept_rows
from skipdecode.families import config_of
from skipdecode.kv import view
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill, Unified
from tests.support.graphs import ROOM, Ending, FakeCaptures, L, as_cuda, make_requests, model
from tests.support.schedules import SCHEDULES

__all__ = ["as_cuda", "model"]  # fixtures

SKIP = SCHEDULES["skipdecode"]
OTHERS: list[Schedule] = [
    *(schedule for name, schedule in SCHEDULES.items() if name not in ("full", "skipdecode")),
    SkipBand(SKIP, 1, (2, 3)),
    SkipSaturated(SkipDecode(L, 5, 2, 1, 40), 20, 1, 1, 0.85),  # graphs first, then rows that decide
]


def test_rungs() -> None:
    assert ladder(256) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
    assert ladder(256, 1) == tuple(rung for rung in ladder(256) if rung not in (160, 224))
    assert ladder(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20), "whoever says 20 rows gets a graph for 20"
    assert ladder(200)[-4:] == (128, 160, 192, 200)
    assert ladder(200, 0)[-3:] == (64, 128, 200)
    assert [ladder(n) for n in (1, 2, 3)] == [(1,), (1, 2), (1, 2, 3)]
    assert all(rung_within(n) == max(rung for rung in ladder(256) if rung <= n) for n in range(1, 257))
    assert ladder(256, 0) == (1, 2, 4, 8, 16, 32, 64, 128, 256)


SAMPLED = {"temperature": 1.0, "top_p": 0.9}


@pytest.mark.parametrize(
    ("style", "schedule", "keys"),
    [(style, SKIP, {}) for style in ("125m", "350m", "1.3b")]
    + [("1.3b", SKIP, SAMPLED)]
    + [pytest.param("125m", schedule, {}, marks=pytest.mark.slow) for schedule in OTHERS],
    ids=str,
)
def test_tokens_are_those_without_graphs(
    ending_checkpoint: Ending, style: str, schedule: Schedule, keys: dict[str, float]
) -> None:
    model = load_model(ending_checkpoint(style)).pack()
    graphs = CudaGraphs(model, ROOM)
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
def test_any_shapes_in_any_order_with_output_read_at_any_time(model: Decoder, data: st.DataObject) -> None:
    """One set of graphs through batches of all shapes; tokens are looked at late, behind the newest steps."""
    graphs = CudaGraphs(model, ROOM, max_rows=16)
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=9))
        num_new = data.draw(st.integers(1, 50))
        schedule = data.draw(st.sampled_from([*SCHEDULES.values(), SkipDecode(L, 6, 2, 2, max(num_new - 1, 1))]))
        requests = make_requests(lengths, num_new)
        is_fixed = data.draw(st.booleans())
        fixed = {"prompt_columns": 70, "batch_rows": 10, "compact_at": 0.0} if is_fixed else {}
        async_output = {"check_every": data.draw(st.integers(1, 9)), "max_pending": data.draw(st.integers(0, 2))}
        static = StaticBatch(model, requests, schedule, graphs=graphs, **fixed, **async_output)  # type: ignore[arg-type]
        static.prefill()
        while not static.is_done:
            static.step()
        wanted = generate(model, requests, schedule).completions
        assert [row.tokens for row in static.rows] == [completion.tokens for completion in wanted]


def test_static_batches_alternate(model: Decoder) -> None:
    """Several live in one memory, one step each, as an endpoint has them."""
    graphs, schedule = CudaGraphs(model, ROOM), SkipDecode(L, 5, 2, 1, 19)
    batches = [make_requests([n, 2 * n, 1], 20, seed=n, temperature=t) for n, t in [(3, 0.0), (9, 1.0), (20, 0.0)]]
    statics = [StaticBatch(model, batch, schedule, graphs=graphs, check_every=1, max_pending=1) for batch in batches]
    for static in statics:
        static.prefill()
    while not all(static.is_done for static in statics):
        for static in statics:
            if not static.is_done:
                static.step()
    for static, batch in zip(statics, batches, strict=True):
        assert [row.tokens for row in static.rows] == [c.tokens for c in generate(model, batch, schedule).completions]


@pytest.mark.parametrize("group_size", [1, 3])
def test_swiftkv(tiny_checkpoint: Path, group_size: int) -> None:
    model = load_model(tiny_checkpoint).with_swiftkv(3, group_size).pack()
    schedule, graphs = SwiftKVPrefill(SkipDecode(L, 5, 2, 1, 9), 3), CudaGraphs(model, ROOM)
    requests = make_requests([5, 40, 1], 20)
    for _ in range(2):
        made = generate(model, requests, schedule, graphs=graphs)
        assert made.completions == generate(model, requests, schedule).completions


# Which graphs there are, and when they are made


def test_all_graphs_are_captured_at_load(model: Decoder) -> None:
    """No batch of any length, size or place captures another one, and none is lost when one fails."""
    schedule, captures = SkipDecode(L, 5, 2, 1, 69), FakeCaptures()
    graphs = CudaGraphs(model, ROOM, max_rows=16, captures=captures)
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
def test_160_batches_ask_for_at_most_234_graphs(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 new tokens at 2x, each batch at full depth too, as a worker with a baseline captures and decodes them; row
    counts as `StaticBatch` has them (`kept_rows`). Steps themselves are left out."""
    monkeypatch.setattr(CudaGraphs, "_step", lambda *_: None)
    sizes = {"vocab_size": 8, "hidden_size": 16, "ffn_dim": 16, "num_attention_heads": 1, "num_hidden_layers": layers}
    config = config_of({"model_type": "opt", "max_position_embeddings": 2048} | sizes)
    worker = object.__new__(Generator)
    worker.config = GeneratorConfig("nobody's", {"method": "skipdecode", "speedup": 2}, baseline_fraction=0.05)
    worker.full = FullDepth(layers)
    types = {"dtype": torch.float32, "kv_dtype": torch.float32}
    worker.model = SimpleNamespace(config=config, device=torch.device("cpu"), **types)  # type: ignore[assignment]
    worker.graphs = graphs = CudaGraphs(worker.model, 1 << 28, captures=FakeCaptures())
    worker._capture_graphs()
    assert 100 < graphs.num_captured == graphs.num_graphs <= 234
    assert graphs.rungs == ladder(256), "a released shape keeps 160 and 224 rows"
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
    graphs, seen = CudaGraphs(model, ROOM), set()
    step = graphs._step
    graphs._step = lambda plan, rows, *rest: (seen.add(rows), step(plan, rows, *rest))[1]  # type: ignore[assignment,func-returns-value]
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
    graphs, called = CudaGraphs(model, ROOM), []
    static = StaticBatch(model, make_requests([5, 9, 2], 40), SkipDecode(L, 5, 2, 1, 39), graphs=graphs)
    static.prefill()
    monkeypatch.setattr(view.F, "scaled_dot_product_attention", lambda *a, **k: called.append(a) or a[0])
    monkeypatch.setattr("skipdecode.kv.static_cache.attention", lambda *a: called.append(a) or a[0])
    attends = "skipdecode.backends.torch_kernels.TorchKernels.attend"
    monkeypatch.setattr(attends, lambda _self, _heads, q, *_: q)
    while not static.is_done:
        static.step()
    assert not called
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_more_plans_than_graphs_lose_the_midpoints(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 40)
    graphs = CudaGraphs(model, ROOM, max_rows=64, captures=FakeCaptures())
    graphs.capture_all(plans_of([SkipDecode(L, 6, 2, 1, 59)], 60))
    assert graphs.rungs == (1, 2, 4, 8, 16, 32, 64)
    assert graphs.num_graphs == 5 * 7 <= 40 < 5 * len(ladder(64))
    assert graphs.rows_for(5) == 8


def test_more_plans_than_graphs_lose_the_quarters_first(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of([SkipDecode(L, 6, 2, 1, 59)], 60)
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 18 * len(plans) - 1)
    graphs = CudaGraphs(model, ROOM, captures=FakeCaptures())
    graphs.capture_all(plans)
    assert graphs.rungs == ladder(256, 1)
    assert graphs.num_graphs == 16 * len(plans)
    assert [graphs.rows_for(n) for n in (130, 200)] == [192, 256]


def test_graphs_are_bounded(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 3)
    schedule, graphs, requests = SkipDecode(L, 6, 1, 1, 59), CudaGraphs(model, ROOM), make_requests([4, 40], 60)
    wanted = generate(model, requests, schedule).completions
    for _ in range(2):
        assert generate(model, requests, schedule, graphs=graphs).completions == wanted
        assert graphs.num_captured == graphs.num_graphs == 3 < MAX_GRAPHS, "captured again and again"
    assert ", full (at most 256 graphs are kept)" in graphs.describe()


def test_as_many_graphs_as_there_may_be_are_no_lack(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 4)
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    graphs.capture_all(plans_of([FullDepth(L)], 9))
    assert (graphs.num_graphs, graphs.full) == (4, None)


def test_graphs_of_other_plans_give_way_at_load(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another configuration of the same model, as a sweep has many."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 8)
    graphs = CudaGraphs(model, ROOM, max_rows=4, captures=FakeCaptures())
    for depth in (6, 5, 4, 3):
        graphs.capture_all(plans_of([Unified(L, depth)], 9))
        assert graphs.num_graphs == (4 if depth == 6 else 8)
        assert generate(model, make_requests([4, 2], 5), Unified(L, depth), graphs=graphs).completions
    assert (graphs.num_captured, graphs.num_late, graphs.full) == (16, 0, None)


def test_graphs_take_so_much_memory_and_no_more(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the bound steps run kernel by kernel, with the same tokens."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPH_BYTES", 1000)
    graphs = CudaGraphs(model, ROOM, max_rows=8, captures=FakeCaptures(graph_bytes=300))
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
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPH_BYTES", 1000)
    graphs, requests = CudaGraphs(model, ROOM, captures=FakeCaptures(graph_bytes=400)), make_requests([5, 2], 40)
    for schedule in (FullDepth(L), SkipDecode(L, 5, 2, 1, 39)):
        assert generate(model, requests, schedule, graphs=graphs).completions
    assert (graphs.num_graphs, graphs.num_late, graphs.graph_bytes) == (3, 3, 1200)
