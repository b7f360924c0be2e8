"""What Triton makes of the kernels for devices that are not there: `python -m`, in a process of its own.

Capabilities are arguments; for the first one all kernels are compiled, for the others attention alone. `slow`: all, and
more of them. `released`: attention and the store of prompts for all shapes of released models, in each type, alone.
Prints one JSON document: of each kernel and capability its registers, stack, and loads by bytes for a thread.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from skipdecode.backends.backend import GraphKVRange, KVRange, PackedPrompts, PrefixGroups, SharedPrefix
from skipdecode.backends.cuda_kernels import Heads, Norm
from skipdecode.backends.fp8 import FP8, MIN_CAPABILITY
from skipdecode.backends.triton_kernels import TritonKernels
from skipdecode.families import FAMILIES, released
from tests.support.triton_compile import compiled, launches_of

BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {"bfloat16": (BF16, False), "float16": (torch.float16, False), "float32": (FP32, False), "FP8": (BF16, True)}
"""Of states, and whether keys and values are in FP8."""
FP8_CAPABILITY = 10 * MIN_CAPABILITY[0] + MIN_CAPABILITY[1]
KERNELS = TritonKernels()


def attend(
    K: int, H: int, G: int, B: int, *, dtype: torch.dtype = BF16, turns: float = 0.0, norms: bool = False,
    is_stored: bool = False, has_table: bool = True, window: int | None = None, is_fp8: bool = False,
) -> Callable[[], object]:  # fmt: skip
    def run() -> object:
        weights = [torch.empty(K, dtype=dtype)] * 2 if norms else [None, None]
        heads = Heads(
            H, G, K, torch.empty(256, int(K * turns)) if turns else None, *weights, epsilon=1e-6, window=window
        )
        q, k, v = torch.empty(B, (H + 2 * G) * K, dtype=dtype).split([H * K, G * K, G * K], dim=1)
        first, last = torch.zeros(B, dtype=torch.int64), torch.zeros(1, dtype=torch.int64).expand(B)
        memory = torch.empty(B, G, 192, K, dtype=FP8 if is_fp8 else dtype)
        where = torch.zeros(4, dtype=torch.int64)
        columns = (
            GraphKVRange(memory.view(-1), where, first, last) if has_table else KVRange(memory, memory, first, last)
        )
        return KERNELS.attend(heads, q, *((None, None) if is_stored else (k, v)), columns)

    return run


def places(
    K: int, H: int, G: int, rows: int, each: int, *, dtype: torch.dtype = BF16, turns: float = 0.0,
    norms: bool = False, window: int | None = None, is_fp8: bool = False,
) -> Callable[[], object]:  # fmt: skip
    """`each` new columns of so many rows."""

    def run() -> object:
        N = rows * each
        weights = [torch.empty(K, dtype=dtype)] * 2 if norms else [None, None]
        heads = Heads(
            H, G, K, torch.empty(256, int(K * turns)) if turns else None, *weights, epsilon=1e-6, window=window
        )
        q, k, v = torch.empty(N, (H + 2 * G) * K, dtype=dtype).split([H * K, G * K, G * K], dim=1)
        at = torch.arange(N)
        memory = torch.empty(rows, G, 192, K, dtype=FP8 if is_fp8 else dtype)
        among = torch.stack([at % each, torch.full((N,), each)])
        return KERNELS.attend(
            heads, q, k, v, KVRange(memory, memory, at * 0, at, at // each, query_index=among, max_queries=each)
        )

    return run


def prefixes(
    K: int, H: int, G: int, B: int, *, dtype: torch.dtype = BF16, turns: float = 0.0, norms: bool = False,
    window: int | None = None, has_table: bool = True, each: int = 1, is_fp8: bool = False,
) -> Callable[[], object]:  # fmt: skip
    """A step whose rows share prefixes: `attend_prefix_kernel`, and attention that adds what it makes."""

    def run() -> object:
        N = B * each
        weights = [torch.empty(K, dtype=dtype)] * 2 if norms else [None, None]
        heads = Heads(
            H, G, K, torch.empty(256, int(K * turns)) if turns else None, *weights, epsilon=1e-6, window=window
        )
        q, k, v = torch.empty(N, (H + 2 * G) * K, dtype=dtype).split([H * K, G * K, G * K], dim=1)
        lines = torch.zeros(9, N, dtype=torch.int64)
        memory = torch.empty(B, G, 192, K, dtype=FP8 if is_fp8 else dtype)
        where = torch.zeros(2, 4, dtype=torch.int64)
        groups = PrefixGroups(*lines[:4])
        columns: KVRange | GraphKVRange
        if has_table:
            flat = memory.view(-1)
            shared = SharedPrefix(flat, flat, lines[4], lines[5], groups, where[1])
            columns = GraphKVRange(flat, where[0], lines[6], lines[7, :1].expand(N), shared)
        else:
            shared = SharedPrefix(memory, memory, lines[4], lines[5], groups)
            columns = KVRange(memory, memory, *lines[6:], shared, query_index=lines[:2], max_queries=each)
        return KERNELS.attend(heads, q, k, v, columns)

    return run


def prompts(
    K: int, H: int, G: int, *, dtype: torch.dtype = BF16, turns: float = 0.0, norms: bool = False, is_fp8: bool = False
) -> Callable[[], object]:
    """The store of prompts alone: their attention is torch's."""

    def run() -> object:
        weights = [torch.empty(K, dtype=dtype)] * 2 if norms else [None, None]
        heads = Heads(H, G, K, torch.empty(256, int(K * turns)) if turns else None, *weights, epsilon=1e-6)
        q, k, v = torch.empty(64, (H + 2 * G) * K, dtype=dtype).split([H * K, G * K, G * K], dim=1)
        packed = PackedPrompts(torch.arange(16).expand(4, 16), torch.zeros(4, dtype=torch.int64))
        memory = torch.empty(2, 4, G, 192, K, dtype=FP8 if is_fp8 else dtype)
        return KERNELS.store(heads, q, k, v, packed, (memory[0], memory[1]))

    return run


