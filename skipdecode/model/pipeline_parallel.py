"""On which devices and in which type a model computes.

Where nobody says it, on a GPU if there is one. A model that does not fit one device has its layers on several. They are
dealt like cards, a few at a time, and not cut in the middle: schedules skip low and middle layers, so the device with
the upper half would have nearly all the work. Dealt out, each device holds its share of every plan.

Rows go through in as many parts as there are devices: while one part is on a device, the next is on the one before. The
order in which the host launches is enough for that, as it waits for nothing (`in_phases`).
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

BLOCK = 2  # layers dealt at a time: to go to the next device costs little beside the weights of two large layers

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
    """Those that one worker decodes on: the first `count` GPUs that it sees; of a CPU as many times itself. ValueError
    where there are fewer."""
    if device.type != "cuda" or count == 1:
        return (device,) * count
    if (found := torch.cuda.device_count()) < count:
        raise ValueError(f"{found} GPUs are visible here, and actors.num_gpus asks for {count}")
    return tuple(torch.device("cuda", number) for number in range(count))


def dtype_name(dtype: torch.dtype) -> str:
    """As configurations write it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of a name in DTYPES; `auto` is what the device's back end takes."""
    if name not in DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, backend_on(device).dtype if name == "auto" else name)
    return dtype


@dataclass(frozen=True)
class Placement:
    """Which of `devices` each layer is on. Embedding, head, tokens and sampling are on the first."""

    devices: tuple[torch.device, ...]
    of_layer: tuple[int, ...]
    """[L] numbers of devices."""

    @property
    def num_parts(self) -> int:
        """In which the rows of a batch go through."""
        return len(self.devices)

    def of_weight(self, name: str) -> torch.device:
        """Where a parameter of `Decoder` belongs."""
        kind, _, rest = name.partition(".")
        return self.devices[self.of_layer[int(rest.partition(".")[0])] if kind == "blocks" else 0]

    @property
    def of_layers(self) -> list[torch.device]:
        """[L]"""
        return [self.devices[number] for number in self.of_layer]


def deal(num_layers: int, devices: Sequence[torch.device]) -> Placement:
    """Layers in turns, BLOCK at a time; ValueError where there are fewer layers than devices."""
    if num_layers < len(devices):
        raise ValueError(f"{num_layers} layers cannot be on {len(devices)} devices; lower actors.num_gpus")
    block = min(BLOCK, num_layers // len(devices))
    return Placement(tuple(devices), tuple(layer // block % len(devices) for layer in range(num_layers)))


@lru_cache(maxsize=4096)
def cut(groups: Groups, of_layer: tuple[int, ...]) -> Groups:
    """`LayerRanges.groups` of which none is on two devices."""
    found: list[list[int]] = []
    for group in groups:
        for at, layer in enumerate(group):
            if at and of_layer[layer] == of_layer[found[-1][-1]]:
                found[-1].append(layer)
            else:
                found.append([layer])
    return tuple(map(tuple, found))


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of ours are launched on the current device, wherever their arguments are."""
    is_there = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device(device) if is_there else nullcontext()


def in_phases(runs: Sequence[Generator[None, None, T]]) -> list[T]:
    """What each of `runs` gives back: they work at the same time, each a phase behind the one before it.

    A run pauses twice in a phase: behind the copy of its states to the next device, and behind its work there. In each
    phase all copies are launched, and then all work: torch puts a copy on the streams of both devices, behind what they
    have to do. Behind the work of the same phase, it would keep one device waiting for the other.
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
    """What `run` gives back, without a pause."""
    return in_phases([run])[0]
