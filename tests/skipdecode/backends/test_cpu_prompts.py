"""A decoder layer as one call for whole prompts, without their padding, against its parts and against float32."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from skipdecode.backends.backend import KVRange, LayerShape, PackedPrompts
from skipdecode.backends.cpu_layers import KVStoreKernel
from skipdecode.families.opt import OPTConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer import Layer
from skipdecode.model.linear import Linear
from skipdecode.model.teacher_forcing import ForcedView
from skipdecode.schedules.layer_plan import LayerPlan
from tests.support.cpu_backends import Kind, num_threads, precise_kind, product_dtype, read_last, step_one
from tests.support.cpu_layers import SHAPES, TOLERANCE, layers
from tests.support.cpu_llama_layers import POSITIONS, REAL, LlamaLayer, Spec, assert_close, specs
from tests.support.examples import examples

__all__ = ["precise_kind", "product_dtype"]  # fixtures


class Filled:
    """Prompts of these lengths with random states, and a cache full of NaN."""

    def __init__(self, lengths: list[int], width: int, heads: int, dtype: torch.dtype, spare: int = 0) -> None:
        self.columns = max(lengths)
        pads = torch.tensor([self.columns - n for n in lengths])
        self.prompts = PackedPrompts((torch.arange(self.columns) - pads[:, None]).clamp(min=-1), pads)
        self.h = torch.randn(sum(lengths), width).to(dtype)
        shape = (len(lengths), heads, self.columns + spare, width // heads)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=dtype) for _ in "kv")
        self.lengths, self.pads = lengths, pads

    def row(self, row: int) -> "Filled":
        """That prompt alone, without padding and with its cache empty."""
        width, heads = self.h.shape[1], self.k.shape[1]
        alone = Filled([self.lengths[row]], width, heads, self.h.dtype)
        alone.h = self.h[self.span(row)].clone()
        return alone

    def span(self, row: int) -> slice:
        return slice(int(self.prompts.starts[row]), int(self.prompts.starts[row + 1]))

    def cached(self, row: int) -> Tensor:
        """[2, H, S, K] of the prompt's own columns."""
        return torch.stack([self.k, self.v])[:, row, :, int(self.pads[row]) : self.columns]

    def read(self, block: Layer, *, attends: bool, runs_ffn: bool, only_last: bool = False) -> Tensor:
        assert block.kernel is not None
        h, memory = self.h.clone(), (self.k, self.v) if attends else None
        if only_last:
            return read_last(block.kernel, h, self.prompts, memory, runs_ffn=runs_ffn)
        return block.kernel.run_prompts(h, self.prompts, memory, runs_ffn=runs_ffn)


def exact_prompt(block: Layer, h: Tensor, *, attends: bool, runs_ffn: bool) -> tuple[Tensor, Tensor]:
    """A prompt [T, D] without padding through a layer of parts: [T, D], and [2, H, T, K] of keys and values."""
    view = Kept(torch.arange(len(h))[None], None, (None,) * 9, [])
    return block(h[None], view, 0, attends=attends, runs_ffn=runs_ffn)[0], view.kept


class Kept(ForcedView):
    """Remembers keys and values."""

    kept = torch.zeros(2, 0)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, variant: None) -> Tensor:
        assert k is not None
        assert v is not None
        self.kept = torch.stack([k[0], v[0]])
        return super().attend(layer, q, k, v, variant)


