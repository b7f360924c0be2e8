"""Keys and values, and products, in FP8: by torch's operators, against decoders that round the same numbers.

A cache in FP8 gives exactly the tokens of the same model whose keys and values are rounded where they are made, each
divided by the scale of its head before and multiplied by it after. Triton's kernels are held against this path in
`tests/support/triton_interpreted.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import OPTForCausalLM

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.cpu_backend import CPU
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.cuda_fp8 import Fp8Product, Fp8Weight, scaled_product
from skipdecode.backends.fp8 import FP8, FP8_MAX, narrowed, rows_in_fp8
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.model import Quantization
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import CudaGraphs
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.prefix_sharing import share_prefixes
from skipdecode.engine.request import Request
from skipdecode.kv.view import KVView
from skipdecode.model.decoder import Decoder
from skipdecode.model.layer import Layer
from skipdecode.schedules.schedule import FullDepth, SkipDecode, SwiftKVPrefill
from tests.support.cuda_models import SHAPES, CheckedKernels, cpu_computed_by, random_model, some_requests
from tests.support.examples import examples
from tests.support.forward import feed, left_pad
from tests.support.naive import NaiveRow, naive_decode, random_prompts, requests_for, tokens_of

KERNELS = CudaBackend(CheckedKernels())
PRE_NORM = [name for name in SHAPES if name != "opt, norms behind"]


def scales_of(plain: Tensor, scaled: Tensor, heads: int) -> Tensor:
    """[heads] what the outputs of a projection were divided by, which is a power of two of each head."""
    ratios = (plain / scaled).view(heads, -1)
    assert torch.equal(ratios, ratios[:, :1].expand_as(ratios))
    assert torch.equal(ratios.log2(), ratios.log2().round())
    return ratios[:, 0]


def rounded(x: Tensor, scales: Tensor) -> Tensor:
    """[B, G, T, K] as a cache in FP8 gives them back."""
    scales = scales[:, None, None]
    return narrowed(x / scales, FP8).float() * scales


class Rounding:
    """Layers whose keys and values are rounded where they are made: a model as it is, beside one with a cache in
    FP8."""

    def __init__(self, plain: Decoder, scaled: Decoder) -> None:
        self.scales = {}
        for own, other in zip(plain.layers, scaled.layers, strict=True):
            c = own.config
            keys, values = (
                scales_of(a, b, c.num_kv_heads)
                for a, b in zip(own.qkv.weight[c.q_dim :].chunk(2), other.qkv.weight[c.q_dim :].chunk(2), strict=True)
            )
            if own.k_norm is not None and other.k_norm is not None:
                keys = scales_of(own.k_norm.weight, other.k_norm.weight, 1).expand(c.num_kv_heads)
            self.scales[id(own)] = keys, values
        self.project = Layer._project

    def __call__(self, layer: Layer, h: Tensor, kv: KVView, number: int) -> tuple[Tensor, ...]:
        q, k, v = self.project(layer, h, kv, number)
        keys, values = self.scales[id(layer)]
        return q, rounded(k, keys), rounded(v, values)


@pytest.mark.parametrize("name", PRE_NORM)
def test_tokens_are_those_of_the_model_whose_keys_and_values_are_rounded(name: str) -> None:
    """By torch's operators to the last bit of each logit, and by the paths of the CUDA back end in tokens."""
    requests, schedule = some_requests(8, temperature=2.0), SkipDecode(4, 4, 2, 1, 7)
    tokens, _, num_pad = left_pad([request.prompt_tokens for request in requests])
    with cpu_computed_by(TORCH):
        plain, scaled = random_model(name), random_model(name).pack(kv_cache_dtype="fp8")
        rounding = Rounding(plain, scaled)
        with patch.object(Layer, "_project", lambda *given: rounding(*given)):
            wanted = tokens_of(generate(plain, requests, schedule))
            logits, _ = feed(plain, tokens, num_pad, schedule.prefill())
        assert torch.equal(feed(scaled, tokens, num_pad, schedule.prefill())[0], logits)
        assert not torch.equal(feed(plain, tokens, num_pad, schedule.prefill())[0], logits), "nothing was rounded"
        assert tokens_of(generate(scaled, requests, schedule)) == wanted
    with cpu_computed_by(KERNELS):
        model = random_model(name).pack(kv_cache_dtype="fp8")
        assert tokens_of(generate(model, requests, schedule)) == wanted
        assert tokens_of(generate_continuous(model, requests, schedule, max_rows=3)) == wanted
        graphs = CudaGraphs(model, 1 << 20, max_rows=8)
        assert graphs.pool.memory.dtype == FP8
        assert tokens_of(generate(model, requests, schedule, graphs=graphs)) == wanted


