"""Training checkpoints, and the weights in them: complete on rank 0, however the workers are sharded.

Where the files are written is `pipeline.training.folder`.
"""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from actors.training.workers import rank_and_size
from skipdecode.config.model import DecoderConfig
from skipdecode.model.decoder import Decoder
from skipdecode.training.lora import adapter_modules
from skipdecode.training.loss import ResponseLoss

Weights = dict[str, torch.Tensor]


def save_state(state: dict[str, Any], path: str | Path) -> None:
    """Writes a state that `Hooks.checkpoint` was given."""
    torch.save(state, path)


def load_state(path: str | Path) -> dict[str, Any]:
    """Reads a checkpoint; raises ValueError if the file is incomplete. Other errors do not mean that it is damaged.

    The file is mapped into memory, so that the workers of a node share its pages.
    """
    with Path(path).open("rb") as file:
        if not zipfile.is_zipfile(file):  # whose directory is at the end of the file
            raise ValueError(f"{path}: not a whole checkpoint")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state


def model_of(weights: Weights, config: DecoderConfig) -> Decoder:
    """A model on the CPU with the weights that `Hooks.keep_best` was given."""
    with torch.device("meta"):
        model = Decoder(config)
    model.load_state_dict({name.removeprefix("model."): value for name, value in weights.items()}, assign=True)
    return model


def full_state(get: Callable[..., Any], loss: ResponseLoss, *of: Any) -> dict[str, Any]:
    """The complete state dict on the CPU of rank 0 (a collective call under FSDP); with LoRA, only the adapter's."""
    only = bool(adapter_modules(loss))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=only)
    state: dict[str, Any] = get(loss, *of, options=options)
    return state if rank_and_size()[0] == 0 else {}


def collect_state(loss: ResponseLoss, optimizer: torch.optim.Optimizer, progress: dict[str, Any]) -> dict[str, Any]:
    state = {
        "model": full_state(get_model_state_dict, loss),
        "optimizer": full_state(get_optimizer_state_dict, loss, optimizer),
    }
    return state | progress if rank_and_size()[0] == 0 else {}


def restore_state(loss: ResponseLoss, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    is_whole = not adapter_modules(loss)
    set_model_state_dict(loss, state["model"], options=StateDictOptions(full_state_dict=True, strict=is_whole))
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_optimizer_state_dict(loss, optimizer, state["optimizer"], options=options)
    # weights that no step has used yet have no optimizer state, and must not get one that counts steps
    for name, parameter in loss.named_parameters():
        if name not in state["optimizer"]["state"]:
            optimizer.state.pop(parameter, None)
