"""The endpoint as its users see it: the real `openai` client and raw HTTP against a real Ray Serve application.

One application for the module (`jobs.serve`, demo model, float32, continuous scheduler). Every text is compared with
what the offline generator makes of the same prompt.
"""

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai.types import Completion
from prometheus_client.parser import text_string_to_metric_families

from pipeline.demo.restaurant_prompts import make_prompts
from tests.support.processes import wait_for
from tests.support.service_helpers import Offline, Served, served
from tests.support.sockets import ask as ask_of
from tests.support.sockets import connect

pytestmark = pytest.mark.ray

PROMPTS = [row["prompt"] for row in make_prompts(24, seed=5)]
POUND = "name[The Mill], eatType[pub], priceRange[£20-25], area[riverside]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def offline() -> Offline:
    return Offline()


def ask(client: openai.OpenAI, prompt: Any, max_tokens: int = 20, **keys: Any) -> Completion:
    made: Completion = client.completions.create(
        model="opt-e2e", prompt=prompt, max_tokens=max_tokens, **({"temperature": 0} | keys)
    )
    return made


def tokens_of(made: Completion) -> list[list[int]]:
    return [choice.token_ids for choice in made.choices]  # type: ignore[attr-defined]


# What is there


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("opt-e2e", "skipdecode-ray")
    assert client.models.retrieve("opt-e2e") == model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match=r"there is 'opt-e2e'"):
        client.completions.create(model="gpt-9", prompt="x")


def test_health(server: Served) -> None:
    answer = server.get("/health")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"


def test_page(server: Served) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "v1/completions" in answer.text


# Prompts


def test_text(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[0], 40)
    wanted = offline(PROMPTS[0], 40)
    (choice,) = made.choices
    assert made.object == "text_completion"
    assert made.model == "opt-e2e"
    assert choice.text == offline.text(wanted)
    assert len(choice.text) > 20
    assert choice.finish_reason == wanted.finish_reason
    assert made.usage is not None
    assert made.usage.completion_tokens == len(wanted.tokens)
    assert made.usage.prompt_tokens == len(offline.generator.tokenizer.encode([PROMPTS[0]])[0])
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_several_texts(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[:5], 16)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3, 4]
    assert [choice.text for choice in made.choices] == [offline.text(offline(p, 16)) for p in PROMPTS[:5]]


def test_token_ids(client: openai.OpenAI, offline: Offline) -> None:
    tokens = offline.generator.tokenizer.encode([PROMPTS[1]])[0]
    assert ask(client, tokens).choices[0].text == offline.text(offline(PROMPTS[1], 20))


def test_several_lists_of_token_ids(client: openai.OpenAI, offline: Offline) -> None:
    lists = [[2, 17, 30], [2], [2, 500, 501, 502, 503]]
    made = ask(client, lists, 9, extra_body={"return_token_ids": True})
    assert tokens_of(made) == [offline(tokens, 9).tokens for tokens in lists]
    assert [choice.prompt_token_ids for choice in made.choices] == lists  # type: ignore[attr-defined]


def test_an_empty_prompt_is_bos(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, "", 8)
    assert made.choices[0].text == offline.text(offline("", 8))
    assert made.usage is not None
    assert made.usage.prompt_tokens == 1


@pytest.mark.parametrize("prompt", ["naïve café — 東京 🙂 Ωmega £20", "\x00\ttab\r\nline", "a" * 900])
def test_any_text(client: openai.OpenAI, offline: Offline, prompt: str) -> None:
    assert ask(client, prompt, 6).choices[0].text == offline.text(offline(prompt, 6))


# Parameters


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens(client: openai.OpenAI, offline: Offline, max_tokens: int) -> None:
    made = ask(client, PROMPTS[2], max_tokens)
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].text == offline.text(offline(PROMPTS[2], max_tokens))
    assert made.usage is not None
    assert made.usage.completion_tokens == max_tokens


def test_the_end_of_a_text_stops_it(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[0], 120, extra_body={"return_token_ids": True})
    assert made.choices[0].finish_reason == "stop"
    assert tokens_of(made)[0][-1] == 2
    assert tokens_of(made)[0] == offline(PROMPTS[0], 120).tokens


