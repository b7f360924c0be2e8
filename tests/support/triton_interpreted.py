"""Triton's kernels by its interpreter, on the CPU, held against torch's operators: `python -m`, in a process of its
own.

TRITON_INTERPRET is read when Triton is imported. Prints one JSON document: of each case, what was found wrong (nothing:
an empty text). On a GPU the same cases run compiled (`tests/skipdecode/backends/test_gpu_kernels.py`).
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from skipdecode.backends import triton_kernels
from skipdecode.backends.backend import (
    TORCH,
    GraphKVRange,
    KVRange,
    PackedPrompts,
    PrefixGroups,
    SharedPrefix,
    prefix_groups,
)
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.cuda_kernels import PREFIX_ROWS, Heads, Norm
from skipdecode.backends.fp8 import FP8, as_bytes, narrowed, rows_in_fp8
from skipdecode.backends.kernel_self_test import KernelShape, Of, self_test
from skipdecode.backends.torch_kernels import TorchKernels, normed_by
from skipdecode.backends.torch_sampling import NO_TOKEN, likeliest, pick_by_sort
from skipdecode.backends.triton_kernels import TritonKernels
from skipdecode.config.model import FeedForwardKind, KVCacheDtype
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate, generate_continuous, refill
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.model.decoder import Decoder
from skipdecode.model.random_numbers import row_uniforms
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, SkipDecode, SwiftKVPrefill, Unified
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.cuda_models import cpu_computed_by, random_model, some_requests

ROUNDING = {torch.float32: 1.2e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of a number near 1, half a step of the type, and one of float32."""
FP8_STEP = 2.0**-3
TRITON, REFERENCE = TritonKernels(), TorchKernels()
DEVICE = "cpu" if triton_kernels.IS_INTERPRETED else "cuda"
CONVERT = interpreter._convert_float
FIRST, LAST, CAPACITY = [0, 70, 149], 149, 160


def attention(
    K: int, H: int, G: int, dtype: torch.dtype, *, turns: float = 0.0, norms: bool = False, splits: int = 1,
    is_stored: bool = False, has_table: bool = False, window: int | None = None, is_fp8: bool = False,
) -> None:  # fmt: skip
    """Against the reference in float32 from the same numbers; keys and values stored, and nothing else touched.
    `is_fp8`: keys and values are in FP8."""
    rng = torch.Generator().manual_seed(K + H + splits)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    rotary_table = torch.randn(100, int(K * turns), generator=rng).to(DEVICE) if turns else None
    q_norm, k_norm = (numbers(K).abs() + 0.5, numbers(K).abs() + 0.5) if norms else (None, None)
    heads, B = Heads(H, G, K, rotary_table, q_norm, k_norm, 1e-6, window), len(FIRST)
    of_heads = (None if w is None else w.float() for w in (q_norm, k_norm))
    wide = Heads(H, G, K, rotary_table, *of_heads, epsilon=1e-6, window=window)
    cached = FP8 if is_fp8 else dtype
    # what is around may be anything
    memory = torch.full((2 * B * G * CAPACITY * K + 64,), torch.nan, device=DEVICE).to(cached)
    half = B * G * CAPACITY * K
    keys, values = (
        memory[16 : 16 + half].view(B, G, CAPACITY, K),
        memory[32 + half : 32 + 2 * half].view(B, G, CAPACITY, K),
    )
    for row, first in enumerate(FIRST):
        for own in (keys, values):
            own[row, :, first : LAST + is_stored] = narrowed(numbers(G, LAST + is_stored - first, K), cached)
    q, k, v = numbers(B, (H + 2 * G) * K).split([H * K, G * K, G * K], dim=1)
    first, last = torch.tensor(FIRST, device=DEVICE), torch.tensor([LAST], device=DEVICE).expand(B)
    wanted_keys, wanted_values = (own.clone() if is_fp8 else own.float() for own in (keys, values))
    new = (None, None) if is_stored else (k.float(), v.float())
    wanted = REFERENCE.attend(wide, q.float(), *new, KVRange(wanted_keys, wanted_values, first, last))
    where = torch.tensor([16, 32 + half, G * CAPACITY * K, CAPACITY * K], device=DEVICE)
    columns = GraphKVRange(memory, where, first, last) if has_table else KVRange(keys, values, first, last)
    before = triton_kernels.splits_for, triton_kernels.MIN_CHUNK
    triton_kernels.splits_for, triton_kernels.MIN_CHUNK = (lambda *_: splits), 32
    try:
        for _ in range(2):  # counters of parts are ready again
            made = TRITON.attend(heads, q, *((None, None) if is_stored else (k, v)), columns)
    finally:
        triton_kernels.splits_for, triton_kernels.MIN_CHUNK = before
    step = ROUNDING[dtype]
    near(made, wanted, 8 * step)  # queries, keys, weights and sums are rounded
    near(keys, wanted_keys, 4 * step)  # after the norm and after the turn
    near(values, narrowed(wanted_values, cached), 0.0)
    around = memory.float()
    assert torch.cat([around[:16], around[16 + half : 32 + half], around[-32:]]).isnan().all()


