"""A decoder layer as one call for one new token per row, against its parts and against float32."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from skipdecode.backends.backend import KVRange, LayerNorms, LayerShape
from skipdecode.backends.cpu_backend import attend_one
from skipdecode.backends.cpu_layers import KVStoreKernel, LayerKernel, Product, Step
from skipdecode.config.model import Quantization
from skipdecode.families.opt import OPTConfig
from skipdecode.model.decoder import Decoder
from tests.support.cpu_backends import Kind, num_threads, precise_kind, product_dtype, step_one
from tests.support.cpu_layers import SHAPES, TOLERANCE, layers
from tests.support.cpu_llama_layers import POSITIONS, REAL, LlamaLayer, Norm, Spec, assert_close, rotary_table, specs
from tests.support.cuda_models import random_model
from tests.support.examples import examples

__all__ = ["precise_kind", "product_dtype"]  # fixtures


class OneLayer:
    """A cache of one layer, as a layer sees it (`skipdecode.kv.view.KVView`)."""

    has_kernels, rotations = True, (None,)

    def __init__(self, *columns: torch.Tensor) -> None:
        self.held = KVRange(*columns)

    def attend(self, _: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: None) -> Tensor:
        return attend_one(q, k, v, self.held)

    def run_fused(
        self, kernels: list[LayerKernel], h: Tensor, _: list[int], *, attends: bool, runs_ffn: bool
    ) -> Tensor:
        return Step(kernels, len(h), [self.held] * len(kernels) if attends else None, runs_ffn=runs_ffn)(h)


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
    precise_kind: Kind,
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
    (width, heads), (attends, runs_ffn), (dtype, quantization) = shape, does, precise_kind
    block, parts, exact = layers(
        width, heads, dtype=dtype, is_plain=is_plain, is_post=is_post, quantization=quantization
    )
    h = torch.randn(rows, 1, width).to(dtype)
    k, v = (torch.randn(rows, heads, capacity, width // heads).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    keys = {"attends": attends, "runs_ffn": runs_ffn}
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
    precise_kind: Kind, rows: int, does: tuple[bool, bool], is_post: bool
) -> None:
    """Bit for bit what one thread makes of all rows, in states and caches; two and three threads, even parts or not."""
    torch.manual_seed(rows)
    dtype, quantization = precise_kind
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
                [Step(kernels, len(h), columns, runs_ffn=does[1])(h.clone()), *(x for cache in own for x in cache)]
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
    block(h, OneLayer(k, k.clone(), at, at), 0, attends=True, runs_ffn=True)
    for columns in ((k[:2], k, at, at), (k.double(), k, at, at), (k, k, at[:2], at), (k, k, at, at.int())):
        with pytest.raises(AssertionError):
            block(h, OneLayer(*columns), 0, attends=True, runs_ffn=True)
    for wrong in (h.double(), h[:, :, :32], torch.zeros(3, 2, 64, dtype=dtype)[:, :1]):
        with pytest.raises(AssertionError):
            block(wrong, OneLayer(k, k, at, at), 0, attends=True, runs_ffn=True)


LAYERS, COLUMNS, SPARE = 2, 24, 3  # rows of the cache that nobody has


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 70])  # of 70, two threads take their own through all layers
@pytest.mark.parametrize("order", ["rising", "any"])
@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meeting"])
def test_tokens_at_places_are_rows(
    precise_kind: tuple[torch.dtype, Quantization | None], rows: int, order: str, meets: bool, threads: int
) -> None:
    """`meets`: some have a second token, in the next column, among the others. They see each other's keys in order."""
    dtype, quantization = precise_kind
    model = random_model("llama", layers=LAYERS, dtype=dtype).pack(quantization)
    kernels = [layer.kernel for layer in model.layers if isinstance(layer.kernel, LayerKernel)]
    rng = torch.Generator().manual_seed(rows)
    table = torch.randperm(rows + SPARE, generator=rng)[:rows]
    places = table.sort().values if order == "rising" else table
    last = torch.randint(0, COLUMNS - 1, (rows,), generator=rng)
    shape = (rows + SPARE, model.config.num_kv_heads, COLUMNS, model.config.head_dim)
    memory = [tuple(torch.randn(shape, generator=rng).to(dtype) for _ in "kv") for _ in kernels]
    h = torch.randn(rows, 1, model.config.hidden_size, generator=rng).to(dtype)
    second = torch.arange(0, rows, 3) if meets else torch.empty(0, dtype=torch.int64)
    h2 = torch.randn(len(second), 1, model.config.hidden_size, generator=rng).to(dtype)

    wanted = [tuple(held[places].clone() for held in pair) for pair in memory]
    made = Step(kernels, rows, [KVRange(k, v, torch.zeros_like(last), last) for k, v in wanted], runs_ffn=True)(
        h.clone()
    )
    if meets:
        own = [tuple(held[second].clone() for held in pair) for pair in wanted]
        bounds = torch.zeros_like(second), last[second] + 1
        made2 = Step(kernels, len(second), [KVRange(k, v, *bounds) for k, v in own], runs_ffn=True)(h2.clone())
        for pair, owned in zip(wanted, own, strict=True):
            for held, new in zip(pair, owned, strict=True):
                held[second] = new
        made = torch.cat([made, made2])

    mixed = torch.randperm(len(made), generator=rng) if order == "any" else torch.arange(len(made))
    where = torch.cat([places, places[second]])[mixed].contiguous()
    at = torch.cat([last, last[second] + 1])[mixed].contiguous()
    columns = [KVRange(k, v, torch.zeros_like(at), at, slots=where) for k, v in memory]
    before = [tuple(held.clone() for held in pair) for pair in memory]
    with num_threads(threads):
        ours = Step(kernels, len(at), columns, runs_ffn=True)(torch.cat([h, h2])[mixed].contiguous())
    assert torch.equal(ours, made[mixed])
    for pair, ended, begun in zip(memory, wanted, before, strict=True):
        for held, rows_then, all_before in zip(pair, ended, begun, strict=True):
            all_before[places] = rows_then
            assert torch.equal(held, all_before), "something else was written, or not all"


