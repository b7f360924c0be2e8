"""What one client may hold of a replica, over real HTTP without Ray: prompts, bodies that come slowly, threads."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx2 as httpx
import pytest

from actors.generator import Generator
from pipeline.service import answers
from pipeline.service.answers import encode, encode_in_pieces
from pipeline.service.api_error import ApiError
from pipeline.service.auth import digest
from pipeline.service.config import LimitsSection
from pipeline.service.endpoint import Endpoint
from pipeline.service.shares import NUM_THREADS, Shares
from tests.support.processes import wait_for
from tests.support.service_helpers import error_of, local, make_endpoint, post
from tests.support.sockets import connect, head, status

KEYS = ("first-key", "other-key")


@pytest.fixture
def keyed(generator: Generator, request: pytest.FixtureRequest) -> Iterator[tuple[Endpoint, str]]:
    """An endpoint with two keys, and its URL."""
    endpoint = make_endpoint(generator, [digest(key) for key in KEYS], limits=getattr(request, "param", {}))
    with local(endpoint) as url:
        yield endpoint, url
    endpoint.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("keyed", [{"max_client_prompts": 2}], indirect=True)
def test_a_share_is_taken_before_the_body_is_read(keyed: tuple[Endpoint, str]) -> None:
    endpoint, url = keyed
    with ExitStack() as stack:
        for _ in range(2):
            connection = stack.enter_context(connect(url))
            connection.sendall(head(url, "Content-Length: 100", "Authorization: Bearer first-key") + b'{"prompt"')
        wait_for(lambda: endpoint.shares._prompts.total() == 2)
        third = stack.enter_context(connect(url))
        third.sendall(head(url, "Content-Length: 100", "Authorization: Bearer first-key"))
        assert status(third) == 429, "no byte of its body has come"
        assert post(url, headers=bearer("other-key")).status_code == 200
    wait_for(lambda: not endpoint.shares._prompts, timeout_s=30)
    assert post(url, headers=bearer("first-key")).status_code == 200


@pytest.mark.parametrize("keyed", [{"max_body_bytes": 50_000, "max_reading_bytes": 100_000}], indirect=True)
def test_all_bodies_that_are_read_have_a_budget(keyed: tuple[Endpoint, str]) -> None:
    endpoint, url = keyed
    with ExitStack() as stack:
        lines = ("Content-Length: 40001", "Authorization: Bearer first-key")
        slow = [stack.enter_context(connect(url)) for _ in range(2)]
        for connection in slow:
            connection.sendall(head(url, *lines) + b" " * 20_000)
        wait_for(lambda: endpoint.shares._bytes.total() == 40_000)
        slow[0].sendall(b" " * 20_000)
        assert status(slow[0]) == 429, "half of the budget is for one client"
        large = {"prompt": "a", "max_tokens": 2, "user": "u" * 40_000}
        assert httpx.post(f"{url}/v1/completions", json=large, headers=bearer("other-key")).status_code == 200
    wait_for(lambda: not endpoint.shares._bytes, timeout_s=30)


def test_the_budget_of_bytes_is_that_of_all_clients() -> None:
    shares = Shares(LimitsSection(max_body_bytes=100, max_reading_bytes=1000))
    with ExitStack() as stack:
        for client in "abc":
            stack.enter_context(shares.body(client))(330)
        add = stack.enter_context(shares.body("d"))
        add(10)
        with pytest.raises(ApiError, match="more than 1000 bytes") as caught:
            add(1)
        assert caught.value.status == 429
    assert not shares._bytes
    shares.close()


def test_one_client_has_not_all_threads() -> None:
    """Nor does what it sends wait for ever: its calls take turns."""
    shares, is_free = Shares(LimitsSection()), threading.Event()

    async def crowd() -> list[bool]:
        own = [asyncio.ensure_future(shares.in_thread("first", is_free.wait, 10)) for _ in range(3 * NUM_THREADS)]
        await asyncio.sleep(0)  # each of them begins
        await shares.in_thread("other", lambda: None)
        is_free.set()
        return await asyncio.gather(*own)

    assert asyncio.run(crowd()) == [True] * 3 * NUM_THREADS
    assert not shares._turns
    shares.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_large_answer_is_made_beside_the_loop(url: str, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    is_free, add = threading.Event(), answers.add_prompt
    monkeypatch.setattr("pipeline.service.answers.add_prompt", lambda *args: (is_free.wait(30), add(*args)))
    asked: dict[str, Any] = {"prompt": [[7] * 100] * 11, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 5}
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, url, **asked, stream=stream)
        wait_for(lambda: httpx.get(f"{url}/health").json()["waiting"] == 0 and not large.done(), timeout_s=30)
        assert post(url).status_code == 200, "another one is answered meanwhile"
        assert not large.done()
        is_free.set()
    assert large.result().status_code == 200
    if not stream:
        choices = large.result().json()["choices"]
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [101] * 11


def test_pieces_are_the_same_json() -> None:
    bodies: list[dict[str, Any]] = [
        {}, {"choices": []}, {"choices": [{}], "usage": None}, {"a": {}, "b": [], "c": [[]], "d": {"e": {"f": [1]}}},
        {"choices": [{"text": "\ud800 é", "logprobs": {"tokens": ["\n"] * 1000, "top": [{"a": -1.5}] * 257}}] * 3},
        {"choices": [{"layers": [("x", 3)] * 256, "token_ids": list(range(5000))}]},
    ]  # fmt: skip
    for body in bodies:
        assert encode_in_pieces(body) == encode(body)


def test_a_request_that_can_never_fit_is_refused(
    url: str, endpoint: Endpoint, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would start once nothing else runs, hold up all that wait, and may take the replica with it."""
    config, row = generator.model.config, 50
    per_token = 2 * config.num_hidden_layers * config.kv_dim * generator.dtype.itemsize
    monkeypatch.setattr(endpoint.engine._scheduler, "cache_budget", row * per_token)
    assert post(url, prompt=[7] * 20, max_tokens=10).status_code == 200
    answer = post(url, prompt=[7] * 100, max_tokens=10)
    assert error_of(answer) == (400, "invalid_value")
    assert "shorten the prompt or max_tokens" in answer.json()["error"]["message"]


def test_why_an_engine_died_is_told_to_those_who_may_ask(
    keyed: tuple[Endpoint, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, url = keyed
    monkeypatch.setattr(endpoint.engine, "step", lambda: 1 / 0)
    assert error_of(post(url, headers=bearer("first-key"))) == (503, "engine_dead")
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "dead")
    assert "ZeroDivision" not in health.text
    assert "ZeroDivision" in httpx.get(f"{url}/health", headers=bearer("other-key")).json()["reason"]
