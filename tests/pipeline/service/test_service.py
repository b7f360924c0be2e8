"""A replica over real HTTP without Ray: keys, limits, failures."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from actors.generator import Generator
from pipeline.config.job import ConfigError
from pipeline.service.answers import CompletionAnswer
from pipeline.service.api_error import ApiError
from pipeline.service.auth import digest, read_keys
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import Endpoint, resolve_stall_s
from pipeline.service.requests import CompletionRequest
from pipeline.service.responses import Watch, streamed
from pipeline.service.routes import TimedStream
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from tests.support.processes import wait_for
from tests.support.service_helpers import error_of, local, make_endpoint, post

# Keys


def test_keys(generator: Generator) -> None:
    endpoint = make_endpoint(generator, [digest("first-key"), digest("second-key")])
    with local(endpoint) as url:
        assert error_of(post(url)) == (401, "invalid_api_key")
        for wrong in ("first-key", "Basic first-key", "Bearer", "Bearer third-key", "Bearer first-key2", "Bearer \xe9"):
            answer = httpx.post(
                f"{url}/v1/completions", json={"prompt": "a"}, headers={"Authorization": wrong.encode("latin-1")}
            )
            assert error_of(answer) == (401, "invalid_api_key"), wrong
        for right in ("Bearer first-key", "bearer second-key"):
            assert post(url, headers={"Authorization": right}).status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == httpx.get(f"{url}/metrics").status_code == 401
        key = {"Authorization": "Bearer first-key"}
        assert "come from Ray" in httpx.get(f"{url}/metrics", headers=key).json()["error"]["message"]
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/").status_code == 200
    endpoint.close()


def test_keys_are_read_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = ServeConfig().auth
    monkeypatch.delenv(auth.api_keys_env, raising=False)
    assert read_keys(auth.model_copy(update={"open_on_loopback": True})) == ()
    with pytest.raises(ConfigError, match=r"auth: no API keys where the application is built; set SKIPDECODE_API_KEYS"):
        read_keys(auth)  # the variable was set in another shell
    monkeypatch.setenv(auth.api_keys_env, "key-number-1, key-number-2")
    assert read_keys(auth) == (digest("key-number-1"), digest("key-number-2"))
    (tmp_path / "keys").write_text("key-number-3\n")
    with_file = auth.model_copy(update={"api_keys_file": str(tmp_path / "keys")})
    assert read_keys(with_file)[-1] == digest("key-number-3")
    monkeypatch.setenv(auth.api_keys_env, "short")
    with pytest.raises(ConfigError, match="fewer than 8"):
        read_keys(auth)
    monkeypatch.delenv(auth.api_keys_env)
    for content in (None, "\n"):
        (tmp_path / "keys").unlink() if content is None else (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="api_keys_file"):
            read_keys(with_file)


def test_behind_a_proxy_of_rays_keys_are_a_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the replica's own machine, sets no header that says for whom it speaks, and listens everywhere."""
    auth = ServeConfig().auth.model_copy(update={"open_on_loopback": True})
    monkeypatch.delenv(auth.api_keys_env, raising=False)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(ConfigError, match=r"auth: .*RAY_SERVE_ENABLE_HA_PROXY"):
        read_keys(auth)
    monkeypatch.setenv(auth.api_keys_env, "key-number-1")
    assert read_keys(auth) == (digest("key-number-1"),)
    monkeypatch.delenv(auth.api_keys_env)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    assert read_keys(auth) == ()


def test_a_key_may_have_any_letters(generator: Generator) -> None:
    endpoint = make_endpoint(generator, [digest("schlüssel-🔑-1"), digest("clé-secrète"), digest("voilà")])
    with local(endpoint) as url:
        for key, status in (
            ("schlüssel-🔑-1".encode(), 200), ("clé-secrète".encode(), 200), ("clé-secrète".encode("latin-1"), 200),
            ("voilà".encode(), 200), ("clé-secrete".encode(), 401), (b"\xff\xfe", 401),
        ):  # fmt: skip
            answer = httpx.get(f"{url}/v1/models", headers={"Authorization": b"Bearer " + key})
            assert answer.status_code == status, key
    endpoint.close()


