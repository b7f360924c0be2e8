"""The order in which the CUDA back end calls its kernels, with torch's operators as kernels, on a CPU.

Float32 tokens are those of the decoder by parts. That Triton's kernels are these ones: `test_triton_kernels.py`.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from actors.measuring.bench import BenchCase, profile_case
from skipdecode.backends.backend import TORCH, GraphKVRange, KVRange
from skipdecode.backends.cuda_backend import CudaBackend, CudaLayer
from skipdecode.backends.cuda_kernels import Heads
from skipdecode.backends.rope import rotary_tables
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.engine.continuous_batch import Member
from skipdecode.engine.generate import generate, generate_continuous, refill
from skipdecode.kv.slot_cache import QUERY, SLOT, TokensView
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import EarlyExit, FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.cuda_models import SHAPES, cpu_computed_by, random_model, some_requests

BACKEND = CudaBackend(TorchKernels())
SCHEDULES: list[Schedule] = [
    SkipDecode(4, 4, 2, 1, 6),
    SkipBand(EarlyExit(4, 4, 2, 1, 6), 1, (1, 2)),
    SkipSaturated(FullDepth(4), 2, 1, 1, 0.9),
]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tokens_are_those_of_torch(name: str, schedule: Schedule) -> None:
    keys = {"temperature": 0.9, "top_p": 0.9} if name == "llama" else {}
    requests = some_requests(9, **keys)
    with cpu_computed_by(TORCH):
        wanted = generate(random_model(name), requests, schedule).completions
    with cpu_computed_by(BACKEND):
        model = random_model(name).pack()
        assert all(isinstance(layer.kernel, CudaLayer) for layer in model.layers)
        assert generate(model, requests, schedule).completions == wanted
        fixed = generate(model, requests, schedule, prompt_columns=32, batch_rows=7, compact=False)
        assert fixed.completions == wanted
        if schedule.is_static:
            made = generate_continuous(model, requests, schedule, max_rows=3).completions
            assert [c.tokens for c in made] == [c.tokens for c in wanted]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_are_verified_by_kernels(name: str, sampled: bool) -> None:
    """Several new columns of a row in a pass, of rows that advance unevenly."""
    requests = some_requests(12, **({"temperature": 0.9, "top_p": 0.9} if sampled else {}))
    with cpu_computed_by(TORCH):
        wanted = generate(random_model(name), requests, FullDepth(4)).completions
    Watched.sizes.clear()
    with cpu_computed_by(BACKEND):
        batch = Watched(random_model(name).pack(), Lossless(4, SkipDecode(4, 3, 2, 1, 6), draft_tokens=3))
        assert [c.tokens for c in refill(batch, requests, max_rows=len(requests)).completions] == [
            c.tokens for c in wanted
        ]
    assert max(batch.sizes) == 4
    assert sum(batch.stats.drafted_at) > 0


class Watched(SpeculativeBatch):
    """Notes how many new columns of a row a pass has."""

    sizes: ClassVar[list[int]] = []

    def _view_of(
        self, members: Sequence[Member], columns: Sequence[int], queries: Sequence[tuple[int, int]] | None = None
    ) -> TokensView:
        assert self._cache.backend.needs_query_index
        assert self._cache.token_attention is not None, "by torch's attention"
        view = super()._view_of(members, columns, queries)
        places = view.index[SLOT]
        each = torch.bincount(places).tolist()
        found = view.index[QUERY : QUERY + 2].tolist()
        assert found == [[i for n in each_of(places) for i in range(n)], [each[p] for p in places.tolist()]]
        assert max(each) == view.most
        self.sizes.append(view.most)
        return view


def each_of(places: Tensor) -> list[int]:
    """Lengths of runs of one place."""
    return [len(list(run)) for _, run in groupby(places.tolist())]


@pytest.mark.parametrize("group_size", [1, 2])
def test_swiftkv(group_size: int) -> None:
    requests, schedule = some_requests(9), SwiftKVPrefill(SkipDecode(4, 4, 2, 1, 6), 2)
    with cpu_computed_by(TORCH):
        wanted = generate(random_model("llama").with_swiftkv(2, group_size), requests, schedule).completions
    with cpu_computed_by(BACKEND):
        model = random_model("llama").with_swiftkv(2, group_size).pack()
        assert generate(model, requests, schedule).completions == wanted


def test_a_table_is_columns() -> None:
    """The same memory, as tensors and as numbers on the device."""
    torch.manual_seed(0)
    config = random_model("qwen3").config
    heads = Heads(4, 2, 128, rotary_tables(config)[0], torch.rand(128), torch.rand(128), 1e-6)
    memory, rows, capacity = torch.full((100_000,), torch.nan), 3, 48
    where = torch.tensor([32, 40_000, 2 * capacity * 128, capacity * 128])
    shape, strides = (rows, 2, capacity, 128), (2 * capacity * 128, capacity * 128, 128, 1)
    k, v = (memory.as_strided(shape, strides, at) for at in (32, 40_000))
    first, last = torch.tensor([0, 5, 9]), torch.tensor([9])
    for own in (k, v):
        for row, start in enumerate(first.tolist()):
            own[row, :, start:9] = torch.randn(2, 9 - start, 128)
    k_plain, v_plain = k.contiguous(), v.contiguous()
    q, new_k, new_v = torch.randn(rows, 4 * 128), torch.randn(rows, 2 * 128), torch.randn(rows, 2 * 128)
    kernels = TorchKernels()
    wanted = kernels.attend(heads, q, new_k, new_v, KVRange(k_plain, v_plain, first, last.repeat(rows)))
    made = kernels.attend(heads, q, new_k, new_v, GraphKVRange(memory, where, first, last.expand(rows)))
    assert made.isfinite().all()
    torch.testing.assert_close(made, wanted)
    assert torch.equal(k[:, :, 9], k_plain[:, :, 9])
    assert torch.equal(v[:, :, 9], v_plain[:, :, 9])


def test_stages_are_timed_and_left_as_they_were() -> None:
    with cpu_computed_by(BACKEND):
        model = random_model("llama").pack()
        before = CudaLayer.feed
        rows = profile_case(model, BenchCase(3, 5, 4), [{"method": "full"}])
        assert {"attention", "norms", "feed-forward", "products of attention"} <= {row["stage"] for row in rows}
        assert CudaLayer.feed is before
        assert "attend" not in vars(BACKEND.kernels)