@pytest.mark.parametrize("as_list", [False, True])
def test_stop(client: openai.OpenAI, offline: Offline, as_list: bool) -> None:
    whole = offline.text(offline(PROMPTS[3], 40))
    stop = whole[len(whole) // 2 :][:3]
    made = ask(client, PROMPTS[3], 40, stop=[stop, "never there"] if as_list else stop)
    assert made.choices[0].text == whole[: whole.index(stop)]
    assert made.choices[0].finish_reason == "stop"


def test_a_seed_repeats_itself(client: openai.OpenAI) -> None:
    texts = [ask(client, PROMPTS[4], temperature=1.0, seed=seed).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_without_a_seed_answers_differ(client: openai.OpenAI) -> None:
    made = ask(client, [PROMPTS[4]] * 6, temperature=1.5)
    again = ask(client, [PROMPTS[4]] * 6, temperature=1.5)
    assert len({choice.text for choice in (*made.choices, *again.choices)}) > 6


@pytest.mark.parametrize("keys", [{}, {"top_p": 0.8}, {"top_k": 12}, {"top_k": -1, "top_p": 0.95}], ids=str)
def test_sampled_tokens_are_those_of_the_offline_job(client: openai.OpenAI, offline: Offline, keys: Any) -> None:
    """Same prompt, id and seed."""
    for number, prompt in enumerate(PROMPTS[:3]):
        extra = {"row_id": f"demo-{number}", "return_token_ids": True} | {k: v for k, v in keys.items() if k == "top_k"}
        own = {k: v for k, v in keys.items() if k == "top_p"}
        made = ask(client, prompt, 24, temperature=0.9, seed=11, extra_body=extra, **own)
        sampling = {name: max(value, 0) for name, value in keys.items()}
        wanted = offline(prompt, 24, row_id=f"demo-{number}", temperature=0.9, seed=11, **sampling)
        assert tokens_of(made) == [wanted.tokens]


def test_prompts_of_one_request_have_ids_of_their_own(client: openai.OpenAI, offline: Offline) -> None:
    extra = {"row_id": "batch", "return_token_ids": True}
    made = ask(client, [PROMPTS[0]] * 3, temperature=1.0, seed=3, extra_body=extra)
    assert tokens_of(made) == [
        offline(PROMPTS[0], 20, row_id=f"batch-{n}", temperature=1.0, seed=3).tokens for n in range(3)
    ]


def test_ignore_eos(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[0], 90, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert len(tokens_of(made)[0]) == 90
    assert tokens_of(made)[0] == offline(PROMPTS[0], 90, ignore_eos=True).tokens


def test_user_and_neutral_values_are_accepted(client: openai.OpenAI) -> None:
    made = ask(client, "x", 2, user="me", n=1, best_of=1, presence_penalty=0, frequency_penalty=0, logit_bias={})
    assert made.choices[0].text


# Log-probabilities and echo


def test_logprobs(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[0], 12, logprobs=3, extra_body={"return_token_ids": True}).choices[0]
    found = made.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == made.text
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 12
    for token, own, top, at in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset, strict=True
    ):
        assert own == max(top.values()) == top[token] <= 0  # greedy
        assert len(top) == 3
        assert made.text[at:].startswith(token)


def test_logprobs_of_the_drawn_tokens_alone(client: openai.OpenAI) -> None:
    found = ask(client, PROMPTS[0], 5, logprobs=0, temperature=1.0, seed=1).choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.top_logprobs == [
        {token: value} for token, value in zip(found.tokens, found.token_logprobs or [], strict=True)
    ]
    assert len(found.tokens) == 5
    assert all(value <= 0 for value in found.token_logprobs or [1])


def test_echo(client: openai.OpenAI, offline: Offline) -> None:
    text = ask(client, PROMPTS[0], 8, echo=True).choices[0].text
    assert text == PROMPTS[0] + offline.text(offline(PROMPTS[0], 8))


def test_a_prompt_can_be_scored(client: openai.OpenAI, offline: Offline) -> None:
    """`echo`, `logprobs` and no new token; the model's greedy answer must score as it did when it was made."""
    prompt = offline.generator.tokenizer.encode([PROMPTS[0]])[0]
    answer = offline(PROMPTS[0], 10).tokens
    made = ask(client, [*prompt, *answer], 0, echo=True, logprobs=1)
    found = made.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert made.choices[0].text == PROMPTS[0] + offline.text(offline(PROMPTS[0], 10))
    assert len(found.token_logprobs) == len(prompt) + 10
    assert found.token_logprobs[0] is None
    assert made.usage is not None
    assert made.usage.completion_tokens == 0
    first = ask(client, PROMPTS[0], 1, logprobs=1).choices[0].logprobs  # its first token ran all layers too
    assert first is not None
    assert first.token_logprobs is not None
    assert found.token_logprobs[len(prompt)] == pytest.approx(first.token_logprobs[0], abs=1e-4)


def test_layers(client: openai.OpenAI, offline: Offline) -> None:
    made = ask(client, PROMPTS[0], 30, extra_body={"return_layers": True}).choices[0]
    pieces = made.layers  # type: ignore[attr-defined]
    assert "".join(text for text, _ in pieces) == made.text
    assert pieces[0][1] == 24
    assert sum(layers for _, layers in pieces[1:]) == offline(PROMPTS[0], 30).layers_run


# Streams


def test_a_stream_is_the_text(client: openai.OpenAI, offline: Offline) -> None:
    chunks = list(client.completions.create(model="opt-e2e", prompt=PROMPTS[1], max_tokens=40, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == offline.text(offline(PROMPTS[1], 40))
    assert len(chunks) > 3
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == offline(PROMPTS[1], 40).finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="opt-e2e", prompt=PROMPTS[1], max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_stream_of_several_prompts(client: openai.OpenAI, offline: Offline) -> None:
    texts, ends = [""] * 4, 0
    for chunk in client.completions.create(model="opt-e2e", prompt=PROMPTS[:4], max_tokens=15, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends += choice.finish_reason is not None
    assert texts == [offline.text(offline(p, 15)) for p in PROMPTS[:4]]
    assert ends == 4


def test_a_stream_never_shows_a_stop_string(client: openai.OpenAI, offline: Offline) -> None:
    whole = offline.text(offline(PROMPTS[3], 40))
    stop = whole[10:15]
    chunks = client.completions.create(model="opt-e2e", prompt=PROMPTS[3], max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]


def test_the_wire_format_of_a_stream(server: Served) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert [json.loads(line[6:])["object"] for line in lines[:-1]] == ["text_completion"] * (len(lines) - 1)


def test_the_async_client(server: Served, offline: Offline) -> None:
    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            made = [client.completions.create(model="opt-e2e", prompt=p, max_tokens=12) for p in PROMPTS[:8]]
            return [answer.choices[0].text for answer in await asyncio.gather(*made)]

    assert asyncio.run(all_at_once()) == [offline.text(offline(p, 12)) for p in PROMPTS[:8]]


def test_many_at_once_get_their_own_answers(client: openai.OpenAI, offline: Offline) -> None:
    with ThreadPoolExecutor(24) as pool:
        made = list(pool.map(lambda n: ask(client, PROMPTS[n], 4 + n).choices[0].text, range(24)))
    assert made == [offline.text(offline(p, 4 + n)) for n, p in enumerate(PROMPTS)]


def test_several_answers_to_each_prompt(client: openai.OpenAI) -> None:
    """In the order of the prompts, each as it would be alone; a prompt counts once."""
    asked: Any = {"model": "opt-e2e", "temperature": 1.5, "seed": 5, "max_tokens": 6}
    many = client.completions.create(prompt=PROMPTS[:2], n=3, extra_body={"row_id": "r"}, **asked)
    assert [choice.index for choice in many.choices] == list(range(6))
    for prompt, answer, place in ((0, 1, 1), (1, 2, 5)):
        row_id = {"row_id": f"r-{prompt}-{answer}"}
        alone = client.completions.create(prompt=PROMPTS[prompt], extra_body=row_id, **asked)
        assert alone.choices[0].text == many.choices[place].text
    assert len({choice.text for choice in many.choices}) > 2
    once = client.completions.create(prompt=PROMPTS[:2], **asked)
    assert many.usage.prompt_tokens == once.usage.prompt_tokens
    assert many.usage.completion_tokens > once.usage.completion_tokens
    one = client.completions.create(prompt=PROMPTS[0], n=2, extra_body={"row_id": "r"}, **asked)
    alone = client.completions.create(prompt=PROMPTS[0], extra_body={"row_id": "r-1"}, **asked)
    assert one.choices[1].text == alone.choices[0].text, "as `sampling.n` names rows"


# What is refused, by name


@pytest.mark.parametrize(
    ("keys", "param", "message"),
    [
        ({"n": 2}, "n", "n is 2, and at temperature 0"),
        ({"n": 129, "temperature": 1}, "n", "n must be"),
        ({"n": 2, "echo": True, "max_tokens": 0}, "n", "n must be"),
        ({"best_of": 3}, "best_of", "best_of must be 1 or null, got 3: every answer"),
        ({"suffix": "end"}, "suffix", 'suffix must be "" or null'),
        ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "token 50256 is not in the vocabulary"),
        ({"max_tokens": 0}, "max_tokens", "at least 1; 0 goes with echo=true only"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 2048}, "max_tokens", "2048 positions"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", 'got "hot"'),
        ({"temperature": 10**400}, "temperature", "valid number, got 1000"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"seed": 1.5}, "seed", "valid integer"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": ""}, "stop", "at least 1 character"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stream": "yes"}, "stream", 'valid boolean, got "yes"'),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true only"),
        ({"max_new_tokens": 5}, "max_new_tokens", "is not known; remove it (or is it max_tokens?)"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": []}, "prompt", "a list of strings"),
        ({"prompt": [1, "a"]}, "prompt", "a list of strings"),
        ({"prompt": [[1, 2], []]}, "prompt", "a list of strings"),
        ({"prompt": ["a", [5]]}, "prompt", "mixes"),
        ({"prompt": {"text": "a"}}, "prompt", "a string"),
        ({"prompt": [5, 1024]}, "prompt", "the vocabulary has 1024 tokens"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
        ({"prompt": [5] * 2047, "max_tokens": 2}, "max_tokens", "2047 tokens"),
        ({"prompt": "far too long " * 9000}, "prompt", "than could fit"),
    ],
    ids=str,
)
def test_bad_parameters(client: openai.OpenAI, keys: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/completions", body={"model": "opt-e2e", "prompt": "x"} | keys, cast_to=object)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert message in caught.value.message


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"text"', b"\xff\xfe{}", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}',
     b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=range(8),
)  # fmt: skip
def test_malformed_bodies(server: Served, body: bytes) -> None:
    answer = server.post(body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_ten_megabytes_do_no_harm(server: Served, client: openai.OpenAI) -> None:
    answer = server.post({"prompt": "x" * 10_000_000})
    assert answer.status_code == 413
    assert "max_body_bytes" in answer.json()["error"]["message"]
    assert ask(client, "x", 2).choices[0].text


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/v1/nope", 404)])
def test_other_routes(server: Served, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


# On the way


def test_metrics_are_those_of_the_engine(server: Served) -> None:
    """Ray gathers them every few seconds."""
    assert server.post({"prompt": "x", "max_tokens": 3}).status_code == 200
    deadline = time.monotonic() + 30
    least = {"output_tokens_total": 3, "requests_total": 1}  # 0 may come first
    found: dict[str, float] = {}
    while any(found.get(name, 0) < count for name, count in least.items()):
        assert time.monotonic() < deadline, found
        time.sleep(0.5)
        found = figures_of(server.get("/metrics"))


def figures_of(answer: httpx.Response) -> dict[str, float]:
    """Our figures by name, summed over their labels."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    figures: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            name = sample.name.removeprefix("ray_skipdecode_serve_")
            figures[name] = figures.get(name, 0.0) + sample.value
    return figures


def test_the_request_id_goes_through(server: Served) -> None:
    answer = server.post({"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine-7"})
    assert answer.headers["x-request-id"] == "mine-7"


def test_curl(server: Served, offline: Offline) -> None:
    body = json.dumps({"prompt": POUND, "max_tokens": 30})
    done = subprocess.run(
        ["curl", "-s", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["choices"][0]["text"] == offline.text(offline(POUND, 30))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows(server: Served, stream: bool) -> None:
    """They do not come to their end."""

    def cancelled() -> float:
        return figures_of(server.get("/metrics")).get("cancelled_total", 0)

    before = cancelled()
    with connect(server.url) as connection:
        ask_of(connection, server.url, prompt=["x"] * 4, max_tokens=2000, ignore_eos=True, stream=stream)
        wait_for(lambda: server.get("/health").json()["running"] == 4, timeout_s=60)
    wait_for(lambda: cancelled() == before + 4, timeout_s=60)
