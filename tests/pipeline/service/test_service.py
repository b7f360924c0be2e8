"""A replica over real HTTP without Ray: keys, limits, failures."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from actors.generator import Generator
from pipeline.config.job import ConfigError
from pipeline.service.auth import digest, read_keys
from pipeline.service.config import ServeConfig
from pipeline.service.endpoint import Endpoint, resolve_stall_s
from pipeline.service.errors import ApiError
from skipdecode.config.sampling import Sampling
from skipdecode.engine.request import Request
from tests.support.service_helpers import error_of, local, make_endpoint, post, slow_down

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
    assert read_keys(auth) == ()
    monkeypatch.setenv(auth.api_keys_env, "key-number-1, key-number-2")
    assert read_keys(auth) == (digest("key-number-1"), digest("key-number-2"))
    (tmp_path / "keys").write_text("key-number-3\n")
    with_file = auth.model_copy(update={"api_keys_file": str(tmp_path / "keys")})
    assert read_keys(with_file)[-1] == digest("key-number-3")
    monkeypatch.setenv(auth.api_keys_env, "short")
    with pytest.raises(ConfigError, match="fewer than 8"):
        read_keys(auth)
    monkeypatch.delenv(auth.api_keys_env)
    closed = auth.model_copy(update={"open_on_loopback": False})
    with pytest.raises(ConfigError, match=r"auth\.open_on_loopback: false, and there are no API keys"):
        read_keys(closed)  # the variable was set in another shell
    assert read_keys(closed.model_copy(update={"api_keys_file": str(tmp_path / "keys")}))
    for content in (None, "\n"):
        (tmp_path / "keys").unlink() if content is None else (tmp_path / "keys").write_text(content)
        with pytest.raises(ConfigError, match="api_keys_file"):
            read_keys(with_file)


def test_behind_a_proxy_of_rays_keys_are_a_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the replica's own machine, sets no header that says for whom it speaks, and listens everywhere."""
    auth = ServeConfig().auth
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


@pytest.mark.parametrize(
    "endpoint",
    [{"engine": {"batch_size": 1, "max_cohorts": 1}, "limits": {"max_waiting": 2, "request_timeout_s": 60}}],
    indirect=True,
)
def test_a_full_queue_is_429_at_once(url: str, endpoint: Endpoint) -> None:
    async def flood() -> list[tuple[httpx.Response, float]]:
        async with httpx.AsyncClient(timeout=60) as client:

            async def one() -> tuple[httpx.Response, float]:
                began = time.monotonic()
                body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
                answer = await client.post(f"{url}/v1/completions", json=body)
                return answer, time.monotonic() - began

            return await asyncio.gather(*(one() for _ in range(12)))

    answers = asyncio.run(flood())
    good = [answer for answer, _ in answers if answer.status_code == 200]
    refused = [(answer, seconds) for answer, seconds in answers if answer.status_code != 200]
    assert len(good) >= 2
    assert len(good) + len(refused) == 12
    assert len({answer.json()["choices"][0]["text"] for answer in good}) == 1
    for answer, seconds in refused:
        assert error_of(answer) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert seconds < 1  # measured more strictly under load, in test_serve_load
    assert post(url).status_code == 200


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 0.15}}], indirect=True)
def test_too_slow_is_408_and_frees_the_row(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(endpoint, 0.02, monkeypatch)
    assert error_of(post(url, max_tokens=100, ignore_eos=True)) == (408, "timeout")
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True}
    ) as answer:
        assert answer.status_code == 200  # it had begun
        lines = [line for line in answer.iter_lines() if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "timeout"
    time.sleep(0.1)
    assert endpoint.thread.num_running == endpoint.num_responses == 0


@pytest.mark.parametrize("endpoint", [{"limits": {"request_timeout_s": 0.3}}], indirect=True)
def test_a_body_that_does_not_come_is_408(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"prompt"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("endpoint", [{"engine": {"batch_size": 1}, "limits": {"max_waiting": 1}}], indirect=True)
def test_a_full_queue_reads_no_bodies(url: str, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    is_free, step = threading.Event(), endpoint.engine.step
    monkeypatch.setattr(endpoint.engine, "step", lambda: (is_free.wait(30), step())[1])
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
    encode = generator.tokenizer.encode
    monkeypatch.setattr(generator.tokenizer, "encode", lambda texts: (time.sleep(0.1), encode(texts))[1])
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(post, url, prompt=["a " * 500] * 10)
        time.sleep(0.2)
        began = time.monotonic()
        assert httpx.get(f"{url}/health").status_code == 200
        assert time.monotonic() - began < 0.5
        assert not large.done()
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
        assert error_of(post(url, prompt=["a"] * 4)) == (400, "invalid_value"), "it would never have room"
        assert post(url, prompt=["a"] * 3).status_code == 200, "what is over counts no more"
    assert not endpoint._by_client

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
