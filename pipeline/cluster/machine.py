"""The device of a measurement, and its provenance: date, device and versions."""

import datetime
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import TypedDict

import torch

from pipeline.config.tree import ConfigError
from pipeline.formatting import Json
from skipdecode.model.devices import available_device


def device_to_measure(name: str) -> torch.device:
    """The device that the key `device` names; ConfigError if torch does not see it."""
    try:
        return available_device(name)
    except ValueError as error:
        raise ConfigError.parse(error) from error


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
    except (OSError, StopIteration):  # not on Linux
        return platform.processor()
