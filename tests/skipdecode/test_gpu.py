"""CUDA: the same tokens as on the CPU and as Hugging Face on CUDA. Skipped, with a reason, where there is none."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM

from actors.generator import Generator, GeneratorConfig
from skipdecode.cohort import Cohort
from skipdecode.ffn_skip import SkipAtRandom, SkipBand, SkipSaturated
from skipdecode.generate import Request, generate
from skipdecode.kv.padded import KVCache
from skipdecode.plan import EarlyExit, FullDepth, Schedule, SkipDecode, SwiftPrefill, Unified
from skipdecode.sampling import Sampling
from skipdecode.step_graphs import StepGraphs
from skipdecode.weights import load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]

STYLES = ["125m", "350m", "1.3b"]
SCHEDULES: list[Schedule] = [
    FullDepth(6),
    SkipDecode(6, 5, 2, 1, 9),
    EarlyExit(6, 6, 1, 1, 14),
    Unified(6, 3),
    SkipSaturated(FullDepth(6), 2, 1, 1, 0.85),
    SkipBand(SkipDecode(6, 5, 2, 1, 9), 1, (2, 3)),
    SkipAtRandom(FullDepth(6), 1, 0, 0, 0.5, 3),
]
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    """float32 means float32: TF32 would be another type."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def make_requests(num_new: int, **keys: float) -> list[Request]:
    rng = torch.Generator().manual_seed(3)
    lengths = [1, 9, 4, 16, 2, 9, 30, 7]
    prompts = [[2, *torch.randint(4, 320, (n - 1,), generator=rng).tolist()] for n in lengths]
    return [Request(f"row-{i}", p, Sampling(max_new_tokens=num_new, **keys)) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


def padded(requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    prompts = [r.prompt_tokens for r in requests]
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[1] * (width - len(p)) + p for p in prompts], device=DEVICE)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=DEVICE)
    return tokens, mask


@pytest.mark.parametrize("style", STYLES)
def test_full_depth_is_hugging_face(ending_checkpoint: Callable[[str], Path], style: str) -> None:
    folder, requests = ending_checkpoint(style), make_requests(40)
    model = load_model(folder, device=DEVICE)
    eos = model.config.eos_token_id
    tokens, mask = padded(requests)
    reference = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
    made = reference.generate(
        tokens, attention_mask=mask, max_new_tokens=40, do_sample=False, eos_token_id=eos, pad_token_id=1
    )[:, tokens.shape[1] :].tolist()
    wanted = [row[: row.index(eos) + 1] if eos in row else row for row in made]
    assert [c.tokens for c in generate(model, requests, FullDepth(6)).completions] == wanted


# As on the CPU: 8 bits of mantissa over 6 layers (tests/test_model.py).
BF16_RELATIVE_ERROR = 0.03


@pytest.mark.parametrize("style", STYLES)
def test_bfloat16_stays_within_its_bound(checkpoint_factory: Callable[..., Path], style: str) -> None:
    folder, requests = checkpoint_factory(style), make_requests(1)
    tokens, mask = padded(requests)
    with torch.inference_mode():
        reference = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
        exact = reference(tokens, attention_mask=mask).logits[:, -1]
        model = load_model(folder, device=DEVICE, dtype=torch.bfloat16)
        num_pad = (mask == 0).sum(1)
        cache = KVCache.allocate(model.config, num_pad=num_pad, capacities=[tokens.shape[1]] * 6, dtype=model.dtype)
        positions = (torch.arange(tokens.shape[1], device=DEVICE) - num_pad[:, None]).clamp(min=-1)
        logits = model(tokens, positions, cache, FullDepth(6).prefill())
    assert 0 < float((logits - exact).norm() / exact.norm()) < BF16_RELATIVE_ERROR


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu(
    ending_checkpoint: Callable[[str], Path], style: str, schedule: Schedule, keys: dict[str, float]
) -> None:
    """Token checks come every eight steps here and every step there: that must not show either."""
    folder, requests = ending_checkpoint(style), make_requests(30, **keys)
    wanted = generate(load_model(folder), requests, schedule).completions
    model = load_model(folder, device=DEVICE)
    assert generate(model, requests, schedule).completions == wanted
    fixed = generate(model, requests, schedule, prompt_columns=32, batch_rows=10, compact=False)
    assert fixed.completions == wanted
    graphs = StepGraphs(model)
    for _ in range(3):  # warm-up, capture, replay alone
        assert generate(model, requests, schedule, graphs=graphs).completions == wanted
        again = generate(model, requests, schedule, prompt_columns=32, batch_rows=10, compact=False, graphs=graphs)
        assert again.completions == wanted
    assert graphs.num_captured > 0 or isinstance(schedule, (SkipSaturated, SkipAtRandom))


