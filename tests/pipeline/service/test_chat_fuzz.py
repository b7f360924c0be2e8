"""Chats over real HTTP at random: every answer is whole, in the words of the API, and not the server's own fault."""

import json
import os
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.service.requests import ChatRequest
from tests.support.chat_service import ask, client, generator, url

__all__ = ["client", "generator", "url"]  # fixtures

NUM_FUZZED = int(os.environ.get("FUZZ_EXAMPLES", "1500"))

TEXT = st.text(max_size=12)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
ROLE = st.sampled_from(["system", "developer", "user", "assistant"])
PART = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})
MESSAGE = st.fixed_dictionaries(
    {"role": ROLE, "content": TEXT | st.sampled_from(["raise", "{{ 1 }}"]) | st.lists(PART, min_size=1, max_size=2)},
    optional={"name": TEXT},
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3)
STREAM_OPTIONS = {"include_usage": st.booleans(), "continuous_usage_stats": st.booleans() | st.none(), "x": ANY}
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "other"]),
    "n": st.integers(0, 3),
    "max_tokens": st.integers(-1, 12) | st.sampled_from([120, 2**31, 2**64]),
    "max_completion_tokens": st.integers(-1, 12),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1, -1, 10**400]),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**65), 2**65),
    "stop": TEXT | st.lists(TEXT, max_size=18),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(-1, 21),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional=STREAM_OPTIONS),
    "user": TEXT,
    "continue_final_message": st.booleans(),
    "add_generation_prompt": st.booleans(),
    "row_id": TEXT,
    "return_token_ids": st.booleans(),
    "return_layers": st.booleans(),
    "min_p": st.floats(-1, 2),
    "min_tokens": st.integers(-1, 12),
    "repetition_penalty": st.floats(-1, 3),
    "presence_penalty": st.floats(-3, 3),
    "frequency_penalty": st.floats(-3, 3),
    "stop_token_ids": st.lists(st.integers(-1, 400), max_size=3),
    "repetition_detection": st.fixed_dictionaries({}, optional={"max_pattern_size": st.integers(-1, 30), "x": ANY}),
    "structured_outputs": st.fixed_dictionaries({}, optional={"choice": st.lists(TEXT, max_size=2), "regex": TEXT}),
    "logit_bias": st.dictionaries(TEXT, st.floats(), max_size=2),
    "chat_template_kwargs": st.dictionaries(TEXT, ANY, max_size=2),
    "tools": st.just([]) | st.just([{"type": "function", "function": {"name": "f"}}]) | ANY,
    "tool_choice": st.sampled_from(["none", "auto", "required"]) | ANY,
    "parallel_tool_calls": st.booleans(),
    "response_format": st.just({"type": "text"}) | ANY,
}
MAD = st.fixed_dictionaries(
    {"messages": MESSAGES | MESSAGES | st.lists(MESSAGE | ANY, max_size=3) | ANY},
    optional={name: likely | likely | ANY for name, likely in LIKELY.items()},
)
GOOD = st.fixed_dictionaries(
    {"messages": MESSAGES, "temperature": st.floats(0.1, 2)},
    optional={"n": st.integers(1, 3), "max_tokens": st.integers(1, 8), "stream": st.booleans(),
              "logprobs": st.booleans(), "return_layers": st.booleans(), "seed": st.integers(0, 9)},
)  # fmt: skip


def test_the_fuzzer_knows_every_parameter() -> None:
    assert LIKELY.keys() | {"messages", "top_k", "ignore_eos"} >= ChatRequest.model_fields.keys()


def fuzzed(url: str, num_examples: int) -> dict[int, int]:
    """How often each status came; every answer is whole, in the words of the API, and not the server's own fault."""
    seen: dict[int, int] = {}

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(body=GOOD | MAD)
    def fuzz(body: dict[str, Any]) -> None:
        answer = client.post("/v1/chat/completions", content=json.dumps(body).encode())
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = answer.text.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            kinds = {json.loads(event.removeprefix("data: "))["object"] for event in events[:-2]}
            assert kinds == {"chat.completion.chunk"}
        elif answer.status_code == 200:
            assert answer.json()["object"] == "chat.completion"
            assert len(answer.json()["choices"]) == (body.get("n") or 1)
        else:
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["error"]["message"]

    with httpx.Client(base_url=url, timeout=60) as client:
        fuzz()
    return seen


def test_requests_at_random(url: str) -> None:
    assert fuzzed(url, 30).keys() >= {200, 400}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_request_breaks_the_server(url: str, client: openai.OpenAI) -> None:
    seen = fuzzed(url, NUM_FUZZED)
    print(f"{NUM_FUZZED} requests: {seen}")
    assert seen[200] > NUM_FUZZED / 10 < seen[400]
    assert ask(client).choices
