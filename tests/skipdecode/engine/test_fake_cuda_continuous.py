"""The continuous batch on a CUDA device that is not there: rows come, go and are moved, and the host waits for nothing
that it has not seen the end of long ago. What a look waits for lies behind a whole step."""

import importlib.util
from collections.abc import Callable

import pytest
import torch

from actors.warm_up import warm_up
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.sampling import Sampling
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs, plans_of
from skipdecode.engine.generate import generate
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.schedules.schedule import EarlyExit, FullDepth, SkipDecode
from tests.support.graphs import FakeCaptures

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
if importlib.util.find_spec("triton") is not None:
    from tests.support.fake_cuda import CUDA, TORCH, NoWaits, fake_cuda, fake_model

L = 4


def request(name: str, prompt: int, num_new: int, top_logprobs: int | None = None, **keys: float) -> Request:
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True, **keys)  # type: ignore[arg-type]
    return Request(name, [2] * prompt, sampling, top_logprobs)


def run(batch: ContinuousBatch, **keys: float) -> None:
    """Rows of different ages and lengths, some of which leave from between; padded prompts, and one that is not."""
    rows = batch.join([request(str(i), 3 + i, 4 if 1 <= i <= 4 else 14, **keys) for i in range(8)])
    batch.step()
    rows += batch.join([request("16", 16, 9, **keys)])
    for _ in range(6):
        batch.step()
    rows += batch.join([request("late", 70, 5, **keys), request("at once", 5, 1, **keys)])
    assert not rows[-1].tokens, "nobody waits for the prompts"
    assert rows[-1] in batch.rows
    while not batch.is_done:
        batch.step()
    assert [len(row.tokens) for row in rows] == [row.request.sampling.max_new_tokens for row in rows]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("opt-125m", {}),
        ("opt-350m", {"temperature": 0.8, "top_p": 0.9}),
        ("tinyllama-1.1b", {"top_logprobs": 3}),
    ],
)
def test_the_host_waits_for_no_step_that_it_has_just_launched(name: str, keys: dict[str, float]) -> None:
    with fake_cuda() as fake:
        model = fake_model(name, layers=L)
        with NoWaits():
            run(ContinuousBatch(model, SkipDecode(L, L, 2, 1, 6)), **keys)  # type: ignore[arg-type]
        assert fake.left[-1] == 0, "the last tokens of all come with no step behind them"
        assert min(fake.left[:-1]) >= 2 * 2, fake.left  # that of a step, whose layers are two at least


@pytest.mark.parametrize(
    ("name", "num_devices"), [("opt-125m", 1), pytest.param("opt-125m", 2, marks=pytest.mark.slow)]
)
def test_kernels_are_compiled_at_load(name: str, num_devices: int) -> None:
    """None in the loop, whatever rows join, leave or end up where: a compiler takes longer than many steps."""

    def requests(count: int, temperature: float) -> list[Request]:
        return [request(str(i), 3 + i % 5, 2 + i % 3, temperature=temperature) for i in range(count)]

    with fake_cuda() as fake:
        model, schedule = fake_model(name, layers=2, num_devices=num_devices), SkipDecode(2, 2, 1, 1, 4)
        warm_up(model, schedule, max_rows=24)
        known = set(fake.compiled)
        assert len([kind for kind in known if kind[0] == "attend_kernel"]) > 1, "the case has lost its point"
        batch = ContinuousBatch(model, schedule) if num_devices == 1 else None
        for rows, temperature in [(1, 0.8), (9, 0.0), (24, 0.8)]:
            if batch is None:
                generate(model, requests(rows, temperature), schedule)
            else:
                batch.join(requests(rows - len(batch.rows), temperature))
                batch.step()
        while batch is not None and not batch.is_done:
            batch.step()
        assert fake.compiled == known, fake.compiled - known


@pytest.mark.parametrize("name", [pytest.param("opt-125m", marks=pytest.mark.slow), "llama-3.2-1b"])
def test_nor_are_any_beside_graphs(name: str) -> None:
    """The last column of prompts is no captured step, and its kernels depend on the rows that are fed together."""
    with fake_cuda() as fake:
        model, schedule = fake_model(name, layers=2), SkipDecode(2, 2, 1, 1, 4)
        graphs = CudaGraphs(model, 1 << 30, max_rows=48, captures=FakeCaptures())
        graphs.capture_all(plans_of([schedule], 4))
        warm_up(model, schedule, graphs, max_rows=48)
        known = set(fake.compiled)
        for rows, temperature in [(1, 0.8), (9, 0.0), (48, 0.0)]:
            requests = [request(str(i), 3 + i % 5, 2 + i % 2, temperature=temperature) for i in range(rows)]
            generate(model, requests, schedule, graphs=graphs)
        assert fake.compiled == known, fake.compiled - known
        assert graphs.num_late == 0


@pytest.mark.slow
def test_torchs_operators_do_as_well() -> None:
    """What `SKIPDECODE_KERNELS=torch` runs."""
    with fake_cuda(TORCH):
        opt, llama = fake_model("opt-125m", layers=L), fake_model("tinyllama-1.1b", layers=L)
        with NoWaits():
            run(ContinuousBatch(opt, EarlyExit(L, L, 2, 1, 6)))
            run(ContinuousBatch(llama, FullDepth(L)), temperature=0.7, top_k=5)


@pytest.mark.parametrize("name", ["opt-125m", "tinyllama-1.1b"])
def test_continuous_batches_with_shared_prefixes_do_not_wait_for_the_device(name: str) -> None:
    prompts = [[2, *range(10, 10 + n), 5 + n] for n in (20, 20, 30, 30, 7)]
    sharing = share_prefixes(prompts, [[8, 20], [8, 20], [8, 20], [8], [4]])
    assert sharing is not None
    assert len(sharing.levels) == 2
    with fake_cuda() as fake:
        model = fake_model(name, layers=L)
        with NoWaits():
            batch = ContinuousBatch(model, FullDepth(L))
            rows = batch.join([request("first", 5, 9)])
            batch.step()
            pool = [Request(str(i), prompt, rows[0].request.sampling) for i, prompt in enumerate(prompts)]
            rows += batch.join(pool, sharing)
            while not batch.is_done:
                batch.step()
        assert [len(row.tokens) for row in rows] == [9] * 6
        assert min(fake.left[:-1]) > 0


def test_an_early_look_is_seen() -> None:
    """That the tests above can fail: a look at the tokens of the step just launched."""
    with fake_cuda() as fake:
        batch = ContinuousBatch(fake_model("opt-125m", layers=L), FullDepth(L), max_pending=0)
        batch.join([request("0", 3, 4)])
        batch.step()
        assert fake.left == [0, 0]


@pytest.mark.parametrize(
    "copy",
    [
        lambda: torch.tensor([1, 2], device=CUDA),
        lambda: torch.tensor([1, 2]).to(CUDA, non_blocking=True),
        lambda: torch.empty(2, device=CUDA).copy_(torch.tensor([1.0, 2.0])),
        lambda: torch.empty(2, device=CUDA).cpu(),
        lambda: to_device([1, 2], CUDA).tolist(),
    ],
)
def test_copies_that_wait_are_seen(copy: Callable[[], object]) -> None:
    with fake_cuda(), NoWaits():
        assert to_device([[1], [2]], CUDA).shape == (2, 1)
        assert to_device([0.5], CUDA).dtype == torch.float32
        with pytest.raises((AssertionError, RuntimeError)):
            copy()
