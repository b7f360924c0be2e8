"""CUDA: the same tokens as on the CPU and as Hugging Face on CUDA. Skipped, with a reason, where there is none."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import OPTForCausalLM

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from actors.measuring.bench import random_model
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import CudaGraphs, plans_of
from skipdecode.engine.generate import generate, generate_continuous, refill
from skipdecode.engine.prefill import allocate_cache, feed_prompts, pad_prompts
from skipdecode.engine.request import Request
from skipdecode.engine.static_batch import StaticBatch
from skipdecode.families import config_of
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.ffn_skip import SkipBand, SkipSaturated
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import FullDepth, Schedule, SkipDecode, SwiftKVPrefill
from skipdecode.speculative.speculative_batch import SpeculativeBatch
from tests.support.schedules import SCHEDULES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, torch sees none"),
]

STYLES = ["125m", "350m", "1.3b"]
PLANS: list[Schedule] = [
    *SCHEDULES.values(),
    SkipSaturated(FullDepth(6), 2, 1, 1, 0.85),
    SkipBand(SkipDecode(6, 5, 2, 1, 9), 1, (2, 3)),
]
DEVICE = "cuda"
ROOM = 1 << 26  # bytes for caches


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


# As on the CPU: 8 bits of mantissa over 6 layers (tests/skipdecode/model/test_decoder.py).
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
@pytest.mark.parametrize("schedule", PLANS, ids=str)
@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu(
    ending_checkpoint: Callable[[str], Path], style: str, schedule: Schedule, keys: dict[str, float]
) -> None:
    """Token checks come every eight steps here and every step there: that must not show either."""
    folder, requests = ending_checkpoint(style), make_requests(30, **keys)
    wanted = generate(load_model(folder), requests, schedule).completions
    model = load_model(folder, device=DEVICE).pack()
    assert generate(model, requests, schedule).completions == wanted
    fixed = generate(model, requests, schedule, prompt_columns=32, batch_rows=10, compact=False)
    assert fixed.completions == wanted
    graphs = CudaGraphs(model, ROOM)
    for _ in range(2):  # capture, replay alone
        assert generate(model, requests, schedule, graphs=graphs).completions == wanted
        again = generate(model, requests, schedule, prompt_columns=32, batch_rows=10, compact=False, graphs=graphs)
        assert again.completions == wanted
    assert graphs.failure is None
    assert graphs.num_captured > 0 or isinstance(schedule, SkipSaturated)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_lossless_tokens_are_those_of_the_cpu(
    ending_checkpoint: Callable[[str], Path], style: str, keys: dict[str, float]
) -> None:
    """Several new columns of a row in a pass, of rows that advance unevenly."""
    folder, requests = ending_checkpoint(style), make_requests(30, **keys)
    wanted = generate(load_model(folder), requests, FullDepth(6)).completions
    schedule = Lossless(6, SkipDecode(6, 5, 2, 1, 9), draft_tokens=3)
    batch = SpeculativeBatch(load_model(folder, device=DEVICE).pack(), schedule)
    made = refill(batch, requests, max_rows=len(requests)).completions
    assert [row.tokens for row in made] == [row.tokens for row in wanted]
    assert sum(batch.stats.drafted_at) > 0


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error. Setting that mode warns that it is a prototype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graphs_wait_for_nothing(ending_checkpoint: Callable[[str], Path]) -> None:
    """Replays are launched without the host waiting for the device, and from then on nothing is captured."""
    model = load_model(ending_checkpoint("125m"), device=DEVICE).pack()
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    requests = [Request(str(i), [2, 5 + i, 9], sampling) for i in range(8)]
    graphs, schedule = CudaGraphs(model, ROOM), SkipDecode(6, 5, 2, 1, 39)
    graphs.capture_all(plans_of([schedule], 40))
    captured = graphs.num_captured
    cohort = StaticBatch(model, requests, schedule, check_every=100, graphs=graphs)
    cohort.prefill()
    cohort.step()  # brings the batch's tables to their place
    with no_waits():
        for _ in range(30):
            cohort.step()
    assert graphs.num_captured == captured
    assert graphs.failure is None


@pytest.mark.parametrize("keys", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("schedule", [FullDepth(6), SkipDecode(6, 5, 2, 1, 9)], ids=str)
def test_continuous_batches_wait_for_nothing(
    ending_checkpoint: Callable[[str], Path], schedule: Schedule, keys: dict[str, float]
) -> None:
    """Rows join, end and are moved, and the host waits for no event but that of tokens of the step before."""
    folder, requests = ending_checkpoint("125m"), make_requests(30, **keys)
    wanted = [c.tokens for c in generate(load_model(folder), requests, schedule).completions]
    model = load_model(folder, device=DEVICE).pack()
    generate_continuous(model, requests, schedule, max_rows=3)  # kernels are compiled
    with no_waits():
        made = generate_continuous(model, requests, schedule, max_rows=3).completions
    assert [completion.tokens for completion in made] == wanted


PRODUCTION = {  # as in the released models, with few layers
    "opt, heads of 64": {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32},
    "opt, heads of 80": {"hidden_size": 2560, "ffn_dim": 10240, "num_attention_heads": 32},
    "opt, heads of 96": {"hidden_size": 3072, "ffn_dim": 12288, "num_attention_heads": 32},
    "opt, heads of 128": {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32},
    "llama, 8 heads of keys": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                               "num_key_value_heads": 8, "head_dim": 128},
    "qwen3": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 128},
}  # fmt: skip


def production_model(name: str) -> Decoder:
    kind = name.partition(",")[0]
    common = {"vocab_size": 50272, "max_position_embeddings": 2048, "num_hidden_layers": 4, "eos_token_id": 2}
    start = {} if kind == "opt" else {"bos_token_id": 1}
    config = config_of({"model_type": kind} | common | start | PRODUCTION[name])
    return random_model(config, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", PRODUCTION)
def test_production_shapes_in_bfloat16(name: str) -> None:
    """Logits of steps by graphs against float32 by torch's operators, behind up to 200 columns of padding."""
    model = production_model(name)
    prompts = [[2, *range(10, 10 + n)] for n in (3, 40, 200, 203)]
    plan, config = FullDepth(4), model.config
    reference = copy.deepcopy(model).float()
    model.pack()
    graphs, logits = CudaGraphs(model, 1 << 30, max_rows=8), []
    requests = [Request(str(i), p, Sampling(max_new_tokens=9, ignore_eos=True)) for i, p in enumerate(prompts)]
    cohort = StaticBatch(model, requests, plan, graphs=graphs, check_every=100)
    cohort.prefill()
    for _ in range(8):
        cohort.step()
        logits.append(graphs._logits[:4].float().clone())
    assert graphs.failure is None
    tokens = torch.stack(cohort._unsent_tokens, dim=1).tolist()
    for row, prompt in enumerate(prompts):
        whole = torch.tensor([[*prompt, *tokens[row][:-1]]], device=DEVICE)
        pad = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        for k in range(8):
            end = len(prompt) + k + 1
            cache = KVCache.allocate(config, num_pad=pad, capacities=[end] * 4, dtype=torch.float32)
            positions = torch.arange(end, device=DEVICE)[None]
            with torch.inference_mode():
                wanted = reference(whole[:, :end], positions, cache, plan.prefill())[0]
            made = logits[k][row]
            assert float((made - wanted).norm() / wanted.norm()) < BF16_RELATIVE_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("longest", [203, 1901])