@settings(max_examples=examples(40))
@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 40), min_size=1, max_size=12),
        st.lists(st.integers(1, 400), min_size=1, max_size=4),
        st.lists(st.integers(60, 70), min_size=12, max_size=20),
    ),
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**31),
    does=st.sampled_from([(True, True), (True, False), (False, True)]),
    is_plain=st.booleans(),
    is_post=st.booleans(),
    threads=st.integers(1, 3),
    spare=st.integers(0, 3),
)
def test_prompts_in_one_call_are_the_layer(
    precise_kind: Kind,
    lengths: list[int],
    shape: tuple[int, int],
    seed: int,
    does: tuple[bool, bool],
    is_plain: bool,
    is_post: bool,
    threads: int,
    spare: int,
) -> None:
    """Against float32. A prompt's bits are those it has alone, whatever it is padded with and how work is shared."""
    torch.manual_seed(seed)
    (width, heads), (attends, runs_ffn), (dtype, quantization) = shape, does, precise_kind
    block, _, exact = layers(width, heads, dtype=dtype, is_plain=is_plain, is_post=is_post, quantization=quantization)
    keys = {"attends": attends, "runs_ffn": runs_ffn}
    with torch.inference_mode():
        batch = Filled(lengths, width, heads, dtype, spare)
        with num_threads(threads):
            made = batch.read(block, **keys)
        row = seed % len(lengths)
        alone = batch.row(row)
        assert torch.equal(alone.read(block, **keys), made[batch.span(row)])
        if attends:
            assert torch.equal(alone.cached(0), batch.cached(row))
            assert batch.k[row, :, : batch.pads[row]].isnan().all()
            assert batch.k[:, :, batch.columns :].isnan().all()
        before = batch.cached(row)
        with num_threads(threads):
            last = batch.read(block, **keys, only_last=True)
        assert last.shape == (len(lengths), 1, width)
        wanted, cached = exact_prompt(exact, batch.h[batch.span(row)].float(), **keys)
    if attends:
        assert torch.equal(batch.cached(row), before)
        assert (before.float() - cached).abs().max() <= TOLERANCE[dtype] * float(cached.abs().max())
    limit = TOLERANCE[dtype] * float(wanted.abs().max())
    assert (made[batch.span(row)].float() - wanted).abs().max() <= limit
    assert (last[row, 0].float() - wanted[-1]).abs().max() <= limit


@pytest.mark.parametrize("threads", [1, 2, 5, 16])  # 16 share the tokens, fewer take some each
def test_long_prompts_are_cut_anywhere(precise_kind: Kind, threads: int) -> None:
    """More tokens, and more inputs, than a thread takes at once."""
    torch.manual_seed(0)
    dtype, quantization = precise_kind
    block, _, exact = layers(64, 2, dtype=dtype, ffn_dim=2048 + 96, quantization=quantization)
    lengths = [1700, 1, 900, 33, 450]
    with torch.inference_mode():
        batch = Filled(lengths, 64, 2, dtype)
        with num_threads(threads):
            made = [batch.read(block, attends=True, runs_ffn=True) for _ in range(3)]
        assert all(torch.equal(made[0], other) for other in made[1:])
        for row in range(len(lengths)):
            wanted, _ = exact_prompt(exact, batch.h[batch.span(row)].float(), attends=True, runs_ffn=True)
            assert (made[0][batch.span(row)].float() - wanted).abs().max() <= TOLERANCE[dtype] * float(
                wanted.abs().max()
            )
            assert torch.equal(batch.row(row).read(block, attends=True, runs_ffn=True), made[0][batch.span(row)])


def test_threads_wait_for_keys_that_others_make(product_dtype: torch.dtype) -> None:
    """A cache is full of NaN before: without the wait, one try in two reads them."""
    torch.manual_seed(0)
    block, _, _ = layers(512, 2, dtype=product_dtype)
    with torch.inference_mode(), num_threads(5):
        for _ in range(10):
            assert Filled([2048], 512, 2, product_dtype).read(block, attends=True, runs_ffn=False).isfinite().all()


def test_scores_far_apart_do_not_overflow(product_dtype: torch.dtype) -> None:
    """Queries and keys are large biases: scores of hundreds of thousands, nearly alike."""
    block, _, _ = layers(64, 2, dtype=product_dtype)
    assert block.qkv.bias is not None
    block.qkv.bias[:128] = 0
    block.attn_norm.bias[:] = 0
    block.qkv.bias[:32], block.qkv.bias[64:96] = 300, 300  # head 0: scores of 500,000, all alike
    with torch.inference_mode():
        batch = Filled([70], 64, 2, product_dtype)
        made = batch.read(block, attends=True, runs_ffn=False)
    assert made.isfinite().all()


