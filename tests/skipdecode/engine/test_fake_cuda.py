"""Decoding on a CUDA device that is not there: every released shape, from prompts to tokens, without a host read.

What is seen: devices mixed, shapes that do not fit, numbers asked for by the host, and how many kernels a step is. What
is not: what a kernel computes (`test_triton_kernels.py`), and time.
"""

import importlib.util
import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from skipdecode.config.model import SwiftKVConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import CudaGraphs, plans_of
from skipdecode.engine.prefill import allocate_cache, feed_prompts, pad_prompts
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.families import FAMILIES
from skipdecode.kv.static_cache import KVCache
from skipdecode.model import layer_loop
from skipdecode.model.decoder import Decoder
from skipdecode.model.sampler import Sampler
from skipdecode.schedules.schedule import EarlyExit, FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from tests.support.graphs import FakeCaptures

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
if importlib.util.find_spec("triton") is not None:
    from tests.support.fake_cuda import CUDA, TORCH, FakeCuda, NoWaits, fake_cuda, fake_model

SHAPES = [*dict.fromkeys(name for family in FAMILIES.values() for name in family.released_shapes), "qwen3-1.7b"]
ROWS, COLUMNS, NEW = 6, 40, 12


def requests_for(**keys: float) -> list[Request]:
    sampling = Sampling(max_new_tokens=NEW, **keys)  # type: ignore[arg-type]
    return [Request(f"row-{i}", [2] * (1 + 7 * i % 40), sampling) for i in range(ROWS)]


def prefilled(model: Decoder, requests: list[Request], schedule: Schedule) -> tuple[KVCache, torch.Tensor]:
    tokens, num_pad, _ = pad_prompts(model, requests, COLUMNS, ROWS)
    cache = allocate_cache(model, num_pad, COLUMNS, schedule, NEW, force_mask=True)
    return cache, feed_prompts(model, tokens, cache, schedule.prefill())


def step(model: Decoder, newest: torch.Tensor, cache: KVCache, schedule: Schedule, k: int, **how: bool) -> torch.Tensor:
    positions = (cache.length - cache.num_pad)[:, None].clamp(max=model.config.max_position_embeddings - 1)
    made = model(newest[:, None], positions, cache, schedule.step(k), **how)
    assert made.device == CUDA
    return made


def decode(fake: "FakeCuda", model: Decoder, schedule: Schedule, **keys: float) -> list[Counter[str]]:
    """Prompts, steps, rows dropped, more steps; the kernels of each step."""
    requests = requests_for(**keys)
    cache, logits = prefilled(model, requests, schedule)
    assert logits.shape == (ROWS, model.config.vocab_size)
    assert logits.dtype == model.dtype
    sampler, kernels = Sampler([r.id for r in requests], [r.sampling for r in requests], NEW, CUDA), []
    newest = sampler(logits, 0)
    for k in range(2):
        with fake.counting() as counted:
            logits = step(model, newest, cache, schedule, k)
            newest = sampler(logits, k + 1)
        kernels.append(counted)
        assert newest.shape == (len(logits),)
        assert newest.dtype == torch.int64
        if k == 0:
            keep = torch.tensor([0, 2, 5], device=CUDA)
            sampler.keep(keep)
            newest, cache = newest[keep], cache.keep([0, 2, 5], schedule.step(k + 1).attn)
    return kernels


FIRST_OF_FAMILY = {next(iter(family.released_shapes), None) for family in FAMILIES.values()}