def places(
    K: int, H: int, G: int, dtype: torch.dtype, counts: Sequence[int], *, turns: float = 0.0, norms: bool = False,
    splits: int = 1, is_stored: bool = False, window: int | None = None, is_fp8: bool = False,
) -> None:  # fmt: skip
    """So many new columns of each place, against the reference in float32; nothing but these is stored."""
    rng = torch.Generator().manual_seed(K + H + splits)
    at, owns = [4, 2, 0, 3], [9, 130, 64, 31]  # places in this order, and the columns that each has before
    tokens = [(place, own + i) for place, own, n in zip(at, owns, counts, strict=True) for i in reversed(range(n))]
    N, R = len(tokens), 5

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    rotary_table = torch.randn(100, int(K * turns), generator=rng).to(DEVICE) if turns else None
    q_norm, k_norm = (numbers(K).abs() + 0.5, numbers(K).abs() + 0.5) if norms else (None, None)
    heads = Heads(H, G, K, rotary_table, q_norm, k_norm, 1e-6, window)
    of_heads = (None if w is None else w.float() for w in (q_norm, k_norm))
    wide = Heads(H, G, K, rotary_table, *of_heads, epsilon=1e-6, window=window)
    cached = FP8 if is_fp8 else dtype
    keys, values = (torch.full((R, G, CAPACITY, K), torch.nan, device=DEVICE).to(cached) for _ in "kv")
    for place, own, n in zip(at, owns, counts, strict=True):
        for memory in (keys, values):
            memory[place, :, : own + n * is_stored] = narrowed(numbers(G, own + n * is_stored, K), cached)
    q, k, v = numbers(N, (H + 2 * G) * K).split([H * K, G * K, G * K], dim=1)
    of, last = torch.tensor(tokens, device=DEVICE).T.contiguous()
    among = torch.tensor([[i, n] for n in counts for i in range(n)], device=DEVICE).T.contiguous()
    first = torch.zeros_like(last)
    wanted_keys, wanted_values = (own.clone() if is_fp8 else own.float() for own in (keys, values))
    new = (None, None) if is_stored else (k.float(), v.float())
    wanted = REFERENCE.attend(wide, q.float(), *new, KVRange(wanted_keys, wanted_values, first, last, of))
    columns = KVRange(keys, values, first, last, of, query_index=among, max_queries=max(counts))
    before = triton_kernels.splits_for, triton_kernels.MIN_CHUNK
    triton_kernels.splits_for, triton_kernels.MIN_CHUNK = (lambda *_: splits), 32
    try:
        for _ in range(2):  # counters of parts are ready again
            made = TRITON.attend(heads, q, *((None, None) if is_stored else (k, v)), columns)
    finally:
        triton_kernels.splits_for, triton_kernels.MIN_CHUNK = before
    step = ROUNDING[dtype]
    near(made, wanted, (16 if norms else 8) * step)
    near(keys, wanted_keys, 4 * step)
    near(values, narrowed(wanted_values, cached), 0.0)