@pytest.mark.parametrize(("lengths", "threads"), [([5, 30, 1], 2), ([300, 1, 499], 2), ([2900, 40, 7], 16)])
def test_keys_and_values_of_several_layers_in_one_call(
    product_dtype: torch.dtype, lengths: list[int], threads: int
) -> None:
    """As SwiftKV has them: what is stored is the norm and the product of each, and only where it is asked for."""
    torch.manual_seed(0)
    dtype = product_dtype
    norm = torch.nn.LayerNorm(96).to(dtype).requires_grad_(False)
    torch.nn.init.normal_(norm.weight)
    linears = [Linear(96, 192).to(dtype).requires_grad_(False) for _ in range(3)]
    batch = Filled(lengths, 96, 3, dtype)
    memory = {layer: (batch.k.clone(), batch.v.clone()) for layer in (2, 0)}
    x = copy.deepcopy(norm).float()(batch.h.float())
    wanted = {layer: F.linear(x, linears[layer].weight.float(), linears[layer].bias.float()) for layer in memory}
    for linear in linears:
        linear.pack()
    products = [linear.product() for linear in linears]
    with torch.inference_mode(), num_threads(threads):
        KVStoreKernel(LayerShape(3, 3, 32, norm.eps), norm, [product for product in products if product])(
            batch.h, batch.prompts, memory
        )
    for layer, stored in memory.items():
        for held, made in zip(stored, wanted[layer].chunk(2, dim=1), strict=True):
            for row in range(3):
                own = held[row, :, batch.pads[row] :].transpose(0, 1).flatten(1)
                assert (own.float() - made[batch.span(row)]).abs().max() <= TOLERANCE[dtype] * float(made.abs().max())
                assert held[row, :, : batch.pads[row]].isnan().all()


SUBLAYERS = [
    LayerPlan((True, False, True), (True, True, True)),
    LayerPlan((True, True, False), (True, False, True)),  # the last layer runs its FFN only
    LayerPlan((True, True, True), (False, False, False)),
    LayerPlan((True, True, False), (True, True, False)),
    LayerPlan((False, False, False), (True, False, False)),
    LayerPlan((False, False, False), (False, False, False)),
]


@pytest.mark.parametrize("plan", SUBLAYERS, ids=str)
@pytest.mark.parametrize("how", ["fused", "parts", "plain"])
def test_prompts_of_any_plan(product_dtype: torch.dtype, plan: LayerPlan, how: str) -> None:
    """Of the last layer only the last column is run; the logits are those of running all of it."""
    torch.manual_seed(0)
    config = OPTConfig(vocab_size=50, hidden_size=64, num_hidden_layers=3, ffn_dim=96, num_attention_heads=2)
    model = Decoder(config).requires_grad_(False).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim == 1 else 0.15)
    model = model.to(product_dtype)
    exact = copy.deepcopy(model).float()
    num_pad = torch.tensor([3, 0, 8])
    tokens, positions = torch.randint(4, 50, (3, 9)), (torch.arange(9) - num_pad[:, None]).clamp(min=-1)

    def cache(dtype: torch.dtype) -> KVCache:
        return KVCache.allocate(config, num_pad=num_pad, capacities=[10] * 3, dtype=dtype)

    h, view = exact.embed(tokens, positions), ForcedView(positions, cache(torch.float32).mask(9), (None,) * 9, [])
    for i, block in enumerate(exact.layers):
        h = block(h, view, i, attends=plan.attn[i], runs_ffn=plan.ffn[i])
    wanted = exact.head(h[:, -1])
    if how == "plain":
        model = exact
    else:
        model.pack()
        assert model.supports_shared_prefix, "layers by parts"
        for block in model.layers:
            block.kernel = block.kernel if how == "fused" else None
    with torch.inference_mode():
        made = model(tokens, positions, cache(model.dtype), plan)
    assert (made - wanted).abs().max() <= TOLERANCE[model.dtype] * float(wanted.abs().max())