def add_norm(D: int, kind: str, *, is_pre: bool = True, dtype: torch.dtype = BF16) -> Callable[[], object]:
    def run() -> object:
        h, y, one = torch.empty(64, D, dtype=dtype), torch.empty(64, D, dtype=dtype), torch.empty(D, dtype=dtype)
        is_layer = kind == "layer"
        norm = Norm("layer" if is_layer else "rms", 1e-5, one, one if is_layer else None)
        return KERNELS.add_norm(h, y, one if is_layer else None, norm, is_pre=is_pre)

    return run


def draw() -> object:
    row, uniforms = torch.empty(64, 1), torch.empty(64, 9)
    logits = torch.empty(64, 50272, dtype=BF16)
    return KERNELS.draw(logits, row, torch.empty(64, 1, dtype=torch.int64), row, uniforms[:, 2:3])


def fp8_rows(K: int) -> Callable[[], object]:
    return lambda: KERNELS.rows_in_fp8(torch.empty(64, K, dtype=BF16))


CASES: dict[str, Callable[[], object]] = {
    "attention, OPT-1.3B": attend(64, 32, 32, 64),
    "attention, OPT-2.7B": attend(80, 32, 32, 64),
    "attention, OPT-6.7B, parts": attend(128, 32, 32, 8),
    "attention, Llama-3.1-8B": attend(128, 32, 8, 128, turns=1.0),
    "attention, Llama-3.1-8B, parts": attend(128, 32, 8, 16, turns=1.0),
    "attention, Qwen3": attend(128, 16, 8, 128, turns=1.0, norms=True),
    "attention, Gemma 3 270M": attend(256, 4, 1, 64, turns=1.0, norms=True, window=512),
    "attention, OPT-1.3B, prefixes": prefixes(64, 32, 32, 256),
    "attention, Llama-3.1-8B, prefixes": prefixes(128, 32, 8, 256, turns=1.0),
    "attention, Gemma 3 270M, prefixes": prefixes(256, 4, 1, 64, turns=1.0, norms=True, window=512),
    "attention, OPT-1.3B, places, parts": places(64, 32, 32, 4, 5),
    "attention, Llama-3.1-8B, places": places(128, 32, 8, 64, 5, turns=1.0),
    "store of prompts, OPT-1.3B": prompts(64, 32, 32),
    "store of prompts, Llama-3.1-8B": prompts(128, 32, 8, turns=1.0),
    "store of prompts, Qwen3": prompts(128, 16, 8, turns=1.0, norms=True),
    "FP8, attention, OPT-1.3B": attend(64, 32, 32, 64, is_fp8=True),
    "FP8, attention, Llama-3.1-8B": attend(128, 32, 8, 128, turns=1.0, is_fp8=True),
    "FP8, attention, Llama-3.1-8B, prefixes": prefixes(128, 32, 8, 256, turns=1.0, is_fp8=True),
    "FP8, store of prompts, Llama-3.1-8B": prompts(128, 32, 8, turns=1.0, is_fp8=True),
    "FP8, rows, Llama-3.1-8B": fp8_rows(4096),
    "norm, OPT-1.3B": add_norm(2048, "layer"),
    "norm, OPT-66B": add_norm(9216, "layer"),
    "norm, Llama-3.1-8B": add_norm(4096, "rms"),
    "gate, Llama-3.1-8B": lambda: KERNELS.gate(torch.empty(64, 2 * 14336, dtype=BF16)),
    "argmax, OPT": lambda: KERNELS.argmax(torch.empty(64, 50272, dtype=BF16)),
    "draw, OPT": draw,
}
ATTENTION = [name for name in CASES if "attention" in name and "parts" not in name]
SLOW: dict[str, Callable[[], object]] = {
    "attention, OPT-1.3B, tensors": attend(64, 32, 32, 64, has_table=False),
    "attention, OPT-1.3B, float16": attend(64, 32, 32, 64, dtype=torch.float16),
    "attention, OPT-6.7B, float32": attend(128, 32, 32, 64, dtype=FP32),
    "attention, heads of 96": attend(96, 32, 32, 64),
    "attention, heads of 96 in groups": attend(96, 32, 8, 64, turns=1.0),
    "attention, StableLM": attend(80, 32, 32, 64, turns=0.25),
    "attention, heads of 8 in groups": attend(8, 4, 2, 64, turns=1.0),
    "attention, TinyLlama": attend(64, 32, 4, 256, turns=1.0),
    "attention, TinyLlama, float32": attend(64, 32, 4, 256, turns=1.0, dtype=FP32),
    "attention, Qwen3, stored": attend(128, 16, 8, 128, turns=1.0, norms=True, is_stored=True),
    "attention, OPT-2.7B, prefixes": prefixes(80, 32, 32, 64),
    "attention, OPT-6.7B, prefixes": prefixes(128, 32, 32, 256),
    "attention, heads of 96 in groups, prefixes": prefixes(96, 32, 8, 64, turns=1.0),
    "attention, StableLM, prefixes": prefixes(80, 32, 32, 64, turns=0.25),
    "attention, TinyLlama, prefixes, float16": prefixes(64, 32, 4, 256, turns=1.0, dtype=torch.float16),
    "attention, Qwen3, prefixes": prefixes(128, 16, 8, 128, turns=1.0, norms=True),
    "attention, Qwen2.5-0.5B, prefixes": prefixes(64, 14, 2, 64, turns=1.0),
    "attention, SmolLM2-135M, prefixes, tensors": prefixes(64, 9, 3, 64, turns=1.0, has_table=False),
    "attention, Llama-3.1-8B, prefixes, places": prefixes(128, 32, 8, 16, turns=1.0, has_table=False, each=5),
    "attention, OPT-6.7B, places": places(128, 32, 32, 64, 9),
    "attention, TinyLlama, places": places(64, 32, 4, 8, 9, turns=1.0),
    "attention, Qwen3, one place each": places(128, 16, 8, 64, 1, turns=1.0),
    "store of prompts, Gemma 3 270M": prompts(256, 4, 1, turns=1.0, norms=True),
    "store of prompts, StableLM, float16": prompts(80, 32, 32, turns=0.25, dtype=torch.float16),
    "FP8, attention, OPT-2.7B": attend(80, 32, 32, 64, is_fp8=True),
    "FP8, attention, OPT-6.7B, parts": attend(128, 32, 32, 8, is_fp8=True),
    "FP8, attention, heads of 96 in groups": attend(96, 32, 8, 64, turns=1.0, is_fp8=True),
    "FP8, attention, TinyLlama, parts": attend(64, 32, 4, 16, turns=1.0, is_fp8=True),
    "FP8, attention, Qwen3": attend(128, 16, 8, 128, turns=1.0, norms=True, is_fp8=True),
    "FP8, attention, Gemma 3 270M": attend(256, 4, 1, 64, turns=1.0, norms=True, window=512, is_fp8=True),
    "FP8, attention, StableLM, tensors": attend(80, 32, 32, 64, turns=0.25, has_table=False, is_fp8=True),
    "FP8, attention, OPT-1.3B, prefixes": prefixes(64, 32, 32, 256, is_fp8=True),
    "FP8, attention, Gemma 3 270M, prefixes": prefixes(256, 4, 1, 64, turns=1.0, norms=True, window=512, is_fp8=True),
    "FP8, attention, Llama-3.1-8B, places": places(128, 32, 8, 64, 5, turns=1.0, is_fp8=True),
    "FP8, attention, OPT-1.3B, places": places(64, 32, 32, 4, 5, is_fp8=True),
    "FP8, store of prompts, Gemma 3 270M": prompts(256, 4, 1, turns=1.0, norms=True, is_fp8=True),
    "FP8, rows, OPT-66B": fp8_rows(36864),
    "norm, OPT-350m": add_norm(1024, "layer", is_pre=False),
    "norm, OPT-66B, float32": add_norm(9216, "layer", dtype=FP32),
    "argmax, Llama-3.1, float32": lambda: KERNELS.argmax(torch.empty(64, 128256)),
}


