"""The back end of a device: compiled kernels on CPUs, Triton's kernels on CUDA devices, else torch's operators.

Triton needs a C compiler, a driver that fits and a device that it compiles for, so every CUDA kernel is run once and
compared with torch before it is chosen (`kernel_self_test`), and again at the shapes of each model before it decodes
(`check_kernels`). CPUs are examined in `choice`.
"""

import logging
import os
from functools import cache
from typing import Final, Literal

import torch

from skipdecode.backends.backend import TORCH, Backend
from skipdecode.backends.choice import VARIABLE, BackendError, Choice, choose
from skipdecode.backends.cpu_backend import CPU
from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.backends.errors import is_out_of_memory
from skipdecode.backends.flash_attention import TYPES, missing
from skipdecode.backends.kernel_self_test import KernelShape, Of, self_test
from skipdecode.config.model import DecoderConfig, Quantization
from skipdecode.user_cache import own_folder

logger = logging.getLogger(__name__)

# On Hopper torch prefers cuDNN for attention with a mask. It caches plans by batch size, columns and strides, and each
# takes 20 to 40 ms to build, so nearly every step would pay; with a mask its backward pass sometimes gives NaN. It is
# switched off here because everything that decodes or trains imports this module; the flag needs no device.
torch.backends.cuda.enable_cudnn_sdp(False)

MIN_CAPABILITY = (8, 0)
"""Ampere and later, which multiply bfloat16 (A100, L4); nothing older is tested."""
TRITON_CACHE: Final = "TRITON_CACHE_DIR"
"""Triton's own variable."""


_unfit: dict[KernelShape, str] = {}
"""Shapes of models at which a kernel failed in this process, and how."""
_unfit_prompts: dict[KernelShape, str] = {}
"""Those at which packed prompts did."""
_unfit_prefixes: dict[KernelShape, str] = {}
"""Those at which attention to shared prefixes did."""


def backend_on(device: torch.device) -> Backend:
    """The back end that computes on a device. A new kind of device is a line here."""
    if device.type == "cuda":
        return cuda_backend()
    return CPU if device.type == "cpu" else TORCH


def choice_on(device: torch.device) -> Choice:
    """Which kernels decode on a device, and why. BackendError if the user forces some that cannot run."""
    return choose_cuda() if device.type == "cuda" else choose()


@cache
def choose_cuda() -> Choice:
    """The kernels that CUDA devices of this process use, and why. Compiles and tests all of them on the first call.

    `SKIPDECODE_KERNELS` set to `torch` (`off`, `0`) takes torch's operators. BackendError if it is `triton` and the
    kernels do not run. Names of CPU back ends have no effect here.
    """
    wanted = os.environ.get(VARIABLE, "").strip().lower()
    name: Literal["triton", "torch"] = "torch"
    if wanted in ("torch", "off", "0"):
        reason = f"{_device_name()}; forced by {VARIABLE}"
    elif (problem := _triton_problem()) is None:
        name, reason = "triton", f"{_device_name()}, Triton {_triton_version()}"
    elif wanted == "triton":
        raise BackendError(f"{VARIABLE}: triton cannot run here: {problem}; torch can")
    else:
        reason = f"{_device_name()}; {problem}"
    return Choice(name, reason, "bfloat16", no_int8="int8 weights are for CPUs")


class TorchOnCuda(Backend):
    """torch's operators on CUDA devices, where Triton's kernels cannot be used or are not wanted: several times slower,
    and without graphs."""

    @property
    def why_slow(self) -> str | None:
        return f"the CUDA kernels are not used: {choose_cuda().reason}"


@cache
def cuda_backend() -> Backend:
    """The back end of CUDA devices that `choose_cuda` has chosen."""
    if choose_cuda().name == "torch":
        return TorchOnCuda()
    from skipdecode.backends.triton_kernels import TritonKernels

    return CudaBackend(
        TritonKernels(),
        no_packed_prompts=missing() or next(iter(_unfit_prompts.values()), None),
        no_shared_prefixes=next(iter(_unfit_prefixes.values()), None),
    )


def check_kernels(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Runs the kernels once at the shapes of a model that is to decode on a CUDA device. Where one fails or is wrong,
    this process uses torch's operators on CUDA devices from then on. BackendError if the user forces the kernels.

    Where those of packed prompts alone fail, prompts are fed with padding (`Backend.why_padded`); where those of shared
    prefixes do, each row gets a copy (`Backend.supports_shared_prefix`). `kv_dtype`: the type of keys and values in the
    cache; None: `dtype`.
    """
    if device.type != "cuda" or choose_cuda().name == "torch" or config.implementation != "own":
        return
    from skipdecode.backends.triton_kernels import TritonKernels

    shapes = KernelShape.of_model(config, dtype, kv_dtype, quantization)
    for shape in shapes:
        with torch.inference_mode():
            problem = self_test(TritonKernels(), device, shape)
        if problem is not None:
            _unfit[shape] = f"{problem}, with {shape}"
            for kept in (choose_cuda, cuda_backend):
                kept.cache_clear()
            choose_cuda()
            return
    if dtype not in TYPES or missing() is not None:
        return
    unfit: dict[Of, dict[KernelShape, str]] = {"prompts": _unfit_prompts, "prefixes": _unfit_prefixes}
    for of, found in unfit.items():
        for shape in shapes:
            with torch.inference_mode():
                problem = self_test(TritonKernels(), device, shape, of=of)
            if problem is not None:
                found[shape] = f"{problem}, with {shape}"
                if of == "prefixes":  # of prompts it is said where they are fed
                    logger.warning("rows get copies of the prefixes that they share: %s", found[shape])
                cuda_backend.cache_clear()
                break


def use_own_triton_cache() -> None:
    """Lets Triton keep what it compiles beside our kernels, unless the user has named a folder: it loads what it finds
    there, whoever has written it."""
    if not os.environ.get(TRITON_CACHE):
        os.environ[TRITON_CACHE] = str(own_folder("triton"))


def _device_name() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, sm_{major}{minor}"


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _triton_problem() -> str | None:
    """Why Triton's kernels cannot be used on this process's device; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA devices"
    if (capability := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0"
    use_own_triton_cache()
    try:
        from skipdecode.backends.triton_kernels import TritonKernels
    except ImportError as error:
        return f"Triton cannot be imported ({error}); CUDA builds of torch bring it"
    try:
        with torch.inference_mode():
            problem = self_test(TritonKernels(), torch.device("cuda"))
        return problem or next(iter(_unfit.values()), None)
    except Exception as error:  # the device itself
        if is_out_of_memory(error):  # others hold it, perhaps for a moment: no reason to decode slowly for good
            raise
        return f"the first kernels failed ({type(error).__name__}: {error})".splitlines()[0][:300]
