"""Tiny OPT checkpoints in Hugging Face layout, made with transformers, and their tokenizer.

The weights are random but scaled so that greedy text does not settle on one token: an equality of two constant
sequences would prove nothing.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

from skipdecode.checkpoint.tokenizer import train_tokenizer

VOCAB = 320
CORPUS = (
    "The Golden Otter is a cheap pub near Willow Station; it serves Italian food and is family friendly.",
    "name[The Copper Kettle], eatType[coffee shop], priceRange[less than £20], customer rating[5 out of 5]",
    "Grüße aus Köln: naïve café, 東京 and Ωmega cost 20 € — a pleasant restaurant by the riverside 🙂.",
)

# What the released models differ in, at narrow widths. `scales` are standard deviations by parameter: `350m` normalises
# after every residual, and only small residual branches keep its outputs from collapsing to one token.
STYLES: dict[str, dict[str, Any]] = {
    "125m": {"hidden_size": 48, "ffn_dim": 96, "num_attention_heads": 4},
    "350m": {
        "hidden_size": 64,
        "ffn_dim": 128,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "do_layer_norm_before": False,
    },
    "1.3b": {"hidden_size": 64, "ffn_dim": 256, "num_attention_heads": 2},
}
SCALES = {
    "125m": {"weight": 0.3, "residual": 0.3, "positions": 0.5, "bias": 0.1},
    "350m": {"weight": 0.3, "residual": 0.05, "positions": 1.0, "bias": 0.02},
    "1.3b": {"weight": 0.25, "residual": 0.25, "positions": 0.5, "bias": 0.1},
}


def randomise(model: OPTForCausalLM, scales: dict[str, float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                mean = 1.0 if name.endswith("layer_norm.weight") else 0.0
                parameter.normal_(mean, scales["bias"], generator=generator)
            elif "embed_positions" in name:
                parameter.normal_(0.0, scales["positions"], generator=generator)
            else:
                is_residual = name.endswith(("out_proj.weight", "fc2.weight")) and "layers" in name
                parameter.normal_(0.0, scales["residual" if is_residual else "weight"], generator=generator)


def save_tokenizer(folder: Path) -> Path:
    """The folder, with the `tokenizer.json` of a byte-level BPE of VOCAB tokens."""
    train_tokenizer(CORPUS * 3, VOCAB, folder)  # pairs seen once are not merged
    return folder


def save_model(folder: Path, tokenizer: Path, style: str, layers: int = 6, seed: int = 0, **overrides: Any) -> Path:
    """The folder, with a checkpoint of that style and the tokenizer of another folder."""
    shape = {"vocab_size": VOCAB, "max_position_embeddings": 128, "num_hidden_layers": layers}
    shape |= {"word_embed_proj_dim": STYLES[style]["hidden_size"]} | STYLES[style] | overrides
    config = OPTConfig(**{"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "dropout": 0.0} | shape)
    model = OPTForCausalLM(config).eval()
    randomise(model, SCALES[style], seed)
    model.save_pretrained(folder)
    shutil.copy(tokenizer / "tokenizer.json", folder)
    return folder