def test_prompts_in_one_call_refuse_what_they_would_misread(product_dtype: torch.dtype) -> None:
    block, _, _ = layers(64, 2, dtype=product_dtype)
    assert block.kernel is not None
    batch = Filled([3, 5], 64, 2, product_dtype)
    k, h, prompts = batch.k, batch.h, batch.prompts
    for memory in ((k[:1], k), (k.double(), k), (k, k[:, :, :3]), (k[:, :, :4].contiguous(),) * 2):
        with pytest.raises(AssertionError):
            block.kernel.run_prompts(h, prompts, memory, runs_ffn=True)
    for wrong in (h[1:], h.double(), h[:, :32], h.T.contiguous().T):
        with pytest.raises(AssertionError):
            block.kernel.run_prompts(wrong, prompts, (k, k.clone()), runs_ffn=True)
    for positions, message in (([[0, 1], [-1, -1]], "without tokens"), ([[0, -1], [0, 1]], "left-padded")):
        with pytest.raises(AssertionError, match=message):
            PackedPrompts(torch.tensor(positions), torch.zeros(2, dtype=torch.int64))


def test_packed_prompts() -> None:
    positions = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 3], [-1, -1, -1, 0]])
    prompts, x = PackedPrompts(positions, torch.tensor([2, 1, 3])), torch.arange(24.0).view(3, 4, 2)
    packed = prompts.pack(x)
    assert packed.tolist() == [*x[0, 2:].tolist(), *x[1].tolist(), *x[2, 3:].tolist()]
    assert torch.equal(prompts.last(packed), x[:, -1:])
    assert (prompts.starts.tolist(), prompts.columns.tolist()) == ([0, 2, 6, 7], [2, 1, 3])
    assert (prompts.last_columns.tolist(), prompts.num_columns, prompts.num_tokens) == ([3, 4, 3], 5, 7)


class Batch:
    """Prompts of these lengths with random states, and a cache full of NaN."""

    def __init__(self, lengths: list[int], layer: LlamaLayer, spare: int = 0) -> None:
        spec = layer.spec
        self.lengths, self.columns, self.dtype = lengths, max(lengths), layer.dtype
        self.pads = torch.tensor([self.columns - n for n in lengths])
        self.prompts = PackedPrompts((torch.arange(self.columns) - self.pads[:, None]).clamp(min=-1), self.pads)
        self.h = torch.randn(sum(lengths), spec.width).to(layer.dtype)
        shape = (len(lengths), spec.groups, self.columns + spare, spec.dim)
        self.k, self.v = (torch.full(shape, torch.nan, dtype=layer.dtype) for _ in "kv")

    def span(self, row: int) -> slice:
        return slice(int(self.prompts.starts[row]), int(self.prompts.starts[row + 1]))

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        for row in range(len(self.lengths)):
            yield row, self.h[self.span(row)].float()

    def cached(self, row: int) -> tuple[Tensor, Tensor]:
        """A prompt's keys and values [T, G, K]."""
        own = slice(int(self.pads[row]), self.columns)
        return self.k[row, :, own].transpose(0, 1), self.v[row, :, own].transpose(0, 1)


def check_prompts(layer: LlamaLayer, lengths: list[int], threads: int, *, runs_ffn: bool = True) -> None:
    batch, kernel = Batch(lengths, layer, spare=2), layer.kernel()
    alone = Batch([lengths[-1]], layer)
    with num_threads(threads):
        made = kernel.run_prompts(batch.h.clone(), batch.prompts, (batch.k, batch.v), runs_ffn=runs_ffn)
        alone.h = batch.h[batch.span(len(lengths) - 1)].clone()
        made_alone = kernel.run_prompts(alone.h.clone(), alone.prompts, (alone.k, alone.v), runs_ffn=runs_ffn)
        own = [x[-1, :, batch.pads[-1] : batch.columns].clone() for x in (batch.k, batch.v)]
        last = read_last(kernel, batch.h.clone(), batch.prompts, (batch.k, batch.v), runs_ffn=runs_ffn)
    assert torch.equal(made_alone, made[batch.span(len(lengths) - 1)])
    assert torch.equal(torch.stack(own), torch.stack([alone.k[0], alone.v[0]]))
    for row, h in batch.rows():
        wanted, k, v = layer.read(h, runs_ffn=runs_ffn)
        assert_close(made[batch.span(row)], wanted, layer.dtype)
        assert_close(last[row, 0], wanted[-1], layer.dtype)
        for held, exact in zip(batch.cached(row), (k, v), strict=True):
            assert_close(held, exact, layer.dtype)