def of_released() -> dict[str, Callable[[], object]]:
    """Attention in steps, in parts, behind prefixes and to several places, and the store of prompts, for each width and
    group of heads, and in each type, that a released shape has."""
    found: dict[str, Callable[[], object]] = {}
    seen = set()
    for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.released_shapes):
        config = released(name)
        K, H, G = config.head_dim, config.num_attention_heads, config.num_kv_heads
        turns, norms = 0.0 if config.rope is None else 1.0, config.has_qk_norm
        for window in {config.layer_window(layer) for layer in range(config.num_hidden_layers)}:
            if (shape := (K, H // G, turns, norms, window)) in seen:
                continue
            seen.add(shape)
            for kind, (dtype, is_fp8) in TYPES.items():
                keys: dict[str, Any] = {"dtype": dtype, "turns": turns, "norms": norms, "is_fp8": is_fp8}
                of_layer = keys | {"window": window}
                title = f"{name}, {kind}" + (f", window {window}" if window else "")
                found[f"attention, {title}"] = attend(K, H, G, 256, **of_layer)
                found[f"attention, {title}, parts"] = attend(K, H, G, 1, **of_layer)
                found[f"attention, {title}, prefixes"] = prefixes(K, H, G, 64, **of_layer)
                found[f"attention, {title}, places"] = places(K, H, G, 64, 5, **of_layer)
                if dtype != FP32 and window is None:  # prompts in float32 have padding, and torch stores them
                    found[f"store of prompts, {title}"] = prompts(K, H, G, **keys)
    return found


def main() -> None:
    torch.set_num_threads(1)
    words = sys.argv[1:]
    takes_all = "slow" in words or "released" in words
    cases = of_released() if "released" in words else CASES | SLOW if "slow" in words else CASES
    found = {}
    capabilities = [int(word) for word in words if word.isdigit()]
    for capability in capabilities:
        for name, case in cases.items():
            if not takes_all and capability != capabilities[0] and name not in ATTENTION:
                continue
            if "FP8" in name and capability < FP8_CAPABILITY:
                continue
            *before, launched = launches_of(case)
            found[f"{name}, sm_{capability}"] = asdict(compiled(launched, capability)) | _tile(launched)
            for first in before:
                made = asdict(compiled(first, capability)) | _tile(first)
                kind = "store, " if first[0].__name__ == "store_kernel" else ""  # type: ignore[attr-defined]
                found[f"{kind}{name}, before, sm_{capability}"] = made
    print(json.dumps(found))


def _tile(launched: tuple[object, tuple[object, ...], dict[str, int]]) -> dict[str, int]:
    """Loads of 16 bytes that a thread needs for keys and values of one block of columns; 0: no attention."""
    _, arguments, options = launched
    if "BLOCK" not in options or "KP" not in options:
        return {"tile_loads": 0}
    keys = arguments[3]
    assert isinstance(keys, torch.Tensor)
    size = 2 * options["BLOCK"] * options["KP"] * keys.element_size()
    return {"tile_loads": size // (16 * 32 * options["num_warps"])}


if __name__ == "__main__":
    main()
