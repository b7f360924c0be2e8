"""Prompts on a CUDA device that is not there: what they ask of torch's attention, and the memory that they take.

Without padding they are given to its flash attention. With padding (`padded`), its fused attention takes a mask or
groups of queries, not both, and what it falls back to keeps all scores in float32.
"""

import importlib.util
import itertools
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.pinned_copy import to_device
from skipdecode.config.model import SwiftKVConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine import prefix_sharing
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate
from skipdecode.engine.logprobs import score_prompts
from skipdecode.engine.prefill import (
    PACKED_TOKENS,
    PREFILL_BYTES,
    allocate_cache,
    feed_prompts,
    packed_parts,
    pad_prompts,
    shared_prompts,
)
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.families import released
from skipdecode.kv import view
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_states
from skipdecode.schedules.schedule import FullDepth, SwiftKVPrefill
from tests.support.graphs import FakeCaptures

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
if importlib.util.find_spec("triton") is not None:
    from skipdecode.backends.triton_kernels import TritonKernels
    from tests.support.fake_cuda import CUDA, TORCH, FakeCuda, NoWaits, fake_cuda, fake_model

L = 2
Seen = list[tuple[bool, bool]]


def requests_for(lengths: list[int]) -> list[Request]:
    return [Request(str(i), [2] * n, Sampling(max_new_tokens=3, ignore_eos=True)) for i, n in enumerate(lengths)]


def padded() -> AbstractContextManager["FakeCuda"]:
    """A device on which flash attention does not run."""
    return fake_cuda(CudaBackend(TritonKernels(), no_packed_prompts="to see the other way"))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Of each call of torch's attention: whether it has a mask, and groups. It allocates what the fused one does."""
    calls: Seen = []

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
        enable_gqa: bool,
    ) -> Tensor:
        has_groups = q.shape[1] != k.shape[1]
        assert has_groups == enable_gqa
        assert attn_mask is None or not is_causal
        calls.append((attn_mask is not None, has_groups))
        if attn_mask is not None:
            assert attn_mask.stride(-1) == 1
            numbers = torch.where(attn_mask.logical_not(), -torch.inf, torch.zeros((), dtype=q.dtype, device=q.device))
            if attn_mask.shape[-1] % 16:
                numbers = torch.ops.aten.constant_pad_nd(numbers, [0, 16 - attn_mask.shape[-1] % 16])
            assert numbers.shape[-2] == q.shape[2]
        return torch.empty_like(q)

    monkeypatch.setattr(view.F, "scaled_dot_product_attention", attention)
    yield calls
    assert calls, "the case has lost its point"
    assert (True, True) not in calls


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-1.7b"])
def test_a_mask_never_meets_groups(seen: Seen, name: str) -> None:
    """Prompts of a batch, heads that it shares, prompts that are scored, and the passes of training."""
    with padded():
        model = fake_model(name, layers=L)
        graphs = CudaGraphs(model, 1 << 30, max_rows=8, captures=FakeCaptures())
        for lengths in ([5, 9, 200], [9, 9]):
            StaticBatch(model, requests_for(lengths), FullDepth(L), graphs=graphs).prefill()
        assert set(seen) == {(True, False), (False, True)}
        prompts = [[2, *range(10, 10 + n), 5 + n] for n in (20, 20, 30, 30, 7)]
        sharing = share_prefixes(prompts, [[8, 20], [8, 20], [8, 20], [8], [4]])
        assert sharing is not None
        requests = [Request(str(i), prompt, Sampling(max_new_tokens=2)) for i, prompt in enumerate(prompts)]
        StaticBatch(model, requests, FullDepth(L), graphs=graphs, sharing=sharing).prefill()
        assert seen[-1] == (True, False)
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):  # it reads its scores
            score_prompts(model, prompts, 1)
        batch = teacher_batch([([2, 5, 6], [7, 8]), ([2], [7, 8, 9])], 1, model.device)
        batch.num_pad.any = lambda: True  # type: ignore[method-assign]
        teacher_forced_states(model, batch, FullDepth(L))
        assert seen[-1] == (True, False)


def test_nor_by_torchs_operators(seen: Seen) -> None:
    """Whose steps are behind a mask, too."""
    with fake_cuda(TORCH):
        generate(fake_model("llama-3.2-1b", layers=L), requests_for([5, 9]), FullDepth(L))
    assert set(seen) == {(True, False)}


