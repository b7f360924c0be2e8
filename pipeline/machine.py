"""What a figure is worth nothing without: the day, the device and the versions it was measured with."""

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version

import torch

from pipeline.units import Json


def provenance(device: torch.device, packages: Sequence[str] = ("torch",)) -> dict[str, Json]:
    """`date`, `device`, `cores` (of a CPU: torch threads), and the version of each package."""
    is_cuda = device.type == "cuda"
    found: dict[str, Json] = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "cores": None if is_cuda else torch.get_num_threads(),
    }
    for name in packages:
        found[name] = torch.__version__ if name == "torch" else version(name)
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # no Linux
        return platform.processor()
