"""Prompts without padding on the CUDA back end, with torch's operators in place of its kernels, on a CPU: the tokens
and the keys and values of prompts with padding.

That Triton's kernels are these operators: `test_triton_kernels.py`. What a GPU is given: `test_fake_cuda_prompts`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.backends.backend import Backend
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.config.model import KVCacheDtype
from skipdecode.config.sampling import Sampling
from skipdecode.engine import prefill
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand
from skipdecode.schedules.schedule import EarlyExit, FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from tests.support.cuda_models import SHAPES, CheckedKernels, cpu_computed_by, random_model
from tests.support.naive import random_prompts


class Counting(CheckedKernels):
    """Counts the tokens of each call for packed prompts."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def attend_packed(self, q: Tensor, *rest: object) -> Tensor:
        self.tokens.append(len(q))
        return super().attend_packed(q, *rest)  # type: ignore[arg-type]


KERNELS = Counting()
PACKED = CudaBackend(KERNELS)
PADDED = CudaBackend(TorchKernels(), no_packed_prompts="to compare with")
SWIFTKV = {None: None, "swiftkv": (2, 1), "swiftkv, groups": (2, 2)}
SCHEDULES: list[Schedule] = [FullDepth(4), SkipDecode(4, 4, 2, 1, 6), SkipBand(EarlyExit(4, 4, 2, 1, 6), 1, (1, 2))]
KV_TYPES: list[KVCacheDtype] = ["auto", "fp8"]
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=7)


@contextmanager
def feeding(backend: Backend, most: int = prefill.PACKED_TOKENS) -> Iterator[None]:
    """`most`: the tokens that are fed together."""
    with cpu_computed_by(backend), patch.object(prefill, "PACKED_TOKENS", most):
        yield


@cache
def model_of(
    name: str, swiftkv: str | None = None, dtype: torch.dtype = torch.float32, kv: KVCacheDtype = "auto"
) -> Decoder:
    with cpu_computed_by(PACKED):
        model = random_model(name, dtype=dtype)
        shape = SWIFTKV[swiftkv]
        return (model if shape is None else model.with_swiftkv(*shape)).pack(kv_cache_dtype=kv)


def requests_of(prompts: Sequence[Sequence[int]], num_new: int = 5, temperature: float = 0.0) -> list[Request]:
    sampling = Sampling(num_new, temperature=temperature, ignore_eos=True)
    return [Request(str(row), list(prompt), sampling) for row, prompt in enumerate(prompts)]


@given(
    lengths=LENGTHS,
    name=st.sampled_from(sorted(SHAPES)),
    schedule=st.sampled_from(SCHEDULES),
    swiftkv=st.sampled_from(list(SWIFTKV)),
    temperature=st.sampled_from([0.0, 0.9]),
    most=st.sampled_from([1, 30, 8192]),
    seed=st.integers(0, 99),
    kv=st.sampled_from(KV_TYPES),
)
@settings(max_examples=20)
def test_tokens_are_those_of_padded_prompts(
    lengths: list[int],
    name: str,
    schedule: Schedule,
    swiftkv: str | None,
    temperature: float,
    most: int,
    seed: int,
    kv: KVCacheDtype,
) -> None:
    """In a batch, and of rows that join one, in as many parts as may be; with keys and values in FP8, too."""
    swiftkv = swiftkv if name in ("llama", "qwen3") else None
    model = model_of(name, swiftkv, kv="auto" if name == "opt, norms behind" else kv)
    if (shape := SWIFTKV[swiftkv]) is not None:
        schedule = SwiftKVPrefill(schedule, shape[0])
    requests = requests_of(random_prompts(lengths, seed=seed, vocab=200), temperature=temperature)
    with feeding(PADDED):
        wanted = [c.tokens for c in generate(model, requests, schedule).completions]
    KERNELS.tokens.clear()
    with feeding(PACKED, most):
        assert [c.tokens for c in generate(model, requests, schedule).completions] == wanted
        made = generate_continuous(model, requests, schedule, max_rows=3).completions
        assert [c.tokens for c in made] == wanted
    assert len(KERNELS.tokens) > 0
    if most == 1:
        assert max(KERNELS.tokens) == max(lengths)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["opt", "opt, norms behind", "llama", "qwen3", "gemma3", "smollm3, windows"])
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_keys_and_values_are_those_of_padded_prompts(name: str, dtype: torch.dtype, apart: float) -> None:
    """Within the rounding of their type, in the columns where padded prompts have them; nothing else is written."""
    requests, schedule = requests_of(random_prompts([9, 1, 17, 4], seed=2, vocab=200)), FullDepth(4)
    model, found, logits = model_of(name, dtype=dtype), [], []
    for backend in (PADDED, PACKED):
        with feeding(backend):
            batch = StaticBatch(model, requests, schedule)
            for memory in (*batch._cache.k, *batch._cache.v):
                memory.fill_(torch.nan if backend is PACKED else 0)
            logits.append(batch._feed(schedule.prefill(), return_argmax=False))
            found.append([*batch._cache.k, *batch._cache.v])
            pads = batch._cache.num_pad.tolist()
    scale = apart * float(logits[0].abs().max())
    assert (logits[0] - logits[1]).abs().max() <= scale
    for padded, packed in zip(*found, strict=True):
        for row, pad in enumerate(pads):
            own, wanted = packed[row, :, pad:17], padded[row, :, pad:17]
            assert (own - wanted).abs().max() <= apart * wanted.abs().max()
            assert packed[row, :, :pad].isnan().all()
            assert packed[row, :, 17:].isnan().all()


@given(
    mix=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=3),
    name=st.sampled_from(["opt", "llama", "qwen3", "gemma3"]),
    swiftkv=st.booleans(),
    most=st.sampled_from([12, 8192]),
    most_rows=st.sampled_from([3, 99]),
    seed=st.integers(0, 99),
    kv=st.sampled_from(KV_TYPES),
)
@settings(max_examples=12)
def test_prefixes_that_rows_share(
    mix: list[tuple[int, int]], name: str, swiftkv: bool, most: int, most_rows: int, seed: int, kv: KVCacheDtype
) -> None:
    """Fed once, nested too, and read in place by all rows, of which others join as some end."""
    kind = "swiftkv" if swiftkv and name == "llama" else None
    model, schedule = model_of(name, kind, kv=kv), SkipDecode(4, 4, 2, 1, 5)
    if kind is not None:
        schedule = SwiftKVPrefill(schedule, 2)  # type: ignore[assignment]
    head, *ends = random_prompts([32, *(2 * n for n, _ in mix)], seed=seed, vocab=200)
    prompts, marks = [], []
    for number, (end, (_, rows)) in enumerate(zip(ends, mix, strict=True)):
        for row in range(rows):
            prompts.append([*head, *end, 150 + 5 * number + row, *range(10, 10 + row)])
            marks.append([32, 32 + len(end)])
    prompts.append([7, 8, 9])
    marks.append([])
    sharing, requests = share_prefixes(prompts, marks), requests_of(prompts, 4)
    with feeding(PADDED):
        wanted = [c.tokens for c in generate(model, requests, schedule).completions]
    KERNELS.tokens.clear()
    with feeding(PACKED, most):
        made = generate(model, requests, schedule, sharing=sharing)
        assert [c.tokens for c in made.completions] == wanted
        fed = sum(KERNELS.tokens)
        joined = generate_continuous(model, requests, schedule, max_rows=most_rows, sharing=sharing)
        assert [c.tokens for c in joined.completions] == wanted
    attending = 1 if kind else 3  # layers below the last one, and below SwiftKV's
    assert fed <= attending * (sum(map(len, prompts)) - made.stats.prefix_tokens_saved) * (2 if kind else 1)


def test_rows_of_one_shape_keep_their_padding() -> None:
    """`deterministic`: torch's products depend on how many tokens there are."""
    model, requests = model_of("llama"), requests_of(random_prompts([3, 9, 5], seed=1, vocab=200))
    KERNELS.tokens.clear()
    with feeding(PACKED):
        fixed = generate(model, requests, FullDepth(4), prompt_columns=16, batch_rows=4, compact=False)
        assert not KERNELS.tokens
        assert generate(model, requests, FullDepth(4)).completions == fixed.completions
    assert KERNELS.tokens == [17] * 3


def test_padding_that_was_run_is_counted() -> None:
    model, requests = model_of("llama"), requests_of(random_prompts([3, 9, 5], seed=1, vocab=200))
    fixed = {"prompt_columns": 16, "batch_rows": 4, "compact": False}
    for backend, static, kept_full in (PACKED, 0, 0), (PADDED, 3 * 9 - 17, 3 * 16 - 17):
        with feeding(backend):
            assert generate(model, requests, FullDepth(4)).stats.prompt_padding == static
            assert generate(model, requests, FullDepth(4), **fixed).stats.prompt_padding == 4 * 16 - 17
            assert generate_continuous(model, requests, FullDepth(4), max_rows=3).stats.prompt_padding == kept_full


def test_prompts_are_stored_where_rows_are_decoded() -> None:
    """Rows that join take slots that lie apart, and nothing is copied."""
    model, prompts = model_of("llama"), random_prompts([3, 9, 5, 7], seed=4, vocab=200)
    first, later = requests_of(prompts[:3], 2), requests_of(prompts, 6)
    with feeding(PADDED):
        wanted = [c.tokens for c in generate(model, later, FullDepth(4)).completions]
    with feeding(PACKED), patch("skipdecode.kv.slot_cache.SlotCache.copy", side_effect=AssertionError):
        batch = ContinuousBatch(model, FullDepth(4))
        batch.join(first)
        rows = batch.join(later[:2])
        while len(batch.rows) > 2:
            batch.step()
        rows += batch.join(later[2:])
        while not batch.is_done:
            batch.step()
    assert [row.tokens for row in rows] == wanted


def test_parts_of_packed_prompts() -> None:
    """Consecutive rows of at most so many tokens; one that has more goes alone."""
    with feeding(PACKED, 10):
        model = model_of("opt")
        parts = [(part.start, part.stop) for part in prefill.packed_parts(model, [4, 6, 1, 25, 9, 1, 1])]
    assert parts == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
