"""Prompts of which groups begin alike, and narrow random models to run them; for the tests of shared heads."""

from collections.abc import Sequence

import torch

from skipdecode.config.model import DecoderConfig
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.families.gemma3 import Gemma3Config
from skipdecode.families.llama import LlamaConfig
from skipdecode.families.opt import OPTConfig
from skipdecode.model.decoder import Decoder

VOCAB = 160
LAYERS = 6


def opt(**changed: object) -> DecoderConfig:
    """Positions that are learned; every head has keys of its own."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": LAYERS, "ffn_dim": 96, "num_attention_heads": 2,
        "max_position_embeddings": 160,
    }  # fmt: skip
    return OPTConfig(**(shape | changed))  # type: ignore[arg-type]


def llama(**changed: object) -> DecoderConfig:
    """Rotations; heads that share keys."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": LAYERS, "intermediate_size": 64,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 160,
    }  # fmt: skip
    return LlamaConfig(**(shape | changed))  # type: ignore[arg-type]


def gemma3(**changed: object) -> DecoderConfig:
    """Windows shorter than prompts, rotations of their own there, norms of outputs, and GELU."""
    shape: dict[str, object] = {
        "vocab_size": VOCAB, "hidden_size": 96, "num_hidden_layers": LAYERS, "intermediate_size": 64, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 160, "sliding_window": 9,
        "query_pre_attn_scalar": 32, "eos_token_id": 2,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention") * 2,
    }  # fmt: skip
    return Gemma3Config(**(shape | changed))  # type: ignore[arg-type]


def random_decoder(
    config: DecoderConfig, dtype: torch.dtype = torch.float32, *, seed: int = 0, swiftkv: tuple[int, int] | None = None
) -> Decoder:
    """Weights large enough that greedy text does not settle on one token; not packed."""
    torch.manual_seed(seed)
    model = Decoder(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3 if parameter.ndim == 1 else 0.25)
    model = model.to(dtype).eval().requires_grad_(False)
    return model if swiftkv is None else model.with_swiftkv(*swiftkv)


def requests_of(prompts: Sequence[Sequence[int]], num_new: Sequence[int], temperature: float = 0.0) -> list[Request]:
    limits = [num_new[row % len(num_new)] for row in range(len(prompts))]
    return [
        Request(
            str(row), list(prompt), Sampling(max_new_tokens=limit, temperature=temperature, ignore_eos=row % 2 == 0)
        )
        for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def grouped_prompts(groups: Sequence[tuple[int, Sequence[int]]], seed: int) -> list[list[int]]:
    """For each group (length of its head, lengths of the rows' ends): prompts, all of them of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(3, VOCAB, (count,), generator=generator).tolist()

    prompts = []
    for length, ends in groups:
        head = draw(length)
        prompts += [head + draw(end) for end in ends]
    return prompts