# Limits


def hold_steps(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine takes no step before the event that is returned is set."""
    is_free, step = threading.Event(), endpoint.engine.step
    monkeypatch.setattr(endpoint.engine, "step", lambda: (is_free.wait(30), step())[1])
    return is_free


@pytest.mark.parametrize(
    "endpoint",
    [{"engine": {"batch_size": 1, "max_cohorts": 1}, "limits": {"max_waiting": 2, "request_timeout_s": 60}}],
    indirect=True,
)
def test_a_full_queue_is_429_at_once(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, before any of those that wait is answered."""
    is_free = hold_steps(endpoint, monkeypatch)

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
            answers = [asyncio.ensure_future(client.post(f"{url}/v1/completions", json=body)) for _ in range(12)]
            while sum(answer.done() for answer in answers) < 10:
                await asyncio.sleep(0.01)
            is_free.set()
            return await asyncio.gather(*answers)

    answers = asyncio.run(flood())
    good = [answer for answer in answers if answer.status_code == 200]
    assert len(good) == 2
    assert len({answer.json()["choices"][0]["text"] for answer in good}) == 1
    for answer in answers:
        if answer not in good:
            assert error_of(answer) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
    assert post(url).status_code == 200


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 2}}], indirect=True)
def test_too_slow_is_408_and_frees_the_row(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream too, which has not begun."""
    is_free = hold_steps(endpoint, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        ask = partial(post, url, max_tokens=100, ignore_eos=True)
        answers = [pool.submit(ask, stream=stream) for stream in (False, True)]
        assert [error_of(answer.result()) for answer in answers] == [(408, "timeout")] * 2
    is_free.set()
    wait_for(lambda: endpoint.engine.counts.cancelled == 2 and endpoint.engine.is_idle)
    assert endpoint.num_responses == endpoint.num_answering == 0


def test_a_stream_that_becomes_too_slow_ends_with_an_error(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status was 200 already."""
    is_free, step, steps = threading.Event(), endpoint.engine.step, iter(range(10**6))
    monkeypatch.setattr(endpoint.engine, "step", lambda: (next(steps) < 3 or is_free.wait(30), step())[1])
    asked = CompletionRequest.parse({"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True})
    answer = CompletionAnswer(asked, endpoint.prompts.of_completion(asked), "tiny", endpoint.generator.tokenizer.decode)

    async def read() -> list[bytes]:
        seen: list[tuple[int, float | None, float]] = []
        watch, ends_at = Watch(lambda *told: seen.append(told)), asyncio.get_running_loop().time() + 2
        events = [event async for event in streamed(endpoint, answer, "", watch, ends_at)]
        assert [status for status, _, _ in seen] == [408]
        return events

    *texts, last = asyncio.run(read())
    assert texts
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"
    is_free.set()
    wait_for(lambda: endpoint.engine.counts.cancelled == 1 and endpoint.engine.is_idle)


def test_a_stream_is_closed_where_it_cannot_be_sent() -> None:
    """Else its rows would go on."""
    closed: list[str] = []

    async def events(name: str) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
                await asyncio.sleep(0.01)
        finally:
            closed.append(name)

    async def gone(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the client has gone")

    async def slow(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def send() -> None:
        now = asyncio.get_running_loop().time()
        streams = TimedStream(events("gone"), now + 60), TimedStream(events("slow"), now + 0.05)
        with pytest.raises(OSError, match="the client has gone"):
            await streams[0].stream_response(gone)
        assert closed == ["gone"]
        await streams[1].stream_response(slow)
        assert closed == ["gone", "slow"]

    asyncio.run(send())


def test_answers_to_all_prompts_together_have_a_limit(url: str) -> None:
    assert post(url, prompt=["a"] * 64, n=2, temperature=1, max_tokens=1).status_code == 200
    answer = post(url, prompt=["a"] * 64, n=3, temperature=1, max_tokens=1)
    assert error_of(answer) == (400, "invalid_value")
    assert "n must be an integer from 1 to 2, got 3" in answer.json()["error"]["message"]


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 0.3}}], indirect=True)
def test_a_body_that_does_not_come_is_408(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("endpoint", [{"engine": {"batch_size": 1}, "limits": {"max_waiting": 1}}], indirect=True)
def test_a_full_queue_reads_no_bodies(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free = hold_steps(endpoint, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        inside = pool.submit(post, url)
        while not endpoint.thread.num_waiting:
            time.sleep(0.01)
        answer = httpx.post(f"{url}/v1/completions", content=b"{")
        is_free.set()
    assert error_of(answer) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert inside.result().status_code == 200


def test_a_large_body_does_not_hold_up_others(url: str, generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, encode = threading.Event(), generator.tokenizer.encode
    monkeypatch.setattr(
        generator.tokenizer, "encode", lambda texts: (len(texts[0]) < 500 or is_free.wait(30), encode(texts))[1]
    )
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, url, prompt=["a " * 500] * 10)
        assert httpx.get(f"{url}/health").status_code == 200
        assert post(url).status_code == 200
        assert not large.done()
        is_free.set()
    assert error_of(large.result()) == (400, "invalid_value")


def test_draining(url: str, endpoint: Endpoint) -> None:
    endpoint.is_draining = True
    assert error_of(post(url)) == (503, "draining")
    assert error_of(post(url, stream=True)) == (503, "draining")
    assert error_of(httpx.post(f"{url}/v1/completions", content=b"{")) == (503, "draining")
    assert httpx.get(f"{url}/health").json()["status"] == "draining"


@pytest.mark.parametrize("endpoint", [{"limits": {"max_client_prompts": 3}}], indirect=True)
def test_one_client_has_its_share_and_no_more(generator: Generator, endpoint: Endpoint) -> None:
    with local(endpoint) as url:
        assert post(url, prompt=["a"] * 3).status_code == 200
        for stream in (False, True):  # no stream begins that can only end in an error
            answer = post(url, prompt=["a"] * 4, stream=stream)
            assert error_of(answer) == (400, "invalid_value"), "it would never have room"
        assert post(url, prompt=["a"] * 3).status_code == 200, "what is over counts no more"
    assert not endpoint.shares._prompts

    async def two() -> None:
        one = [Request("r", [2], Sampling(max_new_tokens=2))]
        async with endpoint.answering(one * 3, "first"), endpoint.answering(one * 3, "second"):
            with pytest.raises(ApiError, match="3 prompts of yours"):
                async with endpoint.answering(one, "first"):
                    pytest.fail("there was room")

    asyncio.run(two())


# Failures


def test_a_dead_engine_is_503_for_all_and_health_is_red(
    url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint.engine, "step", lambda: 1 / 0)
    assert error_of(post(url)) == (503, "engine_dead")  # it was in flight
    assert error_of(post(url)) == (503, "engine_dead")
    health = httpx.get(f"{url}/health")
    assert health.status_code == 503
    assert "ZeroDivisionError" in health.json()["reason"]
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        endpoint.check()


def test_one_that_cannot_be_decoded_is_500_alone(
    url: str, endpoint: Endpoint, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = generator.model.embed

    def raising(tokens: Any, positions: Any) -> Any:
        if bool((tokens == 300).any()) and tokens.shape[1] > 1:
            raise RuntimeError("poison")
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", raising)

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient() as client:
            bodies = [{"prompt": [2, 5 + n if n != 2 else 300], "max_tokens": 4} for n in range(5)]
            return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))

    answers = asyncio.run(together())
    assert [answer.status_code for answer in answers] == [200, 200, 500, 200, 200]
    assert "poison" in answers[2].json()["error"]["message"]


@pytest.mark.slow
def test_a_slow_model_may_take_longer_over_a_prompt(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one long request would restart the replica again and again."""
    assert resolve_stall_s(generator, ServeConfig.model_validate({"limits": {"stall_s": 200}})) == 200
    config = ServeConfig.model_validate({"limits": {"stall_s": 20}})
    embed = generator.model.embed

    def slow(tokens: Any, positions: Any) -> Any:
        time.sleep(0.004 * tokens.shape[-1])
        return embed(tokens, positions)

    monkeypatch.setattr(generator.model, "embed", slow)
    assert 0.004 * 4096 * 2 < resolve_stall_s(generator, config) < 300
