"""Which back end computes on a device. The only place that maps one to the other: a new back end is a line here."""

import torch

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.choice import Choice, choose
from skipdecode.backends.cpu_backend import CPU
from skipdecode.backends.cuda_choice import choose_cuda, cuda_backend

# On Hopper torch prefers cuDNN for attention behind a mask. Its plans are kept by batch, columns and strides, and one
# takes 20 to 40 ms to build, so that nearly every step would pay; with a mask its backward pass gives NaN at times.
# Here, since whatever decodes or trains comes by: the flag needs no device.
torch.backends.cuda.enable_cudnn_sdp(False)


def backend_on(device: torch.device) -> Backend:
    """That of CPUs, that of CUDA devices, or torch's operators."""
    if device.type == "cuda":
        return cuda_backend()
    return CPU if device.type == "cpu" else TORCH


def choice_on(device: torch.device) -> Choice:
    """Whose kernels decode on a device, for people; BackendError where the user forces what cannot run."""
    return choose_cuda() if device.type == "cuda" else choose()
