"""A generator of a tiny model that the files of this folder share."""

from pathlib import Path

import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from pipeline.estimate import measure


@pytest.fixture(autouse=True)
def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests ask what is made of the times, not how good they are."""
    monkeypatch.setattr(measure, "PROBES_S", 0.0)


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    decode = {"method": "skipdecode", "speedup": 2.0}
    return Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", device="cpu"))