def prefixes(
    K: int, H: int, G: int, dtype: torch.dtype, lengths: Sequence[int], users: Sequence[int], owns: Sequence[int],
    each: Sequence[int] | None = None, *, turns: float = 0.0, norms: bool = False, splits: int = 1, parts: int = 1,
    window: int | None = None, has_table: bool = False, skipped: int = 0, is_fp8: bool = False,
) -> None:  # fmt: skip
    """Rows behind shared prefixes with so many tokens (`users`: of each row its prefix, -1: none), with `owns` columns
    of their own and `each` new ones (None: one), against the reference in float32 that reads copies. `skipped`: rows of
    the batch that are not in the step."""
    rng = torch.Generator().manual_seed(K + H + splits + len(users))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    def on(given: Sequence[int]) -> Tensor:
        return torch.tensor(given, device=DEVICE, dtype=torch.int64)

    rotary_table = torch.randn(100, int(K * turns), generator=rng).to(DEVICE) if turns else None
    q_norm, k_norm = (numbers(K).abs() + 0.5, numbers(K).abs() + 0.5) if norms else (None, None)
    heads = Heads(H, G, K, rotary_table, q_norm, k_norm, 1e-6, window)
    of_heads = (None if w is None else w.float() for w in (q_norm, k_norm))
    wide = Heads(H, G, K, rotary_table, *of_heads, epsilon=1e-6, window=window)
    news, R, B, P = each or [1] * len(users), max(1, len(lengths)), len(users), max(lengths, default=0)
    pads, S, C = [row % 4 for row in range(B)], P + 8, 4 + max(owns) + max(news)
    half, of_prefixes = B * G * C * K, R * G * S * K
    cached = FP8 if is_fp8 else dtype
    memory = torch.full((2 * (half + of_prefixes) + 64,), torch.nan, device=DEVICE).to(cached)
    k_at, v_at, pk_at, pv_at = 16, 32 + half, 48 + 2 * half, 48 + 2 * half + of_prefixes
    keys, values = (memory[at : at + half].view(B, G, C, K) for at in (k_at, v_at))
    held = [memory[at : at + of_prefixes].view(R, G, S, K) for at in (pk_at, pv_at)]
    begins = [2 * (number % 3) for number in range(R)]
    whole = [torch.full((B, G, P + C, K), torch.nan, device=DEVICE) for _ in "kv"]
    for own, shared, both in zip((keys, values), held, whole, strict=True):
        for number, length in enumerate(lengths):
            shared[number, :, begins[number] : begins[number] + length] = narrowed(numbers(G, length, K), cached)
        for row, user in enumerate(users):
            at = pads[row]
            own[row, :, at : at + owns[row]] = narrowed(numbers(G, owns[row], K), cached)
            both[row, :, P:] = own[row].float()
            if user >= 0:
                length, begin = lengths[user], begins[user]
                both[row, :, P + at - length : P + at] = shared[user, :, begin : begin + length].float()
    tokens = [(row, i) for row, n in enumerate(news) for i in range(n)]
    rows, N = [row for row, _ in tokens], len(tokens)
    counts = [lengths[users[row]] if users[row] >= 0 else 0 for row in rows]
    places = [(users[row] * G * S + begins[users[row]] if n else 0, n) for row, n in zip(rows, counts, strict=True)]
    first, slots = on([pads[row] for row in rows]), on(rows)
    last = on([pads[row] + owns[row] + i for row, i in tokens])
    q, k, v = numbers(N, (H + 2 * G) * K).split([H * K, G * K, G * K], dim=1)
    whole = [narrowed(both, FP8) for both in whole] if is_fp8 else whole
    seen = KVRange(whole[0], whole[1], first + P - on(counts), last + P, slots)
    wanted = REFERENCE.attend(wide, q.float(), k.float(), v.float(), seen)
    lines = prefix_groups([(begins[0], lengths[0])] * skipped + places if lengths else places, PREFIX_ROWS)
    of, starts, sizes = torch.from_numpy(lines).to(DEVICE)
    groups = PrefixGroups(of, starts, sizes, torch.arange(skipped, skipped + N, device=DEVICE))
    offsets = on([offset for offset, _ in places])
    where, of_held = on([k_at, v_at, G * C * K, C * K]), on([pk_at, pv_at, G * S * K, S * K])
    columns: KVRange | GraphKVRange
    if has_table:
        columns = GraphKVRange(
            memory, where, first, last, SharedPrefix(memory, memory, offsets, on(counts), groups, of_held)
        )
    else:
        among = on([[i for _, i in tokens], [news[row] for row in rows]])  # type: ignore[arg-type,list-item]
        columns = KVRange(
            keys, values, first, last, slots, SharedPrefix(held[0], held[1], offsets, on(counts), groups),
            query_index=among, max_queries=max(news),
        )  # fmt: skip
    before = as_bytes(memory)[pk_at:].clone()
    with split_into(splits, parts):
        made = TRITON.attend(heads, q, k, v, columns)
    near(made, wanted, (16 if norms else 8) * ROUNDING[dtype])
    near(keys, whole[0].float()[:, :, P:].where(~keys.float().isnan(), torch.nan), 4 * ROUNDING[dtype])
    assert torch.equal(as_bytes(memory)[pk_at:].nan_to_num(), before.nan_to_num()), "prefixes are only read"


@contextmanager
def split_into(splits: int, parts: int) -> Iterator[None]:
    """Columns of rows and of prefixes, where they have 32 or more for each part."""
    with (
        patch.object(triton_kernels, "splits_for", lambda *_: splits),
        patch.object(triton_kernels, "prefix_splits_for", lambda *_: parts),
        patch.object(triton_kernels, "MIN_CHUNK", 32),
    ):
        yield


def ragged(examples: int) -> None:
    """Any prefixes, rows and lengths."""

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(data=st.data(), G=st.sampled_from([1, 2]), group=st.sampled_from([1, 3, 4]), R=st.integers(1, 3))
    def run(data: st.DataObject, G: int, group: int, R: int) -> None:
        lengths = [2 * n for n in data.draw(st.lists(st.integers(1, 45), min_size=R, max_size=R))]
        users = data.draw(st.lists(st.integers(-1, R - 1), min_size=1, max_size=20))
        owns = data.draw(st.lists(st.integers(0, 40), min_size=len(users), max_size=len(users)))
        each = None
        if data.draw(st.booleans()):
            users, owns = users[:6], owns[:6]
            each = data.draw(st.lists(st.integers(1, 4), min_size=len(users), max_size=len(users)))
        prefixes(
            16, G * group, G, FP32, lengths, users, owns, each, turns=data.draw(st.sampled_from([0.0, 0.5])),
            splits=data.draw(st.sampled_from([1, 2])), parts=data.draw(st.sampled_from([1, 2, 4])),
            window=data.draw(st.sampled_from([None, 5, 40])), skipped=data.draw(st.integers(0, 3)),
            has_table=each is None and data.draw(st.booleans()), is_fp8=data.draw(st.booleans()),
        )  # fmt: skip

    run()


