"""Which back end computes on a device. The only place that maps one to the other: a new back end is a line here."""

import torch

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.compiled import CPU


def backend_on(device: torch.device) -> Backend:
    """That of CPUs, or torch's operators."""
    return CPU if device.type == "cpu" else TORCH
