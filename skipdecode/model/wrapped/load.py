"""Loads a model of transformers for decoding, and proves it: a few tokens, decoded by our loop with our cache, must
have the logits of the model's own forward pass with transformers' eager attention. That costs two reads of the weights.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skipdecode.config.wrapped import WrappedConfig
from skipdecode.kv.static_cache import KVCache
from skipdecode.model.wrapped.adapter import merge_adapter
from skipdecode.model.wrapped.attention import ATTENTION
from skipdecode.model.wrapped.decoder import WrappedDecoder
from skipdecode.model.wrapped.examine import no_progress_bar, refuse_misfits
from skipdecode.model.wrapped.swiftkv import load_weights
from skipdecode.schedules.schedule import FullDepth

TOLERANCE = 1e-3
"""Of the distance of logits, relative to their norm, in float32."""
HALF_TOLERANCE = 0.5
"""In 16 bits, of the median row: a token near the border between two experts may go to the other one there."""
PROOF_LENGTHS = (5, 4, 3, 2)
"""Tokens of the prompts of the proof."""


def load_wrapped(
    folder: Path,
    config: WrappedConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    adapter: Path | None = None,
) -> WrappedDecoder:
    """The model in eval mode, with the LoRA adapter in `adapter` merged. ValueError names tensors that are missing or
    do not belong, or says that the proof failed."""
    theirs = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        with no_progress_bar():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                config=theirs,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # else transformers raises an error that does not name them
                output_loading_info=True,
            )
    except Exception as error:  # transformers and its libraries raise many kinds
        raise ValueError(f"{folder}: transformers cannot load it: {error}") from error
    refuse_misfits(folder, found)
    model = model.to(device)
    if adapter is not None:
        model = merge_adapter(model, adapter)
    decoder = WrappedDecoder(model, config).eval().requires_grad_(False)
    prove(decoder)
    if decoder.swiftkv is not None:
        load_weights(decoder.swiftkv, folder)
    return decoder


@torch.inference_mode()
def prove(decoder: WrappedDecoder) -> None:
    """Raises ValueError if padded prompts, and a step behind them, do not have the logits of transformers."""
    config, model, device = decoder.config, decoder.model, decoder.device
    columns = max(PROOF_LENGTHS) + 1  # every row is padded
    count = len(PROOF_LENGTHS) * (columns + 1)
    ids = torch.arange(count, device=device).view(-1, columns + 1) * 7919 % config.vocab_size  # [B, columns + 1]
    num_pad = columns - torch.tensor(PROOF_LENGTHS, device=device)
    full, capacities = FullDepth(config.num_hidden_layers), [columns + 1] * config.num_hidden_layers
    cache = KVCache.allocate(config, num_pad=num_pad, capacities=capacities, dtype=decoder.dtype)
    positions = (torch.arange(columns, device=device) - num_pad[:, None]).clamp(min=-1)
    prompt = decoder(ids[:, :columns], positions, cache, full.prefill())
    step = decoder(ids[:, columns:], cache.next_positions[:, None], cache, full.step(0))
    ours = torch.stack([prompt, step], dim=1).float()  # [B, 2, V]
    model.set_attn_implementation("eager")
    try:
        rows = [model(input_ids=row[pad:][None], use_cache=False).logits for row, pad in zip(ids, num_pad, strict=True)]
    finally:
        model.set_attn_implementation(ATTENTION)
    theirs = torch.stack([logits[0, -2:] for logits in rows]).float()
    apart = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)  # [B, 2]
    is_exact = decoder.dtype == torch.float32
    worst = float((apart if is_exact else apart.median(dim=0).values).max())
    if not worst <= (TOLERANCE if is_exact else HALF_TOLERANCE):
        raise ValueError(
            f"model_type {config.type_name!r} does not decode here as in transformers: the logits of a few tokens are "
            f"{worst:.1e} apart"
        )