def prompts(
    K: int, H: int, G: int, dtype: torch.dtype, *, turns: float = 0.0, norms: bool = False, has_queries: bool = True,
    is_fp8: bool = False,
) -> None:  # fmt: skip
    """Packed prompts, one of them behind tokens that are cached: queries, keys and the cache as by the reference in
    float32; nothing else is stored."""
    rng, lengths, before = torch.Generator().manual_seed(K + H), [5, 1, 9], [0, 4, 0]

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    rotary_table = torch.randn(8, int(K * turns), generator=rng).to(DEVICE) if turns else None
    q_norm, k_norm = (numbers(K).abs() + 0.5, numbers(K).abs() + 0.5) if norms else (None, None)
    heads = Heads(H, G, K, rotary_table, q_norm, k_norm, 1e-6)
    wide = Heads(H, G, K, rotary_table, *(None if w is None else w.float() for w in (q_norm, k_norm)), epsilon=1e-6)
    at = torch.arange(9, device=DEVICE) - torch.tensor([[9 - n] for n in lengths], device=DEVICE)
    positions = torch.where(at >= 0, at + torch.tensor(before, device=DEVICE)[:, None], -1)
    columns, slots = torch.tensor([2, 0, 1], device=DEVICE), torch.tensor([3, 0, 2], device=DEVICE)
    packed = PackedPrompts(positions, columns, before, slots)
    q, k, v = numbers(sum(lengths), (H + 2 * G) * K).split([H * K, G * K, G * K], dim=1)
    memory = torch.full((2, 4, G, 12, K), torch.nan, device=DEVICE).to(FP8 if is_fp8 else dtype)
    wanted_memory = memory.clone() if is_fp8 else memory.float()
    given = q if has_queries else None
    wanted = REFERENCE.store(
        wide, None if given is None else q.float(), k.float(), v.float(), packed, (wanted_memory[0], wanted_memory[1])
    )
    made = TRITON.store(heads, given, k, v, packed, (memory[0], memory[1]))
    near(memory, wanted_memory, 4 * ROUNDING[dtype])
    if has_queries:  # without them nobody reads the keys and values
        for own, its, is_kv in zip(made, wanted, (False, True, True), strict=True):
            assert own is not None
            assert its is not None
            near(own, its, FP8_STEP if is_fp8 and is_kv else 4 * ROUNDING[dtype])


def near(made: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Both numbers or both none; apart by at most so much of the largest, or where both are in FP8 by its step, and
    hardly ever: what differs before it is rounded may go either way."""
    if made.dtype == wanted.dtype == FP8 and tolerance > 0:
        apart = as_bytes(made) != as_bytes(wanted)
        assert apart.sum() <= 2 + 8 * tolerance * apart.numel(), f"{apart.sum()} of {apart.numel()} numbers differ"
        tolerance = FP8_STEP
    made, wanted = made.float(), wanted.float()
    assert torch.equal(made.isnan(), wanted.isnan()), "where there is no number"
    apart = (made - wanted).nan_to_num().abs().max()
    assert apart <= tolerance * wanted.nan_to_num().abs().max(), f"{apart:.2e} apart"


def add_norm(D: int, kind: str, dtype: torch.dtype, *, is_pre: bool, bias: bool, plain: bool = False) -> None:
    """The sum bit for bit, as torch rounds it, and the norm within its rounding."""
    rng = torch.Generator().manual_seed(D)
    h, y = (torch.randn(5, D, generator=rng).mul(3).to(DEVICE, dtype) for _ in "hy")
    weight, shift, added = (torch.randn(D, generator=rng).to(DEVICE, dtype) for _ in "wsa")
    norm = None
    if kind != "none":
        norm = Norm(kind, 1e-5, None if plain else weight, shift if kind == "layer" and not plain else None)  # type: ignore[arg-type]
    first, second = h.clone(), h.clone()
    of_bias = added if bias else None
    wanted = REFERENCE.add_norm(first, y, of_bias, norm, is_pre=is_pre)
    made = TRITON.add_norm(second, y, of_bias, norm, is_pre=is_pre)
    is_cut = dtype == torch.bfloat16 and DEVICE == "cpu"  # the interpreter does not round
    near(made, wanted, (8 if is_cut else 2) * ROUNDING[dtype])
    if is_pre and is_cut:
        near(second, first, 4 * ROUNDING[dtype])
        first = second.clone()
    elif is_pre:
        assert torch.equal(first, second), "the residual stream"
    else:
        assert made is second
    if norm is not None and is_pre:
        near(
            TRITON.add_norm(second, None, None, norm, is_pre=True),
            normed_by(norm, second),
            (4 if is_cut else 2) * ROUNDING[dtype],
        )
        assert torch.equal(first, second), "nothing was added"


def gate(dtype: torch.dtype, mlp: FeedForwardKind = "swiglu") -> None:
    y = torch.randn(3, 2 * 1100, generator=torch.Generator().manual_seed(1)).mul(4).to(DEVICE, dtype)
    near(TRITON.gate(y, mlp), REFERENCE.gate(y, mlp), 4 * ROUNDING[dtype])


def argmax(dtype: torch.dtype) -> None:
    """Ties, ends of blocks, no number at all, and rows of a larger tensor."""
    rng = torch.Generator().manual_seed(2)
    for V in (1, 7, 320, 5000):
        logits = torch.randn(6, V + 3, generator=rng).mul(2).round().to(DEVICE, dtype)[:, :V]  # many ties
        assert torch.equal(TRITON.argmax(logits), logits.argmax(-1)), V
    logits = torch.zeros(4, 6000, dtype=dtype, device=DEVICE)
    logits[0, 4095:4097] = 1
    logits[1, 5999] = 1
    logits[2] = -torch.inf
    logits[3, 17] = torch.nan
    assert TRITON.argmax(logits).tolist() == [4095, 5999, 0, NO_TOKEN] == likeliest(logits).tolist()
    logits[1, 5998] = torch.inf
    assert TRITON.argmax(logits).tolist() == [4095, NO_TOKEN, 0, NO_TOKEN] == likeliest(logits).tolist()
    one = torch.ones(4, 1, device=DEVICE)
    for temperature in (0 * one, one):
        made = on_device(logits, (temperature, one.long() * 50, 0.9 * one), 0.5 * one)
        assert made[[1, 3]].tolist() == [NO_TOKEN, NO_TOKEN], temperature
        assert made[0] >= 0, temperature


def parameters(rows: list[tuple[float, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    temperature, top_k, top_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature)[:, None],
        torch.tensor([k or 2**62 for k in top_k])[:, None],
        torch.tensor(top_p)[:, None],
    )


def on_device(logits: Tensor, given: tuple[Tensor, ...], uniform: Tensor) -> Tensor:
    """The draw of numbers that lie on the CPU."""
    temperature, top_k, top_p = (own.to(DEVICE) for own in given)
    return TRITON.draw(logits.to(DEVICE), temperature, top_k, top_p, uniform.to(DEVICE)).cpu()


def draw(dtype: torch.dtype, V: int, spread: float, steps: int = 1) -> None:
    """The tokens that torch's operators choose, in every row."""
    rows = [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 0.9), (1.5, 40, 1.0), (0.9, 12, 0.5), (1.0, 1, 0.99), (2.0, V, 0.3),
            (1e-5, 0, 0.95), (1.0, 3, 0.0)]  # fmt: skip
    logits = (torch.randn(len(rows), V, generator=torch.Generator().manual_seed(V)) * spread).to(dtype)
    uniforms = torch.from_numpy(row_uniforms(0, "x", steps * len(rows))).view(len(rows), steps)
    given = parameters(rows)
    for k in range(steps):
        uniform = uniforms[:, k : k + 1]
        wanted = pick_by_sort(logits.float(), *given, uniform)
        made = on_device(logits, given, uniform)
        assert torch.equal(made, wanted), (k, made.tolist(), wanted.tolist())


