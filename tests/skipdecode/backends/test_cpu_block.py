"""A layer in one call for a step: against float32, and against itself in other company."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.backends.backend import KVRange
from skipdecode.backends.cpu_backend import attend_one
from skipdecode.backends.cpu_layers import LayerKernel, Step
from skipdecode.families.opt import OPTConfig
from skipdecode.model.decoder import Decoder
from tests.support.cpu_backends import kind, num_threads, product_dtype
from tests.support.cpu_layers import SHAPES, TOLERANCE, Kind, layers

__all__ = ["kind", "product_dtype"]  # fixtures


class OneLayer:
    """A cache of one layer, as a layer sees it (`skipdecode.kv.view.KVView`)."""

    has_kernels, rotation = True, None

    def __init__(self, *columns: torch.Tensor) -> None:
        self.held = KVRange(*columns)

    def attend(self, _: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        return attend_one(q, k, v, self.held)

    def run(self, kernels: list[LayerKernel], h: Tensor, _: list[int], *, attends: bool, feeds: bool) -> Tensor:
        return Step(kernels, len(h), [self.held] * len(kernels) if attends else None, feeds=feeds)(h)


@given(
    rows=st.integers(1, 70),
    shape=st.sampled_from(SHAPES),
    capacity=st.integers(1, 40),
    seed=st.integers(0, 2**31),
    does=st.sampled_from([(True, True), (True, False), (False, True)]),
    is_plain=st.booleans(),
    is_post=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_layer_in_one_call_is_the_layer(
    kind: Kind,
    rows: int,
    shape: tuple[int, int],
    capacity: int,
    seed: int,
    does: tuple[bool, bool],
    is_plain: bool,
    is_post: bool,
    threads: int,
) -> None:
    """Against float32, and against its parts one after the other; a row's bits are those it has alone."""
    torch.manual_seed(seed)
    (width, heads), (attends, feeds), (dtype, quantization) = shape, does, kind
    block, parts, exact = layers(
        width, heads, dtype=dtype, is_plain=is_plain, is_post=is_post, quantization=quantization
    )
    h = torch.randn(rows, 1, width).to(dtype)
    k, v = (torch.randn(rows, heads, capacity, width // heads).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    keys = {"attends": attends, "feeds": feeds}
    with torch.inference_mode(), num_threads(threads):
        wanted = exact(h.float(), OneLayer(k.float(), v.float(), first, last), 0, **keys)
        by_parts = parts(h.clone(), own := OneLayer(k.clone(), v.clone(), first, last), 0, **keys)
        row = rows // 2
        one = [x[row : row + 1].clone() for x in (k, v, first, last)]
        alone = block(h[row : row + 1].clone(), OneLayer(*one), 0, **keys)
        given_h = h.clone()
        made = block(given_h, OneLayer(k, v, first, last), 0, **keys)
    assert made.data_ptr() == given_h.data_ptr()
    assert torch.equal(made[row], alone[0])
    limit = TOLERANCE[dtype] * float(wanted.abs().max())
    assert (made.float() - wanted).abs().max() <= limit
    assert (by_parts.float() - wanted).abs().max() <= limit
    for cache, other in ((k, own.held.k), (v, own.held.v)):  # norms may differ in the last bit
        assert (cache.float() - other.float()).abs().max() <= TOLERANCE[dtype] * float(other.abs().max())


@pytest.mark.parametrize("rows", [63, 64, 97, 150, 520])
@pytest.mark.parametrize("does", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("is_post", [False, True])
def test_threads_with_many_rows_take_them_through_all_layers(
    kind: Kind, rows: int, does: tuple[bool, bool], is_post: bool
) -> None:
    """Bit for bit what one thread makes of all rows, in states and caches; two and three threads, even parts or not."""
    torch.manual_seed(rows)
    dtype, quantization = kind
    kernels = []
    for _ in range(2):
        block, _, _ = layers(96, 3, dtype=dtype, is_post=is_post, quantization=quantization, ffn_dim=160)
        assert block.kernel is not None
        kernels.append(block.kernel)
    h, last = torch.randn(rows, 1, 96).to(dtype), torch.randint(0, 9, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    caches = [[torch.randn(rows, 3, capacity, 32).to(dtype) for _ in "kv"] for capacity in (9, 12)]
    made = []
    for threads in (1, 2, 3):
        own = [[x.clone() for x in cache] for cache in caches]
        columns = [KVRange(*cache, first, last) for cache in own] if does[0] else None
        with torch.inference_mode(), num_threads(threads):
            made.append(
                [Step(kernels, len(h), columns, feeds=does[1])(h.clone()), *(x for cache in own for x in cache)]
            )
    assert not torch.equal(made[0][0], h)
    for several in made[1:]:
        assert all(map(torch.equal, several, made[0]))


def test_a_layer_in_one_call_refuses_what_it_would_misread(product_dtype: torch.dtype) -> None:
    dtype = product_dtype
    config = OPTConfig(vocab_size=8, hidden_size=64, num_hidden_layers=1, ffn_dim=64, num_attention_heads=2)
    (block,) = Decoder(config).to(dtype).requires_grad_(False).pack().layers
    k = torch.zeros(3, 2, 5, 32, dtype=dtype)
    h, at = torch.zeros(3, 1, 64, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    block(h, OneLayer(k, k.clone(), at, at), 0, attends=True, feeds=True)
    for columns in ((k[:2], k, at, at), (k.double(), k, at, at), (k, k, at[:2], at), (k, k, at, at.int())):
        with pytest.raises(AssertionError):
            block(h, OneLayer(*columns), 0, attends=True, feeds=True)
    for wrong in (h.double(), h[:, :, :32], torch.zeros(3, 2, 64, dtype=dtype)[:, :1]):
        with pytest.raises(AssertionError):
            block(wrong, OneLayer(k, k, at, at), 0, attends=True, feeds=True)
