"""On which device and in which type a model computes, where nobody says it."""

import torch

from skipdecode.backends.device import backend_on


def choose_device(name: str) -> torch.device:
    """`auto`: the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: what the device's back end takes."""
    dtype: torch.dtype = getattr(torch, backend_on(device).dtype if name == "auto" else name)
    return dtype
