"""What released clients send is answered over real HTTP, and what their users report of other servers is right here.

The requests of released clients are recorded in tests/support/recorded/client_requests.json. Which parameters may have
which values: tests/pipeline/openai_format/test_parameters.py.
"""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from actors.generator import Generator
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


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1//chat/completions", "/v1/v1/models", "/completions", "/api"]
)
def test_a_wrong_base_url_is_told_the_right_one(url: str, path: str) -> None:
    answer = httpx.post(url + path, json={"messages": USER}, timeout=60)
    assert answer.status_code == 404
    assert "a client's base URL ends in /v1, without a slash behind it" in answer.json()["error"]["message"]


def test_the_longest_prompt_and_one_token_more(url: str, generator: Generator) -> None:
    config = generator.model.config

    def status(prompt: list[int], **keys: Any) -> int:
        return httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **keys}, timeout=60).status_code

    room = config.max_position_embeddings - 1
    assert status([7] * room, max_tokens=1) == 200
    assert status([7] * (room + 1), max_tokens=1) == 400
    assert status([7] * (room + 1), max_tokens=0, echo=True, logprobs=0) == 200, "scored alone it may fill the model"
    assert status([7] * (room + 2), max_tokens=0, echo=True, logprobs=0) == 400
    assert status([config.vocab_size - 1], max_tokens=1) == 200
    assert status([config.vocab_size], max_tokens=1) == 400
    assert status([7], max_tokens=1) == 200, "the others go on"


def test_a_balancer_may_ask_for_the_head_alone(url: str) -> None:
    answer = httpx.head(f"{url}/health", timeout=60)
    assert (answer.status_code, answer.content) == (200, b"")


def strict(text: str) -> Any:
    """JSON without the infinities that Python lets pass."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 1e-6}, {"temperature": 0}], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_tokens_that_cannot_be_drawn_are_numbers(
    url: str, keys: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": "correct horse", "max_tokens": 4, "echo": True, "logprobs": 20, "stream": stream} | keys
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n")[:-2]] if stream else [answer.text]
    choices = [choice for part in parts for choice in strict(part)["choices"]]
    tops = [top for choice in choices if choice["logprobs"] for top in choice["logprobs"]["top_logprobs"]]
    assert tops[0] is None
    assert all(top is not None and min(top.values()) > -1e30 for top in tops[1:])


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-9, 1e-300])
def test_a_temperature_near_zero_is_greedy(url: str, temperature: float) -> None:
    """And no overflow, after which every token would be the first of the vocabulary."""

    def tokens(temperature: float) -> list[int]:
        body = {"prompt": "San Francisco is a", "max_tokens": 12, "temperature": temperature, "return_token_ids": True}
        made: list[int] = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["token_ids"]
        return made

    assert tokens(temperature) == tokens(0)
