"""Triton's kernels compiled for a device that is not there, as their launches on one would have them compiled."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from skipdecode.backends import triton_kernels

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64", torch.int32: "i32",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Compiled:
    registers: int
    stack_bytes: int
    """Spilled registers lie here."""
    loads: dict[int, int]
    """Loads of global memory by bytes for a thread, as the code has them."""
    shared_bytes: int
    warps: int


class Launches:
    """Stands in for `triton_kernels.launch` and keeps what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, kernel: Any, _grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        self.seen.append((kernel, arguments, options))


def compiled(launched: tuple[Any, tuple[Any, ...], dict[str, Any]], capability: int) -> Compiled:
    kernel, arguments, options = launched
    constants: dict[str, Any] = {key: value for key, value in options.items() if key in kernel.arg_names}
    extra = {key: value for key, value in options.items() if key not in kernel.arg_names}
    signature, attributes = dict.fromkeys(constants, "constexpr"), {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        kind, is_round = ("i32", False) if kernel.params[place].do_not_specialize else _kind(value)
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = value
        if is_round and not kernel.params[place].do_not_specialize_on_alignment:
            attributes[(place,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=extra)
    return _read(made, extra.get("num_warps", 4))


def _kind(value: Any) -> tuple[str, bool]:
    """As Triton's launcher specialises an argument: its type, and whether 16 divides it."""
    if value is None or value is True or value is False:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", value.data_ptr() % 16 == 0
    if isinstance(value, int):
        return ("constexpr", False) if value == 1 else ("i32" if abs(value) < 2**31 else "i64", value % 16 == 0)
    return "fp32", False


def _read(made: Any, warps: int) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        used = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", binary], capture_output=True, text=True, check=True
        ).stdout
    counts = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", used)}
    loads: dict[int, int] = {}
    for vector, bits in re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.b(\d+)", made.asm["ptx"]):
        size = int(vector or 1) * int(bits) // 8
        loads[size] = loads.get(size, 0) + 1
    for size in re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", made.asm["ptx"]):
        loads[int(size, 0)] = loads.get(int(size, 0), 0) + 1  # into shared memory, ahead of their use
    return Compiled(counts["REG"], counts["STACK"] + counts["LOCAL"], loads, made.metadata.shared, warps)


def launches_of(run: Any) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """What `run` launches, which is then not launched."""
    before, found = triton_kernels.launch, Launches()
    triton_kernels.launch = found  # type: ignore[assignment]
    try:
        run()
    finally:
        triton_kernels.launch = before
    return found.seen
