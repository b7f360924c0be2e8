"""The logic of graphed steps, run on the CPU without a capture: static memory, column steps, masks, compaction.

Against the same decoder without graphs, which other tests hold against Hugging Face; float32, tokens equal. Real
captures are in `test_gpu`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.decoder import Decoder
from skipdecode.ffn_skip import SkipAtRandom, SkipBand, SkipSaturated
from skipdecode.generate import Request, generate
from skipdecode.kv.padded import KVCache
from skipdecode.plan import EarlyExit, FullDepth, Schedule, SkipDecode, SwiftPrefill, Unified
from skipdecode.sampling import Sampling
from skipdecode.step_graphs import COLUMN_STEP, MAX_GRAPHS, StepGraphs, step_graphs
from skipdecode.weights import load_model
from tests.support.naive import random_prompts

L = 6
SCHEDULES: list[Schedule] = [
    FullDepth(L),
    SkipDecode(L, 5, 2, 1, 9),
    EarlyExit(L, 6, 1, 1, 14),
    Unified(L, 3),
    SkipBand(SkipDecode(L, 5, 2, 1, 9), 1, (2, 3)),
    SkipSaturated(SkipDecode(L, 5, 2, 1, 40), 20, 1, 1, 0.85),  # graphs first, then rows that decide
    SkipAtRandom(FullDepth(L), 1, 0, 0, 0.5, 3),
]
Ending = Callable[[str], Path]


def make_requests(lengths: list[int], num_new: int, *, seed: int = 3, **keys: float) -> list[Request]:
    sampling = Sampling(max_new_tokens=num_new, **keys)  # type: ignore[arg-type]
    return [Request(f"row-{i}", p, sampling) for i, p in enumerate(random_prompts(lengths, seed=seed))]


@pytest.fixture(scope="module")
def model(ending_checkpoint: Ending) -> Decoder:
    return load_model(ending_checkpoint("125m"))


@pytest.mark.parametrize("style", ["125m", "350m", "1.3b"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_tokens_are_those_without_graphs(
    ending_checkpoint: Ending, style: str, schedule: Schedule, keys: dict[str, float]
) -> None:
    model = load_model(ending_checkpoint(style))
    graphs = StepGraphs(model)
    small, large = ([3, 5, 1, 2, 4, 3, 2, 1], 9), ([1, 9, 4, 16, 2, 9, 30, 7], 40)
    for lengths, num_new in [small, small, large, small, large]:  # captured, moved to larger memory, and back
        requests = make_requests(lengths, num_new, seed=len(lengths), **keys)
        wanted, made = generate(model, requests, schedule), generate(model, requests, schedule, graphs=graphs)
        assert made.completions == wanted.completions
        assert made.stats.decode_steps == wanted.stats.decode_steps


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_shapes_in_any_order(model: Decoder, data: st.DataObject) -> None:
    """One set of graphs and memory through batches that grow and shrink."""
    graphs = StepGraphs(model)
    for _ in range(3):
        lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=9))
        num_new = data.draw(st.integers(1, 50))
        schedule = data.draw(st.sampled_from([*SCHEDULES[:3], SkipDecode(L, 6, 2, 2, max(num_new - 1, 1))]))
        requests = make_requests(lengths, num_new)
        fixed = {"prompt_columns": 70, "batch_rows": 10, "compact": False} if data.draw(st.booleans()) else {}
        wanted = generate(model, requests, schedule, **fixed).completions  # type: ignore[arg-type]
        assert generate(model, requests, schedule, graphs=graphs, **fixed).completions == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("group_size", [1, 3])
def test_swiftkv(tiny_checkpoint: Path, group_size: int) -> None:
    model = load_model(tiny_checkpoint).with_swiftkv(3, group_size)
    schedule, graphs = SwiftPrefill(SkipDecode(L, 5, 2, 1, 9), 3), StepGraphs(model)
    requests = make_requests([5, 40, 1], 20)
    for _ in range(2):
        assert (
            generate(model, requests, schedule, graphs=graphs).completions
            == generate(model, requests, schedule).completions
        )


def test_as_many_graphs_as_plans_and_column_steps(model: Decoder) -> None:
    """A second batch captures what the first ran once; from the third on there is nothing to capture."""
    schedule, graphs = SkipDecode(L, 5, 2, 1, 69), StepGraphs(model)
    requests = make_requests([4] * 4, 70, ignore_eos=True)
    plans, column_steps = 4, -(-(4 + 69) // COLUMN_STEP)
    captured = []
    for _ in range(3):
        generate(model, requests, schedule, graphs=graphs)
        captured.append(graphs.num_captured)
    assert captured[0] == captured[2] <= plans + column_steps - 1
    assert captured[0] >= plans


def test_rows_and_memory(model: Decoder) -> None:
    """Compaction keeps to powers of two, so that graphs serve again; the memory is that of the largest batch."""
    graphs = StepGraphs(model)
    requests = make_requests([3, 9, 1, 5, 12, 7, 2, 8, 10, 4, 6] * 2, 60)
    rows = generate(model, requests, FullDepth(L), graphs=graphs).stats.batch_rows
    assert rows[0] == 22
    assert len(set(rows)) >= 3, "the case has lost its point: no compaction"
    assert {size & (size - 1) for size in set(rows) - {22}} == {0}
    held = graphs.nbytes
    config = model.config
    column = 2 * config.num_hidden_layers * config.hidden_size * 4
    needed = -(-(12 + 59) // COLUMN_STEP) * COLUMN_STEP
    assert held == 22 * needed * column
    generate(model, requests[:5], FullDepth(L), graphs=graphs)
    assert graphs.nbytes == held
    graphs.clear()
    assert graphs.nbytes == 0
    assert generate(model, requests, FullDepth(L), graphs=graphs).stats.batch_rows == rows


def test_a_batch_that_went_wrong_leaves_nothing_behind(model: Decoder) -> None:
    """What is not a number stays so under a mask that weighs it with zero."""
    graphs, requests = StepGraphs(model), make_requests([3, 20, 9], 30)
    wanted = generate(model, requests, FullDepth(L)).completions
    for _ in range(2):
        generate(model, requests, FullDepth(L), graphs=graphs)
        with torch.inference_mode():
            for memory in graphs._memory.values():
                memory.fill_(torch.nan)
    assert generate(model, requests, FullDepth(L), graphs=graphs).completions == wanted


def test_graphs_are_bounded(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipdecode.step_graphs.MAX_GRAPHS", 3)
    schedule, graphs, requests = SkipDecode(L, 6, 1, 1, 59), StepGraphs(model), make_requests([4, 40], 60)
    wanted = generate(model, requests, schedule).completions
    for _ in range(2):
        assert generate(model, requests, schedule, graphs=graphs).completions == wanted
        assert len(graphs._replays) <= 3 < MAX_GRAPHS


def test_for_gpus_only(model: Decoder) -> None:
    assert step_graphs(model) is None
    plain = KVCache.allocate(model.config, num_pad=torch.tensor([0]), capacities=[4] * L, dtype=torch.float32)
    with pytest.raises(AssertionError, match="from elsewhere"):
        StepGraphs(model)(torch.tensor([5]), plain, FullDepth(L).step(0))
