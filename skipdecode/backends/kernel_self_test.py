"""Self-test of CUDA kernels: each runs once and is compared with torch's operators, at a small shape and at the shapes
of a model.

So a kernel that does not compile on this machine, or that computes something wrong, is found before a process uses it.
The reference must not ask for a back end, because the back end is being chosen while this runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from skipdecode.backends.backend import (
    GATED,
    GraphKVRange,
    KVRange,
    PackedPrompts,
    PrefixGroups,
    SharedPrefix,
    prefix_groups,
)
from skipdecode.backends.cuda_backend import PromptRange, attend_prompts
from skipdecode.backends.cuda_fp8 import Fp8Weight
from skipdecode.backends.cuda_kernels import PREFIX_ROWS, Heads, Kernels, Norm
from skipdecode.backends.errors import is_out_of_memory
from skipdecode.backends.fp8 import FP8, narrowed
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.config.model import DecoderConfig, FeedForwardKind, Quantization

B = 3
LAST = 20
"""The column of the new token, beside those of a window."""
MAX_WINDOW = 256  # columns; kernels are compiled for a window, and a longer one only takes longer here
TOLERANCE = 0.05
"""Share of the largest value. bfloat16 rounds to a 256th several times over; a wrong kernel is farther off."""
FP8_TOLERANCE = 0.13
"""Of numbers in FP8, whose steps are an eighth at most."""


@dataclass(frozen=True)
class KernelShape:
    """What kernels are compiled for, besides numbers of rows and columns."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    """How many numbers of a head are rotated; 0: no rotary embedding."""
    has_qk_norm: bool = False
    window: int | None = None
    width: int = 512
    """Of norms."""
    ffn_dim: int = 1024
    mlp: FeedForwardKind = "swiglu"
    vocab_size: int = 3000
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    """Of keys and values in the cache; None: `dtype`."""
    has_fp8_weights: bool = False

    @classmethod
    def of_model(
        cls,
        config: DecoderConfig,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        quantization: Quantization | None = None,
    ) -> "list[KernelShape]":
        """Those of a model of one of our families, one for each kind of its layers."""
        shapes = []
        for layer in range(config.num_hidden_layers):
            rope, window = config.layer_rope(layer), config.layer_window(layer)
            shapes.append(
                cls(
                    heads=config.num_attention_heads,
                    kv_heads=config.num_kv_heads,
                    head_dim=config.head_dim,
                    rotary_dim=0 if rope is None else int(config.head_dim * rope.share),
                    has_qk_norm=config.has_qk_norm,
                    window=None if window is None else min(window, MAX_WINDOW),
                    width=config.hidden_size,
                    ffn_dim=config.ffn_dim,
                    mlp=config.mlp,
                    vocab_size=config.vocab_size,
                    dtype=dtype,
                    kv_dtype=None if kv_dtype == dtype else kv_dtype,
                    has_fp8_weights=quantization == "fp8",
                )
            )
        return list(dict.fromkeys(shapes))

    def __str__(self) -> str:
        parts = [f"{self.heads} heads of {self.head_dim}", f"{self.kv_heads} for keys and values"]
        return ", ".join([*parts, *(["a window"] if self.window else []), str(self.dtype).removeprefix("torch.")])

    def in_cache(self, numbers: Tensor) -> Tensor:
        """Keys and values as the cache has them."""
        return narrowed(numbers, self.kv_dtype or self.dtype)


Run = Callable[[Kernels], Sequence[Tensor]]
"""Returns the outputs of a kernel, and what it has written in place."""


Of = Literal["steps", "prompts", "prefixes"]
"""Which kernels: those of decode steps, those of packed prompts, or those of decode steps whose rows share prefixes."""


def self_test(
    kernels: Kernels, device: torch.device, shape: KernelShape = KernelShape(), *, of: Of = "steps"
) -> str | None:
    """Says which kernel fails on the device or is wrong; None if all are right. Compiling them takes seconds. Raises
    what the device or its driver raises where memory lacks, which says nothing about kernels.
    """
    cases = {"steps": _cases, "prompts": _prompt_cases, "prefixes": _prefix_cases}[of]
    for name, run in cases(device, shape):
        try:
            is_right = all(_agree(*both) for both in zip(run(kernels), run(TorchKernels()), strict=True))
        except Exception as why:  # no compiler or driver: torch's operators do not need them
            if is_out_of_memory(why):
                raise
            return f"the kernel of {name} failed ({type(why).__name__}: {why})".splitlines()[0][:300]
        if not is_right:
            return f"the kernel of {name} is wrong"
    return None


def _agree(made: Tensor, expected: Tensor) -> bool:
    """Whether the largest difference is a small share of the largest value; tokens are either equal or not."""
    if not expected.is_floating_point():
        return torch.equal(made, expected)
    error = (made.float() - expected.float()).abs().max() / expected.float().abs().max()
    limit = FP8_TOLERANCE if expected.dtype == FP8 else TOLERANCE
    return float(error.nan_to_num(nan=torch.inf)) <= limit


def _cases(device: torch.device, shape: KernelShape) -> Iterator[tuple[str, Run]]:
    """The names of kernels and their runs, each on its own memory because kernels write in place."""
    rng = torch.Generator().manual_seed(1)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng).to(device, shape.dtype)

    H, G, K = shape.heads, shape.kv_heads, shape.head_dim
    last_column = LAST + (shape.window or 0)
    columns = -(-(last_column + 2) // 16) * 16
    memory, qkv = shape.in_cache(numbers(2 * B * G * columns * K)), numbers(B, (H + 2 * G) * K)
    table = torch.randn(columns, shape.rotary_dim, generator=rng).to(device) if shape.rotary_dim else None
    q_norm, k_norm = (numbers(K), numbers(K)) if shape.has_qk_norm else (None, None)
    heads = Heads(H, G, K, table, q_norm, k_norm, epsilon=1e-5, window=shape.window)
    first = torch.zeros(B, dtype=torch.int64, device=device)
    last = torch.tensor([last_column], device=device).expand(B)
    where = torch.tensor([0, len(memory) // 2, G * columns * K, columns * K], device=device)

    def attend(kernels: Kernels, *, has_table: bool) -> Sequence[Tensor]:
        own = memory.clone()
        k, v = own.view(2, B, G, columns, K)
        seen = GraphKVRange(own, where, first, last) if has_table else KVRange(k, v, first, last)
        q, new_k, new_v = torch.split(qkv, [H * K, G * K, G * K], dim=1)
        return kernels.attend(heads, q, new_k, new_v, seen), own

    def attend_several(kernels: Kernels) -> Sequence[Tensor]:
        own = memory.clone()
        k, v = own.view(2, B, G, columns, K)
        ends, slots = torch.tensor([[last_column, last_column + 1, 9], [1, 1, 2]], device=device)
        query_index = torch.tensor([[0, 1, 0], [2, 2, 1]], device=device)
        q, new_k, new_v = torch.split(qkv, [H * K, G * K, G * K], dim=1)
        seen = KVRange(k, v, first, ends, slots, query_index=query_index, max_queries=2)
        return kernels.attend(heads, q, new_k, new_v, seen), own

    yield "attention", lambda kernels: attend(kernels, has_table=False)
    yield "attention of graphs", lambda kernels: attend(kernels, has_table=True)
    yield "attention of several columns a row", attend_several
    states, added, weight, bias = (
        numbers(B, shape.width),
        numbers(B, shape.width),
        numbers(shape.width),
        numbers(shape.width),
    )

    def norm(kernels: Kernels, kind: Norm) -> Sequence[Tensor]:
        own = states.clone()
        return kernels.add_norm(own, added, kind.bias, kind, is_pre=True), own

    yield "layer norms", lambda kernels: norm(kernels, Norm("layer", 1e-5, weight, bias))
    yield "RMS norms", lambda kernels: norm(kernels, Norm("rms", 1e-5, weight, None))
    if shape.mlp in GATED:
        wide = numbers(B, 2 * shape.ffn_dim)
        yield "gates", lambda kernels: [kernels.gate(wide, shape.mlp)]
    if shape.has_fp8_weights:
        weight = numbers(max(16, shape.width), shape.width)
        yield "fp8 products", lambda kernels: [Fp8Weight.of(weight, kernels).plain(states)]
    one, logits = torch.ones(B, 1, device=device), numbers(B, shape.vocab_size)
    logits[:, min(70, shape.vocab_size - 1)] = 40.0  # which is drawn whatever the number
    yield "the likeliest token", lambda kernels: [kernels.argmax(logits)]
    yield "draws", lambda kernels: [kernels.draw(logits, one, one.long() * 40, 0.9 * one, 0.5 * one)]


def _prompt_cases(device: torch.device, shape: KernelShape) -> Iterator[tuple[str, Run]]:
    """Prompts of different lengths, whole, and behind tokens that are in the cache already."""
    rng = torch.Generator().manual_seed(2)
    H, G, K, longest = shape.heads, shape.kv_heads, shape.head_dim, LAST + (shape.window or 0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng).to(device, shape.dtype)

    table = torch.randn(longest + 8, shape.rotary_dim, generator=rng).to(device) if shape.rotary_dim else None
    q_norm, k_norm = (numbers(K), numbers(K)) if shape.has_qk_norm else (None, None)
    heads = Heads(H, G, K, table, q_norm, k_norm, epsilon=1e-5, window=shape.window)
    qkv, memory = numbers(B * longest, (H + 2 * G) * K), shape.in_cache(numbers(2, B, G, longest + 8, K))

    def prompts(kernels: Kernels, lengths: Sequence[int], before: Sequence[int]) -> Sequence[Tensor]:
        own = memory.clone()
        at = torch.arange(-max(lengths), 0, device=device)
        ends = torch.tensor([[n + b] for n, b in zip(lengths, before, strict=True)], device=device)
        is_real = at >= -torch.tensor([[n] for n in lengths], device=device)
        first = torch.zeros(B, dtype=torch.int64, device=device)
        packed = PackedPrompts(torch.where(is_real, at + ends, -1), first, before)
        q, k, v = torch.split(qkv[: sum(lengths)], [H * K, G * K, G * K], dim=1)
        return attend_prompts(kernels, heads, q, k, v, PromptRange(own[0], own[1], packed)), own

    yield "prompts", lambda kernels: prompts(kernels, [longest, 1, longest // 2], [0, 0, 0])
    yield "prompts behind a prefix", lambda kernels: prompts(kernels, [longest, 1, longest // 2], [0, 7, 3])
    yield "prompts of one token", lambda kernels: prompts(kernels, [1, 1, 1], [longest, 0, 3])


def _prefix_cases(device: torch.device, shape: KernelShape) -> Iterator[tuple[str, Run]]:
    """Three rows, two of which share a prefix."""
    rng = torch.Generator().manual_seed(3)
    H, G, K, longest = shape.heads, shape.kv_heads, shape.head_dim, LAST + (shape.window or 0)
    length, columns = longest // 2 * 2, 32

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng).to(device, shape.dtype)

    table = torch.randn(longest + columns, shape.rotary_dim, generator=rng).to(device) if shape.rotary_dim else None
    q_norm, k_norm = (numbers(K), numbers(K)) if shape.has_qk_norm else (None, None)
    heads = Heads(H, G, K, table, q_norm, k_norm, epsilon=1e-5, window=shape.window)
    size, room = 2 * B * G * columns * K, -(-length // 16) * 16
    memory, qkv = shape.in_cache(numbers(size + 2 * G * room * K)), numbers(B, (H + 2 * G) * K)
    first, last = torch.zeros(B, dtype=torch.int64, device=device), torch.tensor([LAST], device=device).expand(B)
    places = [(0, length), (0, 0), (0, length)]
    offsets, counts = torch.tensor(places, device=device).T.contiguous()
    lines = torch.from_numpy(prefix_groups(places, PREFIX_ROWS)).to(device)
    groups = PrefixGroups(lines[0], lines[1], lines[2], torch.arange(B, device=device))
    where = torch.tensor(
        [[0, size // 2, G * columns * K, columns * K], [size, size + G * room * K, G * room * K, room * K]],
        device=device,
    )

    def attend(kernels: Kernels, *, has_table: bool, each: int = 1) -> Sequence[Tensor]:
        own = memory.clone()
        k, v = own[:size].view(2, B, G, columns, K)
        held = own[size:].view(2, 1, G, room, K)
        q, new_k, new_v = torch.split(qkv, [H * K, G * K, G * K], dim=1)
        if has_table:
            shared = SharedPrefix(own, own, offsets, counts, groups, where[1])
            return kernels.attend(heads, q, new_k, new_v, GraphKVRange(own, where[0], first, last, shared)), own
        shared = SharedPrefix(held[0], held[1], offsets, counts, groups)
        slots, query_index = torch.arange(B, device=device), torch.tensor([[0] * B, [1] * B], device=device)
        seen = KVRange(k, v, first, last.contiguous(), slots, shared, query_index, each)
        return kernels.attend(heads, q, new_k, new_v, seen), own

    yield "shared prefixes", lambda kernels: attend(kernels, has_table=False)
    yield "shared prefixes of graphs", lambda kernels: attend(kernels, has_table=True)
    yield "shared prefixes of several columns a row", lambda kernels: attend(kernels, has_table=False, each=2)
