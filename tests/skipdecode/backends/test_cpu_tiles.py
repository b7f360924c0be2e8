"""int8 products against exact sums, and the whole decoder against its parts one by one, on every back end."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.measuring.bench import random_model
from skipdecode.backends import cpu_kernels as cpu
from skipdecode.backends import cpu_weights
from skipdecode.config.model import DecoderConfig, Quantization
from skipdecode.config.sampling import Sampling
from skipdecode.engine import continuous_batch as continuous
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.families.qwen import Qwen3Config
from skipdecode.kv.static_cache import KVCache
from skipdecode.model import sampler
from skipdecode.model.decoder import Decoder
from skipdecode.model.linear import Linear
from skipdecode.schedules.from_config import make_schedule
from skipdecode.schedules.plan import FullDepth, Schedule, SkipDecode, SwiftPrefill, kv_sharing_map
from tests.support.cpu_backends import int8_backend, kind, num_threads

__all__ = ["int8_backend", "kind"]  # fixtures

Kind = tuple[torch.dtype, Quantization | None]


def whole(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest whole numbers and their scales [out, 1], in float64; in between, float32 decides."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight.float() / scales.clamp(min=1e-30)).round().double()
    assert torch.all((numbers * scales - weight).abs() <= 0.50001 * scales)
    return numbers, scales.double()


@given(
    rows=st.integers(0, 140),
    steps=st.integers(1, 9),
    outputs=st.integers(1, 110),
    seed=st.integers(0, 2**31),
    then=st.sampled_from(["nothing", "relu", "residual"]),
    has_bias=st.booleans(),
    is_strided=st.booleans(),
    outlier=st.sampled_from([1.0, 100.0]),
    threads=st.integers(1, 3),
)
def test_int8_products_are_those_of_the_whole_numbers(
    int8_backend: str,
    rows: int,
    steps: int,
    outputs: int,
    seed: int,
    then: str,
    has_bias: bool,
    is_strided: bool,
    outlier: float,
    threads: int,
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, 32 * steps, generator=rng).bfloat16() for n in (rows, outputs))
    x[:, :1] *= outlier
    bias = torch.randn(outputs, generator=rng).bfloat16() if has_bias else None
    residual = torch.randn(rows, outputs, generator=rng).bfloat16() if then == "residual" else None
    numbers, scales = whole(weight)
    wanted = x.double() @ (numbers * scales).T + (0 if bias is None else bias.double())
    wanted = wanted.relu() if then == "relu" else wanted if residual is None else wanted + residual.double()
    # half a step of a row's 16 bits in each input, half a unit in the last place of bfloat16
    steps_of_rows = x.double().abs().amax(dim=1, keepdim=True) / 32767 / 2 if rows else 0.0
    limit = steps_of_rows * (numbers.abs() * scales).sum(dim=1) + wanted.abs() / 256 + 1e-5
    if is_strided:
        x = torch.stack([x + 1, x], dim=1)[:, -1]
    packed = cpu_weights.pack_int8(weight)
    activation: cpu.Activation = "relu" if then == "relu" else "none"
    with num_threads(threads):
        made = cpu.linear(x, packed, outputs, bias, activation=activation, residual=residual)
    assert made.shape == (rows, outputs)
    assert torch.all((made.double() - wanted).abs() <= limit)
    if residual is None:
        for row in range(min(rows, 2)):
            assert torch.equal(cpu.linear(x[row : row + 1], packed, outputs, bias, activation=activation)[0], made[row])


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(1100, 3072), (600, 96), (70, 20000), (40, 32 * 2048)])
def test_many_rows_and_inputs_go_through_in_parts(int8_backend: str, rows: int, inputs: int, threads: int) -> None:
    """More than stays in the caches at once, and the most inputs there may be; a row's bits are those it has alone."""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((rows, inputs), (70, inputs), (70,)))
    numbers, scales = whole(weight)
    packed = cpu_weights.pack_int8(weight)
    with num_threads(threads):
        made = cpu.linear(x, packed, 70, bias)
    wanted = x.double() @ (numbers * scales).T + bias.double()
    assert (made.double() - wanted).abs().max() <= wanted.abs().max() / 256
    for row in (0, 15, 16, rows - 1):
        assert torch.equal(cpu.linear(x[row : row + 1], packed, 70, bias)[0], made[row])


