"""A pytest plugin (`-p tests.support.emulated_amx`): the `amx` back end with its tiles emulated, on a CPU without AMX.

The C++ is compiled with `amx_emulation.h` in front, so that all of the back end's own code runs: packing, cuts, fusion,
prompts, int8. Needs AVX-512 with BF16.
"""

import hashlib
from collections.abc import Set
from pathlib import Path

from skipdecode.backends import build, choice

HEADER = Path(__file__).with_name("amx_emulation.h")
TILES = frozenset({"amx_tile", "amx_bf16", "amx_int8"})

_compile_flags = build.compile_flags


def compile_flags(name: str, flags: Set[str]) -> tuple[str, ...]:
    made = _compile_flags(name, flags)
    if name != "amx":
        return made
    digest = hashlib.sha256(HEADER.read_bytes()).hexdigest()[:15]  # part of the library's name, as the sources are
    return (*made, "-include", str(HEADER), f"-DAMX_EMULATION=0x{digest}")


_flags = choice.cpu_flags() | TILES
build.compile_flags = compile_flags
choice.cpu_flags = lambda: _flags  # type: ignore[assignment]
