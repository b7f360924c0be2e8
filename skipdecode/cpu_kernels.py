"""The CPU kernels of `cpu_*.cpp`: compiled once per machine by the C++ compiler that is there, called by ctypes.

torch's attention for one query reads the cache at a third of memory bandwidth, its products of few rows read weights at
half of it or less, and its argmax of bfloat16 logits takes as long as the matrix product before it. Where there is no
compiler, `is_available` is false and torch's operators do the same work: `status` says why. SKIPDECODE_KERNELS=off
turns the kernels off.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("cpu_attention.cpp", "cpu_linear.cpp", "cpu_block.cpp", "cpu_prompt.cpp")]
HEADERS = [HERE / name for name in ("cpu_attention.h", "cpu_block.h", "cpu_int8.h", "cpu_threads.h", "cpu_tiles.h")]
# Sums may be reordered, which is what makes them vectors. Not -ffast-math: at linking it adds code that takes subnormal
# numbers away from the whole process.
MATH = "-fassociative-math -fno-signed-zeros -fno-trapping-math -fno-math-errno -ffinite-math-only -freciprocal-math"
WIDE = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()  # compilers choose 256
FLAGS = ("-O3", "-march=native", *WIDE, *MATH.split(), "-fopenmp", "-shared", "-fPIC", "-std=c++17")
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MAX_INT8_INPUTS = 1 << 16
POINTER, INT, INT64, DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double


def is_available(tensor: Tensor) -> bool:
    """Whether the kernels take tensors of this kind, on this machine."""
    return tensor.device.type == "cpu" and tensor.dtype in NAMES and _library()[0] is not None


def status() -> str:
    """`compiled`, or why torch's operators are used instead."""
    return _library()[1]


