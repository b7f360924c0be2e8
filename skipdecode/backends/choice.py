"""Chooses the CPU back end of this process, and says why. Imports no torch.

This is the only place that reads the CPU's flags. The automatic dtype and whether weights may be int8 or int4 follow
from the choice. The kernels themselves are compiled and loaded by `skipdecode.backends.build`.
"""

import os
import platform
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

from skipdecode.backends.build import BuildError, has_slow_bfloat16, load
from skipdecode.config.model import Quantization

Name = Literal["amx", "avx512", "avx2", "torch", "triton"]
NAMES: tuple[Name, ...] = ("amx", "avx512", "avx2", "torch")
"""CPU back ends, fastest first. `triton` is for CUDA devices (`skipdecode.backends.device`)."""
VARIABLE = "SKIPDECODE_KERNELS"
"""Environment variable that forces a back end. `off` and `0` mean `torch`; empty or `auto` means the automatic
choice."""

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"})
NEEDS: dict[Name, frozenset[str]] = {
    "amx": _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512": _AVX512,
    "avx2": frozenset({"avx2", "fma", "f16c", "bmi2"}),
    "torch": frozenset(),
}
"""The flags of /proc/cpuinfo that a back end needs."""
MAX_INT8_INPUTS = 1 << 16  # more, and sums would not fit into 32 bits


class BackendError(ValueError):
    """`SKIPDECODE_KERNELS` names a back end that is unknown, or that cannot run here."""

    exit_code = 2


@dataclass(frozen=True)
class Choice:
    """The kernels that decode on a device, why they were chosen, and which types of weights follow from them."""

    name: Name
    reason: str
    dtype: Literal["bfloat16", "float32"]
    """The type that `dtype: auto` stands for."""
    no_int8: str | None
    """Why weights cannot be int8; None if they can."""

    @property
    def no_int4(self) -> str | None:
        """Why weights cannot be int4; None if they can."""
        if self.name == "triton":
            return "int4 weights are for CPUs"
        return "the back end is torch, and only amx, avx512 and avx2 have it" if self.name == "torch" else None

    def lacks(self, quantization: Quantization | None) -> str | None:
        """Why it has no weights quantized like this, of those that are for CPUs; None if it has them."""
        return {"int8": self.no_int8, "int4": self.no_int4}.get(quantization or "")

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose() -> Choice:
    """The back end of this process. Compiles its kernels on the first call.

    BackendError where `SKIPDECODE_KERNELS` asks for the impossible. Without a working compiler the automatic choice is
    `torch`, and the reason says so.
    """
    return _choose(os.environ.get(VARIABLE, "").strip().lower(), cpu_flags())


def int8_misfit(inputs: int) -> str | None:
    """Why an int8 weight cannot have so many inputs, on any back end; None if it can."""
    if inputs % 32:
        return "no multiple of 32"
    return f"above {MAX_INT8_INPUTS}: sums would not fit into 32 bits" if inputs > MAX_INT8_INPUTS else None


def possible(flags: Set[str] | None = None) -> tuple[Name, ...]:
    """The back ends that a CPU with these flags (by default this CPU) can run, fastest first."""
    have = cpu_flags() if flags is None else flags
    return tuple(name for name in NAMES if have >= NEEDS[name])


def describe_cpu(flags: Set[str] | None = None) -> str:
    """The instruction sets of a CPU that matter here, for instance `AVX-512 with BF16 and VNNI; no AMX`."""
    have = cpu_flags() if flags is None else flags
    if platform.machine().lower() not in ("x86_64", "amd64") and not have:
        return f"{platform.machine()}, for which there are no kernels"
    names = possible(have)
    if "amx" in names:
        return "AMX with BF16 and int8"
    if "avx512" in names:
        bfloat16 = "slow BF16" if has_slow_bfloat16(have) else "BF16"
        extras = [name for name, flag in ((bfloat16, "avx512_bf16"), ("VNNI", "avx512_vnni")) if flag in have]
        return f"AVX-512 {'with ' + ' and '.join(extras) if extras else 'without BF16'}; no AMX"
    return "AVX2; no AVX-512" if "avx2" in names else "no AVX2"


@cache
def cpu_flags() -> frozenset[str]:
    """This CPU's flags as Linux names them; empty on other systems and on CPUs other than x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:  # not on Linux
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


@cache
def _choose(wanted: str, flags: frozenset[str]) -> Choice:
    names = possible(flags)
    if wanted in ("", "auto"):
        return _automatic(names, flags)
    name = cast(Name, "torch" if wanted in ("off", "0") else wanted)
    if name not in names:
        kind = "is for CUDA devices" if name == "triton" else "cannot run here" if name in NAMES else "is unknown"
        raise BackendError(
            f"{VARIABLE}: {wanted} {kind}; this CPU has {describe_cpu(flags)}; possible are {', '.join(names)}"
        )
    problem = _problem(name, flags)
    if problem is not None:
        raise BackendError(f"{VARIABLE}: {name} cannot run here: {problem}; torch can")
    return make_backend(name, f"forced by {VARIABLE}; this CPU has {describe_cpu(flags)}", flags)


def _automatic(names: tuple[Name, ...], flags: frozenset[str]) -> Choice:
    """The first back end that works; the reason names what is wrong with faster ones."""
    problems: list[str] = []
    for name in names:
        problem = _problem(name, flags)
        if problem is None:
            return make_backend(name, "; ".join([describe_cpu(flags), *problems]), flags)
        problems += [] if problem in problems else [problem]
    raise AssertionError("torch always works")


def _problem(name: Name, flags: frozenset[str]) -> str | None:
    """Why a back end does not work on a CPU that has the flags it needs; None if it works."""
    if name == "torch":
        return None
    try:
        library = load(name, flags)
    except BuildError as error:
        return str(error)
    return None if library.is_allowed() else "this system does not let programs use AMX"


def make_backend(name: Name, reason: str, flags: frozenset[str]) -> Choice:
    """The choice of this back end on a CPU with these flags."""
    return Choice(name, reason, _dtype(name, flags), _why_no_int8(name, flags))


def _dtype(name: Name, flags: frozenset[str]) -> Literal["bfloat16", "float32"]:
    """bfloat16 wherever the back end multiplies it, for half of float32's bytes."""
    has_bfloat16 = name != "avx2" and bool(flags & {"avx512_bf16", "amx_bf16"})
    return "bfloat16" if has_bfloat16 else "float32"


def _why_no_int8(name: Name, flags: frozenset[str]) -> str | None:
    if name == "amx" or (name == "avx512" and flags >= {"avx512_bf16", "avx512_vnni"}):
        return None
    if name == "avx512":
        return f"the back end avx512 needs BF16 and VNNI for it, and this CPU has {describe_cpu(flags)}"
    return f"the back end is {name}, and only amx and avx512 have it"
