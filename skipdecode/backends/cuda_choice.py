"""Whose kernels decode on a CUDA device in this process, and why: Triton's, or torch's operators.

As `choice` for CPUs, and by the same variable: `torch` (`off`, `0`) takes torch's operators, `triton` must have its
kernels. Names of CPU back ends say nothing here. All kernels run once before they are chosen (`first_kernels`): Triton
needs a C compiler on the machine, a driver that fits, and a device that it compiles each of them for.
"""

import os
from functools import cache

import torch

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.choice import VARIABLE, BackendError, Choice
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.kernel_self_test import self_test

MIN_CAPABILITY = (8, 0)
"""bfloat16 products begin here (A100, L4); nothing older is tested."""
ONLY_PLAIN = "quantized weights are for CPUs"


@cache
def choose_cuda() -> Choice:
    """The kernels of this process. Compiles each of them on the first call.

    BackendError where `SKIPDECODE_KERNELS` is `triton`, and they do not run.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    if wanted in ("torch", "off", "0"):
        return _choice("torch", f"{_device()}; forced by {VARIABLE}")
    problem = _problem()
    if problem is None:
        return _choice("triton", f"{_device()}, Triton {_version()}")
    if wanted == "triton":
        raise BackendError(f"{VARIABLE}: triton cannot run here: {problem}; torch can")
    return _choice("torch", f"{_device()}; {problem}")


@cache
def cuda_backend() -> Backend:
    """The back end that `choose_cuda` names."""
    if choose_cuda().name == "torch":
        return TORCH
    from skipdecode.backends.triton_kernels import TritonKernels

    return CudaBackend(TritonKernels())


def _choice(name: str, reason: str) -> Choice:
    return Choice("triton" if name == "triton" else "torch", reason, "bfloat16", ONLY_PLAIN)


def _device() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}"


def _version() -> str:
    import triton

    return str(triton.__version__)


def _problem() -> str | None:
    """Why Triton's kernels do not run on this process's device; None: they do."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA devices"
    if (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    try:
        from skipdecode.backends.triton_kernels import TritonKernels
    except ImportError as error:
        return f"Triton cannot be imported ({error}); CUDA builds of torch bring it"
    try:
        with torch.inference_mode():
            return self_test(TritonKernels(), torch.device("cuda"))
    except Exception as error:  # the device itself
        return f"the first kernels failed ({type(error).__name__}: {error})".splitlines()[0][:300]