@pytest.mark.parametrize(
    "name", [name if name in FIRST_OF_FAMILY else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
@pytest.mark.parametrize("layers", [6, pytest.param(None, marks=pytest.mark.slow, id="all")])
def test_every_released_shape_decodes_without_a_host_read(name: str, layers: int | None) -> None:
    """SkipDecode, so that plans change; greedy for one half, sampled for the other."""
    with fake_cuda() as fake:
        model = fake_model(name, layers=layers)
        layers = model.config.num_hidden_layers
        keys = {"temperature": 0.8, "top_p": 0.9} if SHAPES.index(name) % 2 else {}
        kernels = decode(fake, model, SkipDecode(layers, layers, 2, 1, 2), **keys)
        few, many = kernels[-1], kernels[0]
        each = (sum(many.values()) - sum(few.values())) / (layers - 2)
        config = model.config
        assert each == (8 if config.is_gated else 7) + 2 * config.has_sublayer_norms, (many, few)
        # around the layers: positions, embeddings, the first norm, the last one, the head, and the choice
        assert sum(many.values()) - each * layers <= 16, many
        assert many["draw_kernel" if keys else "argmax_kernel"] == 1
        assert not {"sort", "_to_copy", "cumsum", "scaled_dot_product_attention", "index_copy"} & set(many), many


@pytest.mark.slow
def test_torchs_operators_do_as_well() -> None:
    """What `SKIPDECODE_KERNELS=torch` runs."""
    with fake_cuda(TORCH) as fake:
        decode(fake, fake_model("opt-125m", layers=4), FullDepth(4), temperature=0.7, top_k=5)
        decode(fake, fake_model("tinyllama-1.1b", layers=4), EarlyExit(4, 4, 2, 1, 2), temperature=0.7)


def test_swiftkv() -> None:
    with fake_cuda() as fake:
        model = fake_model("tinyllama-1.1b", layers=4, swiftkv=SwiftKVConfig(2))
        kernels = decode(fake, model, SwiftKVPrefill(FullDepth(4), 2))
        assert kernels[0]["attend_kernel"] == 4


def test_fp8() -> None:
    """Keys, values and weights: four kernels more in a layer, which round the inputs of its products; the cache has
    half the bytes."""
    with fake_cuda() as fake:
        plain = fake_model("llama-3.1-8b", layers=4)
        model = fake_model("llama-3.1-8b", layers=4, quantization="fp8", kv_cache_dtype="fp8")
        schedule = SkipDecode(4, 4, 2, 1, 2)
        few, many = reversed(decode(fake, model, schedule))
        assert (sum(many.values()) - sum(few.values())) / 2 == 8 + 4, (many, few)
        assert many["attend_kernel"] == 4
        assert many["rows_in_fp8_kernel"] == many["_scaled_mm"] == 4 * 4 + 1
        of_plain, cache = (prefilled(own, requests_for(), schedule)[0] for own in (plain, model))
        assert of_plain.nbytes == 2 * cache.nbytes
        graphs = CudaGraphs(model, 1 << 30, max_rows=8, captures=FakeCaptures())
        graphs.capture_all(plans_of([schedule], 4), rows=[6])
        assert graphs.failure is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"kv_cache_dtype": "fp8"}, "model.kv_cache_dtype: no keys and values in fp8 here: {}; auto stores them as is"),
        ({"quantization": "fp8"}, "quantization: no fp8 weights here: {}"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
def test_fp8_is_refused_on_an_a100(keys: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        reason = "FP8 needs compute capability 8.9 (L4, H100 and later), and this GPU has 8.0"
        with pytest.raises(ValueError, match=re.escape(said.format(reason))):
            fake_model("opt-125m", layers=2, **keys)
        assert fake_model("opt-125m", layers=2).kv_itemsize == 2


def test_the_likeliest_token_needs_no_copy_of_the_logits() -> None:
    with fake_cuda() as fake:
        model, schedule = fake_model("opt-1.3b", layers=2), FullDepth(2)
        cache, logits = prefilled(model, requests_for(), schedule)
        newest = logits.argmax(-1)
        with fake.counting() as counted:
            made = step(model, newest, cache, schedule, 0, return_argmax=True)
        assert made.dtype == torch.int64
        assert counted["argmax_kernel"] == 1
        assert not {"_to_copy", "argmax"} & set(counted)


def test_captured_steps_behind_shared_prefixes() -> None:
    """Two kernels more in each layer that runs; the host reads nothing in a step, nor where rows have left."""
    ends = [3 + row % 5 for row in range(20)]
    prompts = [*([2, *range(10, 109), *[5 + row] * n] for row, n in enumerate(ends[:19])), [2, 3, 4]]
    requests = [Request(str(row), prompt, Sampling(max_new_tokens=NEW)) for row, prompt in enumerate(prompts)]
    schedule, sharing = SkipDecode(3, 3, 2, 1, 2), share_prefixes(prompts, [[100]] * 19 + [[]])
    with fake_cuda() as fake:
        model = fake_model("llama-3.2-1b", layers=3)
        graphs = CudaGraphs(model, 1 << 30, max_rows=32, captures=FakeCaptures())
        graphs.capture_all(plans_of([schedule], NEW))
        static = StaticBatch(model, requests, schedule, graphs=graphs, sharing=sharing, check_every=NEW)
        assert static._cache.shared is not None
        with NoWaits():
            static.prefill()
            for _ in range(3):
                static.step()
            with fake.counting() as counted:
                static.step()
            assert counted["attend_prefix_kernel"] == counted["attend_kernel"] == 2
            assert counted["store_kernel"] == 2  # of queries after their rotation
            assert sum(counted.values()) <= 2 * 10 + 20, counted
            static._keep([0, 5, 19])
            static.step()


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("keys", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "drawn"])
@pytest.mark.grid
def test_a_static_batch_does_not_wait_for_the_device_until_it_reads_output(
    num_devices: int, keys: dict[str, float]
) -> None:
    """Prompts with padding, steps, and rows that leave."""
    with fake_cuda():
        model = fake_model("llama-3.2-1b", layers=6, num_devices=num_devices)
        static = StaticBatch(model, requests_for(**keys), SkipDecode(6, 6, 2, 1, 3), check_every=NEW)
        static.prefill()
        for k in range(4):
            static.step()
            if k == 1:
                static._keep([0, 2, 5])
        assert static._newest.shape == (3,)


def test_host_reads_and_mixed_devices_are_seen() -> None:
    """That the tests above can fail."""
    with fake_cuda() as fake:
        model, schedule = fake_model("opt-125m", layers=2), FullDepth(2)
        cache, logits = prefilled(model, requests_for(), schedule)
        newest, before = logits.argmax(-1), fake.launched["attend_kernel"]
        for read in (lambda: newest.tolist(), lambda: bool(cache.num_pad.any())):
            with pytest.raises(DataDependentOutputException):
                read()
        with pytest.raises(RuntimeError, match="device"):
            step(model, torch.zeros(ROWS, dtype=torch.int64), cache, schedule, 0)
        cache.num_pad = torch.zeros(ROWS, dtype=torch.int64)
        with pytest.raises((AssertionError, RuntimeError), match=r"cpu|device"):
            step(model, newest, cache, schedule, 0)
        assert fake.launched["attend_kernel"] == before


@pytest.mark.parametrize("name", ["opt-66b", "opt-350m", "llama-3.1-70b"])
@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.grid
def test_layers_on_several_devices(name: str, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States alone go from one to the next, nothing is read on the host, and kernels are launched where they belong."""
    current = [CUDA]

    def launching_on(device: torch.device) -> nullcontext[None]:
        current.append(device)
        return nullcontext()

    monkeypatch.setattr(layer_loop, "launching_on", launching_on)
    with fake_cuda() as fake:
        model = fake_model(name, layers=8, num_devices=num_devices)
        schedule = SkipDecode(8, 8, 4, 1, 3)
        cache, logits = prefilled(model, requests_for(), schedule)
        newest = logits.argmax(-1)
        for k in range(3):
            plan, parts = schedule.step(k), min(num_devices, len(newest))
            before, entered = len(fake.devices), len(current)
            with fake.counting() as counted:
                newest = step(model, newest, cache, schedule, k, return_argmax=True)
            assert counted["attend_kernel"] == plan.num_layers_run * parts
            wanted = {model.device_of(layer) for layer in plan.layers}
            assert set(fake.devices[before:]) == wanted | {CUDA}  # the choice is made on the first
            assert set(current[entered:]) == wanted
            for _, part in cache.parts(parts):  # what other devices ask of a cache is made once, and holds no other
                assert len(part._by_device) == num_devices - 1
                assert not any(other._by_device for other in part._by_device.values())
            if k == 0:
                keep = torch.tensor([0, 2, 5], device=CUDA)
                newest, cache = newest[keep], cache.keep([0, 2, 5], schedule.step(k + 1).attn)


@pytest.mark.parametrize("name", ["opt-350m", "opt-2.7b", "llama-3.1-8b"])
def test_captured_steps_read_nothing_on_the_host(name: str) -> None:
    """What a graph holds, and what surrounds its replay: plans change, rows leave, and no number is asked for."""
    with fake_cuda() as fake:
        model = fake_model(name, layers=4)
        schedule = SkipDecode(4, 4, 2, 1, 3)
        captures = FakeCaptures()
        graphs = CudaGraphs(model, 1 << 30, max_rows=8, captures=captures)
        graphs.capture_all(plans_of([schedule], 4), rows=[6, 3])
        captured = captures.captures
        requests = requests_for()
        tokens, num_pad, _ = pad_prompts(model, requests, COLUMNS, ROWS)
        with NoWaits():  # a cohort that comes leaves others' steps running
            cache = allocate_cache(model, num_pad, COLUMNS, schedule, NEW, force_mask=True, graphs=graphs)
        newest = feed_prompts(model, tokens, cache, schedule.prefill(), return_argmax=True)
        for k in range(4):
            with fake.counting() as counted:
                newest = graphs(newest, cache, schedule.step(k), return_argmax=True)
            layers = schedule.step(k).num_layers_run
            assert counted["attend_kernel"] == layers
            assert k % 2 == 0 or counted["copy_"] == 1, "more than the tokens is copied; the head writes where it stays"
            each = 8 if model.config.mlp == "swiglu" else 7
            assert counted.total() - each * layers <= 20, counted
            assert newest.device == CUDA
            if k == 1:
                keep = torch.tensor([0, 2, 5], device=CUDA)
                newest, cache = newest[keep], cache.keep([0, 2, 5], schedule.step(k + 1).attn)
        assert captures.captures == captured == graphs.num_captured
        assert captures.replays == 4