def draw_ties(ks: Sequence[int], ps: Sequence[float], uniforms: Sequence[float]) -> None:
    """Equal logits across both cuts: the lower ids stay. Weights are powers of two, so every sum is exact."""
    half = torch.tensor(2.0).log()
    logits = torch.tensor([[-2, 0, -1, -2, -1, -2, -1, -2, -1, 0]]) * half  # weights 1/4, 1, 1/2, 1/4, ...
    rows = [(1.0, k, p) for k in ks for p in ps]
    given = parameters(rows)
    for uniform in uniforms:
        u = torch.full((len(rows), 1), uniform)
        wanted = pick_by_sort(logits.expand(len(rows), -1), *given, u)
        made = on_device(logits.repeat(len(rows), 1), given, u)
        wrong = [(rows[i], int(made[i]), int(wanted[i])) for i in (made != wanted).nonzero()[:, 0].tolist()]
        assert not wrong, (uniform, wrong[:4])


def first_kernels() -> None:
    """What a process tries before it takes the kernels, and before a model decodes with them."""
    wide = KernelShape(
        2, 2, head_dim=80, rotary_dim=20, has_qk_norm=True, window=5, width=160, vocab_size=300, dtype=torch.float32
    )
    for shape in (KernelShape(), wide):
        kinds: list[Of] = ["steps", "prompts", *(["prefixes"] if shape == wide else [])]  # type: ignore[list-item]
        if TRITON.why_no_prompts(shape.head_dim, shape.dtype, torch.device(DEVICE)) is not None:
            kinds.remove("prompts")
        for of in kinds:
            problem = self_test(TRITON, torch.device(DEVICE), shape, of=of)
            assert problem is None, problem


def decoder(
    name: str,
    *,
    num_new: int = 3,
    swiftkv: bool = False,
    kv_cache_dtype: KVCacheDtype = "auto",
    is_captured: bool = False,
    **keys: float,
) -> None:
    """Whole models: tokens are those of torch, in float32."""
    requests = some_requests(num_new, (1, 7), **keys)
    skipping = SkipDecode(2, 2, 1, 1, num_new - 1)
    schedule = SwiftKVPrefill(skipping, 1) if swiftkv else skipping
    made = []
    for backend in (TORCH, CudaBackend(TRITON)):
        with cpu_computed_by(backend):
            model = random_model(name, layers=2)
            model = (model.with_swiftkv(1) if swiftkv else model).pack(kv_cache_dtype=kv_cache_dtype)
            graphs = CudaGraphs(model, 1 << 22, max_rows=8) if is_captured and backend is not TORCH else None
            made.append([c.tokens for c in generate(model, requests, schedule, graphs=graphs).completions])
    assert made[0] == made[1], made


def fp8_rows(dtype: torch.dtype) -> None:
    """Numbers and scales of rows are those of torch, bit for bit; a row with NaN has nothing else."""
    x = torch.randn(5, 700, generator=torch.Generator().manual_seed(3)) * torch.tensor([[1e-3], [1], [50], [0], [1]])
    x[4, 3] = torch.nan
    given = x.to(DEVICE, dtype)[:, :650]
    (made, scales), (wanted, wanted_scales) = TRITON.rows_in_fp8(given), rows_in_fp8(given)
    assert torch.equal(as_bytes(made)[:4], as_bytes(wanted)[:4])
    assert torch.equal(scales[:4], wanted_scales[:4])
    assert (made.float() * scales)[4].isnan().any()


