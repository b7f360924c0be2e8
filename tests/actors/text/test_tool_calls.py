"""Calls of tools told from text, whole and in pieces; and forced ones, which the parser reads back."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.text.tool_calls import (
    ParsedAnswer,
    ToolCall,
    ToolCallStream,
    ToolForm,
    split_calls,
    tool_form,
    tool_grammar,
)
from skipdecode.checkpoint.tokenizer import Tokenizer
from skipdecode.config.sampling import Sampling
from skipdecode.config.structured_outputs import StructuredOutputs
from skipdecode.engine.generate import generate
from skipdecode.engine.request import Request
from skipdecode.model.decoder import Decoder
from skipdecode.schedules.schedule import FullDepth
from tests.support.chat_templates import LLAMA3, OBJECTS, TAGS
from tests.support.examples import examples

NAMES = {"f", "get-weather"}
A = ToolCall("f", '{"a": 1}')
B = ToolCall("get-weather", '{"city": "Köln"}')
NONE = ToolCall("f", "{}")
TEXTS: list[tuple[ToolForm, str, str, list[ToolCall]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [A]),
    ("hermes", 'Let me see. \n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n', "Let me see.", [A]),
    (
        "hermes",
        '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>\n'
        '<tool_call>{"name": "get-weather", "arguments": {"city": "Köln"}}</tool_call>',
        "",
        [A, B],
    ),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n', "", [A]),
    ("hermes", '<tool_call>{"name": "f", "parameters": "{\\"a\\": 1}"}</tool_call>', "", [A]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [NONE]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call> x', None, []),
    ("hermes", '<tool_call>{"name": "f", "argu', None, []),
    ("hermes", "a < b <tool", None, []),
    ("hermes", '{"name": "f", "arguments": {"a": 1}}\n', None, []),
    ("hermes", "", "", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [A]),
    ("llama3_json", '\n{"name": "f", "arguments": {"a": 1}} ', "", [A]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "f"};', "", [A, NONE]),
    ("llama3_json", '[{"name": "f", "parameters": {"a": 1}}]', "", [A]),
    ("llama3_json", '{"name": "g", "parameters": {"a": 1}}', None, []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}} or so', None, []),
    ("llama3_json", "[]", None, []),
    ("llama3_json", 'Here: {"name": "f", "parameters": {"a": 1}}', None, []),
    ("llama3_json", " \n", None, []),
]  # fmt: skip


def in_pieces(form: ToolForm, pieces: list[str], *, is_single: bool = False) -> ParsedAnswer:
    stream = ToolCallStream(form, NAMES, is_single=is_single)
    made = [stream.push(piece) for piece in pieces] + [stream.finish()]
    assert stream.num_calls == sum(len(part.calls) for part in made)
    return ParsedAnswer("".join(part.content for part in made), [call for part in made for call in part.calls])


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_calls_and_text(form: ToolForm, text: str, content: str | None, calls: list[ToolCall]) -> None:
    wanted = ParsedAnswer(text if content is None else content, calls)
    assert split_calls(text, form, NAMES) == in_pieces(form, list(text)) == wanted
    single = in_pieces(form, list(text), is_single=True)
    assert single == ParsedAnswer(wanted.content, wanted.calls[:1])


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "<", "call>", "\n", " ", "a", "[", "]", ";"]


@settings(max_examples=examples(300))
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), form=st.sampled_from(["hermes", "llama3_json"]))
def test_pieces_of_any_size_give_the_same(pieces: list[str], form: ToolForm) -> None:
    text = "".join(pieces)
    whole = split_calls(text, form, NAMES)
    assert in_pieces(form, pieces) == in_pieces(form, list(text)) == whole
    assert whole.calls or whole.content == text


def test_text_before_calls_comes_at_once() -> None:
    stream = ToolCallStream("hermes", NAMES)
    assert stream.push("Let me see. <") == ParsedAnswer("Let me see.", [])
    assert stream.push("b <tool") == ParsedAnswer(" <b", [])
    assert ToolCallStream("llama3_json", NAMES).push("Let me") == ParsedAnswer("Let me", [])


def test_the_form_is_that_of_the_template() -> None:
    assert [tool_form(source) for source in (TAGS, OBJECTS, LLAMA3)] == ["hermes", "llama3_json", "llama3_json"]
    for source in ("{{ '[TOOL_CALLS] ' }}", "<tool_call><function=f>"):
        with pytest.raises(ValueError, match="are not parsed"):
            tool_form(source)


SCHEMAS: dict[str, dict[str, Any] | None] = {
    'say "hi"\\': None,
    "get": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False},
}


@pytest.mark.parametrize("form", ["hermes", "llama3_json"])
def test_a_forced_answer_is_calls_of_these_tools(loaded: Decoder, tiny_checkpoint: Path, form: ToolForm) -> None:
    pytest.importorskip("llguidance")
    tokenizer = Tokenizer(tiny_checkpoint, loaded.config)
    grammar = tool_grammar(form, SCHEMAS, is_single=True)
    structure = StructuredOutputs.of({"grammar": grammar})
    sampling = Sampling(max_new_tokens=100, temperature=1, structured_outputs=structure)
    compiled = tokenizer.grammars.compile(structure)
    requests = [Request(str(row), [2, 9, 70], sampling, grammar=compiled) for row in range(12)]
    made = generate(loaded, requests, FullDepth(loaded.config.num_hidden_layers), decode_text=tokenizer.decode)
    found = [split_calls(tokenizer.decode(row.tokens), form, SCHEMAS) for row in made.completions]
    assert {row.finish_reason for row in made.completions} == {"stop"}
    assert all(content == "" and len(calls) == 1 for content, calls in found)
    calls = {call.name: json.loads(call.arguments) for _, (call,) in found}
    assert calls.keys() == SCHEMAS.keys()
    assert calls['say "hi"\\'] == {}
    assert calls["get"]["n"] in (1, 2)