@pytest.mark.parametrize("name", ["llama, 8 heads of keys", "qwen3"])
def test_prompts_of_groups_need_no_scores_in_memory(name: str, longest: int, dtype: torch.dtype) -> None:
    """Behind a mask, with more than 128 columns of padding: torch's fused attention serves, and computes the same."""
    model, plan = production_model(name).to(dtype), FullDepth(4)
    prompts = [[2, *range(10, 10 + n)] for n in (3, longest - 140, longest)]
    requests = [Request(str(i), p, Sampling(max_new_tokens=2)) for i, p in enumerate(prompts)]
    made = []
    fused, plain = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], [SDPBackend.MATH]
    for backends in (fused, plain):
        tokens, num_pad, num_pad_host = pad_prompts(model, requests, None, None)
        cache = allocate_cache(model, num_pad, tokens.shape[1], plan, 2, num_pad_host=num_pad_host)
        with torch.inference_mode(), sdpa_kernel(backends):
            made.append(feed_prompts(model, tokens, cache, plan.prefill()).float())
    assert float((made[0] - made[1]).norm() / made[1].norm()) < BF16_RELATIVE_ERROR


@pytest.mark.parametrize("name", PRODUCTION)
def test_prompts_without_padding_are_those_with_it(name: str) -> None:
    """By torch's flash attention; what the host does not know the lengths of keeps its padding."""
    model, plan = production_model(name).pack(), FullDepth(4)
    requests = [Request(str(i), [2, *range(10, 10 + n)], Sampling(max_new_tokens=2)) for i, n in enumerate((3, 900, 1))]
    made = []
    for is_known in (False, True):
        tokens, num_pad, num_pad_host = pad_prompts(model, requests, None, None)
        known = num_pad_host if is_known else None
        cache = allocate_cache(model, num_pad, tokens.shape[1], plan, 2, num_pad_host=known)
        assert model.supports_packed_prompts(cache.k[0]), model.why_padded
        with torch.inference_mode():
            made.append(feed_prompts(model, tokens, cache, plan.prefill()).float())
    assert 0 < float((made[0] - made[1]).norm() / made[1].norm()) < BF16_RELATIVE_ERROR