def check_step(
    layer: LlamaLayer, rows: int, capacity: int, threads: int, *, is_new: bool, attends: bool, runs_ffn: bool
) -> None:
    spec, dtype = layer.spec, layer.dtype
    h = torch.randn(rows, 1, spec.width).to(dtype)
    k, v = (torch.randn(rows, spec.groups, capacity, spec.dim).to(dtype) for _ in "kv")
    last = torch.randint(0, capacity, (rows,))
    first = (torch.rand(rows) * (last + 1)).long()
    kernel = layer.kernel(only_queries=not is_new)
    keys = {"attends": attends, "runs_ffn": runs_ffn}
    wanted, wanted_k, wanted_v = layer.step(h[:, 0].float(), k.float(), v.float(), first, last, is_new=is_new, **keys)
    row = rows // 2
    one = KVRange(*(x[row : row + 1].clone() for x in (k, v, first, last)))
    with num_threads(threads):
        alone = step_one(kernel, h[row : row + 1].clone(), one if attends else None, runs_ffn=runs_ffn)
        made = step_one(kernel, h.clone(), KVRange(k, v, first, last) if attends else None, runs_ffn=runs_ffn)
    assert torch.equal(alone[0], made[row])
    assert_close(made[:, 0], wanted, dtype)
    assert_close(k, wanted_k, dtype)
    assert_close(v, wanted_v, dtype)


@settings(max_examples=examples(60))
@given(
    spec=specs(),
    rows=st.integers(1, 40),
    capacity=st.integers(1, POSITIONS + 40),
    seed=st.integers(0, 2**31),
    does=st.sampled_from([(True, True), (True, True), (True, False), (False, True)]),
    is_new=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_step_is_the_layer(
    precise_kind: Kind,
    spec: Spec,
    rows: int,
    capacity: int,
    seed: int,
    does: tuple[bool, bool],
    is_new: bool,
    threads: int,
) -> None:
    """A row's bits are those it has alone. `is_new` False: keys and values are in the cache already (SwiftKV)."""
    torch.manual_seed(seed)
    attends, runs_ffn = does
    check_step(
        LlamaLayer(spec, *precise_kind), rows, capacity, threads, is_new=is_new, attends=attends, runs_ffn=runs_ffn
    )


@pytest.mark.parametrize("spec", REAL, ids=str)
def test_a_step_of_real_shapes(precise_kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    for rows, capacity in ((1, 70), (13, 40)):
        check_step(LlamaLayer(spec, *precise_kind), rows, capacity, 2, is_new=True, attends=True, runs_ffn=True)


def test_positions_past_the_table_are_its_last(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = LlamaLayer(Spec(64, 4, 2, 32, 64, 32), product_dtype)
    kernel = layer.kernel()
    capacity = POSITIONS + 9
    k, v = (torch.randn(2, 2, capacity, 32).to(product_dtype) for _ in "kv")
    first, last = torch.tensor([0, 9]), torch.tensor([capacity - 1] * 2)
    h = torch.randn(1, 1, 64).expand(2, 1, 64).to(product_dtype).contiguous()
    step_one(kernel, h, KVRange(k, v, first, last), runs_ffn=False)
    assert torch.equal(k[0, :, -1], k[1, :, -1])


def test_a_layer_of_wrong_parts_is_refused(product_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    spec = Spec(64, 4, 2, 32, 64, 32)
    layer = LlamaLayer(spec, product_dtype)
    layer.kernel()
    shape = spec.shape()
    attn, q_norm = layer.module("attn"), Norm(torch.ones(32, dtype=product_dtype))
    assert attn is not None
    parts = [layer.product(name) for name in ("qkv", "out", "fc1", "fc2")]

    def build(shape: LayerShape, parts: list[Product], **norms: nn.Module) -> LayerKernel:
        return LayerKernel(shape, LayerNorms(attn, attn, **norms), *parts)

    build(shape, parts, q=q_norm, k=q_norm)
    table = rotary_table(32)
    for wrong in (
        replace(shape, kv_heads=4), replace(shape, kv_heads=3), replace(shape, head_dim=16), replace(shape, mlp="relu"),
        replace(shape, rotary_table=table.double()), replace(shape, rotary_table=rotary_table(34)),
        replace(shape, rotary_table=table.T.contiguous().T), replace(shape, rotary_table=table[:, :31].contiguous()),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            build(wrong, parts)
    with pytest.raises(AssertionError):
        build(shape, [*parts[:2], replace(parts[2], is_gated=False), parts[3]])
    for norm in (Norm(torch.ones(16, dtype=product_dtype)), Norm(torch.ones(32).double())):
        with pytest.raises(AssertionError):
            build(shape, parts, k=norm)
    with pytest.raises(AssertionError):
        KVStoreKernel(shape, attn, [parts[0]])
    kernel = build(shape, parts)
    k, at = torch.zeros(3, 2, 5, 32, dtype=product_dtype), torch.zeros(3, dtype=torch.int64)
    h = torch.zeros(3, 1, 64, dtype=product_dtype)
    step_one(kernel, h, KVRange(k, k.clone(), at, at), runs_ffn=True)
    for held in (k[:, :1], k.repeat(1, 2, 1, 1), k[..., :16]):
        with pytest.raises(AssertionError):
            step_one(kernel, h, KVRange(held.contiguous(), held.contiguous(), at, at), runs_ffn=True)