class RoundedRow(NaiveRow):
    """The naive decoder, whose keys and values are divided by bounds that follow from its weights, and rounded."""

    def attend(self, i: int, x: Tensor) -> Tensor:
        made = super().attend(i, x)
        layer = self.decoder.layers[i]
        attn, norm = layer.self_attn, layer.self_attn_layer_norm
        for kept, projection in ((self.keys[i], attn.k_proj), (self.values[i], attn.v_proj)):
            weight = projection.weight
            most = (weight * norm.weight).norm(dim=1) * weight.shape[1] ** 0.5  # sqrt(D) is all that a norm leaves
            most = most + (weight @ norm.bias).abs() + projection.bias.abs()
            scales = torch.exp2((most.view(attn.num_heads, -1).amax(1) / FP8_MAX).log2().ceil())
            kept[-1] = rounded(kept[-1][:, None], scales)[:, 0]
        del made  # by numbers that were not rounded
        k, v = torch.stack(self.keys[i], 1), torch.stack(self.values[i], 1)  # [H, S, K]
        q = attn.q_proj(x).view(attn.num_heads, 1, attn.head_dim) / attn.head_dim**0.5
        return attn.out_proj(((q @ k.transpose(1, 2)).softmax(-1) @ v).reshape(-1))


def test_tokens_are_those_of_a_naive_decoder_that_rounds(
    checkpoint_factory: Callable[..., Path], hf: Callable[[Path], OPTForCausalLM]
) -> None:
    folder, prompts, schedule = checkpoint_factory("1.3b"), random_prompts([3, 11, 6]), SkipDecode(6, 6, 3, 1, 9)
    reference = hf(folder)
    with patch("tests.support.naive.NaiveRow", RoundedRow):
        wanted = [naive_decode(reference, prompt, schedule, 10) for prompt in prompts]
    for backend in (TORCH, KERNELS):
        with cpu_computed_by(backend):
            model = load_model(folder, dtype=torch.float32).pack(kv_cache_dtype="fp8")
            assert tokens_of(generate(model, requests_for(prompts, Sampling(10)), schedule)) == wanted


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_swiftkv(name: str, group_size: int) -> None:
    """Layers of a group share keys and values, and so their scales; the same weights serve prompts at full depth."""
    requests, made = some_requests(6, temperature=2.0), []
    for backend in (TORCH, KERNELS):
        with cpu_computed_by(backend):
            model = random_model(name).with_swiftkv(2, group_size).pack(kv_cache_dtype="fp8")
            schedules = SwiftKVPrefill(FullDepth(4), 2), FullDepth(4)
            made.append([tokens_of(generate(model, requests, schedule)) for schedule in schedules])
    assert made[0] == made[1]
    with cpu_computed_by(TORCH):  # without rounding, scales change nothing: powers of two round nothing
        scaled, plain = random_model(name).with_swiftkv(2, group_size), random_model(name).with_swiftkv(2, group_size)
        scaled.pack(kv_cache_dtype="fp8").has_fp8_cache = False
        for schedule in schedules:
            assert tokens_of(generate(scaled, requests, schedule)) == tokens_of(generate(plain, requests, schedule))