def test_graphs_wait_for_nothing(ending_checkpoint: Callable[[str], Path]) -> None:
    """Replays are launched without the host waiting for the device, and from then on nothing is captured."""
    model = load_model(ending_checkpoint("125m"), device=DEVICE)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    requests = [Request(str(i), [2, 5 + i, 9], sampling) for i in range(8)]
    graphs, schedule = StepGraphs(model), SkipDecode(6, 5, 2, 1, 39)
    for _ in range(2):
        generate(model, requests, schedule, graphs=graphs)
    captured = graphs.num_captured
    cohort = Cohort(model, requests, schedule, check_every=100, graphs=graphs)
    cohort.prefill()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            cohort.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert graphs.num_captured == captured


def test_cleared_graphs_give_their_memory_back(ending_checkpoint: Callable[[str], Path]) -> None:
    model = load_model(ending_checkpoint("125m"), device=DEVICE)
    before = torch.cuda.memory_allocated()
    graphs = StepGraphs(model)
    for _ in range(2):
        generate(model, make_requests(30), FullDepth(6), graphs=graphs)
    assert torch.cuda.memory_allocated() > before
    graphs.clear()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("group_size", [1, 3])
def test_swiftkv_tokens_are_those_of_the_cpu(tiny_checkpoint: Path, group_size: int) -> None:
    schedule, made = SwiftPrefill(SkipDecode(6, 5, 2, 1, 9), 3), []
    for device in ("cpu", DEVICE):
        model = load_model(tiny_checkpoint, device=device).with_swiftkv(3, group_size)
        made.append(generate(model, make_requests(20), schedule).completions)
    graphs = StepGraphs(model)
    made += [generate(model, make_requests(20), schedule, graphs=graphs).completions for _ in range(2)]
    assert made == made[:1] * 4


def test_generator_on_the_device(tiny_checkpoint: Path) -> None:
    decode = {"method": "skipdecode", "max_layers": 5, "min_layers": 2}
    answers = []
    for device in ("cpu", "auto"):
        config = GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", device=device, length_buckets=(8, 32))
        generator = Generator(config)
        answers.append(generator(make_requests(20)).answers)
    assert generator.device.type == "cuda"
    assert answers[0] == answers[1]


def test_deterministic_bfloat16_is_bit_for_bit(tiny_checkpoint: Path) -> None:
    """A full batch of full-length rows needs no mask, and must take the same kernels as a row among padding rows."""
    model = load_model(tiny_checkpoint, device=DEVICE, dtype=torch.bfloat16)
    sampling = Sampling(max_new_tokens=16, ignore_eos=True)
    # who asks for log-probabilities has logits made
    rows = [Request(str(i), [2, *range(10 + i, 17 + i)], sampling, top_logprobs=0) for i in range(4)]

    def logits_of_first(requests: list[Request]) -> torch.Tensor:
        logs: list[torch.Tensor] = []
        hook = model.register_forward_hook(lambda _m, _a, out: logs.append(out[0].clone()))
        generate(model, requests, FullDepth(6), prompt_columns=8, batch_rows=4, compact=False)
        hook.remove()
        return torch.stack(logs)

    assert torch.equal(logits_of_first(rows), logits_of_first(rows[:1]))