def fp8_ends(count: int = 150) -> None:
    """What a cache in FP8 makes of any number: the nearest, 448 for what is larger, NaN for NaN."""
    ends = [448.0, 464, 465, -1e9, torch.inf, -torch.inf, torch.nan, 0, 2.0**-9, 2.0**-10, 3 * 2.0**-11, -0.0]
    usual = torch.randn(count - len(ends)) * 10.0 ** torch.randint(-4, 4, (count - len(ends),))
    x = torch.cat([usual, torch.tensor(ends)]).to(DEVICE)
    memory = torch.zeros(2, 1, 1, count, 1, device=DEVICE).to(FP8)
    prompts = PackedPrompts(torch.arange(count, device=DEVICE)[None], torch.zeros(1, dtype=torch.int64, device=DEVICE))
    TRITON.store(Heads(1, 1, 1), None, x[:, None], x[:, None], prompts, (memory[0], memory[1]))
    assert torch.equal(as_bytes(memory), as_bytes(narrowed(x, FP8)).expand(2, -1).view(2, 1, 1, count, 1))


def lossless(name: str) -> None:
    """Drafts, and their verification: tokens are those of full depth by torch's operators, in float32."""
    requests, full = some_requests(9, (1, 7, 4)), FullDepth(3)
    with cpu_computed_by(TORCH):
        wanted = [c.tokens for c in generate(random_model(name, layers=3), requests, full).completions]
    with cpu_computed_by(CudaBackend(TRITON)):
        schedule = Lossless(3, Unified(3, 2), draft_tokens=3)
        batch = SpeculativeBatch(random_model(name, layers=3).pack(), schedule)
        assert [c.tokens for c in refill(batch, requests, max_rows=len(requests)).completions] == wanted
    assert sum(batch.stats.drafted_at) > 0