def test_sums_of_the_largest_numbers_fit(int8_backend: str) -> None:
    """The most inputs, every byte at its limit."""
    x, weight = torch.ones(2, 1 << 16).bfloat16(), torch.ones(3, 1 << 16).bfloat16()
    x[1] = -1
    made = cpu.linear(x, cpu_weights.pack_int8(weight), 3, None)
    assert made.tolist() == [[65536.0] * 3, [-65536.0] * 3]
    with pytest.raises(AssertionError, match="32 bits"):
        cpu_weights.pack_int8(torch.ones(1, (1 << 16) + 32))


def test_zeros_and_what_is_not_a_number(int8_backend: str) -> None:
    weight = torch.ones(3, 96).bfloat16()
    weight[1] = 0
    packed = cpu_weights.pack_int8(weight)
    x = torch.ones(5, 96).bfloat16()
    x[1], x[2], x[3, 5], x[4, 7] = 0, 1e-40, torch.nan, torch.inf
    made = cpu.linear(x, packed, 3, None)
    assert made[0].tolist() == [96.0, 0.0, 96.0]
    assert made[1:3].tolist() == [[0.0] * 3] * 2
    assert made[3:].isnan().all()


def test_a_wrong_operand_is_refused(int8_backend: str) -> None:
    packed = cpu_weights.pack_int8(torch.ones(3, 96))
    for wrong in (torch.ones(2, 96), torch.ones(2, 128).bfloat16(), torch.ones(2, 32).bfloat16()):
        with pytest.raises(AssertionError):
            cpu.linear(wrong, packed, 3, None)
    with pytest.raises(AssertionError):
        cpu.linear(torch.ones(2, 96).bfloat16(), packed, 33, None)


def test_int8_weights_where_they_cannot_be() -> None:
    config = OPTConfig(vocab_size=64, hidden_size=48, num_hidden_layers=1, ffn_dim=64, num_attention_heads=2)
    model = random_model(config, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"quantization: int8 weights are for bfloat16.*float32 on cpu"):
        model.pack("int8")
    with pytest.raises(
        ValueError, match=r"quantization: (int8 weights need inputs in a multiple of 32|no int8 weights here)"
    ):
        model.bfloat16().pack("int8")
    assert not model.is_packed


# The whole decoder. Its tokens are chosen by place, so that both sides go the same way whatever the last bits are.

CONFIG = OPTConfig(vocab_size=96, hidden_size=64, num_hidden_layers=6, ffn_dim=160, num_attention_heads=2)

LLAMA = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 6, "intermediate_size": 160}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
CONFIGS: dict[str, DecoderConfig] = {
    "opt": CONFIG,
    "llama": LlamaConfig(**LLAMA),
    "qwen3": Qwen3Config(**LLAMA | {"head_dim": 64}),  # its heads together are wider than the model
}


@dataclass
class Run:
    name: str
    schedule: Schedule
    is_continuous: bool = False


def by_rows() -> Schedule:
    skip = {"mode": "row", "threshold": 0.9, "cold_start": 1, "cold_end": 1, "warmup_tokens": 2}
    return make_schedule({"method": "full", "ffn_skip": skip}, num_layers=6, max_new_tokens=12)


RUNS = [
    Run("full", FullDepth(6)),
    Run("skipdecode", SkipDecode(6, 5, 2, 1, 11)),
    Run("continuous", SkipDecode(6, 5, 2, 1, 11), is_continuous=True),
    Run("swiftkv", SwiftPrefill(SkipDecode(6, 5, 3, 1, 11), 2)),
    Run("by row", by_rows()),
]


