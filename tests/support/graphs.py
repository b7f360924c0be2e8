"""Graphs without a device: the CUDA back end with torch's operators on the CPU, and captures that count or fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from skipdecode.backends.cuda import CudaBackend
from skipdecode.backends.cuda_reference import TorchKernels
from skipdecode.captures import Work
from skipdecode.decoder import Decoder
from tests.support.cuda_models import cpu_computed_by


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Everything on the CPU as CUDA devices do it; models are packed within."""
    with cpu_computed_by(CudaBackend(TorchKernels())):
        yield


class FakeCaptures:
    """A capture does nothing, a replay does the work again. `fails`: what a capture raises."""

    def __init__(self, fails: Exception | None = None, graph_bytes: int = 0) -> None:
        self.fails, self.graph_bytes = fails, graph_bytes
        self.warm_ups = self.captures = self.replays = self.forgotten = 0

    def warm_up(self, work: Work) -> None:
        self.warm_ups += 1
        work()

    def capture(self, work: Work) -> Callable[[], None]:
        self.captures += 1
        if self.fails is not None:
            raise self.fails

        def replay() -> None:
            self.replays += 1
            work()

        return replay

    def forget(self) -> None:
        self.forgotten += 1

    def held_bytes(self) -> int:
        return self.captures * self.graph_bytes


def forget_memory(model: Decoder, memory: torch.Tensor) -> None:
    """Nothing but what a row has written may matter: all else becomes NaN."""
    with torch.inference_mode():
        memory.fill_(torch.nan)
