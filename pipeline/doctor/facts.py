"""Facts about this machine: cores, memory, GPUs, kernels, and what of them would hurt a run. Changes nothing."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.memory import free_bytes
from pipeline.cluster.pool import object_store_bytes
from pipeline.config.job import ConfigError
from skipdecode.backends.choice import VARIABLE, BackendError, Choice, choose, cpu_flags
from skipdecode.backends.device import choice_on
from skipdecode.backends.host_memory import num_cores, total_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """What `pipeline.cluster.machine.provenance` does not say."""

    usable_cores: int
    memory_bytes: int
    free_memory_bytes: int
    has_amx_bf16: bool
    shared_memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory_bytes: int
    free_memory_bytes: int


def cpu_backend() -> Choice:
    """The CPU back end and the reason for its choice; ConfigError if the requested one cannot run here."""
    try:
        return choose()
    except BackendError as error:
        raise ConfigError.parse(error) from error


def says_nothing_of_cpus() -> bool:
    """Whether the environment forces GPU kernels on a machine with a GPU."""
    return os.environ.get(VARIABLE, "").strip().lower() == "triton" and torch.cuda.is_available()


def cuda_backend() -> Choice | None:
    """The CUDA back end and the reason for its choice, None without a GPU; ConfigError as for `cpu_backend`."""
    if not torch.cuda.is_available():
        return None
    try:
        return choice_on(torch.device("cuda"))
    except BackendError as error:
        raise ConfigError.parse(error) from error


def machine() -> Machine:
    return Machine(
        usable_cores=num_cores(),
        memory_bytes=total_bytes(),
        free_memory_bytes=free_bytes(torch.device("cpu")),
        has_amx_bf16="amx_bf16" in cpu_flags(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
    )


def gpus() -> list[Gpu]:
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, f"{properties.major}.{properties.minor}", total, free))
    return found


def wrong_devices() -> list[str]:
    has_driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if has_driver and not torch.cuda.is_available():
        return [
            f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU; install a CUDA build of "
            "torch, or check CUDA_VISIBLE_DEVICES"
        ]
    return []


def check_shared_memory() -> list[str]:
    if not os.path.isdir("/dev/shm"):
        return []
    total = shutil.disk_usage("/dev/shm").total
    wanted = object_store_bytes()
    if total < wanted:
        return [
            f"/dev/shm holds {total / GIB:.1f} GiB, and Ray's object store wants {wanted / GIB:.1f}: it would lie on "
            "disk; give the container more (docker run --shm-size=4g)"
        ]
    return []