def test_prefixes_that_rows_share() -> None:
    heads = [[2, *range(20, 20 + n)] for n in (15, 23)]
    prompts = [[*heads[row % 2], *range(60, 62 + row)] for row in range(7)]
    requests, schedule = requests_for(prompts, Sampling(6, ignore_eos=True)), FullDepth(4)
    sharing = share_prefixes(prompts, [[len(heads[row % 2])] for row in range(7)])
    with cpu_computed_by(TORCH):
        wanted = tokens_of(generate(random_model("llama").pack(kv_cache_dtype="fp8"), requests, schedule))
    with cpu_computed_by(KERNELS):
        model = random_model("llama").pack(kv_cache_dtype="fp8")
        graphs = CudaGraphs(model, 1 << 20, max_rows=8)
        assert tokens_of(generate(model, requests, schedule, sharing=sharing)) == wanted
        assert tokens_of(generate(model, requests, schedule, sharing=sharing, graphs=graphs)) == wanted
        assert tokens_of(generate_continuous(model, requests, schedule, max_rows=3, sharing=sharing)) == wanted


@settings(max_examples=examples(25), deadline=None)
@given(
    name=st.sampled_from(PRE_NORM), seed=st.integers(0, 1000), size=st.sampled_from([1e-3, 1.0, 1e3]),
    is_sparse=st.booleans(),
)  # fmt: skip
def test_no_key_and_no_value_is_cut_off(name: str, seed: int, size: float, is_sparse: bool) -> None:
    """Whatever enters a layer, even a state of one number alone, what is stored is within FP8's range."""
    with cpu_computed_by(TORCH):
        model = random_model(name, layers=1, seed=seed)
        for weight in (model.layers[0].qkv.weight, model.layers[0].qkv.bias):
            if weight is not None:
                weight *= size
        model.pack(kv_cache_dtype="fp8")
        stored: list[Tensor] = []
        h = torch.randn(1, 12, model.config.hidden_size, generator=torch.Generator().manual_seed(seed))
        if is_sparse:
            h = torch.zeros_like(h).scatter(2, h.argmax(2, keepdim=True), 1e4)

        class Keeping:
            rotations = dict.fromkeys([0])

            def store(self, layer: int, k: Tensor, v: Tensor) -> None:
                stored.extend((k, v))

        model.layers[0].store(h, Keeping(), 0)  # type: ignore[arg-type]
    most = max(float(own.detach().abs().max()) for own in stored)
    assert 0 < most <= FP8_MAX * (1 + 1e-5)


def test_weights_that_others_share_stay() -> None:
    with cpu_computed_by(TORCH):
        first = random_model("llama")
        second = first.without_swiftkv()
        before = {name: weight.clone() for name, weight in first.state_dict().items()}
        second.pack(kv_cache_dtype="fp8")
        assert all(torch.equal(weight, before[name]) for name, weight in first.state_dict().items())
        once = {name: weight.clone() for name, weight in second.state_dict().items()}
        second.pack(kv_cache_dtype="fp8")  # again: nothing
        assert all(torch.equal(weight, once[name]) for name, weight in second.state_dict().items())


@pytest.mark.parametrize(
    ("backend", "name", "dtype", "problem"),
    [
        (CPU, "llama", torch.float32, r"kv_cache_dtype: no .*fp8 here: the kernels of CPUs have no such type; auto "),
        (TORCH, "opt, norms behind", torch.float32, r"no norm before attention \(do_layer_norm_before\)"),
        (TORCH, "llama", torch.float16, r"weights of float16; bfloat16 has room"),
    ],
)
def test_where_keys_and_values_cannot_be_in_fp8(backend: Backend, name: str, dtype: torch.dtype, problem: str) -> None:
    model = random_model(name, dtype=dtype)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    with cpu_computed_by(backend), pytest.raises(ValueError, match=problem):
        model.pack(kv_cache_dtype="fp8")
    assert all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())


# --- products


def test_numbers_of_rows_are_the_nearest() -> None:
    """Within half a step of FP8, 2^-4 of each, down to 2^-6 / 448 of the row's largest; below, within 2^-10 / 448."""
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, 64)[:, None]
    numbers, scales = rows_in_fp8(x)
    assert torch.equal(numbers.float().abs().amax(1), torch.full((64,), FP8_MAX))
    apart = (numbers.float() * scales - x).abs()
    assert (apart <= torch.maximum(x.abs() * 2**-4, scales * 2**-10) * (1 + 1e-5)).all()
    assert torch.equal(rows_in_fp8(torch.zeros(2, 16))[0].float(), torch.zeros(2, 16))


