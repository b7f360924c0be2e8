"""Which back end computes on a device. The only place that maps one to the other: a new back end is a line here."""

import torch

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.compiled import CPU

# On Hopper torch prefers cuDNN for attention behind a mask. Its plans are kept by batch, columns and strides, and one
# takes 20 to 40 ms to build, so that nearly every step would pay; with a mask its backward pass gives NaN at times.
# Here, since whatever decodes or trains comes by: the flag needs no device.
torch.backends.cuda.enable_cudnn_sdp(False)


def backend_on(device: torch.device) -> Backend:
    """That of CPUs, or torch's operators."""
    return CPU if device.type == "cpu" else TORCH
