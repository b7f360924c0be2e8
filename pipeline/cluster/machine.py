"""The provenance of a measurement: date, device and versions."""

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import TypedDict

import torch

from pipeline.formatting import Json


class DeviceFacts(TypedDict):
    date: str
    device: str
    cores: int | None
    """torch threads of a CPU; None on GPUs."""


def device_facts(device: torch.device) -> DeviceFacts:
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "cores": None if is_cuda else torch.get_num_threads(),
    }


def version_of(package: str) -> str:
    """torch says more of its build than its package does."""
    return torch.__version__ if package == "torch" else version(package)


def provenance(device: torch.device, packages: Sequence[str] = ("torch",)) -> dict[str, Json]:
    """`device_facts`, and the version of each package under its name."""
    facts = device_facts(device)
    found: dict[str, Json] = {"date": facts["date"], "device": facts["device"], "cores": facts["cores"]}
    return found | {name: version_of(name) for name in packages}


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # no Linux
        return platform.processor()
