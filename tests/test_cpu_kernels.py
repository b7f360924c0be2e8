"""The compiled CPU kernels against torch's operators, over any shapes; and what happens without a compiler."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import cohort, cpu_kernels
from skipdecode.continuous import generate_continuous
from skipdecode.generate import Request, generate
from skipdecode.linear import Linear
from skipdecode.model import OPT
from skipdecode.plan import FullDepth, Schedule, SkipDecode, SwiftPrefill, Unified
from skipdecode.sampling import Sampling
from skipdecode.weights import load_opt, save_opt

ROOT = Path(__file__).parent.parent
DTYPES = [torch.float32, torch.bfloat16]
# Of the largest output: float32 sums in another order; bfloat16's last bit is 2^-8, and torch rounds its weights too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}

compiled = pytest.mark.skipif(cpu_kernels.status() != "compiled", reason=cpu_kernels.status())


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    dim=st.sampled_from([1, 3, 16, 64, 80, 128]),
    capacity=st.integers(1, 70),
    seed=st.integers(0, 2**31),
    is_new=st.booleans(),
    threads=st.integers(1, 3),
)
def test_attention_is_that_of_torch(
    dtype: torch.dtype, rows: int, heads: int, dim: int, capacity: int, seed: int, is_new: bool, threads: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(rows, heads, capacity, dim, generator=rng).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,), generator=rng)
    first = (torch.rand(rows, generator=rng) * (last + 1)).long()
    qkv = torch.randn(rows, 3 * heads * dim, generator=rng).to(dtype)
    q, new_k, new_v = qkv.chunk(3, dim=-1)
    wanted_k, wanted_v = k.clone(), v.clone()
    if is_new:
        for cache, new in ((wanted_k, new_k), (wanted_v, new_v)):
            cache[torch.arange(rows), :, last] = new.view(rows, heads, dim)
    columns = torch.arange(capacity)
    mask = (columns >= first[:, None]) & (columns <= last[:, None])
    query = q.reshape(rows, heads, 1, dim)
    wanted = F.scaled_dot_product_attention(
        query.float(), wanted_k.float(), wanted_v.float(), attn_mask=mask[:, None, None]
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        made = cpu_kernels.attend(q, k, v, first, last, (new_k, new_v) if is_new else None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(k, wanted_k)  # only the new column was written
    assert torch.equal(v, wanted_v)
    difference = (made.float() - wanted.reshape(rows, -1)).abs().max()
    assert difference <= TOLERANCE[dtype] * max(1.0, float(wanted.abs().max()))


@compiled
def test_weights_far_apart_do_not_overflow() -> None:
    q = torch.full((1, 64), 50.0)
    k = torch.stack([torch.full((64,), x) for x in (-40.0, 40.0, 39.0)])[None, None].contiguous()
    v = torch.stack([torch.full((64,), x) for x in (1.0, 2.0, 3.0)])[None, None].contiguous()
    made = cpu_kernels.attend(q, k, v, torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(made, torch.full((1, 64), 2.0))


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 7), size=st.integers(1, 1300), seed=st.integers(0, 2**31), levels=st.integers(1, 60))
def test_argmax_is_the_lowest_of_the_largest(dtype: torch.dtype, rows: int, size: int, seed: int, levels: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randint(-levels, levels + 1, (rows, size), generator=rng) / 8 - levels / 16).to(dtype)  # many ties
    wanted = np.argmax(x.float().numpy(), axis=1)  # numpy promises the first
    assert cpu_kernels.argmax(x).tolist() == wanted.tolist()


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_strange_numbers(dtype: torch.dtype) -> None:
    infinity = float("inf")
    rows = [[-0.0, 0.0, -1.0], [-infinity, -3.0, -2.0], [1.0, infinity, 2.0], [-3.0, -2.0, -4.0]]
    assert cpu_kernels.argmax(torch.tensor(rows, dtype=dtype)).tolist() == [0, 2, 1, 1]


@compiled
def test_loading_leaves_the_arithmetic_of_the_process_alone() -> None:
    """Some flags of a compiler flush subnormal numbers to zero in every library of the process."""
    code = (
        "import torch; from skipdecode import cpu_kernels as c;"
        "assert c.status() == 'compiled'; c.argmax(torch.ones(2, 3));"
        "import numpy as np; x = np.float32(1e-40); assert x * np.float32(1.0) != 0, 'flushed'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_without_a_compiler_torch_does_the_work(tmp_path: Path) -> None:
    for settings, word in (
        ({"PATH": str(tmp_path)}, "no C++ compiler"),
        ({"CXX": "/bin/false"}, "/bin/false failed"),
        ({"SKIPDECODE_KERNELS": "off"}, "turned off"),
    ):
        env = {key: value for key, value in os.environ.items() if key not in ("CXX", "SKIPDECODE_KERNELS")}
        env |= {"XDG_CACHE_HOME": str(tmp_path)} | settings
        code = (
            "import torch; from skipdecode import cpu_kernels as c; from skipdecode.sampler import likeliest;"
            "assert not c.is_available(torch.ones(1));"
            "assert likeliest(torch.tensor([[0.0, 2.0]])).tolist() == [1]; print(c.status())"
        )
        made = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True, text=True
        )
        assert word in made.stdout


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), out=st.integers(1, 90), seed=st.integers(0, 2**31))
def test_a_packed_layer_is_the_layer(dtype: torch.dtype, rows: int, width: int, out: int, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.inference_mode():
        layer = Linear(width, out, bias=bool(seed % 2)).to(dtype)
        x, residual = torch.randn(rows, 1, width).to(dtype), torch.randn(rows, 1, out).to(dtype)
        wanted = [layer(x), layer(x, relu=True), layer(x, residual=residual)]
        layer.pack()
        for one, other in zip(wanted, [layer(x), layer(x, relu=True), layer(x, residual=residual)], strict=True):
            assert one.dtype == other.dtype
            assert (one.float() - other.float()).abs().max() <= TOLERANCE[dtype] * max(1, float(one.abs().max()))


# The whole decoder, as fast as it gets and as plain as it gets. The plain one is held to Hugging Face elsewhere.


@pytest.fixture(scope="module")
def plain(checkpoint_factory: Callable[..., Path]) -> Callable[[str], OPT]:
    return lambda style: load_opt(checkpoint_factory(style))


def tokens_of(model: OPT, lengths: list[int], num_new: int, schedule: Schedule) -> list[list[int]]:
    rng = torch.Generator().manual_seed(sum(lengths))
    prompts = [[2, *torch.randint(4, 320, (n - 1,), generator=rng).tolist()] for n in lengths]
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True)
    requests = [Request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    return [c.tokens for c in generate(model, requests, schedule).completions]


@given(
    style=st.sampled_from(["125m", "350m", "1.3b"]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    num_new=st.integers(1, 12),
    schedule=st.sampled_from([FullDepth(6), SkipDecode(6, 5, 2, 1, 9), Unified(6, 3)]),
    at_once=st.integers(1, 200),
)
def test_every_fast_path_gives_the_tokens_of_the_plain_one(
    plain: Callable[[str], OPT], style: str, lengths: list[int], num_new: int, schedule: Schedule, at_once: int
) -> None:
    model = plain(style)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "is_available", lambda _: False)
        wanted = tokens_of(model, lengths, num_new, schedule)
        packed = copy.deepcopy(model).pack()
        patch.setitem(cohort.PREFILL_TOKENS, "cpu", at_once)  # prompts in several parts
        assert tokens_of(packed, lengths, num_new, schedule) == wanted
    assert tokens_of(packed, lengths, num_new, schedule) == wanted


@pytest.mark.parametrize("group_size", [1, 2])
def test_swiftkv_too(plain: Callable[[str], OPT], group_size: int) -> None:
    model = copy.deepcopy(plain("125m")).with_swiftkv(2, group_size)
    schedule = SwiftPrefill(SkipDecode(6, 5, 3, 1, 9), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "is_available", lambda _: False)
        wanted = tokens_of(model, [3, 9, 1, 14, 6], 11, schedule)
    assert tokens_of(model.pack(), [3, 9, 1, 14, 6], 11, schedule) == wanted


def test_rows_of_different_ages_too(plain: Callable[[str], OPT]) -> None:
    model, schedule = copy.deepcopy(plain("125m")).pack(), SkipDecode(6, 5, 2, 1, 9)
    prompts = [[2, *range(5, 5 + n)] for n in (3, 9, 1, 14, 6, 2, 8)]
    requests = [
        Request(str(i), prompt, Sampling(max_new_tokens=4 + 3 * (i % 3), ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    made = []
    for is_available in (lambda _: False, cpu_kernels.is_available):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_kernels, "is_available", is_available)
            rows, _ = generate_continuous(model, requests, schedule, max_rows=3)
            made.append([row.tokens for row in rows])
    assert made[0] == made[1]
    assert made[0] == [c.tokens for c in generate(model, requests, schedule).completions]


def test_a_packed_model_is_neither_saved_nor_shared(plain: Callable[[str], OPT], tmp_path: Path) -> None:
    packed = copy.deepcopy(plain("125m")).pack()
    assert packed.is_packed
    with pytest.raises(AssertionError, match="cannot be saved"):
        save_opt(packed, tmp_path)
    with pytest.raises(AssertionError, match="cannot be shared"):
        packed.with_swiftkv(3)
