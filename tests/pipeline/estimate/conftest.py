"""A generator of a tiny model that the files of this folder share."""

from pathlib import Path

import pytest

from actors.generator import Generator, GeneratorConfig


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    decode = {"method": "skipdecode", "speedup": 2.0}
    return Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", device="cpu"))