@settings(max_examples=examples(30))
@given(
    spec=specs(),
    lengths=st.lists(st.integers(1, POSITIONS + 20), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    runs_ffn=st.booleans(),
    threads=st.integers(1, 3),
)
def test_prompts_are_the_layer(
    precise_kind: Kind, spec: Spec, lengths: list[int], seed: int, runs_ffn: bool, threads: int
) -> None:
    """Also their last tokens alone. A prompt's bits are those it has alone."""
    torch.manual_seed(seed)
    check_prompts(LlamaLayer(spec, *precise_kind), lengths, threads, runs_ffn=runs_ffn)


@pytest.mark.parametrize("spec", REAL, ids=str)
def test_prompts_of_real_shapes(precise_kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    check_prompts(LlamaLayer(spec, *precise_kind), [40, 3, 65], 2)


def test_many_tokens_each_thread_some(precise_kind: Kind) -> None:
    """More tokens per thread than threads share; heads that share keys are one piece of work."""
    torch.manual_seed(0)
    layer = LlamaLayer(Spec(64, 6, 2, 32, 96, 32, has_head_norms=True), *precise_kind)
    lengths = [301, 1, 290, 33, 130]
    batch, kernel = Batch(lengths, layer), layer.kernel()
    made = []
    for threads in (1, 2, 5, 16):
        with num_threads(threads):
            made.append(kernel.run_prompts(batch.h.clone(), batch.prompts, (batch.k, batch.v), runs_ffn=True))
    assert all(torch.equal(made[0], other) for other in made[1:])
    for row, h in batch.rows():
        assert_close(made[0][batch.span(row)], layer.read(h)[0], layer.dtype)


@pytest.mark.parametrize("spec", REAL[:3], ids=str)
def test_a_prompt_and_steps_are_one_pass(precise_kind: Kind, spec: Spec) -> None:
    torch.manual_seed(0)
    layer = LlamaLayer(spec, *precise_kind)
    lengths, num_steps = [9, 30, 1], 5
    batch, kernel = Batch(lengths, layer, num_steps), layer.kernel()
    new = torch.randn(num_steps, 3, 1, spec.width).to(layer.dtype)
    read = kernel.run_prompts(batch.h.clone(), batch.prompts, (batch.k, batch.v), runs_ffn=True)
    made = [[read[batch.span(row)]] for row in range(3)]
    for step in range(num_steps):
        last = torch.full((3,), batch.columns + step)
        out = step_one(kernel, new[step].clone(), KVRange(batch.k, batch.v, batch.prompts.columns, last), runs_ffn=True)
        for row in range(3):
            made[row].append(out[row])
    for row, h in batch.rows():
        wanted, _, _ = layer.read(torch.cat([h, new[:, row, 0].float()]))
        assert_close(torch.cat(made[row]), wanted, layer.dtype)


@pytest.mark.parametrize("has_head_norms", [False, True])
def test_keys_of_several_layers_in_one_call(precise_kind: Kind, has_head_norms: bool) -> None:
    """As SwiftKV has them: norm, product, norm of heads and rotation of each, and only where it is asked for."""
    torch.manual_seed(0)
    dtype, quantization = precise_kind
    spec = Spec(96, 6, 2, 32, 64, 32, has_bias=True, has_head_norms=has_head_norms)
    layers = [LlamaLayer(spec, dtype, quantization) for _ in range(3)]
    for layer in layers:
        layer.norms["attn"] = layers[0].norms["attn"]
    store = KVStoreKernel(
        spec.shape(),
        layers[0].module("attn"),
        [layer.product("qkv").tail(6 * 32) for layer in layers],
        [layer.module("k") for layer in layers] if has_head_norms else None,
    )
    batch = Batch([5, 70, 1], layers[0])
    memory = {at: (batch.k.clone(), batch.v.clone()) for at in (2, 0)}
    with num_threads(2):
        store(batch.h, batch.prompts, memory)
    for at, (batch.k, batch.v) in memory.items():
        for row, h in batch.rows():
            _, k, v = layers[at].read(h, attends=False, runs_ffn=False)
            for held, wanted in zip(batch.cached(row), (k, v), strict=True):
                assert_close(held, wanted, dtype)
            assert batch.k[row, :, : batch.pads[row]].isnan().all()
