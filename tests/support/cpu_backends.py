"""The CPU back ends that this machine can run, forced one after the other; for the tests of the kernels.

The short lane runs the fastest back end, which is the one that decodes here. Tests of the others are marked `slow`:
each is a library of its own, which takes the compiler the better part of a minute.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from skipdecode.backends import choice
from skipdecode.backends.backend import KVRange, PackedPrompts
from skipdecode.backends.block_quantization import dequantize, quantize
from skipdecode.backends.cpu_layers import LayerKernel, Step
from skipdecode.config.model import Quantization

NAMES = [name for name in choice.possible() if name != "torch"]
HAS_BFLOAT16 = "avx512_bf16" in choice.cpu_flags()
PRODUCTS = [
    (name, dtype)
    for name in NAMES
    for dtype in (torch.bfloat16, torch.float32)
    if dtype == torch.float32 or (HAS_BFLOAT16 and name != "avx2")
]
HAS_INT8 = HAS_BFLOAT16 and "avx512_vnni" in choice.cpu_flags()
INT8 = [name for name in NAMES if name == "amx" or (name == "avx512" and HAS_INT8)]
KINDS = [(name, dtype, None) for name, dtype in PRODUCTS] + [(name, torch.bfloat16, "int8") for name in INT8]
INT4 = [(name, dtype, "int4") for name, dtype in PRODUCTS]
Kind = tuple[torch.dtype, Quantization | None]
DTYPES = [torch.float32, torch.bfloat16]
# Of the largest output: float32 sums in another order; bfloat16's last bit is 2^-8, and torch rounds its weights too.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
# Rounding of the result, and sums in another order: of the result, and of one.
CLOSE = {torch.float32: (2e-6, 1e-4), torch.bfloat16: (2**-8, 1e-4)}


def is_close(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    relative, absolute = CLOSE[made.dtype]
    return bool(torch.all((made.float() - wanted).abs() <= relative * wanted.abs() + absolute))


def some_allowed(rows: int, outputs: int, share: float, rng: torch.Generator) -> Tensor:
    """Bits [rows, ceil(outputs / 32)] int32, of which about this share is set; those beyond the outputs, too."""
    is_set = torch.rand(rows, -(-outputs // 32), 32, generator=rng) < share
    return (is_set.long() << torch.arange(32)).sum(dim=-1).to(torch.int32)


def nearest_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest whole numbers and their scales [out, 1], in float64; in between, float32 decides."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight.float() / scales.clamp(min=1e-30)).round().double()
    assert torch.all((numbers * scales - weight).abs() <= 0.50001 * scales)
    return numbers, scales.double()


def nearest(weight: Tensor, quantization: Quantization, *, is_head: bool = False) -> Tensor:
    """What a weight is after it has been quantised, in its own type."""
    if quantization == "int4":
        return dequantize(quantize(weight, "Q8_0" if is_head else "Q4_0")).to(weight.dtype)
    numbers, scales = nearest_int8(weight)
    return (numbers * scales).to(weight.dtype)


@contextmanager
def forced(name: str) -> Iterator[choice.Choice]:
    """The process decodes by this back end; skips where there is no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(choice.VARIABLE, name)
        try:
            chosen = choice.choose()
        except choice.BackendError as error:
            pytest.skip(str(error))
        assert chosen.name == name
        yield chosen


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


def _name_of(one: tuple[Any, ...]) -> str:
    """`avx512-bfloat16`, `avx512-int8`, `avx2-int4-float32`, ..."""
    name, dtype, *quantization = one
    asked, of = (*quantization, None)[0], str(dtype).removeprefix("torch.")
    return f"{name}-{of}" if asked is None else f"{name}-int8" if asked == "int8" else f"{name}-{asked}-{of}"


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name != NAMES[0] else []


BACKENDS = [pytest.param(name, marks=_marks(name)) for name in NAMES]


def params_of(kinds: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Parameters for tests of such tuples, which begin with a back end."""
    return [pytest.param(one, id=_name_of(one), marks=_marks(one[0])) for one in kinds]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each back end with kernels."""
    with forced(request.param):
        yield request.param


@pytest.fixture(scope="module", params=[pytest.param(name, marks=_marks(name)) for name in INT8])
def int8_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each back end with int8 weights."""
    with forced(request.param) as chosen:
        assert chosen.no_int8 is None
        yield request.param


@pytest.fixture(scope="module", params=params_of(PRODUCTS))
def product_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Each type that some back end multiplies, by that back end."""
    with forced(request.param[0]):
        yield request.param[1]


@pytest.fixture(scope="module", params=params_of(KINDS))
def precise_kind(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, Quantization | None]]:
    """Those of `kind` whose layers are near those of float32: without int4, which rounds inputs to 8 bits."""
    with forced(request.param[0]):
        yield request.param[1:]


@pytest.fixture(scope="module", params=params_of([*KINDS, *INT4]))
def kind(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, Quantization | None]]:
    """Each type and quantization that some back end has kernels for, by that back end."""
    with forced(request.param[0]):
        yield request.param[1:]


def read_last(
    kernel: LayerKernel, h: Tensor, prompts: PackedPrompts, memory: tuple[Tensor, Tensor] | None, *, runs_ffn: bool
) -> Tensor:
    """A layer behind whose keys and values only the last token of each prompt goes on: [N, D] -> [B, 1, D]."""
    columns = None
    if memory is not None:
        assert kernel.store is not None
        kernel.store(h, prompts, {0: memory})
        columns = KVRange(*memory, prompts.columns, prompts.last_columns)
    return step_one(kernel, prompts.last(h), columns, runs_ffn=runs_ffn)


def step_one(kernel: LayerKernel, h: Tensor, columns: KVRange | None, *, runs_ffn: bool) -> Tensor:
    """`Step` of one layer."""
    return Step([kernel], len(h), None if columns is None else [columns], runs_ffn=runs_ffn)(h)
