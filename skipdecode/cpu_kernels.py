"""The CPU kernels of `cpu_kernels.cpp`: compiled once per machine by the C++ compiler that is there, called by ctypes.

torch's attention for one query reads the cache at a third of memory bandwidth, and its argmax of bfloat16 logits takes
as long as the matrix product before it. Where there is no compiler, `is_available` is false and torch's operators do
the same work: `status` says why. SKIPDECODE_KERNELS=off turns the kernels off.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
# Sums may be reordered, which is what makes them vectors. Not -ffast-math: at linking it adds code that takes subnormal
# numbers away from the whole process.
MATH = "-fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -ffinite-math-only -freciprocal-math"
FLAGS = ("-O3", "-march=native", *MATH.split(), "-fopenmp", "-shared", "-fPIC", "-std=c++17")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
POINTER, INT, INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take tensors of this kind, on this machine."""
    return tensor.device.type == "cpu" and tensor.dtype in NAMES and _library()[0] is not None


def status() -> str:
    """`compiled`, or why torch's operators are used instead."""
    return _library()[1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of one query per row over its columns first..last: q [B, D] -> [B, D], heads side by side.

    k, v [B, H, S, K], contiguous: the cache. `first`, `last` [B] int64, both included. `new`: key and value [B, D] of
    column `last`, stored before it is attended to. q and `new` may be columns of one tensor [B, 3 D].
    """
    B, H, S, K = k.shape
    new_k, new_v = (None, None) if new is None else new
    # wrong ones would be read as if they were right
    for held in (k, v):
        assert held.is_contiguous(), held.stride()
        assert held.shape == k.shape, (held.shape, k.shape)
    for tensor in (q, *(new or ())):
        assert tensor.shape == (B, H * K), (tensor.shape, k.shape)
        assert tensor.stride() == (q.stride(0), 1), (tensor.stride(), q.stride())
    assert len({tensor.dtype for tensor in (q, k, v, *(new or ()))}) == 1, "types differ"
    for columns in (first, last):
        assert columns.dtype == torch.int64, columns.dtype
        assert columns.shape == (B,), (columns.shape, B)
        assert columns.is_contiguous(), columns.stride()
    out = q.new_empty(B, H * K)
    _function("attend", q.dtype)(
        K,
        B,
        H,
        q.data_ptr(),
        None if new_k is None else new_k.data_ptr(),
        None if new_v is None else new_v.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        v.data_ptr(),
        S,
        first.data_ptr(),
        last.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest value, the lowest one where several are equal: [B, V] -> [B] int64."""
    logits = logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    function = _function("argmax", logits.dtype)
    function(*logits.shape, logits.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    library, reason = _library()
    assert library is not None, reason
    function = getattr(library, f"{name}_{NAMES[dtype]}")
    if name == "attend":
        function.argtypes = [*[INT64] * 3, *[POINTER] * 3, INT64, *[POINTER] * 2, INT64, *[POINTER] * 3, INT]
    else:
        function.argtypes = [INT64, INT64, POINTER, POINTER, INT]
    function.restype = None
    return function


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SKIPDECODE_KERNELS", "").lower() in ("off", "0"):
        return None, "turned off by SKIPDECODE_KERNELS"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if compiler is None:
        return None, "no C++ compiler: install g++ for a faster decode step"
    command = [compiler, *FLAGS, str(SOURCE)]
    path = _cache_folder() / f"cpu-{_digest(command)}.so"
    try:
        if not path.is_file():
            _compile(command, path)
        return ctypes.CDLL(str(path)), "compiled"
    except subprocess.CalledProcessError as error:
        return None, f"{compiler} failed: {error.stderr.strip()[-500:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{compiler}: {error}"


def _compile(command: list[str], path: Path) -> None:
    """Whole or not at all: several workers of a machine may start at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        # torch's own OpenMP by its file, so that there is one pool of threads, not two that wait for each other
        openmp = [str(p) for p in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))]
        subprocess.run([*command, *openmp, "-o", str(made)], check=True, capture_output=True, text=True, timeout=120)
        made.replace(path)


def _cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "skipdecode-ray"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="skipdecode-ray-"))  # never a name that others could have taken


def _digest(command: list[str]) -> str:
    """Of all that the machine code depends on; a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        cpu = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        cpu = platform.processor()
    parts = [*command, torch.__version__, platform.machine(), cpu, SOURCE.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
