"""Chats over real HTTP of one replica, by the real `openai` client: answers as offline, streams, errors, and guards.

The model is a tiny one with a chat template; the reference is the same decoder with the rendered tokens.
"""

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import jinja_process
from actors.chat_template import check_messages
from actors.generator import Generator, GeneratorConfig
from pipeline.service.keys import digest
from pipeline.service.parse import CHAT_KEYS
from skipdecode.request import Completion, Request
from skipdecode.sampling import Sampling
from tests.support.service_helpers import local, make_endpoint

pytestmark = pytest.mark.process
DECODE = {"method": "skipdecode", "max_layers": 5, "min_layers": 2, "horizon": 12}
TEMPLATE = """\
</s>{% for m in messages %}{% if m.content == 'raise' %}{{ raise_exception('I do not like this') }}{% endif %}\
{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}\
{% if m.content == 'date' %}{{ strftime_now('%Y') }}{% endif %}\
{{ m.role[0] }}:{{ m.content }}
{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
USER = [{"role": "user", "content": "ab"}]
NUM_FUZZED = int(os.environ.get("FUZZ_EXAMPLES", "1500"))


@pytest.fixture(scope="module")
def generator(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_checkpoint, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Generator(GeneratorConfig(str(folder), DECODE, dtype="float32", num_threads=1))


@pytest.fixture(scope="module")
def url(generator: Generator) -> Iterator[str]:
    endpoint = make_endpoint(generator)
    with local(endpoint) as running:
        yield running
    endpoint.close()


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def rendered(generator: Generator, messages: Any) -> list[int]:
    """By plain text, not by a template."""
    text = "</s>" + "".join(f"{m['role'][0]}:{m['content']}\n" for m in check_messages(messages)) + "a:"
    return generator.tokenizer.encode_rendered([text])[0]


def offline(generator: Generator, messages: Any, max_tokens: int, row_id: str = "", **sampling: Any) -> Completion:
    request = Request(row_id, rendered(generator, messages), Sampling(max_tokens, **sampling))
    (answer,) = generator([request]).answers
    assert isinstance(answer, Completion)
    return answer


def ask(client: openai.OpenAI, messages: Any = USER, **keys: Any) -> Any:
    own = {name: keys.pop(name) for name in ("return_token_ids", "row_id", "return_layers", "top_k") if name in keys}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 0, **keys}, extra_body=own
    )


def refused(client: openai.OpenAI, messages: Any = USER, **keys: Any) -> tuple[str | None, str | None, str]:
    own = keys.pop("extra", {})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": messages, **keys}, extra_body=own)
    error = caught.value
    return error.param, error.code, error.message


# Answers


def test_an_answer_is_that_of_offline(client: openai.OpenAI, generator: Generator) -> None:
    messages = [{"role": "system", "content": "x"}, *USER, {"role": "assistant", "content": "c"}, *USER]
    answer, wanted = ask(client, messages, return_token_ids=True), offline(generator, messages, 12)
    (choice,) = answer.choices
    assert choice.token_ids == wanted.tokens
    assert choice.prompt_token_ids == rendered(generator, messages)
    assert (choice.message.role, choice.message.content) == ("assistant", generator.tokenizer.decode(wanted.tokens))
    assert choice.message.refusal is choice.message.tool_calls is choice.logprobs is None
    assert choice.finish_reason == wanted.finish_reason
    assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", "tiny", "chatcmpl-")
    prompt = len(choice.prompt_token_ids)
    made = len(wanted.tokens)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made
    }  # fmt: skip


def test_sampled_answers_have_ids_of_their_own(client: openai.OpenAI, generator: Generator) -> None:
    keys = {"temperature": 0.9, "seed": 7, "top_p": 0.95}
    answer = ask(client, n=3, row_id="row", return_token_ids=True, **keys)
    for number, choice in enumerate(answer.choices):
        assert choice.index == number
        assert choice.token_ids == offline(generator, USER, 12, f"row-{number}", **keys).tokens
    assert len({tuple(choice.token_ids) for choice in answer.choices}) == 3
    prompt = len(rendered(generator, USER))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 36)
    (alone,) = ask(client, row_id="row-1", return_token_ids=True, **keys).choices
    assert alone.token_ids == answer.choices[1].token_ids
    assert ask(client, **keys).choices[0].message == ask(client, **keys).choices[0].message
    assert len({ask(client, temperature=1).choices[0].message.content for _ in range(5)}) > 1


def test_a_developer_and_parts_of_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first = ask(
        client, [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}], return_token_ids=True
    )
    second = ask(
        client, [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}], return_token_ids=True
    )
    assert first.choices[0].prompt_token_ids == second.choices[0].prompt_token_ids
    assert first.choices[0].token_ids == second.choices[0].token_ids


def test_an_answer_goes_into_the_next_question(client: openai.OpenAI) -> None:
    message = ask(client).choices[0].message
    assert ask(client, [*USER, message, *USER]).choices[0].message.content
    assert ask(client, [*USER, message.model_dump(), *USER]).choices[0].message.content


def test_the_limit_of_an_answer(client: openai.OpenAI, generator: Generator) -> None:
    assert ask(client, max_tokens=3).usage.completion_tokens == 3
    assert ask(client, max_tokens=9, max_completion_tokens=4).usage.completion_tokens == 4
    room = generator.model.config.max_position_embeddings - len(rendered(generator, USER))
    assert ask(client, max_tokens=openai.omit).usage.completion_tokens == room  # 256 would not fit


def test_stop(client: openai.OpenAI, generator: Generator) -> None:
    text = generator.tokenizer.decode(offline(generator, USER, 12).tokens)
    choice = ask(client, stop=[text[4:6], "never"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(text[4:6])], "stop")


def test_the_time_is_that_of_the_request(client: openai.OpenAI, generator: Generator) -> None:
    choice = ask(client, [{"role": "user", "content": "date"}], return_token_ids=True).choices[0]
    wanted = f"</s>{datetime.now().year}u:date\na:"
    assert choice.prompt_token_ids == generator.tokenizer.encode_rendered([wanted])[0]


def test_logprobs(client: openai.OpenAI, generator: Generator) -> None:
    """Beside those of a completion of the same tokens."""
    choice = ask(client, logprobs=True, top_logprobs=3).choices[0]
    plain = (
        client.completions.create(
            model="tiny", prompt=rendered(generator, USER), max_tokens=12, temperature=0, logprobs=3
        )
        .choices[0]
        .logprobs
    )
    assert plain is not None
    assert [one.token for one in choice.logprobs.content] == plain.tokens
    assert [one.logprob for one in choice.logprobs.content] == plain.token_logprobs
    for one, top in zip(choice.logprobs.content, plain.top_logprobs or [], strict=True):
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs)
        assert {other.token: other.logprob for other in one.top_logprobs}.items() <= top.items()
        assert one.bytes == (None if one.token.startswith("token_id:") else list(one.token.encode()))
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask(client, logprobs=False).choices[0].logprobs is None
    stream = ask(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [one for chunk in stream for c in chunk.choices if c.logprobs for one in c.logprobs.content]
    assert streamed == choice.logprobs.content


# Streams


def test_a_stream_is_the_answer(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0.8, seed=3, n=2)
    chunks = list(ask(client, temperature=0.8, seed=3, n=2, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    for wanted in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == wanted.index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert not mine[0].delta.content
        assert "".join(c.delta.content or "" for c in mine) == wanted.message.content
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [wanted.finish_reason]


def test_the_wire_format_of_a_stream(url: str) -> None:
    asked = {"messages": USER, "max_tokens": 5, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    first, *_, last = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    role = {"role": "assistant", "content": "", "refusal": None}
    assert first == [{"index": 0, "delta": role, "logprobs": None, "finish_reason": None}]
    assert last[0]["finish_reason"] == "length"


def test_the_async_client(url: str) -> None:
    async def text() -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "ab"}], max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(text()) == ask(client_of(url)).choices[0].message.content


# What is wrong


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ([], "messages", "is empty"),
        ("hello", "messages", "must be a list"),
        ([{"content": "x"}], "messages[0].role", "is missing"),
        ([*USER, {"role": "tool", "content": "x"}], "messages[1].role", "must be one of"),
        ([{"role": "user"}], "messages[0].content", "is missing"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type",
         "must be 'text', got 'image_url'"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls", "is not supported"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content", "half of a surrogate pair"),
        ([{"role": "user", "content": "raise"}], "messages", "the chat template refuses them: I do not like this"),
        ([{"role": "user", "content": "loop"}], "messages", "the chat template cannot render them: needs too"),
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
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra": {"audio": {"voice": "x"}}}, "audio"),
        ({"extra": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra": {"prompt": "x"}}, "prompt"),
        ({"extra": {"echo": True}}, "echo"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
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


def test_a_template_whose_process_others_end_is_the_servers_own_trouble(url: str) -> None:
    is_done = threading.Event()

    def end_all() -> None:
        while not is_done.wait(0.001):
            if (child := jinja_process._child) is not None:
                child._process.kill()

    jinja_process._drop()
    killer = threading.Thread(target=end_all)
    killer.start()
    asked = {"model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"], "messages": USER}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
    is_done.set()
    killer.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_rendered")
    assert httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).status_code == 200


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


# At random

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
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": ANY}),
    "user": TEXT,
    "row_id": TEXT,
    "return_token_ids": st.booleans(),
    "return_layers": st.booleans(),
    "tools": st.just([]) | ANY,
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
    assert LIKELY.keys() | {"messages"} >= CHAT_KEYS


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