class Columns(NamedTuple):
    """Where one new column per row goes, and what it may attend to: as the arguments of `attend`."""

    k: Tensor
    v: Tensor
    first: Tensor
    last: Tensor


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
    column `last`, stored before it is attended to; q and `new` may be columns of one tensor [B, 3 D]. Finite numbers
    only: what becomes of NaN and infinities is not defined.
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
    function("attend", q.dtype)(
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
    """The index of each row's largest value, the lowest where several are equal (NaN aside): [B, V] -> [B] int64."""
    logits = logits.contiguous()
    out = torch.empty(len(logits), dtype=torch.int64)
    function("argmax", logits.dtype)(*logits.shape, logits.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out


@cache
def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself: half of float32's bytes at no loss of speed."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:  # no Linux
        return False
    return re.search(r"^flags\b.*\b(avx512_bf16|amx_bf16)\b", flags, re.MULTILINE) is not None


@cache
def has_tiles() -> bool:
    """Whether this CPU has matrix tiles (AMX) that the system lets us use; then `linear` is for bfloat16 weights."""
    library, _ = _library()
    return library is not None and bool(library.has_tiles())


def why_no_tiles() -> str:
    library, reason = _library()
    return f"the kernels are not used: {reason}" if library is None else "this CPU or its system has none"


def pack(weight: Tensor) -> Tensor:
    """A bfloat16 weight [out, in], in a multiple of 32, in the order in which `linear` reads it."""
    outputs, inputs = weight.shape
    assert weight.dtype == torch.bfloat16, weight.dtype
    assert inputs % 32 == 0, inputs
    weight = weight.detach().contiguous()
    packed = torch.empty(-(-outputs // 32), inputs // 32, 2, 16, 32, dtype=torch.bfloat16)
    function("pack_tiles")(outputs, inputs, weight.data_ptr(), packed.data_ptr())
    return packed


class Int8Weight(NamedTuple):
    """A weight [out, in] as whole numbers in [-127, 127] times a scale per output, packed (`pack_int8`)."""

    tiles: Tensor
    """[out / 32, in / 64, 2, 16, 16, 4] int8."""
    scales: Tensor
    """[out] float32, filled up to a multiple of 32."""
    inputs: int


def pack_int8(weight: Tensor) -> Int8Weight:
    """The whole numbers nearest to a weight [out, in], in a multiple of 32, the largest of an output being 127."""
    outputs, inputs = weight.shape
    assert inputs % 32 == 0, inputs
    assert inputs <= MAX_INT8_INPUTS, "sums would not fit into 32 bits"
    weight = F.pad(weight.detach().float(), (0, -inputs % 64, 0, -outputs % 32))
    scales = weight.abs().amax(dim=1) / 127.0
    whole = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
    tiles = whole.view(-1, 2, 16, whole.shape[1] // 64, 16, 4).permute(0, 3, 1, 4, 2, 5)
    return Int8Weight(tiles.contiguous(), scales, inputs)


def linear(
    x: Tensor,
    packed: Tensor | Int8Weight,
    outputs: int,
    bias: Tensor | None,
    *,
    relu: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T + bias, then ReLU or plus `residual` [..., outputs]: [..., in] -> [..., outputs], all in bfloat16.

    `packed`: W as `pack` or `pack_int8` gives it. Sums in float32, rounded once; for int8 sums of whole
    numbers, x as 16 bits times a scale per row.
    """
    assert not (relu and residual is not None), "one of the two"
    tiles, inputs = (packed.tiles, packed.inputs) if isinstance(packed, Int8Weight) else (packed, packed.shape[1] * 32)
    assert x.shape[-1] == inputs, (x.shape, inputs)
    assert tiles.shape[0] == -(-outputs // 32), (outputs, tiles.shape)
    rows = x.reshape(-1, inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    if residual is not None:
        assert residual.shape == out.shape, (residual.shape, out.shape)
        residual = residual.contiguous()
    for tensor in (x, bias, residual):
        assert tensor is None or tensor.dtype == torch.bfloat16, tensor.dtype
    assert bias is None or (bias.shape == (outputs,) and bias.is_contiguous()), "a bias of another layer"
    is_int8 = isinstance(packed, Int8Weight)
    assert tiles.dtype == (torch.int8 if is_int8 else torch.bfloat16), tiles.dtype
    function("linear_int8" if is_int8 else "linear_tiles")(
        len(rows),
        outputs,
        inputs,
        rows.data_ptr(),
        rows.stride(0),
        tiles.data_ptr(),
        *([packed.scales.data_ptr()] if isinstance(packed, Int8Weight) else []),
        None if bias is None else bias.data_ptr(),
        1 if relu else 0 if residual is None else 2,
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def likeliest(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """`argmax(linear(x, packed, outputs, None))` without the logits in between: [B, in] bfloat16 -> [B] int64."""
    assert x.dtype == packed.dtype == torch.bfloat16, (x.dtype, packed.dtype)
    assert x.shape[1] == packed.shape[1] * 32, (x.shape, packed.shape)
    assert packed.shape[0] == -(-outputs // 32), (outputs, packed.shape)
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(len(x), dtype=torch.int64)
    function("likeliest_tiles")(
        len(x),
        outputs,
        packed.shape[1] * 32,
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


ARGUMENTS = {
    "block_tiles": [POINTER, INT64, POINTER, INT, INT, *[POINTER] * 2, INT64, *[POINTER] * 3, INT],
    "prompt_tiles": [POINTER, INT64, *[POINTER] * 3, INT, INT, *[POINTER] * 2, INT64, INT],
    "store_tiles": [INT64, DOUBLE, POINTER, INT64, POINTER, INT64, *[POINTER] * 6, INT],
    "attend": [*[INT64] * 3, *[POINTER] * 3, INT64, *[POINTER] * 2, INT64, *[POINTER] * 3, INT],
    "argmax": [INT64, INT64, POINTER, POINTER, INT],
    "pack_tiles": [INT64, INT64, POINTER, POINTER],
    "linear_tiles": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT, POINTER, POINTER, INT],
    "likeliest_tiles": [*[INT64] * 3, POINTER, INT64, POINTER, POINTER, INT],
    "linear_int8": [*[INT64] * 3, POINTER, INT64, *[POINTER] * 3, INT, POINTER, POINTER, INT],
}


@cache
def function(name: str, dtype: torch.dtype | None = None) -> Any:
    """A function of the library, with the types of its arguments; that of `dtype` where there are several."""
    library, reason = _library()
    assert library is not None, reason
    found = getattr(library, name if dtype is None else f"{name}_{NAMES[dtype]}")
    found.argtypes, found.restype = ARGUMENTS[name], None
    return found


@cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("SKIPDECODE_KERNELS", "").lower() in ("off", "0"):
        return None, "turned off by SKIPDECODE_KERNELS"
    name = "the compiler"
    try:
        kept = _cache_folder() / f"cpu-{_digest()}.so"
        if _is_whole(kept):
            return ctypes.CDLL(str(kept)), "compiled"
        command = shlex.split(os.environ.get("CXX", "")) or _compiler()
        if not command:
            return None, "no C++ compiler: install g++ for a faster decode step"
        name = command[0]
        with tempfile.TemporaryDirectory(prefix="skipdecode-ray-") as folder:
            made = Path(folder) / kept.name
            # torch's own OpenMP by its file, so that there is one pool of threads, not two that wait for each other
            openmp = map(str, sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")))
            command += [*FLAGS, *map(str, SOURCES), *openmp, "-o", str(made)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            with contextlib.suppress(OSError):  # a folder that cannot be written to: compiled anew by each process
                _keep(made, kept)
            return ctypes.CDLL(str(made)), "compiled"
    except subprocess.CalledProcessError as error:
        return None, f"{name} failed: {error.stderr.strip()[-500:]}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return None, f"{name}: {error}"


def _compiler() -> list[str]:
    return [name for name in ("g++", "c++", "clang++") if shutil.which(name)][:1]


def _keep(made: Path, kept: Path) -> None:
    """Whole or not at all, since several workers of a machine may start at once; with its hash beside it."""
    kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    content = made.read_bytes()
    for path, data in ((_hash_of(kept), hashlib.sha256(content).hexdigest().encode()), (kept, content)):
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(data)
        os.replace(file.name, path)


def _is_whole(kept: Path) -> bool:
    """A library cut short, by a full disk or a machine that went down, would end the process that loads it."""
    try:
        return hashlib.sha256(kept.read_bytes()).hexdigest() == _hash_of(kept).read_text()
    except OSError:
        return False


def _hash_of(kept: Path) -> Path:
    return kept.with_suffix(".sha256")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skipdecode-ray"


def _digest() -> str:
    """Of all that the machine code depends on; a home folder may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
        cpu = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        cpu = platform.processor()
    sources = [source.read_text(encoding="utf-8") for source in [*SOURCES, *HEADERS]]
    system = [platform.machine(), *platform.libc_ver(), torch.__version__, cpu]
    return hashlib.sha256("\0".join([*FLAGS, *system, *sources]).encode()).hexdigest()[:16]
