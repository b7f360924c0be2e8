"""The devices and the dtype that a model computes with, and pipeline parallelism over several devices.

A model that does not fit on one device has its layers on several. They are assigned in small blocks, round robin,
rather than in contiguous halves: schedules skip low and middle layers, so the device with the upper half would do
nearly all the work. With round robin each device holds its share of every plan.

A batch is cut into as many parts as there are devices: while one part is on a device, the next is on the device before.
The order in which the host launches work achieves that, since it never waits (`in_phases`).
"""

import re
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

from skipdecode.backends.device import backend_on

BLOCK = 2  # layers assigned at a time: moving states costs little compared with the weights of two large layers

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]


DTYPES = ("auto", "float32", "bfloat16", "float16")


def choose_device(name: str) -> torch.device:
    """The device of a name such as `cpu` or `cuda:1`; `auto` is the GPU if there is one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device: must be auto, cpu or cuda, got {name!r}")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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


@dataclass(frozen=True)
class Placement:
    """The assignment of layers to `devices`. Embedding, LM head, tokens and sampling are on the first."""

    devices: tuple[torch.device, ...]
    of_layer: tuple[int, ...]
    """[L] indices into `devices`."""

    @property
    def num_parts(self) -> int:
        """The number of parts that a batch is cut into."""
        return len(self.devices)

    def of_weight(self, name: str) -> torch.device:
        """The device of a parameter of `Decoder`."""
        kind, _, rest = name.partition(".")
        return self.devices[self.of_layer[int(rest.partition(".")[0])] if kind == "blocks" else 0]

    @property
    def of_layers(self) -> list[torch.device]:
        """[L] the device of each layer."""
        return [self.devices[number] for number in self.of_layer]


def deal(num_layers: int, devices: Sequence[torch.device]) -> Placement:
    """Assigns layers round robin, BLOCK at a time. Raises ValueError if there are fewer layers than devices."""
    if num_layers < len(devices):
        raise ValueError(f"{num_layers} layers cannot be on {len(devices)} devices; lower actors.num_gpus")
    block = min(BLOCK, num_layers // len(devices))
    return Placement(tuple(devices), tuple(layer // block % len(devices) for layer in range(num_layers)))


@lru_cache(maxsize=4096)
def cut(groups: Groups, of_layer: tuple[int, ...]) -> Groups:
    """`LayerRanges.groups`, split so that no group is on two devices."""
    found: list[list[int]] = []
    for group in groups:
        for at, layer in enumerate(group):
            if at and of_layer[layer] == of_layer[found[-1][-1]]:
                found[-1].append(layer)
            else:
                found.append([layer])
    return tuple(map(tuple, found))


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one, since our kernels are launched there wherever their arguments are."""
    is_there = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device(device) if is_there else nullcontext()


def in_phases(runs: Sequence[Generator[None, None, T]]) -> list[T]:
    """Runs generators concurrently, each starting one phase after the previous one; returns their results.

    A run yields twice per phase: after the copy of its states to the next device, and after its work there. Each phase
    launches all copies, then all work: torch orders a copy after the pending work of both devices, so a copy launched
    after the work of the same phase would make one device wait for the other.
    """
    made: dict[int, T] = {}
    waiting, active = deque(enumerate(runs)), list[tuple[int, Generator[None, None, T]]]()
    while waiting or active:
        if waiting:
            active.append(waiting.popleft())
        for _ in ("copies", "work"):
            for number, run in tuple(active):
                try:
                    next(run)
                except StopIteration as end:
                    made[number] = end.value
                    active.remove((number, run))
    return [made[number] for number in range(len(runs))]


def finish(run: Generator[None, None, T]) -> T:
    """Runs one generator to its end; returns its result."""
    return in_phases([run])[0]
