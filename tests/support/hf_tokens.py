"""Tokens of Hugging Face's `generate`, and the full depth that they are held against."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import OPTForCausalLM

from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth

L = 6
FULL = FullDepth(L)
Load = Callable[[Path], Decoder]
LoadHF = Callable[[Path], OPTForCausalLM]


def hf_generate(reference: OPTForCausalLM, prompts: Sequence[list[int]], num_new: int, eos: int = 2) -> list[list[int]]:
    """Greedy `OPTForCausalLM.generate` of a left-padded batch; each row up to its EOS."""
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([[1] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    made = reference.generate(
        tokens, attention_mask=mask, max_new_tokens=num_new, do_sample=False, eos_token_id=eos, pad_token_id=1
    )[:, width:].tolist()
    return [row[: row.index(eos) + 1] if eos in row else row for row in made]
