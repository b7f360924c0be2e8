"""Asynchronous copies of a step's output to the host, which overlap with the steps that follow.

On CUDA, output is copied to pinned memory and an event is recorded after the copy, so that reading waits for that
output and not for work launched since. Elsewhere it is available at once.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Owner = TypeVar("Owner")


class AsyncOutput(Generic[Owner]):
    """A queue of outputs on their way to the host, each with the rows that it belongs to (`owner`)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[list[Tensor], Any, Owner]] = deque()

    @property
    def num_pending(self) -> int:
        """Outputs that were sent and not yet taken."""
        return len(self._pending)

    def send(self, output: Sequence[Tensor], owner: Owner) -> None:
        """Starts copying tensors of any shape, which nothing may write into any more; `take` returns `owner` too."""
        tensors, event = list(output), None
        if self._device.type == "cuda":
            tensors = [_pinned_like(t).copy_(t, non_blocking=True) for t in tensors]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))  # which need not be the current device
        self._pending.append((tensors, event, owner))

    def take(self) -> tuple[list[Tensor], Owner]:
        """The oldest pending output, on the host, and its owner; waits for the copy."""
        tensors, event, owner = self._pending.popleft()
        if event is not None:
            event.synchronize()
        return tensors, owner


def _pinned_like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