def sharing(
    name: str, *, num_new: int = 6, lengths: tuple[int, int] = (34, 38), swiftkv: bool = False,
    is_captured: bool = True, is_joined: bool = True, kv_cache_dtype: KVCacheDtype = "auto",
) -> None:  # fmt: skip
    """Rows that share prefixes of these lengths, in a batch, of captured steps or not, and as rows that join: tokens
    are those of torch, in float32, without sharing."""
    rng = torch.Generator().manual_seed(4)
    ids = [[2, *torch.randint(4, 200, (n - 1,), generator=rng).tolist()] for n in (*lengths, 2, 5, 1, 3)]
    prompts = [head + end for head, end in ((ids[0], ids[2]), (ids[1], ids[3]), (ids[0], ids[4]), (ids[1], ids[5]))]
    prompts += [ids[0] + ids[5], ids[4]]
    requests = [Request(str(row), prompt, Sampling(num_new, ignore_eos=True)) for row, prompt in enumerate(prompts)]
    shared = share_prefixes(prompts, [*([lengths[at]] for at in (0, 1, 0, 1, 0)), []])
    assert shared is not None
    skipping = SkipDecode(2, 2, 1, 1, num_new)
    schedule = SwiftKVPrefill(skipping, 1) if swiftkv else skipping

    def model_of() -> Decoder:
        model = random_model(name, layers=2)
        return (model.with_swiftkv(1) if swiftkv else model).pack(kv_cache_dtype=kv_cache_dtype)

    with cpu_computed_by(TORCH):
        wanted = [c.tokens for c in generate(model_of(), requests, schedule).completions]
    with cpu_computed_by(CudaBackend(TRITON)), split_into(1, 2):
        model = model_of()
        graphs = CudaGraphs(model, 1 << 22, max_rows=8) if is_captured else None
        if graphs is not None:
            graphs.pool.memory.copy_(torch.full_like(graphs.pool.memory, torch.nan, dtype=torch.float32))
        batch = StaticBatch(model, requests, schedule, graphs=graphs, sharing=shared)
        assert batch._cache.shared is not None, "copied"
        made = generate(model, requests, schedule, graphs=graphs, sharing=shared)
        assert [c.tokens for c in made.completions] == wanted
        if is_joined:
            joined = generate_continuous(model, requests, schedule, max_rows=4, sharing=shared)
            assert [c.tokens for c in joined.completions] == wanted


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, Callable[[], None]] = {
    "attention, OPT, heads of 64": lambda: attention(64, 2, 2, FP32),
    "attention, OPT, heads of 64, bfloat16, a table": lambda: attention(64, 2, 2, BF16, has_table=True),
    "attention, OPT, heads of 80, bfloat16": lambda: attention(80, 2, 2, BF16),
    "attention, heads of 96, float16, parts": lambda: attention(96, 2, 2, FP16, splits=4),
    "attention, heads of 96, bfloat16, a table": lambda: attention(96, 2, 2, BF16, has_table=True),
    "attention, OPT, heads of 128, bfloat16, parts": lambda: attention(128, 2, 2, BF16, splits=4),
    "attention, OPT, heads of 128, parts, a table": lambda: attention(128, 2, 2, FP32, splits=4, has_table=True),
    "attention, Llama": lambda: attention(128, 8, 2, FP32, turns=1.0),
    "attention, Llama, bfloat16, parts, a table": lambda: attention(
        64, 8, 1, BF16, turns=1.0, splits=8, has_table=True
    ),
    "attention, Qwen3": lambda: attention(128, 4, 2, FP32, turns=1.0, norms=True, splits=2),
    "attention, Qwen3, bfloat16": lambda: attention(128, 4, 2, BF16, turns=1.0, norms=True),
    "attention, a quarter turns, float16": lambda: attention(80, 3, 3, FP16, turns=0.25),
    "attention, a test's heads of 12": lambda: attention(12, 4, 2, FP32, turns=1.0, has_table=True),
    "attention, a window": lambda: attention(64, 4, 1, FP32, turns=1.0, norms=True, window=33, splits=4),
    "attention, a window, bfloat16, a table": lambda: attention(64, 4, 2, BF16, turns=1.0, window=7, has_table=True),
    "attention, stored already": lambda: attention(64, 4, 2, FP32, turns=1.0, is_stored=True, splits=4),
    "attention, stored already, a table": lambda: attention(64, 2, 2, FP32, is_stored=True, has_table=True),
    "places, OPT, bfloat16, parts": lambda: places(80, 2, 2, BF16, [3, 1, 6, 2], splits=4),
    "places, Llama, bfloat16, parts": lambda: places(64, 8, 1, BF16, [9, 3, 5, 1], turns=1.0, splits=8),
    "places, Qwen3": lambda: places(128, 4, 2, FP32, [2, 4, 1, 3], turns=1.0, norms=True, splits=2),
    "places, a window": lambda: places(64, 4, 2, FP32, [3, 9, 4, 2], turns=1.0, splits=4, window=37),
    "places, a window of few": lambda: places(64, 2, 2, FP32, [5, 5, 1, 5], turns=1.0, window=3),
    "prefixes, OPT": lambda: prefixes(64, 2, 2, FP32, [70, 34], [0, 1, -1, 0, 1], [3, 40, 9, 0, 31], splits=2, parts=4),
    "prefixes, Llama, bfloat16, a table, many rows": lambda: prefixes(
        32, 4, 1, BF16, [36, 8], [0] * 18 + [1, -1], [*range(20)], turns=1.0, parts=2, has_table=True
    ),
    "prefixes, Qwen3, several columns a row, of the last rows": lambda: prefixes(
        32, 4, 2, FP32, [66], [0, -1, 0], [5, 3, 0], [2, 1, 4], turns=1.0, norms=True, splits=2, parts=2, skipped=2
    ),
    "prefixes, ragged": lambda: ragged(4),
    "prompts, OPT, bfloat16": lambda: prompts(80, 2, 2, BF16),
    "prompts, Llama": lambda: prompts(64, 8, 2, FP32, turns=1.0),
    "prompts, a quarter turns, float16": lambda: prompts(80, 3, 3, FP16, turns=0.25),
    "prompts, Qwen3, bfloat16": lambda: prompts(128, 4, 2, BF16, turns=1.0, norms=True),
    "prompts, Qwen3, keys and values alone": lambda: prompts(128, 4, 2, FP32, turns=1.0, norms=True, has_queries=False),
    "FP8, attention, OPT, a table": lambda: attention(64, 2, 2, FP32, has_table=True, is_fp8=True),
    "FP8, attention, Llama, bfloat16, parts, a table": lambda: attention(
        64, 8, 2, BF16, turns=1.0, splits=4, has_table=True, is_fp8=True
    ),
    "FP8, attention, Qwen3, a window": lambda: attention(
        128, 4, 2, FP32, turns=1.0, norms=True, window=33, splits=2, is_fp8=True
    ),
    "FP8, places, Llama": lambda: places(64, 4, 2, FP32, [3, 1, 6, 2], turns=1.0, splits=4, is_fp8=True),
    "FP8, prefixes, Llama, a table": lambda: prefixes(
        32, 4, 1, FP32, [36, 8], [0] * 18 + [1, -1], [*range(20)], turns=1.0, parts=2, has_table=True, is_fp8=True
    ),
    "FP8, prompts, OPT": lambda: prompts(64, 2, 2, FP32, is_fp8=True),
    "FP8, prompts, Qwen3, bfloat16": lambda: prompts(128, 4, 2, BF16, turns=1.0, norms=True, is_fp8=True),
    "FP8, prompts, Llama, keys and values alone": lambda: prompts(
        64, 8, 2, FP32, turns=1.0, has_queries=False, is_fp8=True
    ),
    "FP8, ends": fp8_ends,
    "FP8, rows": lambda: fp8_rows(FP32),
    "FP8, rows, bfloat16": lambda: fp8_rows(BF16),
    "norm, OPT": lambda: add_norm(768, "layer", FP32, is_pre=True, bias=True),
    "norm, OPT, bfloat16": lambda: add_norm(2560, "layer", BF16, is_pre=True, bias=True),
    "norm, OPT-350m, float16": lambda: add_norm(1024, "layer", FP16, is_pre=False, bias=True),
    "norm, OPT-350m, bfloat16, no weights": lambda: add_norm(96, "layer", BF16, is_pre=False, bias=False, plain=True),
    "norm, Llama": lambda: add_norm(576, "rms", FP32, is_pre=True, bias=False),
    "norm, Llama, bfloat16": lambda: add_norm(4096, "rms", BF16, is_pre=True, bias=False),
    "no norm, bfloat16": lambda: add_norm(200, "none", BF16, is_pre=True, bias=True),
    "gate": lambda: gate(FP32),
    "gate, bfloat16": lambda: gate(BF16),
    "gate, GELU": lambda: gate(FP32, "geglu"),
    "gate, GELU, bfloat16": lambda: gate(BF16, "geglu"),
    "argmax": lambda: argmax(FP32),
    "argmax, bfloat16": lambda: argmax(BF16),
    "draw": lambda: draw(FP32, 400, 3.0),
    "draw, bfloat16": lambda: draw(BF16, 300, 2.0),
    "draw, ties": lambda: draw_ties((0, 3, 7), (0.25, 0.875), (0.55,)),
    "first kernels": first_kernels,
    "decoder, OPT": lambda: decoder("opt"),
    "sharing, Llama": lambda: sharing("llama", num_new=2, lengths=(16, 18), is_joined=False),
    "decoder, OPT-350m": lambda: decoder("opt, norms behind"),
    "FP8, decoder, Llama": lambda: decoder("llama", kv_cache_dtype="fp8", is_captured=True),
}
SLOW: dict[str, Callable[[], None]] = {
    "places, OPT": lambda: places(64, 2, 2, FP32, [5, 5, 5, 5]),
    "places, OPT, one each": lambda: places(64, 2, 2, FP32, [1, 1, 1, 1]),
    "places, Llama": lambda: places(64, 8, 2, FP32, [1, 4, 9, 2], turns=1.0),
    "places, three queries a head, stored already": lambda: places(
        64, 6, 2, FP32, [17, 1, 12, 2], is_stored=True, splits=2
    ),
    "prefixes, OPT, heads of 80, float16": lambda: prefixes(
        80, 2, 2, FP16, [100, 20], [0] * 9 + [1] * 3, [7] * 12, splits=4, parts=4
    ),
    "prefixes, Gemma 3, a window": lambda: prefixes(
        128, 4, 1, FP32, [80, 300], [0, 1, 1, 0, -1], [3, 9, 60, 0, 5], turns=1.0, norms=True, parts=4, window=33
    ),
    "prefixes, 70 query heads": lambda: prefixes(16, 70, 1, FP32, [40], [0, 0, 0], [1, 2, 3], parts=2),
    "prefixes, ragged, many": lambda: ragged(150),
    "sharing, Llama, longer": lambda: sharing("llama"),
    "sharing, Llama, not captured": lambda: sharing("llama", is_captured=False),
    **{f"sharing, {name}": partial(sharing, name) for name in ("opt", "qwen3", "gemma3", "stablelm")},
    "sharing, OPT, norms behind": lambda: sharing("opt, norms behind"),
    "sharing, Llama, SwiftKV": lambda: sharing("llama", swiftkv=True),
    "lossless, OPT": lambda: lossless("opt"),
    "draw, many": lambda: draw(FP32, 5000, 3.0, 6),
    "draw, bfloat16, many": lambda: draw(BF16, 2500, 2.0, 6),
    "draw, float16, many": lambda: draw(FP16, 300, 1.0, 6),
    "draw, ties, all": lambda: draw_ties(
        (0, 1, 2, 3, 5, 7, 9, 10), (0.0, 0.2, 0.25, 0.5, 0.75, 0.875, 1.0), (0.0, 0.3, 0.55, 0.8, 1 - 2**-24)
    ),
    "decoder, OPT, heads of 80": lambda: decoder("opt, heads of 80", num_new=6),
    "decoder, Llama, sampled": lambda: decoder("llama", num_new=6, temperature=1.0, top_k=30, top_p=0.9),
    "decoder, Llama, one head of keys": lambda: decoder("llama, one head of keys", num_new=6),
    "decoder, Llama, SwiftKV": lambda: decoder("llama", num_new=6, swiftkv=True),
    "decoder, Qwen3": lambda: decoder("qwen3", num_new=6),
    "lossless, Llama": lambda: lossless("llama"),
    "lossless, Qwen3": lambda: lossless("qwen3"),
    "decoder, Gemma 3": lambda: decoder("gemma3", num_new=6),
    "lossless, Gemma 3": lambda: lossless("gemma3"),
    "decoder, StableLM": lambda: decoder("stablelm", num_new=6),
    **{
        f"FP8, decoder, {name}": partial(decoder, name, num_new=6, kv_cache_dtype="fp8", is_captured=True)
        for name in ("opt", "qwen3", "gemma3", "stablelm", "smollm3, windows")
    },
    "FP8, decoder, Llama, SwiftKV": lambda: decoder("llama", num_new=6, swiftkv=True, kv_cache_dtype="fp8"),
    "FP8, ends, many": lambda: fp8_ends(4000),
    "FP8, sharing, Llama": lambda: sharing("llama", kv_cache_dtype="fp8"),
    "FP8, sharing, OPT, not captured": lambda: sharing("opt", kv_cache_dtype="fp8", is_captured=False),
}


def convert_as_devices(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """In place of the interpreter's conversion of numbers, which cuts FP8 off where devices round to the nearest, and
    reads its NaN as 480."""
    from_fp8, to_fp8 = (kind == tl.float8e4nv for kind in (source, target))
    if not from_fp8 and not to_fp8:
        return CONVERT(data, source, target, rounding)
    types = {tl.float8e4nv: FP8, tl.float32: FP32, tl.bfloat16: BF16, tl.float16: FP16}
    given = torch.from_numpy(np.ascontiguousarray(data))
    numbers = given.view(types[source]).to(types[target])
    return numbers.view(torch.uint8 if to_fp8 else {2: torch.int16, 4: torch.int32}[numbers.itemsize]).numpy()


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen when Triton is imported"
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    interpreter._convert_float = convert_as_devices
    found = {}
    for name, case in (SLOW if "slow" in sys.argv else CASES).items():
        try:
            case()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()[-1500:]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
