"""The devices and the dtype that a model computes with, from the names that configurations give."""

import re

import torch

from skipdecode.backends.device import backend_on

DTYPES = ("auto", "float32", "bfloat16", "float16")


def choose_device(name: str) -> torch.device:
    """The device of a name such as `cpu` or `cuda:1`; `auto` is the GPU if there is one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: must be auto, cpu or cuda, got {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def available_device(name: str) -> torch.device:
    """`choose_device`; ValueError if torch does not see that device."""
    device = choose_device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        missing = "CUDA device" if device.index is None else device
        raise ValueError(f"device: torch sees no {missing}; use cpu")
    return device


def devices_of(device: torch.device, count: int) -> tuple[torch.device, ...]:
    """The devices that one worker decodes on: the first `count` visible GPUs, or the CPU `count` times. Raises
    ValueError if there are fewer GPUs."""
    if device.type != "cuda" or count == 1:
        return (device,) * count
    if (found := torch.cuda.device_count()) < count:
        raise ValueError(f"{found} GPUs are visible here, and actors.num_gpus asks for {count}")
    return tuple(torch.device("cuda", number) for number in range(count))


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as configurations write it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a name in DTYPES; `auto` is what the device's back end takes."""
    if name not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, backend_on(device).dtype if name == "auto" else name)
    return dtype