@pytest.mark.parametrize("outputs", [48, 41])
def test_products_are_those_of_the_rounded_numbers(outputs: int) -> None:
    """Against float64. Outputs that are no multiple of 16 are filled up, and cut off again."""
    rng = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((5, 64), (outputs, 64), (outputs,)))
    (own, scales), (others, of_outputs) = rows_in_fp8(x), rows_in_fp8(weight)
    wanted = (own.double() * scales) @ (others.double() * of_outputs).T
    packed = Fp8Weight.of(weight, TorchKernels())
    close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-5)
    close(packed(x, None).double(), wanted)
    close(packed(x, bias, activation="relu").double(), (wanted + bias).relu())
    close(packed.product(bias).tail(16)(x).double(), (wanted + bias)[:, 16:])
    assert torch.equal(packed.into(x, torch.empty(5, outputs)), packed(x, None))
    assert torch.equal(packed.argmax(x), packed(x, None).argmax(1))


def test_the_product_of_torch_is_the_reference() -> None:
    """`torch._scaled_mm` with scales by row, where this build has it for CPUs, gives what is computed in its place."""
    rng = torch.Generator().manual_seed(3)
    (x, x_scales), (weight, scales) = (rows_in_fp8(torch.randn(*shape, generator=rng)) for shape in ((7, 64), (48, 64)))
    try:
        made = torch._scaled_mm(x, weight.t(), scale_a=x_scales, scale_b=scales.t(), out_dtype=torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        pytest.skip(f"torch._scaled_mm does not run here: {error}".splitlines()[0])
    wanted = scaled_product(x, x_scales, weight, scales.t(), torch.bfloat16)
    torch.testing.assert_close(made.float(), wanted.float(), atol=2**-7, rtol=2**-7)


@pytest.mark.parametrize("name", ["llama", "opt", "gemma3"])
@pytest.mark.parametrize("quantization", ["fp8"])
def test_tokens_are_those_of_torchs_operators_on_the_same_numbers(name: str, quantization: Quantization) -> None:
    """Whole models whose layers are kernels, against their parts one by one: every product rounds alike."""
    requests, schedule = some_requests(6, temperature=2.0), SkipDecode(4, 4, 2, 1, 5)
    with cpu_computed_by(KERNELS):
        model = random_model(name).pack(quantization)
        assert all(isinstance(linear.packed, Fp8Weight) for layer in model.layers for linear in layer.linears)
        fused = tokens_of(generate(model, requests, schedule))
        graphs = CudaGraphs(model, 1 << 20, max_rows=8)
        assert tokens_of(generate(model, requests, schedule, graphs=graphs)) == fused
        for layer in model.layers:
            layer.kernel = None
        assert tokens_of(generate(model, requests, schedule)) == fused
        both = random_model(name).pack(quantization, "fp8")
        assert len(tokens_of(generate(both, requests, schedule))) == len(requests)
    assert model.weight_itemsize == both.kv_itemsize == 1
    assert model.kv_itemsize == 4


def test_where_weights_cannot_be_in_fp8() -> None:
    with pytest.raises(ValueError, match=r"quantization: fp8 weights are for bfloat16 on GPUs .* float32 on cpu"):
        random_model("llama").pack("fp8")
    odd = replace(random_model("llama").config, intermediate_size=24)
    with cpu_computed_by(KERNELS), pytest.raises(ValueError, match=r"inputs come in multiples of 16, and these are 24"):
        Decoder(odd).eval().requires_grad_(False).pack("fp8")
    with cpu_computed_by(KERNELS), pytest.raises(ValueError, match=r"int8 weights are for bfloat16 on CPUs"):
        random_model("llama").pack("int8")


def test_one_row_gives_tokens() -> None:
    """Products of a single row."""
    with cpu_computed_by(KERNELS):
        model = random_model("llama").pack("fp8", "fp8")
        (done,) = generate(model, [Request("a", [2], Sampling(1))], FullDepth(4)).completions
    assert len(done.tokens) == 1
    assert isinstance(model.layers[0].qkv.product(), Fp8Product)
