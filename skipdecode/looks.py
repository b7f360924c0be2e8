"""Tokens on their way to the host: copied beside the steps that follow, and waited for when they are looked at.

On CUDA through pinned memory, with an event behind the copy, so that a look waits for its own tokens and not for what
was launched since. Elsewhere tokens are there at once. What a look means is the caller's (`skipdecode.cohort`).

B rows, n steps.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Looks:
    """First sent, first taken."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._sent: deque[tuple[Tensor, Any, list[int]]] = deque()

    @property
    def num_sent(self) -> int:
        """Not taken yet."""
        return len(self._sent)

    def send(self, made: Sequence[Tensor], live: list[int]) -> None:
        """Tokens of n steps, [B] int64 each; `live` says whose the rows are."""
        tokens, event = torch.stack(list(made), dim=1), None  # [B, n]
        if self._is_cuda:
            host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            tokens = host.copy_(tokens, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._sent.append((tokens, event, live))

    def take(self) -> tuple[list[list[int]], list[int]]:
        """The n tokens of each row, and whose rows these are."""
        tokens, event, live = self._sent.popleft()
        if event is not None:
            event.synchronize()
        return tokens.tolist(), live
