"""Self-test of CUDA kernels: each runs once at a small shape and is compared with torch's operators.

So a kernel that does not compile on this machine, or that computes something wrong, is found before a process uses it.
The reference must not ask for a back end, because the back end is being chosen while this runs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skipdecode.backends.backend import GraphKVRange, KVRange
from skipdecode.backends.cuda_kernels import Heads, Kernels, Norm
from skipdecode.backends.torch_kernels import TorchKernels

B, H, G, K, COLUMNS = 3, 8, 2, 64, 32
WIDTH = H * K
TOLERANCE = 0.05
"""Share of the largest value. bfloat16 rounds to a 256th several times over; a wrong kernel is farther off."""

Run = Callable[[Kernels], Sequence[Tensor]]
"""Returns the outputs of a kernel, and what it has written in place."""


def self_test(kernels: Kernels, device: torch.device) -> str | None:
    """Says which kernel fails on the device or is wrong; None if all are right. Compiling them takes seconds."""
    for name, run in _cases(device).items():
        try:
            pairs = zip(run(kernels), run(TorchKernels()), strict=True)
            error = max(_error(made, expected) for made, expected in pairs)
        except Exception as why:  # no compiler, driver or memory: torch's operators do not need them
            return f"the kernel of {name} failed ({type(why).__name__}: {why})".splitlines()[0][:300]
        if error > TOLERANCE:
            return f"the kernel of {name} is wrong"
    return None


def _error(made: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value; tokens are either equal or not."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(made, expected) else 1.0
    error = (made.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(error.nan_to_num(nan=torch.inf))


def _cases(device: torch.device) -> dict[str, Run]:
    """The runs by the name of their kernel, each on its own memory because kernels write in place."""
    rng = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.bfloat16)

    memory, qkv, wide = numbers(2 * B * G * COLUMNS * K), numbers(B, WIDTH + 2 * G * K), numbers(B, 4 * WIDTH)
    states, added, weight, bias = numbers(B, WIDTH), numbers(B, WIDTH), numbers(WIDTH), numbers(WIDTH)
    rotary_table = torch.randn(COLUMNS, K, generator=rng).to(device)
    first, last = torch.zeros(B, dtype=torch.int64, device=device), torch.tensor([20], device=device).expand(B)
    where = torch.tensor([0, len(memory) // 2, G * COLUMNS * K, COLUMNS * K], device=device)
    one = torch.ones(B, 1, device=device)
    logits = numbers(B, 3000)
    logits[:, 70] = 40.0  # which is drawn whatever the number

    def attend(kernels: Kernels, *, has_table: bool) -> Sequence[Tensor]:
        own = memory.clone()
        k, v = own.view(2, B, G, COLUMNS, K)
        columns = GraphKVRange(own, where, first, last) if has_table else KVRange(k, v, first, last)
        q, new_k, new_v = torch.split(qkv, [WIDTH, G * K, G * K], dim=1)
        out = kernels.attend(Heads(H, G, K, rotary_table), q, new_k, new_v, columns)
        return out, own

    def attend_several(kernels: Kernels) -> Sequence[Tensor]:
        own = memory.clone()
        k, v = own.view(2, B, G, COLUMNS, K)
        ends, slots = torch.tensor([[20, 21, 9], [1, 1, 2]], device=device)
        query_index = torch.tensor([[0, 1, 0], [2, 2, 1]], device=device)
        q, new_k, new_v = torch.split(qkv, [WIDTH, G * K, G * K], dim=1)
        columns = KVRange(k, v, first, ends, slots, query_index=query_index, max_queries=2)
        return kernels.attend(Heads(H, G, K, rotary_table), q, new_k, new_v, columns), own

    def norm(kernels: Kernels, kind: Norm) -> Sequence[Tensor]:
        own = states.clone()
        return kernels.add_norm(own, added, kind.bias, kind, is_pre=True), own

    return {
        "attention": lambda kernels: attend(kernels, has_table=False),
        "attention of graphs": lambda kernels: attend(kernels, has_table=True),
        "attention of several columns a row": attend_several,
        "layer norms": lambda kernels: norm(kernels, Norm("layer", 1e-5, weight, bias)),
        "RMS norms": lambda kernels: norm(kernels, Norm("rms", 1e-5, weight, None)),
        "gates": lambda kernels: [kernels.gate(wide)],
        "the likeliest token": lambda kernels: [kernels.argmax(logits)],
        "draws": lambda kernels: [kernels.draw(logits, one, one.long() * 40, 0.9 * one, 0.5 * one)],
    }