class Live(TorchDispatchMode):
    """Bytes of the device that tensors made since hold, and the most of them."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._known = {memory.untyped_storage()._cdata for memory in (*cache.k, *cache.v)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else (made,):
            if isinstance(one, Tensor) and one.device.type == "cuda":
                self._count(one.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def gone() -> None:
            self._known.discard(key)
            self.bytes -= size

        self._known.add(key)
        self.bytes += size
        self.most = max(self.most, self.bytes)
        weakref.finalize(storage, gone)


@pytest.mark.parametrize("name", ["opt-1.3b", "llama-3.1-8b"])
@pytest.mark.parametrize(("rows", "columns"), [(256, 120), (64, 1001), (12, 1999)])
@pytest.mark.grid
def test_prompts_take_a_gibibyte(seen: Seen, name: str, rows: int, columns: int) -> None:
    """States, masks and copies of keys together, whatever the lengths."""
    with padded():
        model, plan = fake_model(name, layers=L), FullDepth(L)
        tokens, num_pad, num_pad_host = pad_prompts(
            model, requests_for([columns - i % 9 for i in range(rows)]), None, None
        )
        cache = allocate_cache(model, num_pad, columns, plan, 2, num_pad_host=num_pad_host)
        with Live(cache) as live:
            feed_prompts(model, tokens, cache, plan.prefill(), return_argmax=True)
    assert PREFILL_BYTES / 2 < live.most < 1.02 * PREFILL_BYTES


def test_a_part_has_the_columns_of_its_own_longest_prompt(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the batch's; and where all its prompts are as long, no mask."""
    forward, fed = Decoder.forward, list[torch.Size]()

    def noted(model: Decoder, tokens: Tensor, *rest: Any, **keys: Any) -> Tensor:
        fed.append(tokens.shape)
        return forward(model, tokens, *rest, **keys)

    monkeypatch.setattr(Decoder, "forward", noted)
    with padded():
        model, plan = fake_model("llama-3.1-8b", layers=L), FullDepth(L)
        for lengths in ([500] * 32 + [1000 - 2 * i for i in range(64)], [1000] * 32 + [600] * 32):
            fed.clear(), seen.clear()
            tokens, num_pad, num_pad_host = pad_prompts(model, requests_for(lengths), None, None)
            cache = allocate_cache(model, num_pad, 1000, plan, 2, num_pad_host=num_pad_host)
            feed_prompts(model, tokens, cache, plan.prefill(), return_argmax=True)
            ends = list(itertools.accumulate(rows for rows, _ in fed))
            parts = [lengths[end - rows : end] for end, (rows, _) in zip(ends, fed, strict=True)]
            assert len(parts) > 4
            assert [columns for _, columns in fed] == [max(part) for part in parts]
            needs_mask = [len(set(part)) > 1 for part in parts]
            assert [has_mask for has_mask, _ in seen[:: len(seen) // len(parts)]] == needs_mask


def test_prefixes_are_copied_to_rows_in_pieces() -> None:
    """All at once they would take as much memory as the cache of a layer, and as much again: 4 GiB here."""
    with fake_cuda():
        model, plan = fake_model("opt-6.7b", layers=1), FullDepth(1)
        prompts = [[2, *range(3, 1002), 5 + row] for row in range(256)]
        sharing = share_prefixes(prompts, [[1000]] * 256)
        assert sharing is not None
        num_pad = to_device([0] * 256, CUDA)
        rows = allocate_cache(model, num_pad, 1001, plan, 2, num_pad_host=[0] * 256)
        prefixes = allocate_cache(model, num_pad[:1], 1000, plan, 1, num_pad_host=[0])
        with Live(rows) as live:
            prefix_sharing._copy(prefixes, sharing.prefix_of_row, rows)
    assert live.most < 3 * prefix_sharing.COPY_BYTES


@pytest.mark.parametrize("piece", [1, 1 << 8])
def test_pieces_of_prefixes_are_the_prefixes(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """A token at a time, and some, which need not end where a row does."""
    config, seed = released("opt-125m"), torch.Generator().manual_seed(1)
    allocate = partial(KVCache.allocate, replace(config, num_hidden_layers=2), dtype=torch.float32)
    prefixes = allocate(num_pad=torch.tensor([0, 3]), num_pad_host=[0, 3], capacities=[7] * 2)
    for memory in (*prefixes.k, *prefixes.v):
        memory.copy_(torch.randn(memory.shape, generator=seed))
    made = []
    for size in (1 << 28, piece * config.kv_dim * 4):
        monkeypatch.setattr(prefix_sharing, "COPY_BYTES", size)
        rows = allocate(num_pad=torch.tensor([2, 0, 1]), num_pad_host=[2, 0, 1], capacities=[12] * 2)
        for memory in (*rows.k, *rows.v):
            memory.zero_()
        prefix_sharing._copy(prefixes, [0, -1, 1], rows)
        made.append([*rows.k, *rows.v])
    assert torch.equal(made[0][0][0, :, 2:9], prefixes.k[0][0])
    assert torch.equal(made[0][0][2, :, 1:5], prefixes.k[0][1, :, 3:])
    assert all(torch.equal(*pair) for pair in zip(*made, strict=True))


def test_a_long_prompt_goes_alone_and_has_no_mask(seen: Seen) -> None:
    with padded():
        model, plan, lengths = fake_model("llama-3.1-8b", layers=L), FullDepth(L), [20_000, 300, 19_999]
        tokens, num_pad, num_pad_host = pad_prompts(model, requests_for(lengths), None, None)
        cache = allocate_cache(model, num_pad, lengths[0], plan, 2, num_pad_host=num_pad_host)
        with Live(cache) as live:
            made = feed_prompts(model, tokens, cache, plan.prefill())
    assert made.shape == (3, model.config.vocab_size)
    assert set(seen) == {(False, True)}
    assert live.most < 3 * PREFILL_BYTES


# Without padding


class Windows(TorchDispatchMode):
    """Of each call of flash attention: whether it is causal, and how far a query sees to the left and to the right."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, int | None, int | None]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keys = kwargs or {}
        if func is torch.ops.aten._flash_attention_forward.default:
            self.seen.add((args[8], keys.get("window_size_left"), keys.get("window_size_right")))
        return func(*args, **keys)


@pytest.mark.parametrize(
    ("name", "each"), [("opt-1.3b", 9), ("llama-3.1-8b", 10), ("qwen3-1.7b", 10), ("gemma-3-1b", 12)]
)
def test_flash_attention_has_prompts_without_padding(name: str, each: int) -> None:
    """In a batch and of rows that join one: the kernels of a layer, no mask, and no wait for the device."""
    requests, counts = requests_for([5, 1, 200, 17]), []
    with fake_cuda() as fake, Windows() as windows:
        for layers in (3, 7):
            model = fake_model(name, layers=layers)
            with fake.counting() as counted, NoWaits():
                ContinuousBatch(model, FullDepth(layers)).join(requests)
            counts.append(counted.total() - counted["zeros"])  # counters of parts are made once
            assert counted["_flash_attention_forward"] == layers - 1
            assert counted["store_kernel"] == layers
            assert "scaled_dot_product_attention" not in counted
            graphs = CudaGraphs(model, 1 << 30, max_rows=8, captures=FakeCaptures())
            with fake.counting() as counted:
                StaticBatch(model, requests, FullDepth(layers), graphs=graphs).prefill()
            assert counted["_flash_attention_forward"] == layers - 1
        config = model.config
    assert (counts[1] - counts[0]) / 4 == each
    kinds = {config.layer_window(layer) for layer in range(6)}
    assert windows.seen == {(True, None, None) if window is None else (False, window - 1, 0) for window in kinds}


def test_swiftkv_stores_keys_and_values_of_packed_prompts() -> None:
    with fake_cuda() as fake:
        model = fake_model("tinyllama-1.1b", layers=6, swiftkv=SwiftKVConfig(3))
        with fake.counting() as counted, NoWaits():
            ContinuousBatch(model, SwiftKVPrefill(FullDepth(6), 3)).join(requests_for([5, 1, 200]))
    assert counted["_flash_attention_forward"] == 3
    assert counted["store_kernel"] == 6
    assert counted["attend_kernel"] == 3


@pytest.mark.parametrize("name", ["opt-6.7b", "llama-3.1-8b"])
def test_packed_prompts_take_a_gibibyte(name: str) -> None:
    """States, and with cached prefixes the keys and values that are read again; however many tokens."""
    prompts = [[2, *range(3, 1002), 5 + row] for row in range(96)]
    with fake_cuda():
        model, plan = fake_model(name, layers=L), FullDepth(L)
        tokens, num_pad, num_pad_host = pad_prompts(model, requests_for([90 + i for i in range(128)]), None, None)
        cache = allocate_cache(model, num_pad, tokens.shape[1], plan, 2, num_pad_host=num_pad_host)
        with Live(cache) as live:
            feed_prompts(model, tokens, cache, plan.prefill(), return_argmax=True)
        assert live.most < 1.02 * PREFILL_BYTES
        own, sharing = (
            [Request(str(i), p, Sampling(2)) for i, p in enumerate(prompts)],
            share_prefixes(prompts, [[1000]] * 96),
        )
        assert sharing is not None
        shared = shared_prompts(
            model, own, plan, sharing, partial(allocate_cache, model, schedule=plan, num_new=2), copies=True
        )
        with Live(shared.cache) as live:  # rows behind prefixes that are copied already
            shared._feed(shared.tokens, shared.cache, [1000] * 96, plan.prefill(), return_argmax=True)
        assert live.most < 1.02 * PREFILL_BYTES
        parts = list(packed_parts(model, [32] * 1024))
    assert max(part.stop - part.start for part in parts) * 32 <= PACKED_TOKENS


def test_a_prompt_longer_than_a_grid_is_high() -> None:
    """CUDA takes 65,535 programs in the second direction of a grid."""
    with fake_cuda():
        model, plan = fake_model("llama-3.1-8b", layers=L), FullDepth(L)
        tokens, num_pad, num_pad_host = pad_prompts(model, requests_for([70_000, 3]), None, None)
        cache = allocate_cache(model, num_pad, 70_000, plan, 2, num_pad_host=num_pad_host)
        assert feed_prompts(model, tokens, cache, plan.prefill()).shape == (2, model.config.vocab_size)


def test_nor_do_float32_and_batches_of_one_shape(seen: Seen) -> None:
    """They keep their padding."""
    with fake_cuda():
        model = fake_model("llama-3.2-1b", layers=L)
        StaticBatch(model, requests_for([5, 9]), FullDepth(L), prompt_columns=16, batch_rows=2).prefill()
        assert set(seen) == {(True, False)}
        assert model.why_padded is None
        memory = torch.empty(1, 8, 4, 64, device=CUDA)
        assert not model.supports_packed_prompts(memory)
        assert model.supports_packed_prompts(memory.bfloat16())
