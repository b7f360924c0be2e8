"""Tools over real HTTP, by the `openai` client: the loop of a program that runs them, streams, forced calls, and lines
of a batch with the same bodies. The model says given texts; what it is forced to say is random."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from actors.generator import Generator
from actors.templates.chat_template import check_messages
from actors.templates.chat_template_files import load_chat_template
from skipdecode.families import FAMILIES
from tests.support.batch_lines import answer_lines
from tests.support.chat_service import client_of
from tests.support.chat_templates import CHATML, TAGS
from tests.support.service_helpers import local, make_endpoint
from tests.support.speaking import speaking


class Weather(BaseModel):
    """Tells the weather."""

    city: str = Field(max_length=8)
    days: int = Field(ge=1, le=3)


WEATHER = openai.pydantic_function_tool(Weather, name="weather")
CLOCK: Any = {"type": "function", "function": {"name": "clock", "strict": True}}
TOOLS: list[Any] = [WEATHER, CLOCK]
ASKED = {"role": "user", "content": "Is it warm?"}
ARGUMENTS = {"city": "Bonn", "days": 2}
SAYS = (
    f'I look.\n<tool_call>\n{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
NOW = datetime(2026, 11, 30)
TOLD = ["21 degrees", "noon"]
ANSWER = "It is 21 degrees."


@pytest.fixture(scope="module")
def generator(checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("tools") / "model"
    source = checkpoint_factory("125m")
    (tmp_path_factory.getbasetemp() / "tags.jinja").write_text(TAGS)
    template = load_chat_template(source, FAMILIES["opt"].tokenizer, tmp_path_factory.getbasetemp() / "tags.jinja")
    assert template is not None
    calls = [("weather", json.dumps(ARGUMENTS)), ("clock", "{}")]
    made = [{"type": "function", "function": {"name": name, "arguments": own}} for name, own in calls]
    later = [
        ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": made},
        *({"role": "tool", "content": text} for text in TOLD),
    ]
    prompts = [template.render(check_messages(chat), now=NOW, tools=TOOLS) for chat in ([ASKED], later)]
    return speaking(checkpoint_factory, folder, TAGS, list(zip(prompts, (SAYS, ANSWER), strict=True)))


@pytest.fixture(scope="module")
def client(generator: Generator) -> Iterator[openai.OpenAI]:
    endpoint = make_endpoint(generator)
    with local(endpoint) as url:
        yield client_of(url)
    endpoint.close()


BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "temperature": 0, "tools": TOOLS}


def told_calls(calls: Any) -> list[tuple[str, Any]]:
    assert len({call.id for call in calls}) == len(calls)
    assert {call.type for call in calls} == {"function"}
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls]


WANTED = [("weather", ARGUMENTS), ("clock", {})]


def test_the_loop_of_a_program_with_tools(client: openai.OpenAI) -> None:
    messages: list[Any] = [ASKED]
    (choice,) = client.chat.completions.create(messages=messages, **BODY).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    assert choice.message.tool_calls is not None
    assert told_calls(choice.message.tool_calls) == WANTED
    messages.append(choice.message)  # the client sends back what it got
    for call, result in zip(choice.message.tool_calls, TOLD, strict=True):
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    (choice,) = client.chat.completions.create(messages=messages, **BODY).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)
    assert choice.message.tool_calls is None


def test_calls_are_parsed_by_pydantic(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.parse(messages=[ASKED], **BODY).choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(**ARGUMENTS)


def test_streams_carry_calls_as_they_are_complete(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(messages=[ASKED], stream=True, **BODY))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert text == "I look."
    assert [call.index for call in calls] == [0, 1]
    assert told_calls(calls) == WANTED
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["tool_calls"]
    with client.chat.completions.stream(messages=[ASKED], **BODY) as stream:
        stream.until_done()
        (choice,) = stream.get_final_completion().choices
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(**ARGUMENTS)


@pytest.mark.parametrize(
    ("own", "num_calls", "content"),
    [
        ({"parallel_tool_calls": False}, 1, "I look."),
        ({"tool_choice": "auto"}, 2, "I look."),
        ({"max_tokens": 9}, 0, None),
    ],
)
def test_lines_of_a_batch_say_the_same(
    client: openai.OpenAI,
    generator: Generator,
    tmp_path: Path,
    own: dict[str, Any],
    num_calls: int,
    content: str | None,
) -> None:
    body = BODY | {"messages": [ASKED]} | own
    answer = client.chat.completions.create(**body)
    (line,) = answer_lines(generator, tmp_path, {"a": body})["a"]["choices"]
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert told_calls(calls) == WANTED[:num_calls] if calls else num_calls == 0
    assert content in (None, choice.message.content)
    assert line["message"]["content"] == choice.message.content
    own_calls = line["message"].get("tool_calls", [])
    assert [call["function"] for call in own_calls] == [call.function.model_dump() for call in calls]
    again = answer_lines(generator, tmp_path / "again", {"a": body})["a"]["choices"][0]
    assert again == line, "ids too"
    assert line["finish_reason"] == choice.finish_reason == ("tool_calls" if num_calls else "length")


@pytest.mark.parametrize("choice", ["required", "weather"])
def test_forced_calls_have_arguments_of_the_schema(
    client: openai.OpenAI, generator: Generator, tmp_path: Path, choice: str
) -> None:
    pytest.importorskip("llguidance")
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    keys = {"tool_choice": forced, "temperature": 1.0, "seed": 4, "messages": [{"role": "user", "content": "x"}]}
    body = BODY | keys | {"parallel_tool_calls": False}
    bodies = {}
    for number in range(6):
        id = f"r{number}"
        (made,) = client.chat.completions.create(**body, extra_body={"row_id": id}).choices
        assert (made.finish_reason, made.message.content) == ("tool_calls", None)
        ((name, arguments),) = told_calls(made.message.tool_calls)
        if name == "weather":
            Weather(**arguments)
        else:
            assert (choice, name, arguments) == ("required", "clock", {})
        bodies[id] = made.message.tool_calls[0].function.model_dump()  # type: ignore[index, union-attr]
    lines = answer_lines(generator, tmp_path, dict.fromkeys(bodies, body))
    assert {id: line["choices"][0]["message"]["tool_calls"][0]["function"] for id, line in lines.items()} == bodies


def test_none_shows_no_tools_and_reads_no_calls(client: openai.OpenAI) -> None:
    plain = {key: value for key, value in BODY.items() if key != "tools"}
    lengths = set()
    for extra in ({}, {"tools": []}, BODY | {"tool_choice": "none"}):
        answer = client.chat.completions.create(**(plain | {"messages": [ASKED]} | extra))
        assert answer.choices[0].message.tool_calls is None
        assert answer.usage is not None
        lengths.add(answer.usage.prompt_tokens)
    assert len(lengths) == 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom"}]}, "tools", "tools[0] must be"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools[0].function.name must have"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "two functions of the name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 7}}]}, "tools", "must be a JSON schema"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "must be none, auto, required or name a function"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "one of tools"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format", "excludes tools"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "tool_choice": "required",
        },
        "tools",
        "Unimplemented keys",
    ),
]


@pytest.mark.parametrize(("own", "param", "reason"), REFUSED)
def test_what_cannot_be_is_refused_by_name(
    client: openai.OpenAI, generator: Generator, tmp_path: Path, own: dict[str, Any], param: str, reason: str
) -> None:
    pytest.importorskip("llguidance")
    body = {"model": "tiny", "messages": [ASKED]} | own
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)
    assert caught.value.param == param
    assert reason in caught.value.message
    error = answer_lines(generator, tmp_path, {"a": body})["a"]
    assert error["code"] == "bad_parameters"
    assert reason in error["message"]


def test_a_template_without_tools_is_said(checkpoint_factory: Callable[..., Path], tmp_path: Path) -> None:
    generator = speaking(checkpoint_factory, tmp_path / "model", CHATML, [])
    endpoint = make_endpoint(generator)
    body = {"messages": [ASKED], "tools": TOOLS}
    with local(endpoint) as url, pytest.raises(openai.BadRequestError) as caught:
        client_of(url).chat.completions.create(model="tiny", **body)  # type: ignore[call-overload]
    endpoint.close()
    assert (caught.value.status_code, caught.value.param) == (400, "tools")
    assert "the chat template of tiny has no tools" in caught.value.message
    error = answer_lines(generator, tmp_path, {"a": body})["a"]
    assert error["code"] == "bad_parameters"
    assert error["message"].endswith("tools cannot be used: the chat template has no tools")
