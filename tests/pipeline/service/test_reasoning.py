"""Reasoning over real HTTP, by the `openai` client: whole answers, streams and lines of a batch say the same. The model
says a given text."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.generator import Generator
from pipeline.config.job import ConfigError, JobConfig, build_config
from pipeline.report.data_files import count_data
from pipeline.store.run_folder import RunFolder
from tests.support.batch_lines import answer_lines
from tests.support.chat_service import USER, client_of
from tests.support.service_helpers import local, make_endpoint
from tests.support.speaking import speaking

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}A:{% if think is defined %}<think>\n{% endif %}"
BLOCK, ANSWER = "<think>\nA pub? Yes.\n</think>", "\n\nIt is a pub."
OUTPUT = {"reasoning_parser": "think"}


@pytest.fixture(scope="module")
def generator(checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Generator:
    turns = [("ab\nA:", BLOCK + ANSWER), ("ab\n" * 61 + "A:<think>\n", (BLOCK + ANSWER)[8:])]
    return speaking(checkpoint_factory, tmp_path_factory.mktemp("thinks") / "model", TEMPLATE, turns)


@pytest.fixture(scope="module")
def client(generator: Generator) -> Iterator[openai.OpenAI]:
    endpoint = make_endpoint(generator, output=OUTPUT)
    with local(endpoint) as url:
        yield client_of(url)
    endpoint.close()


OPEN = {"messages": USER * 61, "chat_template_kwargs": {"think": True}}
BODIES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "whole": ({"messages": USER}, "A pub? Yes.", "It is a pub.", "stop"),
    "open in the prompt": (OPEN, "A pub? Yes.", "It is a pub.", "stop"),
    "cut off": ({"messages": USER, "max_tokens": 12}, "A pub? Yes.", "", "length"),
    "cut off at once": (OPEN | {"max_tokens": 3}, "A pub? Yes.", "", "length"),
}


@pytest.mark.parametrize("name", ["whole", "open in the prompt", "cut off", "cut off at once"])
def test_answers_streams_and_lines(client: openai.OpenAI, generator: Generator, tmp_path: Path, name: str) -> None:
    body, reasoning, content, finish_reason = BODIES[name]
    body = {"max_tokens": 60, "temperature": 0} | body
    own = {"chat_template_kwargs": body.get("chat_template_kwargs"), "return_token_ids": True}
    given = {key: value for key, value in body.items() if key != "chat_template_kwargs"}
    answer = client.chat.completions.create(model="tiny", **given, extra_body=own)
    (choice,) = answer.choices
    told = choice.message.reasoning_content  # type: ignore[attr-defined]
    assert told == reasoning if finish_reason == "stop" else reasoning.startswith(told)
    assert (choice.message.content, choice.finish_reason) == (content, finish_reason)
    text = generator.tokenizer.decode(choice.token_ids)  # type: ignore[attr-defined]
    assert told in text
    num_tokens = answer.usage.completion_tokens_details.reasoning_tokens  # type: ignore[union-attr]
    tokens = generator.tokenizer.encode_rendered([text.partition("</think>")[0] + "</think>"])[0]
    assert num_tokens == (len(tokens) if content else answer.usage.completion_tokens)  # type: ignore[union-attr]

    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = client.chat.completions.create(model="tiny", **given, **options, extra_body=own)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == told
    assert "".join(delta.content or "" for delta in deltas) == content
    assert usage.usage.model_dump() == answer.usage.model_dump()  # type: ignore[union-attr]

    line = answer_lines(generator, tmp_path, {"a": body}, output=OUTPUT)["a"]
    message = {"role": "assistant", "content": content, "reasoning_content": told}
    assert line["choices"][0]["message"] == message
    assert line["usage"] == answer.usage.model_dump(exclude_none=True)  # type: ignore[union-attr]


def test_a_structure_has_no_reasoning(client: openai.OpenAI, generator: Generator, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    body = OPEN | {"max_tokens": 9, "temperature": 0, "structured_outputs": {"regex": "[a-f]{3}"}}
    given = {"model": "tiny", "messages": OPEN["messages"], "max_tokens": 9, "temperature": 0}
    (choice,) = client.chat.completions.create(**given, extra_body=body).choices
    assert choice.message.reasoning_content is None  # type: ignore[attr-defined]
    assert len(choice.message.content or "") == 3
    (line,) = answer_lines(generator, tmp_path, {"a": body}, output=OUTPUT)["a"]["choices"]
    assert line["message"] == {"role": "assistant", "content": choice.message.content, "reasoning_content": None}


def test_without_a_parser_the_text_is_whole(generator: Generator, tmp_path: Path) -> None:
    body = {"messages": USER, "max_tokens": 60, "temperature": 0}
    endpoint = make_endpoint(generator)
    with local(endpoint) as url:
        answer = client_of(url).chat.completions.create(model="tiny", **body)
    endpoint.close()
    message = answer.choices[0].message
    assert message.content == BLOCK + ANSWER
    assert not hasattr(message, "reasoning_content")
    line = answer_lines(generator, tmp_path, {"a": body})["a"]
    assert line["choices"][0]["message"] == {"role": "assistant", "content": BLOCK + ANSWER}
    assert answer.usage is not None
    assert line["usage"] == answer.usage.model_dump(exclude_none=True)


@pytest.mark.parametrize("parser", ["think", None])
def test_the_report_counts_reasoning_and_sees_what_was_cut_off(
    generator: Generator, tmp_path: Path, parser: str | None
) -> None:
    bodies = {name: {"max_tokens": 60, "temperature": 0} | body for name, (body, *_) in BODIES.items()}
    lines = answer_lines(generator, tmp_path, bodies, output={"reasoning_parser": parser})
    state: Any = {
        "state": "running", "sessions": [{"id": "s1"}], "former": [], "known": [],
        "config": {"output": {"reasoning_parser": parser}},
    }  # fmt: skip
    totals = count_data(RunFolder.open(str(tmp_path / "run")), state)
    wanted = [line["usage"].get("completion_tokens_details", {}).get("reasoning_tokens") for line in lines.values()]
    assert totals.reasoning_tokens == (sum(wanted) if parser else None)
    assert totals.unfinished_reasoning == 0.5


def test_another_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"output\.reasoning_parser"):
        build_config(JobConfig, {"output": {"reasoning_parser": "deepseek_r1"}})
