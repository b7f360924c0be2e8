"""Chats over real HTTP: messages and parameters that are refused by name, and the guards of the endpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from actors.generator import Generator
from actors.generator_config import GeneratorConfig
from pipeline.service.auth import digest
from tests.support.chat_service import DECODE, USER, ask, client, client_of, generator, refused, url
from tests.support.service_helpers import local, make_endpoint

__all__ = ["client", "generator", "url"]  # fixtures


# What is wrong


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([], "messages", "is empty"),
        ("hello", "messages", "must be a list"),
        ([{"content": "x"}], "messages[0].role", "is missing"),
        ([*USER, {"role": "function", "content": "x"}], "messages[1].role", "must be one of"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type",
         "must be 'text', got 'image_url'"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0]", "must be a mapping"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content", "half of a surrogate pair"),
        ([{"role": "user", "content": "raise"}], "messages", "the chat template refuses them: I do not like this"),
        ([{"role": "user", "content": "divide"}], "messages", "the chat template cannot render them: ZeroDivision"),
        ([{"role": "user", "content": "ab " * 300}], "messages", "does not fit"),
        ([{"role": "user", "content": "x" * 200_000}], "messages", "more than could fit"),
    ],
)  # fmt: skip
def test_bad_messages_are_named(url: str, client: openai.OpenAI, messages: Any, param: str, said: str) -> None:
    body = json.dumps({"messages": messages}).encode()
    error = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=60)
    assert error.status_code == 400
    assert error.json()["error"]["param"] == param
    assert said in error.json()["error"]["message"]
    assert error.json()["error"]["type"] == "invalid_request_error"
    assert ask(client).choices[0].message.content, "another request has suffered"


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra": {"audio": {"voice": "x"}}}, "audio"),
        ({"extra": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra": {"prompt": "x"}}, "prompt"),
        ({"extra": {"echo": True}}, "echo"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"70000": 1}}, "logit_bias"),
        ({"extra": {"min_tokens": 6}, "max_tokens": 5}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129, "temperature": 1}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"extra": {"logprobs": 3}}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_parameters_are_refused_by_name(client: openai.OpenAI, keys: dict[str, Any], param: str) -> None:
    named, code, message = refused(client, **keys)
    assert (named, code) == (param, "invalid_value")
    assert param in message


def test_values_that_ask_for_nothing(client: openai.OpenAI) -> None:
    keys = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"], "n": 1,
            "presence_penalty": 0, "logit_bias": {}, "user": "me", "store": False, "stop": None}  # fmt: skip
    assert ask(client, **keys).choices[0].message == ask(client).choices[0].message


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is 'tiny'"):
        ask(client, model="gpt-9")


def test_without_a_template_there_are_no_chats(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    (tmp_path / "broken" / "chat_template.jinja").write_text("{% for %}")
    for folder, said in (
        (tiny_checkpoint, "has no chat template;"),
        (tmp_path / "broken", r"template that could be used: "),
    ):
        endpoint = make_endpoint(Generator(GeneratorConfig(str(folder), DECODE, dtype="float32", num_threads=1)))
        with local(endpoint) as url:
            assert httpx.get(f"{url}/v1/models").json()["data"][0]["has_chat_template"] is False
            param, code, message = refused(client_of(url))
            assert (param, code) == (None, "no_chat_template")
            assert said in message
            assert client_of(url).completions.create(model="tiny", prompt="a", max_tokens=2).choices
        endpoint.close()


# Guards


def test_the_guards_of_completions_are_those_of_chats(generator: Generator) -> None:
    limits = {"max_client_prompts": 3, "max_body_bytes": 3000}
    endpoint = make_endpoint(generator, limits=limits)
    with local(endpoint) as url:
        for headers in ({"Origin": "https://evil.example"}, {"Via": "1.1 proxy"}, {"Host": "evil.example"}):
            answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": USER}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_request")
        assert "limits.max_client_prompts is 3" in refused(client_of(url), n=4)[2]
        with pytest.raises(openai.APIStatusError) as caught:
            ask(client_of(url), [{"role": "user", "content": "x" * 3000}])
        assert caught.value.status_code == 413
        assert httpx.get(f"{url}/v1/chat/completions").status_code == 405
        endpoint.is_draining = True
        with pytest.raises(openai.InternalServerError) as down:
            ask(client_of(url))
        assert down.value.code == "draining"
    endpoint.close()
    endpoint = make_endpoint(generator, [digest("the-right-key")])
    with local(endpoint) as url:
        with pytest.raises(openai.AuthenticationError):
            ask(client_of(url, "the-wrong-key"))
        assert ask(client_of(url, "the-right-key")).choices
    endpoint.close()
