"""Products with weights in blocks of 32 inputs: bit by bit those of `tests.support.block_products` on every back end,
and within a stated bound those of the dequantised weight. Whole generations, token by token."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.backends import cpu_kernels, cpu_weights
from skipdecode.backends.backend import Activation
from skipdecode.backends.block_quantization import (
    NUM_BYTES,
    BlockKind,
    BlockRows,
    StoredBlocks,
    dequantize,
    quantize,
)
from skipdecode.backends.cpu_backend import check_int4
from skipdecode.backends.torch_sampling import NO_TOKEN
from skipdecode.checkpoint import gguf_file
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import Linear
from skipdecode.model.teacher_forcing import teacher_batch, teacher_forced_logits
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode
from tests.support import gguf_models
from tests.support.block_products import BlockProduct, block_sums, fma, quantized_rows
from tests.support.cpu_backends import backend, is_close, num_threads, product_dtype
from tests.support.examples import examples
from tests.support.forward import feed, left_pad
from tests.support.ties import first_difference

__all__ = ["backend", "product_dtype"]  # fixtures

KINDS: list[BlockKind] = ["Q4_0", "Q4_1", "Q8_0"]


def random_blocks(kind: BlockKind, outputs: int, steps: int, seed: int) -> StoredBlocks:
    """Any bytes, with scales and minima of about 1."""
    draw = np.random.default_rng(seed)
    raw = draw.integers(0, 256, (outputs, steps, NUM_BYTES[kind]), dtype=np.uint8)
    halves = 4 if kind == "Q4_1" else 2
    raw[..., :halves] = draw.normal(size=(outputs, steps, halves // 2)).astype(np.float16).view(np.uint8)
    if kind == "Q8_0":
        raw[..., 2:][raw[..., 2:] == 128] = 127  # -128, which no file has
    return StoredBlocks(kind, [BlockRows(torch.from_numpy(raw))])


@given(seed=st.integers(0, 2**31))
def test_the_reference_rounds_once(seed: int) -> None:
    """Against sums in the extended precision of x86, which two roundings spoil only where they meet a tie of theirs."""
    draw = np.random.default_rng(seed)
    x, y, z = (draw.normal(size=4096).astype(np.float32) * 2.0 ** draw.integers(-20, 20, 4096) for _ in range(3))
    x, y, z = (one.astype(np.float32) for one in (x, y, z))
    exact = (x.astype(np.longdouble) * y + z).astype(np.float32)
    made = fma(*map(torch.from_numpy, (x, y, z))).numpy()
    assert (made == exact).mean() > 0.999
    assert np.abs(made - exact).max() <= np.abs(np.spacing(exact)).max()


@settings(max_examples=examples(100))
@given(
    rows=st.integers(0, 70),
    steps=st.integers(1, 40),
    outputs=st.integers(1, 110),
    seed=st.integers(0, 2**31),
    stored=st.sampled_from(KINDS),
    then=st.sampled_from(["nothing", "relu", "residual"]),
    has_bias=st.booleans(),
    is_strided=st.booleans(),
    outlier=st.sampled_from([1.0, 100.0]),
    threads=st.integers(1, 3),
)
def test_products_are_those_of_the_reference_and_near_the_dequantised_weight(
    product_dtype: torch.dtype,
    rows: int,
    steps: int,
    outputs: int,
    seed: int,
    stored: BlockKind,
    then: str,
    has_bias: bool,
    is_strided: bool,
    outlier: float,
    threads: int,
) -> None:
    dtype, rng = product_dtype, torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 32 * steps, generator=rng).to(dtype)
    x[:, :1] *= outlier
    blocks = random_blocks(stored, outputs, steps, seed)
    bias = torch.randn(outputs, generator=rng).to(dtype) if has_bias else None
    residual = torch.randn(rows, outputs, generator=rng).to(dtype) if then == "residual" else None
    activation: Activation = "relu" if then == "relu" else "none"
    wanted = BlockProduct(blocks)(x, bias, activation=activation, residual=residual)
    if is_strided:
        x = torch.stack([x + 1, x], dim=1)[:, -1]
    packed = cpu_weights.pack_blocks(blocks, dtype)
    with num_threads(threads):
        plain = cpu_kernels.linear(x, packed, outputs, None)
        made = cpu_kernels.linear(x, packed, outputs, bias, activation=activation, residual=residual)
    assert made.shape == (rows, outputs)
    assert torch.equal(plain, block_sums(x, blocks).to(dtype))
    assert is_close(made, wanted)  # a bias and a residual are added in any order
    # half a step of each input, 1/127 of the largest of its 32; float32 sums of `steps` blocks; the result's rounding
    weight = dequantize(blocks).double()
    exact = F.linear(x.double(), weight, None if bias is None else bias.double())
    exact = exact.relu() if then == "relu" else exact if residual is None else exact + residual.double()
    _, scales = quantized_rows(x)
    half_steps = scales.double().repeat_interleave(32, dim=1) / 2
    largest = weight.abs().view(outputs, -1, 32).amax(dim=2)
    sizes = x.double().abs() @ weight.abs().T + (32 * 127 * scales.double()) @ largest.T
    limit = 1.001 * half_steps @ weight.abs().T + 2**-23 * (steps + 2) * sizes + exact.abs() / 256 + 1e-5
    assert torch.all((made.double() - exact).abs() <= limit)
    if residual is None:
        for row in range(min(rows, 2)):
            alone = cpu_kernels.linear(x[row : row + 1], packed, outputs, bias, activation=activation)
            assert torch.equal(alone[0], made[row])


@pytest.mark.parametrize("stored", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(600, 96), (300, 3072), (40, 20000)])
def test_many_rows_and_inputs_go_through_in_parts(
    product_dtype: torch.dtype, rows: int, inputs: int, threads: int, stored: BlockKind
) -> None:
    torch.manual_seed(0)
    x = torch.randn(rows, inputs).to(product_dtype)
    blocks = random_blocks(stored, 70, inputs // 32, 0)
    packed = cpu_weights.pack_blocks(blocks, product_dtype)
    with num_threads(threads):
        made = cpu_kernels.linear(x, packed, 70, None)
    for row in (0, 6, 15, 16, rows - 1):
        assert torch.equal(block_sums(x[row : row + 1], blocks)[0].to(product_dtype), made[row])
        assert torch.equal(cpu_kernels.linear(x[row : row + 1], packed, 70, None)[0], made[row])


@pytest.mark.parametrize("stored", KINDS)
def test_zeros_and_what_is_not_a_number(product_dtype: torch.dtype, stored: BlockKind) -> None:
    packed = cpu_weights.pack_blocks(random_blocks(stored, 3, 3, 0), product_dtype)
    x = torch.ones(9, 96).to(product_dtype)
    x[1], x[2], x[3, 5], x[4, 70] = 0, 1e-40, torch.nan, torch.inf
    made = cpu_kernels.linear(x, packed, 3, None)
    assert made[1:3].tolist() == [[0.0] * 3] * 2
    assert made[3:5].isnan().all()
    assert made[5:].isfinite().all()
    chosen = cpu_kernels.argmax_linear(x, packed, 3).tolist()
    assert chosen == [made[0].argmax(), 0, 0, NO_TOKEN, NO_TOKEN, *[made[0].argmax()] * 4]


def test_every_byte_of_a_block_at_its_limit(product_dtype: torch.dtype) -> None:
    """The largest sums that 16 bits have to hold on some back ends."""
    for sign in (1, -1):
        x = sign * torch.ones(7, 64).to(product_dtype)
        for stored, low in (("Q4_0", 0x00), ("Q4_0", 0xFF), ("Q4_1", 0xFF), ("Q8_0", 0x81), ("Q8_0", 0x7F)):
            blocks = random_blocks(stored, 3, 2, 0)
            blocks.parts[0].raw[..., -(32 if stored == "Q8_0" else 16) :] = low
            made = cpu_kernels.linear(x, cpu_weights.pack_blocks(blocks, product_dtype), 3, None)
            assert torch.equal(made, block_sums(x, blocks).to(product_dtype))


def test_a_wrong_operand_is_refused(product_dtype: torch.dtype) -> None:
    packed = cpu_weights.pack_int4(torch.ones(3, 96).to(product_dtype))
    for wrong in (
        torch.ones(2, 96).double(),
        torch.ones(2, 128).to(product_dtype),
        torch.ones(2, 32).to(product_dtype),
    ):
        with pytest.raises(AssertionError):
            cpu_kernels.linear(wrong, packed, 3, None)
    with pytest.raises(AssertionError):
        cpu_kernels.linear(torch.ones(2, 96).to(product_dtype), packed, 33, None)
    with pytest.raises(ValueError, match="gates in a multiple of 16, and these are 20"):
        check_int4(torch.ones(40, 64).to(product_dtype), is_gated=True)
    with pytest.raises(ValueError, match="inputs in a multiple of 32; 48 is no"):
        check_int4(torch.ones(40, 48).to(product_dtype))
    with pytest.raises(ValueError, match="no int4 weights in float16"):
        check_int4(torch.ones(40, 64).half())


# How weights are quantised


def test_quantised_weights_are_nearer_than_those_of_ggml() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 2048)
    weight[3] = 0
    weight[5, 7] = 1e-7
    errors = {}
    for kind in ("Q4_0", "Q8_0"):
        ggml = GGMLQuantizationType[kind]
        theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), ggml), ggml))
        ours = dequantize(quantize(weight, kind))  # type: ignore[arg-type]
        assert not ours[3].any()
        errors[kind] = [float((made - weight).square().mean()) for made in (ours, theirs)]
    assert errors["Q4_0"][0] < 0.92 * errors["Q4_0"][1]
    assert errors["Q8_0"][0] == pytest.approx(errors["Q8_0"][1], rel=0.02)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e9])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_weights_that_no_block_holds_are_refused(kind: BlockKind, value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 40] = value
    with pytest.raises(ValueError, match="NaN, infinity, or a number too large"):
        quantize(weight, kind)  # type: ignore[arg-type]


# Whole models


def by_reference(model: Decoder) -> Decoder:
    """Every product as a `BlockProduct`; layers run in parts."""
    for linear in linears_of(model):
        linear.packed = BlockProduct(linear.blocks or quantize(linear.weight, "Q4_0"))
    model.packed_head = BlockProduct(model.head_blocks or quantize(model.head_weight, "Q8_0"))
    return model


def linears_of(model: Decoder) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


@torch.inference_mode()
@pytest.mark.parametrize("schedule", [FullDepth(24), SkipDecode(24, 18, 6, 1, 39)], ids=["full", "skipdecode"])
def test_generations_are_those_of_the_reference(backend: str, schedule: Schedule) -> None:
    """Token for token, of a model that has learned something, but for a tie.

    Norms and attention differ in the last bit, for which an input is rounded to another of 255 numbers now and then.
    """
    folder = "models/opt-e2e"
    model, reference = load_model(folder).pack("int4"), by_reference(load_model(folder))
    encoded = Tokenizer(folder, model.config).encode([row["prompt"] for row in make_prompts(12)])
    requests = [Request(str(i), tokens, Sampling(max_new_tokens=24)) for i, tokens in enumerate(encoded)]
    made, wanted = (generate(one, requests, schedule).completions for one in (model, reference))
    differ = [number for number in range(12) if made[number].tokens != wanted[number].tokens]
    assert len(differ) <= 2
    for ours, theirs, prompt in [(made[number].tokens, wanted[number].tokens, encoded[number]) for number in differ]:
        at = first_difference(ours, theirs)
        assert at is not None
        best = teacher_forced_logits(reference, teacher_batch([(prompt, theirs)], 1), schedule)[0, at].topk(2)
        assert set(best.indices.tolist()) == {ours[at], theirs[at]}
        assert best.values[0] - best.values[1] < 0.05  # of 17
    assert len({tuple(one.tokens) for one in made}) > 6


@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("arch", "is_tied"), [("llama", True), ("llama", False), ("qwen3", False), ("gemma3", True)])
def test_a_file_keeps_its_blocks(backend: str, tmp_path: Path, arch: str, is_tied: bool, kind: BlockKind) -> None:
    """Of fused products, permuted heads, gates and the head: each weight is that of the file, each product has the bits
    of the reference, and together they give its logits."""
    theirs = gguf_models.random_model(arch, tie_word_embeddings=is_tied)
    path = gguf_models.write_model(tmp_path / "model.gguf", theirs, kind)
    plain, kept = load_model(path), load_model(path, quantization="int4")
    wanted = by_reference(load_model(path, quantization="int4"))
    blocks = [kept.head_blocks, *(linear.blocks for linear in linears_of(kept))]
    for own, values in zip(blocks, [plain.head_weight, *(one.weight for one in linears_of(plain))], strict=True):
        assert own is not None
        assert torch.equal(dequantize(own), values)
    assert all(linear.weight.is_meta for linear in linears_of(kept))

    kept.pack("int4")
    assert all(linear.blocks is None for linear in linears_of(kept))
    made = [(kept.packed_head, blocks[0], False)]
    made += [(one.packed, own, one.is_gated) for one, own in zip(linears_of(kept), blocks[1:], strict=True)]
    for packed, own, is_gated in made:
        assert packed is not None
        assert own is not None
        x = torch.randn(9, own.shape[1], generator=torch.Generator().manual_seed(0))
        sums = block_sums(x, own).T
        product = packed(x, None)
        assert torch.equal(product, (cpu_weights.interleave(sums) if is_gated else sums).T)

    tokens, _, num_pad = left_pad([[2, *range(5, 5 + n)] for n in (3, 19, 1, 14, 40, 7, 8, 9)])
    plan = FullDepth(len(kept.layers)).full_plan
    logits, reference = (feed(model, tokens, num_pad, plan)[0] for model in (kept, wanted))
    # Norms, attention and activations differ in last bits, which decide how some inputs are rounded. The reference
    # moves as far, by up to 1.2 % of the largest logit, where its inputs are changed by 1e-7 of themselves.
    assert (logits - reference).abs().max() <= 0.03 * reference.abs().max()


@torch.inference_mode()
def test_other_types_of_a_file_are_quantised_again(tmp_path: Path) -> None:
    theirs = gguf_models.random_model("llama")
    kept = load_model(gguf_models.write_model(tmp_path / "model.gguf", theirs, "Q6_K"), quantization="int4")
    assert kept.head_blocks is None
    assert not any(module.blocks for module in kept.modules() if isinstance(module, Linear))


@torch.inference_mode()
def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    path = gguf_models.write_model(tmp_path / "model.gguf", gguf_models.random_model("llama"), "Q4_0")
    info = next(info for _, info in gguf_file.weights(path) if info.name == "blk.1.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(info.start + 18 * 37)
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(ValueError, match=r"model\.gguf: tensor 'blk\.1\.ffn_down\.weight' holds NaN or infinity"):
        load_model(path, quantization="int4").pack("int4")
