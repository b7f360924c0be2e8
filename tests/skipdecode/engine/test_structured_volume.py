"""2,000 answers of a model under each kind of structure, as a worker decodes them: greedy and sampled, skipping and at
full depth, in drafts, with shared prefixes, in batches that are kept full and in fixed ones. The validators are
jsonschema and re.

The demo model, and the one that SKIPDECODE_REAL_MODEL names (SmolLM2-135M-Instruct), which is not tuned to skip: what
it writes under a schedule is garbage in the right form. SKIPDECODE_STRUCTURED_ROWS: instead of 72 in each of the 28
combinations.

    SKIPDECODE_REAL_MODEL=SmolLM2.gguf pytest -s -m slow tests/skipdecode/engine/test_structured_volume.py -k real
"""

import itertools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from pipeline.demo.restaurant_prompts import make_prompts
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.service_helpers import DEMO

pytest.importorskip("llguidance")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
REAL = os.environ.get("SKIPDECODE_REAL_MODEL")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "food": {"enum": ["Italian", "French", "東京"]},
        "rating": {"type": "integer", "minimum": 1, "maximum": 50},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "maxItems": 2},
        "open": {"type": ["boolean", "null"]},
    },
    "required": ["name", "food", "rating"],
    "additionalProperties": False,
}
CHOICES = ["cheap", "cheap but good", "moderate", "high", "not said"]
STRUCTURES: dict[str, dict[str, Any]] = {
    "json schema": {"json": SCHEMA},
    "json object": {"json_object": True},
    "regex": {"regex": r"The [A-Z][a-z]{1,8} is (a pub|an inn), [1-5]/5( and (cheap|dear))?\."},
    "choice": {"choice": CHOICES},
    "grammar": {"grammar": 'start: item ("; " item)? "."\nitem: /[a-z]{2,8}/ "[" /[A-Z][a-z ]{0,9}/ "]"'},
}
GRAMMAR = r"[a-z]{2,8}\[[A-Z][a-z ]{0,9}\](; [a-z]{2,8}\[[A-Z][a-z ]{0,9}\])?\."
DECODES: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "2x": {"method": "skipdecode", "speedup": 2},
    "3x": {"method": "skipdecode", "speedup": 3},
    "lossless": {"method": "skipdecode", "speedup": 3, "lossless": True},
}
HEAD = "Restaurants of the town, with what they serve, where they are and what their guests say of them. " * 4
ROWS, EVERY = int(os.environ.get("SKIPDECODE_STRUCTURED_ROWS", "72")), 4
"""Answers with a structure in each of 28 combinations, and after how many of them comes one without."""
MOST_TOKENS = 110


def is_valid(kind: str, text: str) -> bool:
    if kind == "choice":
        return text in CHOICES
    if kind in ("regex", "grammar"):
        return re.fullmatch(GRAMMAR if kind == "grammar" else STRUCTURES["regex"]["regex"], text) is not None
    try:
        jsonschema.validate(json.loads(text), SCHEMA if kind == "json schema" else {"type": "object"})
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@pytest.fixture(
    scope="module",
    params=["demo", pytest.param("real", marks=pytest.mark.skipif(REAL is None, reason="SKIPDECODE_REAL_MODEL: none"))],
)
def generators(request: pytest.FixtureRequest) -> dict[tuple[str, bool], Generator]:
    """By the name of the schedule, and whether batches are fixed."""
    made = {}
    source = DEMO if request.param == "demo" else str(REAL)
    for is_fixed in (False, True):
        config = GeneratorConfig(
            source,
            DECODES["full"],
            dtype="float32",
            batch_size=32,
            deterministic=is_fixed,
            shares_prefixes=not is_fixed,
        )
        first = Generator(config)
        made |= {(name, is_fixed): first.with_decode(decode) for name, decode in DECODES.items()}
    return made


def answers_of(generator: Generator, requests: Sequence[Request]) -> tuple[list[Completion], int]:
    """The answers, and how many tokens of prompts were shared."""
    result = generator(requests)
    completions = [answer for answer in result.answers if isinstance(answer, Completion)]
    assert len(completions) == len(requests), result.answers
    return completions, sum(record["prefix_tokens_saved"] for record in result.batches)


@pytest.mark.parametrize("kind", STRUCTURES)
def test_every_text_that_ended_has_its_structure(kind: str, generators: dict[tuple[str, bool], Generator]) -> None:
    tokenizer = generators["full", False].tokenizer
    rows = ended = 0
    for temperature, head in itertools.product((0.0, 1.0), ("", HEAD)):
        prompts = [row["prompt"] for row in make_prompts(ROWS, seed=len(head))]
        tokens = tokenizer.encode([head + prompt for prompt in prompts])
        free = Sampling(40, temperature, seed=3)
        asked = Sampling(MOST_TOKENS, temperature, seed=3).with_parameters({"structured_outputs": STRUCTURES[kind]})
        plain = [Request(f"p{number}", own, free) for number, own in enumerate(tokens) if number % EVERY == 0]
        structured = [Request(f"s{number}", own, asked) for number, own in enumerate(tokens)]
        found: dict[tuple[str, bool], list[list[int]]] = {}
        for name, is_fixed in itertools.product(DECODES, (False, True)):
            if name == "lossless" and is_fixed:
                continue  # drafts have no fixed shapes
            generator = generators[name, is_fixed]
            where = f"{kind}, {name}, temperature {temperature}, {'fixed' if is_fixed else 'kept full'}"
            made, num_shared = answers_of(generator, [*structured, *plain])
            assert num_shared == 0 if is_fixed else num_shared >= 10 * len(made) * bool(head), where
            found[name, is_fixed] = [row.tokens for row in made]
            alone, _ = answers_of(generator, plain)
            assert [row.tokens for row in made[ROWS:]] == [row.tokens for row in alone], where
            for row in made[:ROWS]:
                text = tokenizer.decode(row.tokens)
                rows += 1
                assert row.is_valid == is_valid(kind, text), (where, text)
                if row.finish_reason == "stop":
                    ended += 1
                    assert row.is_valid, (where, text)
        assert found["lossless", False] == found["full", False], f"{kind}, temperature {temperature}"
        for name in ("full", "2x", "3x"):
            assert found[name, False] == found[name, True], f"{kind}, {name}, temperature {temperature}"
    print(f"{kind}: {rows} answers, {ended} ended and are valid")
    assert rows == 28 * ROWS
    assert ended >= (0.05 if kind == "json object" else 0.95) * rows
