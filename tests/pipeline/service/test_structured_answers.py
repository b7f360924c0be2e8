"""Structured outputs over real HTTP, as OpenAI's client asks for them: parsed by pydantic, streamed, and the same
tokens as a batch line with that body. A random model, so what it says without a structure is never JSON."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from actors.generator import Generator
from pipeline.config.job import JobConfig, build_config
from pipeline.openai_format.parameters import ChatLine
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from skipdecode.engine.results import Completion
from tests.support.batch_lines import answer_lines, finished_rows
from tests.support.chat_service import USER, client, generator, refused, rendered, url

pytest.importorskip("llguidance")

__all__ = ["client", "generator", "url"]  # fixtures


class Place(BaseModel):
    food: Literal["Italian", "French"]
    rating: Annotated[int, Field(ge=1, le=5)]
    is_open: bool


SCHEMA = Place.model_json_schema() | {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}


def test_answers_are_parsed_by_pydantic(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="tiny", messages=USER, max_tokens=80, temperature=1, seed=5, response_format=Place, n=3
    )
    assert [choice.finish_reason for choice in made.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, Place) for choice in made.choices)


def test_an_answer_that_is_cut_off_is_no_json_and_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=USER, max_tokens=4, response_format=Place)


def test_streams_batch_lines_and_runs_give_the_same_tokens(client: openai.OpenAI, generator: Generator) -> None:
    body = {"temperature": 1, "seed": 3, "max_tokens": 80, "response_format": FORMAT}
    stream = client.chat.completions.create(
        model="tiny",
        messages=USER,
        stream=True,
        extra_body={"row_id": "a"},
        **body,  # type: ignore[call-overload]
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    Place.model_validate_json(text)
    line = ChatLine.parse(body | {"messages": USER}, ignored={"messages"})
    sampling = Sampling().with_parameters(line.row_parameters())
    (answer,) = generator([Request("a", rendered(generator, USER), sampling)]).answers
    assert isinstance(answer, Completion)
    assert (generator.tokenizer.decode(answer.tokens), answer.finish_reason, answer.is_valid) == (text, "stop", True)


BODIES = {
    "whole": {"response_format": FORMAT, "max_tokens": 80, "seed": 3},
    "cut off": {"response_format": FORMAT, "max_tokens": 5, "seed": 3},
    "no structure": {"max_tokens": 5, "seed": 3},
}
VALID = {"whole": True, "cut off": False, "no structure": None}


def test_answers_streams_and_lines_say_whether_they_have_their_structure(
    client: openai.OpenAI, generator: Generator, tmp_path: Path
) -> None:
    bodies = {id: {"messages": USER, "temperature": 1.0, **body} for id, body in BODIES.items()}
    lines = answer_lines(generator, tmp_path, bodies)
    for id, body in bodies.items():
        extra: dict[str, Any] = {"extra_body": {"row_id": id}}
        whole = client.chat.completions.create(model="tiny", **body, **extra)  # type: ignore[call-overload]
        (choice,) = whole.choices
        assert (choice.model_extra or {}).get("is_valid") is VALID[id]
        (line,) = lines[id]["choices"]
        assert line.get("is_valid") is VALID[id]
        assert ("is_valid" in line) == (id != "no structure")
        assert (line["message"]["content"], line["finish_reason"]) == (choice.message.content, choice.finish_reason)
        *before, last = client.chat.completions.create(model="tiny", stream=True, **body, **extra)  # type: ignore[call-overload]
        assert (last.choices[0].model_extra or {}).get("is_valid") is VALID[id]
        assert not any("is_valid" in (chunk.choices[0].model_extra or {}) for chunk in before)
    made = client.completions.create(
        model="tiny", prompt="ab", max_tokens=2, extra_body={"structured_outputs": {"regex": "[a-f]{9}"}}
    )
    assert (made.choices[0].model_extra or {})["is_valid"] is False


@pytest.mark.parametrize("has_own", [False, True])
def test_rows_with_a_structure_of_their_own_say_it_in_a_column(
    generator: Generator, tmp_path: Path, has_own: bool
) -> None:
    """`has_own`: whether the run asks for a structure, too."""
    how = {"structured_outputs": {"regex": "[a-f]{9}"}}
    rows = [
        {"id": "whole", "prompt": "ab", "how": how},
        {"id": "cut off", "prompt": "ab", "how": how | {"max_new_tokens": 1}},
        {"id": "refused", "prompt": "ab", "how": {"structured_outputs": {"regex": "["}}},
        {"id": "none", "prompt": "ab"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sections: dict[str, Any] = {"input": {"path": [str(tmp_path / "a.jsonl")], "sampling_column": "how"}}
    sections |= {"sampling": {"structured_outputs": {"choice": ["yes"]}}} if has_own else {}
    config = build_config(JobConfig, {"model": {"source": generator.config.source}, **sections})
    made = {row["id"]: row for row in finished_rows(generator, config).to_pylist()}
    assert {id: row["is_valid"] for id, row in made.items()} == {
        "whole": True, "cut off": False, "refused": None, "none": True if has_own else None
    }  # fmt: skip
    assert [id for id, row in made.items() if row["error_code"]] == ["refused"]
    assert re.fullmatch("[a-f]{9}", made["whole"]["generated_text"])


def test_lines_of_a_run_with_a_structure_say_it_too(generator: Generator, tmp_path: Path) -> None:
    sampling = {"structured_outputs": {"regex": "[a-f]{9}"}, "max_new_tokens": 20}
    bodies = {"a": {"messages": USER}, "b": {"messages": USER, "max_tokens": 1}}
    lines = answer_lines(generator, tmp_path, bodies, sampling=sampling)
    assert [lines[id]["choices"][0]["is_valid"] for id in "ab"] == [True, False]


def test_completions_take_vllms_parameter(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="tiny",
        prompt=["ab", "c"],
        max_tokens=30,
        extra_body={"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}},
    )
    assert all(re.fullmatch("[a-f]{3}-[0-9]{2}", choice.text) for choice in made.choices)
    made = client.completions.create(
        model="tiny", prompt="ab", max_tokens=30, extra_body={"response_format": {"type": "json_object"}}, temperature=0
    )
    assert made.choices[0].finish_reason == "length" or isinstance(json.loads(made.choices[0].text), dict)


def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(client: openai.OpenAI) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "uniqueItems": True}}}
    param, code, message = refused(client, response_format=bad)
    assert (param, code) == ("response_format", "invalid_value")
    assert "Unimplemented keys" in message
    param, code, message = refused(client, extra={"structured_outputs": {"regex": "["}})
    assert (param, code) == ("structured_outputs", "invalid_value")
    assert "unclosed character class" in message
