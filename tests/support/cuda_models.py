"""Small random models of the shapes that the CUDA kernels know, and the decoder run on the CUDA back end by a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from skipdecode.backends import device
from skipdecode.backends.backend import Backend, GraphKVRange, KVRange, SharedPrefix
from skipdecode.backends.cuda_kernels import PREFIX_ROWS, Heads
from skipdecode.backends.torch_kernels import TorchKernels
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.families import config_of
from skipdecode.model.decoder import Decoder

OPT = {
    "model_type": "opt", "vocab_size": 200, "hidden_size": 128, "ffn_dim": 256, "num_attention_heads": 2,
    "max_position_embeddings": 96, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 200, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES = {
    "opt": OPT,
    "opt, heads of 80": OPT | {"hidden_size": 160, "ffn_dim": 192},
    "opt, norms behind": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 64},
    "llama": LLAMA,
    "llama, one head of keys": LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 128, "hidden_size": 96},
    "gemma3": LLAMA
    | {
        "model_type": "gemma3_text",
        "tie_word_embeddings": False,
        "sliding_window": 5,
        "query_pre_attn_scalar": 48,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3, windows": LLAMA
    | {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 6,
        "no_rope_layers": [1, 0, 1, 0],
    },
    "stablelm": LLAMA | {"model_type": "stablelm", "use_qkv_bias": True, "num_key_value_heads": 4, "head_dim": None},
}


def random_model(name: str, *, layers: int = 4, dtype: torch.dtype = torch.float32, seed: int = 5) -> Decoder:
    """Ready to decode, not packed. Norms and biases are random, too."""
    raw = {key: value for key, value in SHAPES[name].items() if value is not None}
    if "layer_types" in raw:
        raw["layer_types"] = (raw["layer_types"] * layers)[:layers]
    torch.manual_seed(seed)
    model = Decoder(config_of(raw | {"num_hidden_layers": layers}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn_like(weight)
    return model.to(dtype).eval().requires_grad_(False)


def some_requests(num_new: int, lengths: tuple[int, ...] = (1, 9, 4, 16, 7), **keys: float) -> list[Request]:
    rng = torch.Generator().manual_seed(3)
    sampling = Sampling(max_new_tokens=num_new, ignore_eos=True, **keys)  # type: ignore[arg-type]
    prompts = [[2, *torch.randint(4, 200, (n - 1,), generator=rng).tolist()] for n in lengths]
    return [Request(f"row-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


class CheckedKernels(TorchKernels):
    """The reference, which asserts what Triton's kernels take for granted of groups of rows that share a prefix."""

    def attend(
        self, heads: Heads, q: Tensor, k: Tensor | None, v: Tensor | None, columns: KVRange | GraphKVRange
    ) -> Tensor:
        if columns.shared is not None:
            check_groups(columns.shared)
        return super().attend(heads, q, k, v, columns)


def check_groups(shared: SharedPrefix) -> None:
    """Each row with a prefix is in one group, with none but rows that have the same; groups end with the first empty
    one."""
    assert shared.groups is not None
    rows, starts, sizes = (own.tolist() for own in shared.groups[:3])
    begin, counts, offsets = int(shared.groups.numbers[0]), shared.counts.tolist(), shared.offsets.tolist()
    grouped = []
    for start, size in zip(starts, sizes, strict=True):
        if size == 0:
            break
        assert 0 < size <= PREFIX_ROWS, size
        here = [row - begin for row in rows[start : start + size] if 0 <= row - begin < len(counts)]
        assert len({(offsets[row], counts[row]) for row in here}) <= 1, (here, offsets, counts)
        grouped += here
    assert sorted(grouped) == [row for row, count in enumerate(counts) if count], (grouped, counts)


@contextmanager
def cpu_computed_by(backend: Backend) -> Iterator[None]:
    """Another back end for everything on the CPU."""
    before = device.CPU
    device.CPU = backend  # type: ignore[assignment]
    try:
        yield
    finally:
        device.CPU = before