@pytest.mark.parametrize("name", PRODUCTION)
def test_graphs_are_bit_for_bit_the_steps_without(name: str) -> None:
    """The same kernels at the same number of rows: what a replay makes is what launching them one by one makes."""
    model = production_model(name).pack()
    rng = random.Random(1)
    requests = [Request(str(i), [2, *(rng.randrange(4, 50000) for _ in range(rng.randint(1, 180)))],
                        Sampling(max_new_tokens=40, ignore_eos=True)) for i in range(8)]  # fmt: skip
    by_graphs, one_by_one = CudaGraphs(model, 1 << 30, max_rows=8), CudaGraphs(model, 1 << 30, max_rows=8)
    one_by_one.failure = "not wanted"
    wanted = generate(model, requests, FullDepth(4), graphs=one_by_one).completions
    for _ in range(2):
        assert generate(model, requests, FullDepth(4), graphs=by_graphs).completions == wanted
    assert by_graphs.num_captured > 0
    assert one_by_one.num_captured == 0


def test_memory_is_flat_over_batches_of_mixed_lengths() -> None:
    """50 batches of all lengths and sizes, at both depths: no graph is added, and no memory."""
    model = production_model("opt, heads of 64").pack()
    rng, schedule = random.Random(7), SkipDecode(4, 3, 2, 1, 63)
    graphs = CudaGraphs(model, 2 << 30, max_rows=64)
    graphs.capture_all(plans_of([schedule, FullDepth(4)], 64))
    held, seen = graphs.num_captured, []
    for number in range(50):
        lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 64))]
        if number == 0:  # the largest of all first: what torch reserves for it serves the others
            lengths = [1, *[300] * 63]
        requests = [
            Request(f"{number}-{i}", [2] * n, Sampling(max_new_tokens=rng.randint(2, 64)))
            for i, n in enumerate(lengths)
        ]
        for each in (schedule, FullDepth(4)):
            generate(model, requests, each, graphs=graphs)
        seen.append(torch.cuda.memory_reserved())
    assert graphs.num_captured == held
    assert graphs.pool.free_bytes == graphs.nbytes
    assert max(seen) - max(seen[:3]) < 256 << 20


@pytest.mark.parametrize("group_size", [1, 3])
def test_swiftkv_tokens_are_those_of_the_cpu(tiny_checkpoint: Path, group_size: int) -> None:
    schedule, made = SwiftKVPrefill(SkipDecode(6, 5, 2, 1, 9), 3), []
    for device in ("cpu", DEVICE):
        model = load_model(tiny_checkpoint, device=device).with_swiftkv(3, group_size)
        made.append(generate(model, make_requests(20), schedule).completions)
    graphs = CudaGraphs(model.pack(), ROOM)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", [FullDepth(6), SkipDecode(6, 5, 2, 1, 9)], ids=["full", "skipdecode"])
@pytest.mark.parametrize("style", STYLES)
def test_layers_on_two_gpus(ending_checkpoint: Callable[[str], Path], style: str, schedule: Schedule) -> None:
    """The tokens are those of a CPU."""
    folder, requests = ending_checkpoint(style), make_requests(40)
    model = load_model(folder, devices=[torch.device(DEVICE, number) for number in range(2)]).pack()
    assert {parameter.device.index for parameter in model.parameters()} == {0, 1}
    wanted = [c.tokens for c in generate(load_model(folder), requests, schedule).completions]
    assert [c.tokens for c in generate(model, requests, schedule).completions] == wanted