def logits_of(model: Decoder, run: Run, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Of every forward call, in order."""
    seen: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        seen.append(logits.float().clone())
        return 4 + (torch.arange(len(logits)) + 7 * len(seen)) % 80

    for module in (sampler, continuous):
        monkeypatch.setattr(module, "argmax", choose)
    requests = [
        Request(
            str(i), [2, *range(5, 5 + n)], Sampling(max_new_tokens=4 + 4 * (i % 3), ignore_eos=True), top_logprobs=0
        )
        for i, n in enumerate((3, 19, 1, 14, 6, 2, 33, 8, 40, 5))
    ]
    if run.is_continuous:
        generate_continuous(model, requests, run.schedule, max_rows=4)
    else:
        generate(model, requests, run.schedule)
    return seen


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_layers_in_one_call_are_the_decoder_of_parts(
    kind: Kind, run: Run, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same weights in float32, plain: as near as layers made of their parts in that type are."""
    dtype, quantization = kind
    model = random_model(CONFIGS[family], device="cpu", dtype=torch.float32)
    if isinstance(run.schedule, SwiftPrefill):
        model = model.with_swiftkv(2, 2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim == 1 else 0.1)
    model = model.to(dtype)
    exact = copy.deepcopy(model).float()
    if quantization:
        for module in exact.modules():  # the embedding as well, for the head; what it embeds stays
            if isinstance(module, Linear):
                numbers, scales = whole(module.weight)
                module.weight.copy_(numbers * scales)
        if exact.swift is not None:
            numbers, scales = whole(exact.swift.kv.weight)
            exact.swift.kv.weight.copy_(numbers * scales)
        numbers, scales = whole(exact.embed_tokens.weight if exact.lm_head is None else exact.lm_head.weight)
        head = (numbers * scales).float()
        monkeypatch.setattr(exact, "head", lambda h: exact.final_norm(h) @ head.T)  # type: ignore[misc]
    model.pack(quantization)
    fused = logits_of(model, run, monkeypatch)
    assert all(block.kernel is not None for block in model.layers)
    for block in model.layers:
        block.kernel = block.query_kernel = None
    parts = logits_of(model, run, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "is_available", lambda _: False)
        wanted = logits_of(exact, run, patch)
    assert len(fused) == len(parts) == len(wanted) > 8
    top = max(float(logits.abs().max()) for logits in wanted)
    for ours, apart, true in zip(fused, parts, wanted, strict=True):
        assert ours.shape == apart.shape == true.shape
        limit = (0.02 if dtype == torch.bfloat16 else 1e-4) * top
        assert (apart - true).abs().max() <= limit
        assert (ours - true).abs().max() <= limit


@pytest.mark.parametrize("is_continuous", [False, True])
def test_tokens_without_logits_are_those_with(kind: Kind, is_continuous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits for nobody, for all, and for some, who are gone before the others."""
    dtype, quantization = kind
    model = random_model(CONFIG, device="cpu", dtype=dtype).pack(quantization)
    made = []
    for asking in ([], range(5), [0, 3]):
        requests = [
            Request(str(i), [2, *range(5, 5 + n)], Sampling(max_new_tokens=5 + 5 * (i % 3), ignore_eos=True),
                    top_logprobs=0 if i in asking else None)
            for i, n in enumerate((3, 19, 1, 14, 40))
        ]  # fmt: skip
        with monkeypatch.context() as patch:
            if not asking:
                patch.setattr(model, "head", lambda h: 1 / 0)
            if is_continuous:
                rows, _ = generate_continuous(model, requests, FullDepth(6), max_rows=3)
                made.append([row.tokens for row in rows])
            else:
                made.append([c.tokens for c in generate(model, requests, FullDepth(6)).completions])
    assert made[0] == made[1] == made[2]
    assert len({tuple(tokens) for tokens in made[0]}) > 1


@pytest.mark.parametrize(
    ("kv_layers", "group_size", "lengths"), [(0, 1, (3, 9)), (5, 1, (8, 2)), (2, 2, (1, 1)), (3, 3, (30, 600))]
)
def test_swiftkv_prompts_of_any_shape(kind: Kind, kv_layers: int, group_size: int, lengths: tuple[int, ...]) -> None:
    """Prompts and one step against the parts: layers as calls of their own."""
    dtype, quantization = kind
    torch.manual_seed(0)
    model = random_model(CONFIG, device="cpu", dtype=torch.float32).with_swiftkv(kv_layers, group_size)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3 if parameter.ndim == 1 else 0.1)
    model = model.to(dtype).pack(quantization)
    columns, num_pad = max(lengths), torch.tensor([max(lengths) - n for n in lengths])
    tokens, positions = torch.randint(4, 90, (2, columns)), (torch.arange(columns) - num_pad[:, None]).clamp(min=-1)
    plan = SwiftPrefill(FullDepth(6), kv_layers).prefill()
    sharing_map = kv_sharing_map(SwiftPrefill(FullDepth(6), kv_layers), group_size)
    seen = []
    for is_fused in (True, False):
        for block in model.layers:
            if not is_fused:
                block.kernel = block.query_kernel = None
        cache = KVCache.allocate(
            CONFIG, num_pad=num_pad, capacities=[columns + 1] * 6, sharing_map=sharing_map, dtype=dtype
        )
        with torch.inference_mode():
            first = model(tokens, positions, cache, plan)
            seen.append((first, model(tokens[:, :1], positions[:, -1:] + 1, cache, plan)))
    for ours, parts in zip(*seen, strict=True):
        assert (ours.float() - parts.float()).abs().max() <= 0.02 * float(parts.float().abs().max())
