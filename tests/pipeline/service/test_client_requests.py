"""What released clients send, recorded in tests/support/recorded/client_requests.json, is answered over real HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from pipeline.openai_format.parameters import ChatLine, CompletionLine
from tests.support.chat_service import USER, generator, url

__all__ = ["generator", "url"]  # fixtures

REQUESTS = json.loads((Path(__file__).parents[2] / "support" / "recorded" / "client_requests.json").read_text())
PROGRAMS = ("openai-python", "lm-eval local-completions", "lm-eval local-chat-completions", "vllm bench serve",
            "guidellm", "LangChain ChatOpenAI")  # fmt: skip


def events(text: str) -> list[dict[str, Any]]:
    *made, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in made]


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["client"] for request in REQUESTS])
def test_a_request_of_a_released_client_is_answered(url: str, request_: dict[str, Any]) -> None:
    body = request_["body"]
    answer = httpx.post(url + request_["path"], json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    made = events(answer.text) if body.get("stream") else [answer.json()]
    assert made[-1]["usage"]["completion_tokens"] > 0
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else []
    wanted = len(prompts) if prompts and not isinstance(prompts[0], int) else 1
    assert {choice["index"] for one in made for choice in one["choices"]} == set(range(wanted))


def test_every_program_is_recorded() -> None:
    assert [name for name in PROGRAMS if not any(name in request["client"] for request in REQUESTS)] == []


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["client"] for request in REQUESTS])
def test_the_same_in_a_batch_line(request_: dict[str, Any]) -> None:
    body = {key: value for key, value in request_["body"].items() if key not in ("stream", "stream_options")}
    kind = ChatLine if "messages" in body else CompletionLine
    kind.parse(body, ignored=frozenset({"prompt", "messages", "model", "n"}))


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_the_usage_so_far_is_in_every_event(url: str, path: str) -> None:
    prompt = {"messages": USER} if path.startswith("chat") else {"prompt": "a"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = prompt | {"max_tokens": 8, "ignore_eos": True, "stream": True, "stream_options": options}
    made = events(httpx.post(f"{url}/v1/{path}", json=body, timeout=60).text)
    counts = [event["usage"]["completion_tokens"] for event in made]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert all(event["usage"]["total_tokens"] > event["usage"]["completion_tokens"] for event in made)
    body["stream_options"] = {"include_usage": True}
    made = events(httpx.post(f"{url}/v1/{path}", json=body, timeout=60).text)
    assert ["usage" in event for event in made] == [False] * (len(made) - 1) + [True]
