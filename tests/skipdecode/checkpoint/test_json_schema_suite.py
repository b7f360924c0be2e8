"""The JSON Schema Test Suite, if SKIPDECODE_JSON_SCHEMA_SUITE names its folder `tests` (the source archive of the
package jsonschema has it as `json/tests`): every schema is compiled or refused with a reason, and what the suite calls
invalid is accepted in no spelling, by tokens or by bytes. What it calls valid is counted; docs/corpus.md says what of
it is never written.

    SKIPDECODE_JSON_SCHEMA_SUITE=jsonschema-4.26.0/json/tests pytest -s -m slow tests/skipdecode/checkpoint -k suite
"""

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skipdecode.checkpoint.grammar import Grammar
from skipdecode.checkpoint.model_config import read_config
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.structured_outputs import StructuredOutputs

pytest.importorskip("llguidance")
SUITE = os.environ.get("SKIPDECODE_JSON_SCHEMA_SUITE")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SUITE is None, reason="SKIPDECODE_JSON_SCHEMA_SUITE names no folder"),
]
DEMO = Path(__file__).parents[3] / "models" / "opt-e2e"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MAX_ORDERS = 24
"""Orders of keys that are tried."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO, read_config(DEMO))


def spellings(value: Any) -> Iterator[str]:
    """The value as JSON: with and without spaces, and with its keys in other orders."""
    for ordered in itertools.islice(orders(value), MAX_ORDERS):
        for separators in ((", ", ": "), (",", ":")):
            yield json.dumps(ordered, ensure_ascii=False, separators=separators)


def byte_tokens() -> dict[int, int]:
    """The token of each byte in a byte-level vocabulary, whose names are those of GPT-2: bytes that cannot be printed
    are the characters from 256 on."""
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: vocabulary[name] for byte, name in names.items()}


def orders(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        yield value
        return
    for keys in itertools.permutations(value):
        yield {key: value[key] for key in keys}


def cases(draft: str) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """What it is called, the schema and its tests; the folder `optional` is left out."""
    for path in sorted((Path(SUITE or "") / draft).glob("*.json")):
        for case in json.loads(path.read_text(encoding="utf-8")):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft]} | schema
            yield f"{path.stem}: {case['description']}", schema, case["tests"]


def is_accepted(grammar: Grammar, text: str, tokenizer: Tokenizer, by_byte: dict[int, int]) -> bool:
    """Whether the matcher takes the text, by its tokens or by single bytes."""
    (tokens,) = tokenizer.encode_rendered([text])
    return grammar.matches(tokens) or grammar.matches([by_byte[byte] for byte in text.encode()])


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_json_schema_test_suite(draft: str, tokenizer: Tokenizer) -> None:
    by_byte = byte_tokens()
    counts, refused, too_much, not_taken = Counter[str](), Counter[str](), [], Counter[str]()
    for title, schema, tests in cases(draft):
        counts["schemas"] += 1
        try:
            grammar = tokenizer.grammars.compile(StructuredOutputs.of({"json": schema}))
        except ValueError as error:
            reason = str(error).removeprefix("structured_outputs.json: ")
            assert reason.strip(), title
            refused[reason[:60]] += 1
            continue
        counts["compiled"] += 1
        for test in tests:
            accepted = [text for text in spellings(test["data"]) if is_accepted(grammar, text, tokenizer, by_byte)]
            kind = "valid" if test["valid"] else "invalid"
            counts[f"{kind}, {'accepted' if accepted else 'not accepted'}"] += 1
            if accepted and not test["valid"]:
                too_much.append(f"{title}: {test['description']}: {accepted[0]}")
            if not accepted and test["valid"]:
                not_taken[title] += 1
    print(f"\n{draft}: {dict(counts)}")
    print("refused:", *refused.most_common(), sep="\n    ")
    print("valid, and not taken:", *not_taken.most_common(), sep="\n    ")
    assert not too_much, "\n".join(too_much)
