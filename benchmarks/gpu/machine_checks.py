"""Checks of the machine: what nvidia-smi and torch report, and whether decode steps can be captured."""

import csv
import io
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from actors.memory import DeviceMemory
from benchmarks.gpu.check_context import CheckContext, CheckFailed, Found
from skipdecode.backends.device import backend_on

FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
    "power.draw", "power.limit", "clocks.sm", "clocks.max.sm", "clocks.max.memory", "mig.mode.current",
)  # fmt: skip
UNKNOWN = ("n/a", "not supported", "not available", "unknown error")
"""What nvidia-smi prints in brackets instead of a value."""


def check_device(context: CheckContext) -> Found:
    """Checks that the device computes and has free memory; reports what it is and its software's versions."""
    if torch.ones(1 << 20, device=context.device).sum().item() != 1 << 20:
        raise CheckFailed("the device adds up a million ones to another number; it or its driver is broken")
    found: Found = versions() | {"backend": type(backend_on(context.device)).__name__, "nvidia_smi": nvidia_smi()}
    if context.device.type == "cuda":
        memory, (major, minor) = DeviceMemory.of(context.device), torch.cuda.get_device_capability(context.device)
        found |= {"name": torch.cuda.get_device_name(context.device), "capability": f"{major}.{minor}"}
        found |= {"memory_bytes": memory.total, "free_bytes": memory.free}
        if memory.free < memory.total // 2:
            held = memory.total - memory.free
            raise CheckFailed(f"others hold {held} of {memory.total} bytes of the device; free it first", found)
    return found


def check_kernels(context: CheckContext) -> Found:
    """Checks that steps can be captured, which needs kernels that read their bounds on the device."""
    if not backend_on(context.device).supports_graph_capture:
        raise CheckFailed(
            "the kernels here read no bounds on the device, so steps cannot be CUDA graphs; install triton and unset "
            "SKIPDECODE_KERNELS"
        )
    if torch.backends.cuda.cudnn_sdp_enabled():
        raise CheckFailed(
            "cuDNN's attention is on: it builds a plan for nearly every step; skipdecode.backends turns it off"
        )
    return {"supports_graph_capture": True}


def versions() -> Found:
    """Versions of Python and of the packages that decode on a GPU; None for those that are not installed."""
    found: Found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "ray", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found | {"cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None}


def nvidia_smi() -> Found:
    """The driver, its CUDA version and every device of the machine; `problem` where nvidia-smi fails."""
    try:
        head = _asked()
        rows = parse_devices(_asked(f"--query-gpu={','.join(FIELDS)}", "--format=csv"))
    except (OSError, subprocess.SubprocessError) as error:
        output = str(getattr(error, "stdout", None) or "").strip() or str(error)  # its refusals go to stdout
        return {"problem": output.splitlines()[-1][:300], "devices": []}
    return {"driver": rows[0]["driver_version"] if rows else None, "cuda": parse_cuda(head), "devices": rows}


def parse_devices(text: str) -> list[dict[str, str | None]]:
    """A dictionary per line of `nvidia-smi --query-gpu=... --format=csv`, with None for fields without a value."""
    header, *lines = list(csv.reader(io.StringIO(text), skipinitialspace=True)) or [[]]
    names = [name.partition(" [")[0] for name in header]  # values are followed by their unit, too
    rows = [dict(zip(names, map(str.strip, line), strict=True)) for line in lines if line]
    return [
        {name: None if value.strip("[]").lower() in UNKNOWN else value for name, value in row.items()} for row in rows
    ]


def parse_cuda(text: str) -> str | None:
    """The newest CUDA version that the driver supports, from the header of plain `nvidia-smi`."""
    found = re.search(r"CUDA (?:UMD )?Version:\s*(\d+(?:\.\d+)*)", text)
    return found[1] if found else None


def _asked(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("nvidia-smi is not on PATH")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout
