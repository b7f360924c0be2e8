"""Tokens on their way to the host: copied beside the steps that follow, and waited for when they are looked at.

On CUDA through pinned memory, with an event behind the copy, so that a look waits for its own tokens and not for what
was launched since. Elsewhere tokens are there at once. What a look means is the caller's
(`skipdecode.engine.static_batch`,
`skipdecode.engine.continuous_batch`). What goes with tokens (log-probabilities) goes the same way.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Of = TypeVar("Of")
"""What says whose the tokens are."""


class AsyncOutput(Generic[Of]):
    """First sent, first taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: deque[tuple[list[Tensor], Any, Of]] = deque()

    @property
    def num_pending(self) -> int:
        """Not taken yet."""
        return len(self._sent)

    def send(self, made: Sequence[Tensor], of: Of) -> None:
        """Tensors of the device, of any shape, that nobody writes into any more; `of` comes back with them."""
        tensors, event = list(made), None
        if self._device.type == "cuda":
            tensors = [_pinned_like(t).copy_(t, non_blocking=True) for t in tensors]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))  # which need not be the current device
        self._sent.append((tensors, event, of))

    def take(self) -> tuple[list[Tensor], Of]:
        """The tensors, on the host, and whose they are."""
        tensors, event, of = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return tensors, of


def _pinned_like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
