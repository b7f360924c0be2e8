"""An endpoint of a tiny model over real HTTP, without Ray."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from pipeline.service.endpoint import Endpoint
from tests.support.service_helpers import local, make_endpoint


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path) -> Generator:
    decode = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
    return Generator(GeneratorConfig(str(tiny_checkpoint), decode, dtype="float32", num_threads=1))


@pytest.fixture
def endpoint(generator: Generator, request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    made = make_endpoint(generator, **getattr(request, "param", {}))
    yield made
    made.close()


@pytest.fixture
def url(endpoint: Endpoint) -> Iterator[str]:
    with local(endpoint) as running:
        yield running
