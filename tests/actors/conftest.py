"""Generators of a tiny model that the files of this folder share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors import generator as module
from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from skipdecode.engine.continuous_batch import ContinuousBatch
from skipdecode.engine.generate import generate, refill
from skipdecode.engine.request import Request
from skipdecode.engine.results import BatchResult
from tests.support.engine_helpers import DECODE
from tests.support.random_requests import BUCKETS, SKIP


@pytest.fixture(scope="module")
def folder(ending_checkpoint: Callable[[str], Path]) -> Path:
    return ending_checkpoint("125m")


@pytest.fixture
def build(folder: Path) -> Callable[..., Generator]:
    def make(**changes: Any) -> Generator:
        base: dict[str, Any] = {"source": str(folder), "decode": SKIP, "dtype": "float32", "device": "cpu"}
        return Generator(GeneratorConfig(**(base | {"length_buckets": BUCKETS, "batch_size": 4} | changes)))

    return make


@pytest.fixture(scope="module")
def shared(folder: Path) -> Generator:
    return Generator(GeneratorConfig(str(folder), SKIP, dtype="float32", batch_size=4, length_buckets=BUCKETS))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, Any]]]:
    """(ids, keyword arguments and the schedule) of every call of `generate` or `refill`; the calls go through."""
    seen: list[tuple[list[str], dict[str, Any]]] = []

    def spy(model: Any, requests: Sequence[Request], schedule: Any, **keys: Any) -> BatchResult:
        seen.append(([r.id for r in requests], keys | {"schedule": schedule}))
        return generate(model, requests, schedule, **keys)

    def spy_on_refill(batch: ContinuousBatch, requests: Sequence[Request], **keys: Any) -> BatchResult:
        seen.append(([r.id for r in requests], keys | {"schedule": batch.schedule}))
        return refill(batch, requests, **keys)

    monkeypatch.setattr(module, "generate", spy)
    monkeypatch.setattr(module, "refill", spy_on_refill)
    return seen


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    return Generator(GeneratorConfig(str(tiny_checkpoint), DECODE, dtype="float32", num_threads=1))
