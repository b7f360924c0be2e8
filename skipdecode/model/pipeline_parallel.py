"""Pipeline parallelism: the layers of one model on several devices.

A model that does not fit on one device has its layers on several. They are assigned in small blocks, round robin,
rather than in contiguous halves: schedules skip low and middle layers, so the device with the upper half would do
nearly all the work. With round robin each device holds its share of every plan.

A batch is cut into as many parts as there are devices: while one part is on a device, the next is on the device before.
The order in which the host launches work achieves that, since it never waits (`in_phases`).
"""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch

BLOCK = 2  # layers assigned at a time: moving states costs little compared with the weights of two large layers

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]


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
