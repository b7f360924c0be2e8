"""Graphs without a device: the CUDA back end with torch's operators on the CPU, and captures that count or fail."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skipdecode.backends.cuda_backend import CudaBackend
from skipdecode.checkpoint.weights import load_model
from skipdecode.config.sampling import Sampling
from skipdecode.engine.cuda_graphs import GraphCapture, Work
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from tests.support.cuda_models import CheckedKernels, cpu_computed_by
from tests.support.naive import random_prompts

L = 6
ROOM = 1 << 24
Ending = Callable[[str], Path]


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Everything on the CPU as CUDA devices do it; models are packed within."""
    with cpu_computed_by(CudaBackend(CheckedKernels())):
        yield


class FakeCaptures(GraphCapture):
    """A capture does nothing, a replay does the work again. `fails`: what a capture raises; `fails_at`: only captures
    of these numbers, from 1 on."""

    def __init__(
        self, fails: Exception | None = None, graph_bytes: int = 0, fails_at: Collection[int] | None = None
    ) -> None:
        self.fails, self.graph_bytes, self.fails_at = fails, graph_bytes, fails_at
        self.warm_ups = self.captures = self.replays = self.forgotten = 0

    def warm_up(self, work: Work) -> None:
        self.warm_ups += 1
        work()

    def capture(self, work: Work) -> Callable[[], None]:
        self.captures += 1
        if self.fails is not None and (self.fails_at is None or self.captures in self.fails_at):
            raise self.fails

        def replay() -> None:
            self.replays += 1
            work()

        return replay

    def forget(self) -> None:
        self.forgotten += 1

    def held_bytes(self) -> int:
        return self.captures * self.graph_bytes


def make_requests(lengths: list[int], num_new: int, *, seed: int = 3, **keys: float) -> list[Request]:
    sampling = Sampling(max_new_tokens=num_new, **keys)  # type: ignore[arg-type]
    return [Request(f"row-{i}", p, sampling) for i, p in enumerate(random_prompts(lengths, seed=seed))]


@pytest.fixture(autouse=True, scope="module")
def as_cuda() -> Iterator[None]:
    with cpu_as_cuda():
        yield


@pytest.fixture(scope="module")
def model(ending_checkpoint: Ending) -> Decoder:
    return load_model(ending_checkpoint("125m")).pack()
