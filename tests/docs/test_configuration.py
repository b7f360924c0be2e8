"""docs/configuration.md is made from the configuration classes, and has every key with a meaning."""

import importlib.util
import re
from collections.abc import Iterator
from types import ModuleType

import pytest
from pydantic import BaseModel

from tests.docs.pages import GENERATED, ROOT, name


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs/generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def all_sections(generator: ModuleType) -> Iterator[type[BaseModel]]:
    """Every class of the pages, the ones within others too."""
    waiting = [generator.find(verb.cls) for verb in generator.VERBS]
    seen: set[type[BaseModel]] = set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            yield cls
            waiting += [
                found[0] for field in cls.model_fields.values() if (found := generator.section(field.annotation))
            ]


def test_the_page_is_current(generator: ModuleType) -> None:
    page = generator.make_page()
    assert GENERATED.read_text(encoding="utf-8") == page, "run `python docs/generate_configuration.py`"


def test_every_key_has_a_meaning(generator: ModuleType) -> None:
    without = [
        f"{cls.__name__}.{key}"
        for cls in all_sections(generator)
        for key, field in cls.model_fields.items()
        if not generator.meanings(cls).get(key) and generator.section(field.annotation) is None
    ]
    assert without == []


def test_every_key_of_a_run_is_on_the_page(generator: ModuleType) -> None:
    page = GENERATED.read_text(encoding="utf-8")
    keys = set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.MULTILINE))
    config = generator.find("JobConfig")().model_dump()
    assert {f"{section}.{key}" for section, keys_ in config.items() for key in keys_} - keys <= {
        "decode.ffn_skip",
        "sampling.repetition_detection",
    }
    assert {"decode.ffn_skip.threshold", "runs[].decode[].speedup", "engine.scheduler", "train.schedules"} <= keys


def test_types_are_in_words(generator: ModuleType) -> None:
    found = {
        key: generator.type_words(field.annotation, field.metadata)
        for cls in ("SamplingConfig", "ActorsConfig", "ModelConfig")
        for key, field in generator.find(cls).model_fields.items()
    }
    assert found["top_p"] == "float > 0, <= 1"
    assert found["num_actors"] == "`auto` or int >= 1 or [int, int]"
    assert found["tokenizer"] == "text or null"
    assert found["share_leftovers"] == "true or false"


def test_the_generator_is_where_the_page_says(generator: ModuleType) -> None:
    assert name(ROOT / "docs/generate_configuration.py") in GENERATED.read_text(encoding="utf-8").splitlines()[0]
