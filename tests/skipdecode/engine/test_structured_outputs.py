"""Structured outputs: every text that ended is one that an independent validator takes, in every kind of batch, and
rows without a structure are what they are alone. Random models: what they write by themselves is never JSON."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.checkpoint import grammar_trial
from skipdecode.checkpoint.detokenizer import answer_text
from skipdecode.checkpoint.grammar import GrammarTooComplex, fill_all
from skipdecode.checkpoint.grammar_trial import is_risky
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.config.structured_outputs import StructuredOutputs
from skipdecode.engine.generate import generate, generate_continuous
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.lossless import Lossless
from skipdecode.schedules.schedule import SkipDecode
from skipdecode.speculative.generate_lossless import generate_lossless
from tests.support.examples import examples
from tests.support.hf_tokens import FULL, L, Load
from tests.support.lossless_models import Erratic
from tests.support.naive import random_prompts

pytest.importorskip("llguidance")

DRAFTS = SkipDecode(L, 4, 4, 1, 1)


@pytest.fixture(scope="module")
def model(ending_checkpoint: Callable[[str], Path], ours: Load) -> Decoder:
    return ours(ending_checkpoint("125m"))


@pytest.fixture(scope="module")
def tokenizer(ending_checkpoint: Callable[[str], Path], model: Decoder) -> Tokenizer:
    return Tokenizer(ending_checkpoint("125m"), model.config)


def sampling(structure: dict[str, Any], **keys: Any) -> Sampling:
    return Sampling(**({"max_new_tokens": 90} | keys)).with_parameters({"structured_outputs": structure})


def request(name: str, prompt: list[int], own: Sampling, tokenizer: Tokenizer) -> Request:
    asked = own.structured_outputs
    return Request(name, prompt, own, grammar=None if asked is None else tokenizer.grammars.compile(asked))


def is_valid(structure: dict[str, Any], text: str) -> bool:
    ((kind, own),) = structure.items()
    if kind == "regex":
        return re.fullmatch(own, text) is not None
    if kind == "choice":
        return text in own
    if kind == "grammar":
        return re.fullmatch(r"-?\d+([+*]-?\d+)*", text) is not None
    try:
        value = json.loads(text)
        jsonschema.validate(value, own if kind == "json" else {"type": "object"})
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


STRUCTURES: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
              "tag": {"enum": ["a", "bc", "ü"]}, "t": {"type": "string", "maxLength": 4}},
              "required": ["n", "tag", "t"], "additionalProperties": False}},
    {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}},
    {"regex": r"(yes|no), [0-9]{2,4}( [a-c]{1,3}){0,2}"},
    {"choice": ["yes", "no", "perhaps not", "perhaps"]},
    {"grammar": 'start: NUMBER (OP NUMBER)?\nOP: "+" | "*"\nNUMBER: /-?[0-9]{1,3}/'},
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_that_ended_is_valid_and_neighbours_are_unchanged(
    model: Decoder, tokenizer: Tokenizer, temperature: float
) -> None:
    prompts = random_prompts([5, 12, 3, 9, 7, 2, 8, 4, 6, 11], seed=4)
    plain = [Request(f"p{i}", p, Sampling(30, temperature)) for i, p in enumerate(prompts)]
    asked = [STRUCTURES[i % len(STRUCTURES)] for i in range(len(prompts))]
    own = [
        request(f"s{i}", p, sampling(s, temperature=temperature), tokenizer)
        for i, (p, s) in enumerate(zip(prompts, asked, strict=True))
    ]
    together = [one for pair in zip(plain, own, strict=True) for one in pair]
    alone = [c.tokens for c in generate(model, plain, FULL).completions]
    static = generate(model, together, FULL).completions
    continuous = generate_continuous(model, together, FULL, max_rows=7).completions
    lossless = generate_lossless(model, together, Lossless(L, DRAFTS, 3))
    skipped = generate(model, together, SkipDecode(L, 4, 2, 1, 20)).completions
    for name, made in {"static": static, "continuous": continuous, "lossless": lossless.completions}.items():
        assert [c.tokens for c in made[::2]] == alone, name
        assert [c.tokens for c in made[1::2]] == [c.tokens for c in static[1::2]], name
    ended = 0
    for structure, row in zip([*asked, *asked], [*static[1::2], *skipped[1::2]], strict=True):
        assert row.is_valid == is_valid(structure, tokenizer.decode(row.tokens))
        if row.finish_reason == "stop":
            ended += 1
            assert is_valid(structure, tokenizer.decode(row.tokens)), (structure, tokenizer.decode(row.tokens))
    assert ended >= 16
    assert sum(lossless.stats.accepted_at) > 0  # type: ignore[attr-defined]


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    """Small schemas whose texts end within some 60 characters."""
    kinds = ["integer", "boolean", "null", "enum", "string", "const", "any of"] + ["object", "array"] * (depth > 0)
    kind = draw(st.sampled_from(kinds))
    if kind == "integer":
        low = draw(st.integers(-9, 9))
        return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 900))}
    if kind == "enum":
        return {"enum": draw(st.lists(st.sampled_from(["a", "b c", "ö", 7, True, None]), min_size=1, unique_by=repr))}
    if kind == "const":
        return {"const": draw(st.sampled_from(["x", 5, False]))}
    if kind == "string":
        return {"type": "string", "maxLength": draw(st.integers(0, 5))}
    if kind == "any of":
        return {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 3, "maximum": 40}]}
    if kind == "array":
        return {"type": "array", "items": draw(schemas(depth=depth - 1)), "maxItems": draw(st.integers(0, 3))}
    if kind == "object":
        names = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=2))
        required = [name for name in names if draw(st.booleans())]
        properties = {name: draw(schemas(depth=depth - 1)) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


@settings(max_examples=examples(40))
@given(
    own=st.lists(schemas(), min_size=1, max_size=5), seed=st.integers(0, 99), temperature=st.sampled_from([0.0, 1.5])
)
def test_random_schemas(
    model: Decoder, tokenizer: Tokenizer, own: list[dict[str, Any]], seed: int, temperature: float
) -> None:
    """Lossless decoding with drafts of all kinds gives the tokens of full depth, which validate."""
    rows = [
        request(str(i), p, sampling({"json": s}, temperature=temperature, seed=seed), tokenizer)
        for i, (s, p) in enumerate(zip(own, random_prompts([4] * len(own), seed=seed), strict=True))
    ]
    made = generate(model, rows, FULL).completions
    schedule = Lossless(L, DRAFTS, adaptive=True)
    drafted = generate_lossless(model, rows, schedule, controller=Erratic(schedule, model.config, seed)).completions
    assert [c.tokens for c in drafted] == [c.tokens for c in made]
    for schema, completion in zip(own, made, strict=True):
        text = tokenizer.decode(completion.tokens)
        assert completion.finish_reason == "length" or is_valid({"json": schema}, text), (schema, text)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "strin"}}, "structured_outputs.json: Invalid type: strin"),
        ({"json": {"not": {"type": "string"}}}, 'structured_outputs.json: Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "https://example.org/schema"}}, "structured_outputs.json: Resource 'https://example.org"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "structured_outputs.json: Unsatisfiable schema"),
        ({"regex": "["}, "structured_outputs.regex: "),
        ({"regex": "(?=a)b"}, "structured_outputs.regex: "),
        ({"grammar": "start: nothing"}, "structured_outputs.grammar: "),
        ({"grammar": 'start: start "a"'}, "structured_outputs.grammar: no text matches it"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json: no text matches it"),
        ({"json": False}, 'structured_outputs.json: Unimplemented keys: ["not"]'),
    ],
)
def test_what_cannot_be_compiled_is_refused(tokenizer: Tokenizer, structure: dict[str, Any], message: str) -> None:
    asked = sampling(structure).structured_outputs
    assert asked is not None
    with pytest.raises(ValueError) as caught:
        tokenizer.grammars.compile(asked)
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 600


def test_the_reason_is_told_whatever_the_length_of_what_it_quotes(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="look-around, including look-ahead and look-behind, is not supported"):
        tokenizer.grammars.compile(StructuredOutputs("regex", "a" * 5000 + "(?=b)"))


def chained(number: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other, so many deep."""
    steps = {f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(number)}
    return {"$defs": steps | {f"d{number}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


RULES = "".join(f"r{n}: r{n + 1}\n" for n in range(10_000))
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "definitions": ({"json": chained(2_000)}, "follow each other too deeply"),
    "rules": ({"grammar": f'start: r0\n{RULES}r10000: "a"'}, "follow each other too deeply"),
    "patterns": ({"json": {"allOf": [{"pattern": f"a{n}"} for n in range(100)]}}, "takes more than 1 s"),
    "expressions": (
        {"grammar": "start: A\nA: " + " & ".join(f"/.*{n}.*/" for n in range(400))},
        "takes more than 1 s",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_would_end_the_process_or_take_minutes_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Tried in a process of its own, once."""
    monkeypatch.setattr(grammar_trial, "TRIAL_S", 1)
    structure, reason = BOMBS[name]
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            tokenizer.grammars.compile(StructuredOutputs.of(structure))
        monkeypatch.setattr(sys, "executable", "/no/such/file")  # for another trial


def test_a_large_schema_that_is_harmless_compiles(tokenizer: Tokenizer) -> None:
    """It is tried first, as every large one."""
    dates = {f"d{n}": {"type": "string", "format": "date-time", "description": "z" * 2000} for n in range(9)}
    asked = StructuredOutputs.of({"json": {"type": "object", "properties": dates} | chained(100)})
    assert is_risky(asked.text)
    tokenizer.grammars.compile(asked)
    assert not is_risky(json.dumps(STRUCTURES))


def test_an_answer_may_be_one_of_thousands_of_texts(model: Decoder, tokenizer: Tokenizer) -> None:
    (prompt,) = random_prompts([4], seed=1)
    choices = [f"number {n}" for n in range(4000)]
    own = [request(str(n), prompt, sampling({"choice": choices}, temperature=1.0), tokenizer) for n in range(4)]
    made = generate(model, own, FULL).completions
    assert all(row.is_valid and tokenizer.decode(row.tokens) in choices for row in made)


def test_a_grammar_without_a_next_token_fails_its_row_by_name(model: Decoder, tokenizer: Tokenizer) -> None:
    """It wants the token that ends answers in the middle of one."""
    (prompt,), end = random_prompts([4], seed=1), min(model.config.eos_token_ids)
    with pytest.raises(ValueError, match="no token of the model goes on"):
        request("0", prompt, sampling({"grammar": f'start: <[{end}]> "a"'}), tokenizer)
    row = request("dead", prompt, sampling({"grammar": f'start: "b" <[{end}]> "a"'}), tokenizer)
    with pytest.raises(GrammarTooComplex, match="row 'dead': structured_outputs: no token of the model goes on"):
        generate(model, [row], FULL)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "structured_outputs: give one of json, json_object, regex, choice, grammar, got none"),
        ({"json": {}, "regex": "a"}, "structured_outputs: give one of json, json_object, regex, choice, grammar, got"),
        ({"schema": {}}, "structured_outputs: 'schema' is not known"),
        ({"choice": []}, "structured_outputs: choice: must be a list of texts"),
        ({"choice": [5]}, "structured_outputs: choice: must be a list of texts"),
        ({"regex": "a" * 300_000}, "structured_outputs: regex: has 300000 characters, more than"),
        ({"json": "{"}, "structured_outputs: json: must be a JSON schema"),
        ({"json_object": 1}, "structured_outputs: json_object: must be true"),
    ],
)
def test_what_is_no_structure_is_refused(structure: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        sampling(structure)
    assert str(caught.value).startswith(message)


def test_masks_by_several_threads_are_those_of_one(tokenizer: Tokenizer, model: Decoder) -> None:
    """And a row between them that has no structure keeps all its tokens."""
    matchers = {}
    for row, structure in enumerate(STRUCTURES):
        asked = sampling(structure).structured_outputs
        assert asked is not None
        matchers[row + (row > 2)] = tokenizer.grammars.compile(asked).matcher()
    words = -(-model.config.vocab_size // 32)
    one, several = (np.full((len(STRUCTURES) + 1, words), -1, np.int32) for _ in range(2))
    fill_all(matchers, one, 1)
    fill_all(matchers, several, 3)
    assert np.array_equal(one, several)
    assert (one[3] == -1).all()
    assert all((one[row] != -1).any() and (one[row] != 0).any() for row in matchers)


def test_what_a_stop_string_or_token_leaves_is_judged(model: Decoder, tokenizer: Tokenizer) -> None:
    """Though all tokens together have the structure, in the first row and the third."""
    (prompt,), (semicolon,) = random_prompts([4], seed=1), tokenizer.encode_rendered([";"])[0]
    asked: list[tuple[str, dict[str, Any], str, bool]] = [
        ("[0-9]{2};", {"stop": (";",)}, "[0-9]{2}", False),
        ("[0-9]{2};?[0-9]", {"stop": (";",), "logit_bias": ((semicolon, 100.0),)}, "[0-9]{2}", False),
        ("[0-9]{2};", {"stop_token_ids": (semicolon,)}, "[0-9]{2}", False),
        ("[0-9]{2}(;[0-9])?", {"stop": (";",), "logit_bias": ((semicolon, 100.0),)}, "[0-9]{2}", True),
        ("[0-9]{2}(;[0-9])?", {"stop_token_ids": (semicolon,), "logit_bias": ((semicolon, 100.0),)}, "[0-9]{2}", True),
    ]
    rows = [
        request(str(n), prompt, sampling({"regex": regex}, **own), tokenizer)
        for n, (regex, own, _, _) in enumerate(asked)
    ]
    made = generate(model, rows, FULL, decode_text=tokenizer.decode).completions
    for row, own, (regex, _, left, valid) in zip(made, rows, asked, strict=True):
        text = answer_text(row.tokens, row.finish_reason, own.sampling, tokenizer.decode)
        assert row.finish_reason == "stop"
        assert re.fullmatch(left, text), (regex, text)
        assert row.is_valid == valid == (re.fullmatch(regex, text) is not None)


@pytest.mark.parametrize("key", ["ignore_eos", "min_new_tokens"])
def test_keys_that_contradict_a_structure_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}: excludes structured_outputs"):
        sampling({"regex": "a"}, **{key: 1 if key == "min_new_tokens" else True})


@pytest.mark.parametrize("regex", ["(a+)+b", "(x{1,500}){1,500}", "(.*.*.*.*=.*)|(a|a)*c"])
def test_an_expression_that_explodes_elsewhere_takes_bounded_time(
    model: Decoder, tokenizer: Tokenizer, regex: str
) -> None:
    """Either its rows end, or they fail by themselves; some seconds at most (the module's timeout)."""
    (prompt,) = random_prompts([4], seed=1)
    rows = [
        request(str(i), prompt, sampling({"regex": regex}, max_new_tokens=40, temperature=1.0), tokenizer)
        for i in range(2)
    ]
    try:
        made = generate(model, rows, FULL).completions
    except RuntimeError as error:
        assert "structured_outputs" in str(error)  # noqa: PT017
    else:
        assert all(len(c.tokens) <= 40 for c in made)
